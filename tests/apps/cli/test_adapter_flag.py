"""``--adapter``, with a real model, and a plain one that has the adapter in its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers import oracle
from helpers.command_line import corelm_command, generate, rows, settings_of, write_rows
from helpers.lora import lora, merged, save
from helpers.tiny_models import tiny_model, tiny_tokenizer

ENGINE = ("--backend", "transformers", "--option", "dtype=float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, one with the same model and the adapter in its weights, and one with the adapter."""
    folder = tmp_path_factory.mktemp("adapters")
    state, config = lora(tiny_model())
    for name, model in (("base", tiny_model()), ("merged", merged(tiny_model(), state))):
        model.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    save(state, config, folder / "lora")
    return folder


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    source = tmp_path / "lines.jsonl"
    write_rows(source, [{"prompt": "the cat", "completion": " sat"}, {"prompt": "one", "completion": " two three"}])
    return source, tmp_path / "out.jsonl"


def score(files: tuple[Path, Path], model: Path, *more: object) -> Any:
    return corelm_command("score", *ENGINE, "--model", model, "--input", files[0], "--output", files[1], *more)


def test_scores_are_those_of_the_adapter(folder, files):
    result = score(files, folder / "base", "--adapter", f"policy={folder / 'lora'}")
    assert result.exit_code == 0, result.stderr
    model = merged(tiny_model(), lora(tiny_model())[0])
    tokenizer = tiny_tokenizer()
    for row, (prompt, completion) in zip(rows(files[1]), [("the cat", " sat"), ("one", " two three")], strict=True):
        ids, begun = (tokenizer([text])["input_ids"][0] for text in (prompt + completion, prompt))
        assert row["log_prob"] == pytest.approx(float(oracle.logprobs(model, ids)[len(begun) :].sum()), abs=1e-3)
    saved = settings_of(files[1])
    assert saved["settings"]["adapter"] == f"policy={folder / 'lora'}"
    assert (saved["provenance"]["adapter"], saved["provenance"]["weight_version"]) == ("policy", "0+policy@1")


def test_answers_with_other_adapters_are_not_mixed(folder, files):
    assert score(files, folder / "base", "--adapter", f"policy={folder / 'lora'}").exit_code == 0
    for more in ((), ("--adapter", "policy")):
        result = score(files, folder / "base", *more)
        assert result.exit_code == 2 and "was made with adapter" in result.stderr


def test_answers_and_chats_are_those_of_the_adapter(folder, tmp_path):
    source = tmp_path / "prompts.jsonl"
    write_rows(source, [{"prompt": "the cat"}])
    greedy = (*ENGINE[2:], "--temperature", 0, "--log-probs", "raw")
    for name, more in (("base", ("--adapter", f"policy={folder / 'lora'}")), ("merged", ()), ("base", ())):
        target = tmp_path / f"{name}{len(more)}.jsonl"
        result = generate((source, target), "--model", folder / name, *greedy, *more, backend="transformers")
        assert result.exit_code == 0, result.stderr
    told = [rows(tmp_path / name)[0] for name in ("base2.jsonl", "merged0.jsonl", "base0.jsonl")]
    assert told[0]["response"] == told[1]["response"] != told[2]["response"]
    assert told[0]["log_probs"] == pytest.approx(told[1]["log_probs"], abs=1e-3)
    chats = [
        corelm_command(
            *("chat", *ENGINE, "--model", folder / name, "--temperature", 0, "--max-new-tokens", 9, *more),
            stdin="the cat\n",
        )
        for name, more in (("base", ("--adapter", f"policy={folder / 'lora'}")), ("merged", ()), ("base", ()))
    ]
    assert chats[0].stdout == chats[1].stdout != chats[2].stdout


def test_what_is_no_adapter_ends_the_run_and_names_the_flag(folder, files):
    for flag, says in (
        ("policy", "--adapter: there is no 'policy'; no adapter is loaded. Give --adapter policy=FOLDER"),
        (f"policy={folder}", f"--adapter: there is no readable adapter in {folder}"),
        ("a@b", "--adapter: expected the name"),
        ("=folder", "expected NAME or NAME=FOLDER, got '=folder'"),
        ("policy=", "expected NAME or NAME=FOLDER, got 'policy='"),
    ):
        result = score(files, folder / "base", "--adapter", flag)
        assert result.exit_code == 2 and result.stderr.count(says) == 1, result.stderr


def test_an_engine_without_adapters_refuses_them(files):
    for flag, says in (("policy", "leave out --adapter policy"), ("policy=folder", "lacks adapters")):
        toy = ("score", "--backend", "toy", "--input", files[0], "--output", files[1])
        result = corelm_command(*toy, "--adapter", flag)
        assert result.exit_code == 2 and says in result.stderr

"""`corelm compare`: which engines its flags name, what it reads and prints, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from corelm.errors import InvalidRequestError
from corelm_compare import SideSpec, from_json
from corelm_compare.prompts import CONVERSATIONS, DEFAULT, TEXTS
from helpers.command_line import corelm_command, generate, write_rows
from helpers.lora import lora, merged, save
from helpers.processes import PATIENCE, heed_interrupts, wait_until

TWO = ("--backend", "toy", "--backend", "toy", "--name", "other")
PROMPTS = [{"prompt": "The cat"}, {"messages": [{"role": "user", "content": "Hi"}]}, {"ids": [72, 105, 33]}]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    write_rows(tmp_path / "prompts.jsonl", PROMPTS)
    return tmp_path / "prompts.jsonl"


@pytest.fixture(scope="module")
def older_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the tiny model with weights as they might be some steps earlier."""
    model, folder = AutoModelForCausalLM.from_pretrained(tiny_model), tmp_path_factory.mktemp("older") / "model"
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


def test_engines_that_agree_are_told_so_and_the_exit_code_is_0(prompts):
    result = corelm_command("compare", *TWO, "--input", prompts)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("OK: toy and other agree\n") and "ruled out" in result.stdout
    assert re.search(r"\d+ calls in [\d.]+ s: toy [\d,]+ tokens/s, other [\d,]+ tokens/s$", result.stdout.strip())
    assert result.stderr == ""


def test_without_prompts_those_that_core_brings_are_used_and_this_is_said():
    result = corelm_command("compare", *TWO, "--json")
    assert "comparing with the prompts that core brings" in result.stderr and "OK: toy and other agree" in result.stderr
    found = from_json(json.loads(result.stdout))
    assert [row.text for row in found.rows[: len(TEXTS)]] == list(TEXTS)
    kinds = [row.kind for row in found.rows]
    assert kinds.count("conversation") == len(CONVERSATIONS) and kinds.count("text") == len(TEXTS)


def test_the_json_on_the_standard_output_is_the_comparison(prompts, tmp_path):
    report = tmp_path / "report.html"
    flags = ("--json", "--report", report, "--random-seed", 3, "--max-new-tokens", 5)
    result = corelm_command("compare", *TWO, "--input", prompts, *flags)
    assert result.exit_code == 0
    made = json.loads(result.stdout, parse_constant=lambda name: pytest.fail(name))
    assert made["format"] == "corelm_compare/1" and made["seed"] == 3 and made["verdict"] == "agree"
    found = from_json(made)
    assert [row.kind for row in found.rows[:3]] == ["text", "conversation", "ids"]
    assert all(len(row.ids) - row.prompt_length <= 5 for row in found.rows[:3])
    assert f"The report is in {report}." in result.stderr and "toy and other agree" in report.read_text()


def test_other_weights_are_found_and_named(tiny_model, older_model, tmp_path):
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": "What is your name?"}, {"prompt": "The cat sat on"}])
    result = corelm_command(
        *("compare", "--option", "dtype=float32", "--input", tmp_path / "prompts.jsonl", "--json"),
        *("--backend", "transformers", "--model", tiny_model, "--name", "new"),
        *("--backend", "transformers", "--model", older_model, "--name", "old"),
        *("--checkpoint", older_model, "--report", tmp_path / "report.html"),
    )
    assert result.exit_code == 1, result.stderr
    made = json.loads(result.stdout)
    assert made["verdict"] == "differ" and [side["options"] for side in made["sides"]] == [{"dtype": "float32"}] * 2
    (cause,) = made["causes"]
    assert (cause["id"], cause["side"], cause["confidence"]) == ("stale-weights", "old", "certain")
    assert "FAIL: new and old differ: stale-weights" in result.stderr and str(older_model) in result.stderr
    page = (tmp_path / "report.html").read_text()
    assert "stale-weights" in page and page.count("<figure>") == 4
    # The numbers are those of the two models: Δ of the first token, from forward passes of transformers.
    row, numbers = made["rows"][0]["ids"], made["rows"][0]["numbers"]
    with torch.no_grad():
        expected = [
            AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([row[:1]])).logits[0, 0].log_softmax(-1)[row[1]]
            for folder in (tiny_model, older_model)
        ]
    assert numbers["old"][1] - numbers["new"][1] == pytest.approx(float(expected[1] - expected[0]), abs=1e-4)


def test_a_quick_comparison_and_a_budget(tmp_path):
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"The cat {n}"} for n in range(9)])
    result = corelm_command("compare", *TWO, "--input", tmp_path / "prompts.jsonl", "--json", "--quick")
    made = json.loads(result.stdout)
    params = {"max_new_tokens": 8, "temperature": 1.0}
    limits = {"tolerance": None, "budget": 60.0, "quick": True, "timeout": None}
    assert made["settings"] == {**limits, "sampling": params} == from_json(made).settings
    assert result.exit_code == 0 and sum(row["kind"] == "text" for row in made["rows"]) == 4
    assert re.search(r" tokens in 4 prompts and 3 rows made of their ids, scored by ", " ".join(result.stderr.split()))
    result = corelm_command("compare", *TWO, "--input", tmp_path / "prompts.jsonl", "--budget", "1e-6")
    assert result.exit_code == 0 and "not tried: temperature, the budget of 1e-06 s was spent" in result.stdout
    result = corelm_command("compare", *TWO, "--budget", "0")
    assert result.exit_code == 2 and "error: --budget: expected a finite number above 0" in result.stderr


# Which engine a flag belongs to ---------------------------------------------------------------------------------------


def test_what_cannot_be_compared_is_refused_with_the_flag():
    for flags, said in (
        ((), "Invalid value for --backend: give it for each engine, at least two; got 0"),
        (("--backend", "toy"), "Invalid value for --backend: give it for each engine, at least two; got 1"),
        (("--backend", "toyy", "--quick"), "no installed backend is named 'toyy'; did you mean 'toy'?"),
        (("--backend", "nonesuch"), "no installed backend is named 'nonesuch'; installed: "),
        (
            (*TWO, "--dtype", "float32"),
            "No such option: --dtype; an option of the engine is typed --option dtype=float32",
        ),
        ((*TWO, "--name", "third"), "Invalid value for --name: side 2 (toy) has it more than once"),
        (("--name", "x", *TWO), "Invalid value for --name: give it after the --backend that it names"),
        (("--model", "a", "--model", "b", *TWO), "the beginning, for all sides, has it more than once"),
        ((*TWO, "--option", "python=x", "--python", "y"), "Invalid value for --python: side 2 (toy) has it"),
        ((*TWO, "--option", "model=x"), "Invalid value for --option: model is not an engine option; use --model"),
        ((*TWO, "--option", "x"), "Invalid value for --option: expected KEY=VALUE"),
        ((*TWO, "--adapter", "=x"), "Invalid value for --adapter"),
        ((*TWO, "--option", "colour=red"), "colour"),
        ((*TWO, "--max-prompts", "3"), "Invalid value for --max-prompts: there is no --input to read"),
        (("--backend", "toy", "--backend", "nonesuch"), "no backend is named 'nonesuch'"),
        ((*TWO, "--python", "/nowhere/python"), "/nowhere/python"),
        ((*TWO, "--tolerance", "-1"), "error: --tolerance: expected a finite number above 0"),
        ((*TWO, "--oracle", "/nowhere/model"), "/nowhere/model"),
        ((*TWO, "--report", "/nowhere/report.html"), "error: --report: /nowhere/report.html is in a folder"),
        ((*TWO, "--num-samples", "2"), "No such option: --num-samples; `corelm generate` has --num-samples"),
    ):
        result = corelm_command("compare", *flags)
        assert result.exit_code == 2 and said in result.stderr and result.stdout == "", (flags, result.stderr)


def test_illegal_sampling_is_refused_as_by_generate_and_before_libraries_are_imported(monkeypatch, tmp_path):
    # An import of it fails.
    monkeypatch.setitem(sys.modules, "corelm_compare", None)
    (tmp_path / "in.jsonl").touch()
    for flags, said in (
        (("--temperature", "-1"), "error: temperature: expected a finite number of at least 0, got -1.0"),
        (("--top-p", "2"), "error: top_p: expected a number above 0 and up to 1, got 2.0"),
        (("--max-new-tokens", "2.5"), "--max-new-tokens: expected an integer or none, got '2.5'"),
        (("--top-k", "2.5"), "--top-k: expected an integer, got '2.5'"),
        (("--stop-token-ids", "x"), "--stop-token-ids: expected an integer, got 'x'"),
        (("--temperature", "warm"), "--temperature: expected a number, got 'warm'"),
        (("--temprature", "1"), "No such option: --temprature"),
    ):
        for command in (("compare", *TWO), ("generate", "--input", tmp_path / "in.jsonl", "--output", "-")):
            refused = corelm_command(*command, *flags)
            assert refused.exit_code == 2 and said in refused.stderr, (command, refused.stderr)
    assert "expected a whole number" in corelm_command("compare", *TWO, "--seed", "-1").stderr


def test_flags_belong_to_the_backend_before_them_and_the_first_to_all(prompts, tmp_path, fabricate):
    source = """
import corelm
from corelm_testing.toy import ToyBackend

class Open(ToyBackend):
    @classmethod
    def open(cls, model=None, base_url=None, api_key=None, colour=None, env=None):
        return super().open()
"""
    fabricate("open", "1", {"open": "open_plugin:Open"}, {"open_plugin": source})
    flags = ("--model", "shared", "--option", "colour=red", "--option", "api_key=abcdefgh")
    flags += ("--option", 'env={"HUB": "ijklmnop"}')
    sides = (
        *("--backend", "open", "--name", "a"),
        *("--option", "colour=blue", "--backend=open", "--model=own"),
        *("--backend", "open", "--base-url", "http://host:1"),
    )
    result = corelm_command("compare", *flags, *sides, "--input", prompts, "--json", "--oracle", "none")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)["sides"]
    assert [side["name"] for side in found] == ["a", "open 1", "open 2"]
    assert [side["options"].get("colour") for side in found] == ["blue", "red", "red"]
    assert [side["options"].get("base_url") for side in found] == [None, None, "http://host:1"]
    assert [side["model"] for side in found[:2]] == ["shared", "own"] and "shared" not in found[2]["model"]
    assert "abcdefgh" not in result.output and "ijklmnop" not in result.output
    assert found[0]["options"]["env"] == "{HUB}"


def test_an_adapter_is_loaded_for_its_side(tiny_model, tmp_path):
    state, config = lora(AutoModelForCausalLM.from_pretrained(tiny_model))
    folder = save(state, config, tmp_path / "adapter")
    merged(AutoModelForCausalLM.from_pretrained(tiny_model), state).save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "merged")
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": "What is your name?"}])
    result = corelm_command(
        *("compare", "--option", "dtype=float32", "--input", tmp_path / "prompts.jsonl", "--oracle", "none"),
        *("--backend", "transformers", "--model", tiny_model, "--adapter", f"mine={folder}", "--name", "adapter"),
        *("--backend", "transformers", "--model", tmp_path / "merged", "--name", "merged"),
    )
    assert result.exit_code == 0 and result.stdout.startswith("OK: adapter and merged agree"), result.output
    with pytest.raises(InvalidRequestError, match="adapter: expected the name for"):
        SideSpec(backend="transformers", model=tiny_model, adapter_path=folder).open()


# What is read --------------------------------------------------------------------------------------------------------


def test_a_line_that_is_wrong_is_named_before_an_engine_opens(tmp_path):
    for lines, said in (
        (['{"prompt": 3}'], "line 1: prompt: expected a string, got int"),
        (['{"prompt": "a"}', '{"prompt": "a", "ids": [1]}'], "line 2: expected one of `prompt`, `messages` and `ids`"),
        (['{"id": 7}'], "line 1: expected one of `prompt`, `messages` and `ids`, got none of them"),
        (['{"ids": [1, -2]}'], "line 1: ids: expected ids of at least 0, got -2"),
        (['{"ids": "1 2"}'], "line 1: ids: expected a list of token ids, got str"),
        (['{"ids": [true]}'], "line 1: ids: expected a sequence of token ids"),
        (['{"messages": []}'], "line 1: messages: expected a list of at least one message"),
        (['{"prompt": "a", "tools": []}'], "line 1: unknown keys: tools"),
        (["not json"], "line 1: not valid JSON"),
        (['{"prompt": "a", "completion": "b"}', '{"prompt": "a"}'], "line 2 has no completion, and others have one"),
        (['{"prompt": "a", "completion": "b", "response": "c"}'], "line 1: expected `completion` or `response`"),
        ([], "there is no line; leave the flag out"),
        (["nonsense"] * 9, "; and 4 more"),
    ):
        (tmp_path / "prompts.jsonl").write_text("".join(f"{line}\n" for line in lines))
        result = corelm_command("compare", "--backend", "nonesuch", *TWO, "--input", tmp_path / "prompts.jsonl")
        assert result.exit_code == 2 and result.stderr.startswith("error: --input: "), result.stderr
        assert said in result.stderr and "nonesuch" not in result.stderr, result.stderr


def test_only_so_many_lines_are_read():
    lines = "".join(json.dumps({"prompt": text}) + "\n" for text in ("The cat", "The sea")) + "not json\n"
    result = corelm_command("compare", *TWO, "--input", "-", "--max-prompts", 2, "--json", stdin=lines)
    assert result.exit_code == 0, result.stderr
    assert [row["text"] for row in json.loads(result.stdout)["rows"][:2]] == ["The cat", "The sea"]


def test_given_completions_are_scored_and_those_with_ids_by_their_ids(tmp_path):
    write_rows(tmp_path / "in.jsonl", [{"prompt": "The cat", "completion": " sat"}, {"ids": [72], "response": "i"}])
    result = corelm_command("compare", *TWO, "--input", tmp_path / "in.jsonl", "--json")
    rows = json.loads(result.stdout)["rows"]
    # The toy puts a BOS before a text, and none before ids.
    assert bytes(rows[0]["ids"][1:]) == b"The cat sat" and rows[0]["prompt_length"] == 8
    assert rows[1]["ids"] == [72, 105] and rows[0]["sampled_by"] is None


def test_what_generate_wrote_can_be_compared(tmp_path):
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": "The cat"}, {"prompt": "The sea", "metadata": 3}])
    files = (tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl")
    assert generate(files, "--copy-input", "--return-tokens", "--log-probs", "raw").exit_code == 0
    answers = [json.loads(line) for line in files[1].read_text().splitlines()]
    result = corelm_command("compare", *TWO, "--input", files[1], "--json")
    assert result.exit_code == 0, result.stderr
    for row, answer in zip(json.loads(result.stdout)["rows"], answers, strict=False):
        assert row["ids"][1:] == [*answer["prompt"].encode(), *answer["token_ids"]]


# How it ends ---------------------------------------------------------------------------------------------------------


def test_an_engine_that_fails_is_exit_code_3(prompts, fabricate):
    source = """
import corelm
from corelm_testing.toy import ToyBackend

class Broken(ToyBackend):
    @corelm.hookimpl
    def score_logprobs(self, request):
        raise RuntimeError("out of memory")
"""
    fabricate("broken", "1", {"broken": "broken_plugin:Broken"}, {"broken_plugin": source})
    result = corelm_command("compare", "--backend", "toy", "--backend", "broken", "--input", prompts)
    assert result.exit_code == 3 and "out of memory" in result.stderr and result.stdout == ""


def test_the_help_says_how_many_tokens_are_sampled():
    words = " ".join(corelm_command("compare", "--help").stdout.split())
    assert f"none fills the model's context. Default: {DEFAULT.max_new_tokens}." in words
    assert "Default: 256." in " ".join(corelm_command("generate", "--help").stdout.split())


@pytest.mark.nightly
@pytest.mark.process
def test_ctrl_c_ends_the_command_and_closes_the_engines(tmp_path):
    (tmp_path / "slow_plugin.py").write_text(
        f"""
import pathlib, time
import corelm
from corelm_testing.toy import ToyBackend

class Slow(ToyBackend):
    @corelm.hookimpl
    def score_logprobs(self, request):
        pathlib.Path({str(tmp_path / "scoring")!r}).touch()
        time.sleep({PATIENCE})

    @corelm.hookimpl
    def close(self, request):
        pathlib.Path({str(tmp_path / "closed")!r}).touch()
"""
    )
    info = tmp_path / "slow-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slow\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[corelm.backends]\nslow = slow_plugin:Slow\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    run = subprocess.Popen(
        [sys.executable, "-m", "corelm_cli", "compare", "--backend", "toy", "--backend", "slow"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        preexec_fn=heed_interrupts,
    )
    assert wait_until((tmp_path / "scoring").exists)
    run.send_signal(signal.SIGINT)
    out, said = run.communicate(timeout=PATIENCE)
    assert run.returncode == 130 and out == "" and said.splitlines()[-1] == "interrupted"
    assert (tmp_path / "closed").exists()

"""The `corelm` command with the toy backend, whose answers are known in closed form."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import lazy_loader
import pytest
import torch

import corelm
import corelm_cli
from corelm_cli import progress
from corelm_testing.toy import Bigram, ByteTokenizer
from helpers.command_line import CHAT, FAULTY, LINES, corelm_command, generate, rows, settings_of, write_prompts

COMMAND = Path(sys.executable).parent / "corelm"


def greedy(prompt: list[int], new: int) -> list[int]:
    """Return the `new` most likely next bytes, read from the table itself, without an end of turn."""
    best, ids = Bigram.of_talk().table.argmax(-1), list(prompt)
    for _ in range(new):
        ids.append(int(best[ids[-1]]))
    return ids[len(prompt) :]


# ---------------------------------------------------------------- backends


def test_backends_lists_what_is_installed():
    result = corelm_command("backends")
    assert result.exit_code == 0
    assert re.search(r"^toy +core-testing +0\.1\.0", result.stdout, re.MULTILINE)
    assert re.search(r"^transformers +core-transformers-backend", result.stdout, re.MULTILINE)


def test_backends_as_json():
    listed = json.loads(corelm_command("backends", "--json").stdout)
    assert [row["name"] for row in listed] == [info.name for info in corelm.list_backends()]
    assert {"distribution", "version", "requires_core", "engine_available", "problem"} <= set(listed[0])


def test_backends_says_what_is_wrong(fabricate):
    (fabricate("torn", "1", {"torn": "m:P"}, site="a") / "METADATA").write_bytes(b"\xff")
    fabricate("newer", "1", {"newer": "m:P"}, requires=["core>=99"], site="b")
    result = corelm_command("backends")
    assert result.exit_code == 0 and "requires core>=99" in result.stdout
    assert re.search(r"skipped.*torn-1\.dist-info", result.stderr)


def test_backends_says_how_to_install_one_if_there_is_none(monkeypatch):
    monkeypatch.setenv("CORELM_BACKENDS", "")
    assert "pip install . kits/engine plugins/transformers_backend" in corelm_command("backends").stdout


@pytest.mark.process
def test_commands_that_need_no_model_do_not_import_torch():
    for arguments in (["backends"], ["--help"], ["generate", "--help"], ["--version"]):
        result = subprocess.run(
            [sys.executable, "-X", "importtime", COMMAND, *arguments], capture_output=True, text=True, check=True
        )
        loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines()}
        assert "corelm" in loaded and result.stdout
        assert not loaded & {
            "torch",
            "tensordict",
            "numpy",
            "transformers",
            "corelm_testing",
            "transformers_backend",
        }


@pytest.mark.process
def test_without_its_libraries_the_command_says_what_to_install(tmp_path):
    """The interpreter sees only the standard library and what `import corelm` needs."""
    for package in (corelm, corelm_cli, lazy_loader):
        (tmp_path / package.__name__).symlink_to(Path(package.__file__).parent)
    code = "from corelm_cli import main; main()"
    environment = {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, env=environment)
    assert result.returncode == 1
    assert result.stderr == "the corelm command needs typer and rich: pip install typer rich\n"


# ---------------------------------------------------------------- generate


def test_answers_come_from_the_model_in_input_order(files):
    result = generate(files, "--temperature", 0, "--return-tokens", "--log-probs", "raw", "--batch-size", 2)
    assert result.exit_code == 0, result.output
    assert "5 answers written, 0 already present" in result.stderr
    answers = rows(files[1])
    assert [(row["id"], row["line"]) for row in answers] == [(1, 1), ("chat", 2), ("sea", 3), (10, 4), ("bird", 5)]
    tokenizer, table = ByteTokenizer(), Bigram.of_talk().table.log_softmax(-1)
    for line, row in zip(LINES, answers, strict=True):
        if "prompt" in line:
            text, special = line["prompt"], True
        else:
            text, special = tokenizer.apply_chat_template(line["messages"], add_generation_prompt=True), False
        prompt = tokenizer([text], add_special_tokens=special)["input_ids"][0]
        assert row["token_ids"] == greedy(prompt, 9)
        assert row["response"] == tokenizer.decode(row["token_ids"], skip_special_tokens=True)
        assert (row["finish_reason"], row["tokens"]) == ("length", 9)
        expected = table[[prompt[-1], *row["token_ids"][:-1]], row["token_ids"]]
        torch.testing.assert_close(torch.tensor(row["log_probs"]), expected)
        assert "provenance" not in row
    made = settings_of(files[1])["provenance"]
    assert (made["backend"], made["mode"]) == ("toy", "raw")


def test_tokens_and_log_probs_are_written_only_if_asked_for(files):
    generate(files)
    first, _, third, *_ = rows(files[1])
    assert set(first) == {"id", "line", "prompt_hash", "response", "finish_reason", "tokens", "settings"}
    assert set(third) == {*first, "metadata"} and third["metadata"] == LINES[2]["metadata"]


def test_the_hash_of_a_prompt_is_the_hash_of_its_canonical_json(files):
    generate(files)
    asked = [b'{"prompt":"The cat"}', b'{"messages":[{"content":"Where is the cat?","role":"user"}]}']
    assert [row["prompt_hash"] for row in rows(files[1])][:2] == [hashlib.sha256(a).hexdigest()[:16] for a in asked]


def test_a_stop_string_and_an_engine_option_reach_the_engine(files):
    result = generate(files, "--temperature", 0, "--stop", "is", "--option", "max_context=25")
    answers = rows(files[1])
    assert result.exit_code == 1
    assert rows(files[1].with_name("answers.errors.jsonl"))[0]["id"] == "chat"
    assert "line 2: " in result.stderr
    assert "no room for an answer of max_new_tokens=9 in the context of 25" in result.stderr
    assert len(answers) == 4 and not any("is" in row["response"] for row in answers)


def test_an_answer_depends_on_seed_and_line_not_on_the_batch(files, tmp_path):
    generate(files, "--seed", 5, "--batch-size", 1)
    other = tmp_path / "other.jsonl"
    generate((files[0], other), "--seed", 5, "--batch-size", 4)
    assert rows(files[1]) == rows(other)
    different = tmp_path / "different.jsonl"
    generate((files[0], different), "--seed", 6)
    assert [row["response"] for row in rows(different)] != [row["response"] for row in rows(other)]


def test_a_conversation_that_cannot_be_rendered_fails_alone(files, fabricate):
    fabricate("faulty", "1", {"faulty": "faulty_template:Faulty"}, {"faulty_template": FAULTY})
    with files[0].open("a") as file:
        file.write(json.dumps({"id": "bad", "messages": [{"role": "user", "content": "bad"}]}))
    result = generate(files, backend="faulty")
    (fault,) = rows(files[1].with_name("answers.errors.jsonl"))
    assert result.exit_code == 1 and fault["id"] == "bad" and "not in my template" in fault["error"]
    assert len(rows(files[1])) == 5


def test_answers_survive_an_engine_that_fails_midway(files, fabricate, monkeypatch):
    fabricate("faulty", "1", {"faulty": "faulty_engine:Faulty"}, {"faulty_engine": FAULTY})
    monkeypatch.setenv("FAIL_FROM", "2")
    result = generate(files, "--batch-size", 2, backend="faulty")
    assert result.exit_code == 3 and "out of memory" in result.stderr and "to continue" in result.stderr
    assert len(rows(files[1])) == 2
    monkeypatch.delenv("FAIL_FROM")
    assert generate(files, "--batch-size", 2, backend="faulty").exit_code == 0
    assert len(rows(files[1])) == 5


def test_an_engine_that_does_not_open_leaves_no_output(files, fabricate):
    fabricate("faulty", "1", {"faulty": "faulty_opening:Faulty"}, {"faulty_opening": FAULTY})
    result = generate(files, "--model", "broken", backend="faulty")
    assert result.exit_code == 3 and "no such model" in result.stderr
    assert "to continue" not in result.stderr and "written" not in result.stderr
    assert not files[1].exists()


def test_a_failed_call_is_retried_if_asked(files, fabricate, monkeypatch):
    fabricate("faulty", "1", {"faulty": "faulty_once:Faulty"}, {"faulty_once": FAULTY})
    monkeypatch.setenv("FAIL_AT", "1")
    assert generate(files, "--retry", 2, "--timeout", 30, backend="faulty").exit_code == 0
    assert len(rows(files[1])) == 5


def test_files_are_checked_before_the_engine_opens(files, fabricate, tmp_path):
    fabricate("faulty", "1", {"faulty": "faulty_first:Faulty"}, {"faulty_first": FAULTY})
    source, target = files
    for paths in ((source, tmp_path / "nowhere" / "a.jsonl"), (tmp_path / "nowhere.jsonl", target), (tmp_path, target)):
        result = generate(paths, "--model", "broken", backend="faulty")
        assert result.exit_code == 2 and str(tmp_path) in result.stderr


def test_tools_reach_the_template(files, fabricate, tmp_path):
    """One batch mixes no tools, equal and different ones. The toy's answers depend on the last letter of a prompt."""
    listing = """
from corelm_testing.toy import ByteTokenizer, ToyBackend

class Listing(ByteTokenizer):
    def apply_chat_template(self, conversation, tools=(), **options):
        return super().apply_chat_template(conversation, **options) + " ".join(tool["name"] for tool in tools)

class Tooled(ToyBackend):
    @classmethod
    def open(cls, model=None):
        return super().open(tokenizer=Listing())
"""
    fabricate("tooled", "1", {"tooled": "tooled:Tooled"}, {"tooled": listing})
    names = ["sea", None, "bird", "sea", "", "The cat is", None]
    with files[0].open("w") as file:
        for name in names:
            tools = {} if name is None else {"tools": [{"name": word} for word in name.split()]}
            file.write(json.dumps({"messages": CHAT, **tools}) + "\n")
    result = generate(files, "--temperature", 0, "--return-tokens", backend="tooled")
    assert result.exit_code == 0, result.output
    rendered = ByteTokenizer().apply_chat_template(CHAT, add_generation_prompt=True)
    expected = [greedy(list((rendered + (name or "")).encode()), 9) for name in names]
    assert [row["token_ids"] for row in rows(files[1])] == expected
    assert expected[0] != expected[1] != expected[2] != expected[0]


def test_a_refused_command_says_why(files, uninstalled):
    uninstalled("core-vllm-backend")
    for more, message in (
        (["--backend", "tyo"], "Did you mean 'toy'"),
        (["--backend", "vllm"], 'pip install . kits/engine "plugins/vllm_backend[engine]"'),
        (["--input", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--top-p", "1.5"], "top_p"),
        (["--option", "max_contxt=5"], "did you mean 'max_context'"),
        (["--option", "novalue"], "expected KEY=VALUE"),
    ):
        result = generate(files, *more)
        assert result.exit_code == 2 and message in result.stderr and not files[1].exists(), more


def test_arguments_of_get_backend_are_not_engine_options(files):
    """Some of them can be written down: for these, core or the engine rejects the value 5."""
    parameters = inspect.signature(corelm.get_backend).parameters
    for name in (name for name, each in parameters.items() if each.kind != each.VAR_KEYWORD):
        target = files[1].with_name(f"{name}.jsonl")
        result = generate((files[0], target), "--option", f"{name}=5")
        refused = f"{name} is not an engine option; " in " ".join(result.stderr.replace("│", " ").split())
        accepted = name in ("tokenizer", "python", "canary", "replicas")
        assert (result.exit_code, refused) == (2, not accepted), (name, result.stderr)


@pytest.mark.process
def test_an_engine_in_another_process_answers_alike(tmp_path):
    source, target = write_prompts(tmp_path)
    other = tmp_path / "hosted.jsonl"
    assert generate((source, target), "--seed", 3).exit_code == 0
    result = generate((source, other), "--seed", 3, "--option", f"python={sys.executable}", "--option", "replicas=2")
    assert result.exit_code == 0, result.output
    assert [row["response"] for row in rows(other)] == [row["response"] for row in rows(target)]


# ---------------------------------------------------------------- progress and help


def test_progress_is_shown_on_a_terminal_after_a_while(files, monkeypatch):
    assert "answering" not in generate(files).stderr
    monkeypatch.setattr(progress, "is_terminal", lambda stream: True)
    assert "answering" not in generate(files, "--overwrite").stderr
    monkeypatch.setattr(progress, "LONG", 0.0)
    shown = generate(files, "--overwrite").stderr
    assert re.search(r"answering .* 5/5 .* [\d,]+ tokens/s", shown)
    assert generate(files, "--overwrite", "--quiet").stderr == ""

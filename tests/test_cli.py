"""The `corelm` command on files, with the toy backend: its answers are known in closed form."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_backend import Bigram, ByteTokenizer
from typer.testing import CliRunner, Result

import corelm
from corelm.cli.app import app

COMMAND = Path(sys.executable).parent / "corelm"
CHAT = [{"role": "user", "content": "Where is the cat?"}]
LINES: list[Any] = [
    {"prompt": "The cat"},
    {"id": "chat", "messages": CHAT},
    {"id": "sea", "prompt": "The sea", "kept": "by its owner"},
    {"id": 10, "prompt": "Is the tea"},
    {"id": "bird", "prompt": "A small bird"},
]

FAULTY = """
from toy_backend import ByteTokenizer, ToyBackend
import corelm

class Choosy(ByteTokenizer):
    def apply_chat_template(self, conversation, **options):
        if conversation[-1]["content"] == "bad":
            raise ValueError("not in my template")
        return super().apply_chat_template(conversation, **options)

class Faulty(ToyBackend):
    calls = 0

    @classmethod
    def open(cls, model=None, *, fail_at=99):
        engine = super().open(tokenizer=Choosy())
        engine.fail_at = fail_at
        return engine

    @corelm.hookimpl
    def generate(self, request):
        self.calls += 1
        if self.calls == self.fail_at:
            raise RuntimeError("out of memory")
        return super().generate(request)
"""


def corelm_command(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    source = tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return source, tmp_path / "answers.jsonl"


def generate(files: tuple[Path, Path], *more: object, backend: str = "toy") -> Result:
    source, target = files
    always = ("--backend", backend, "--input", source, "--output", target, "--max-new-tokens", 9)
    return corelm_command("generate", *always, *more)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def greedy(prompt: list[int], new: int) -> list[int]:
    """The most likely next byte, `new` times, from the table itself; without an end of turn."""
    best, ids = Bigram.of_talk().table.argmax(-1), list(prompt)
    for _ in range(new):
        ids.append(int(best[ids[-1]]))
    return ids[len(prompt) :]


# ---------------------------------------------------------------- backends


def test_backends_lists_what_is_installed():
    result = corelm_command("backends")
    assert result.exit_code == 0
    assert re.search(r"^toy +corelm-toy-backend +0\.1\.0 .* yes", result.stdout, re.MULTILINE)
    assert re.search(r"^transformers +core-transformers-backend", result.stdout, re.MULTILINE)


def test_backends_as_json():
    listed = json.loads(corelm_command("backends", "--json").stdout)
    assert [row["name"] for row in listed] == [info.name for info in corelm.list_backends()]
    assert {"distribution", "version", "requires_core", "engine_available", "problem"} <= set(listed[0])


def test_backends_says_what_is_wrong(fabricate):
    (fabricate("torn", "1", {"torn": "m:P"}, site="a") / "METADATA").write_bytes(b"\xff")
    fabricate("newer", "1", {"newer": "m:P"}, requires=["core>=99"], site="b")
    result = corelm_command("backends")
    assert result.exit_code == 0 and "asks for core>=99" in result.stdout
    assert re.search(r"skipped.*torn-1\.dist-info", result.stderr)


def test_backends_without_any_says_how_to_get_one(monkeypatch):
    monkeypatch.setenv("CORELM_BACKENDS", "")
    assert 'pip install "core[transformers]"' in corelm_command("backends").stdout


@pytest.mark.parametrize("arguments", [["backends"], ["--help"], ["generate", "--help"], ["--version"]])
def test_what_needs_no_model_imports_no_torch(arguments):
    result = subprocess.run(
        [sys.executable, "-X", "importtime", COMMAND, *arguments], capture_output=True, text=True, check=True
    )
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines()}
    assert "corelm" in loaded and result.stdout
    assert not loaded & {"torch", "tensordict", "numpy", "transformers", "toy_backend", "transformers_backend"}


def test_without_its_libraries_it_says_what_to_install(tmp_path):
    """In an interpreter that sees the standard library and corelm, and nothing else."""
    (tmp_path / "corelm").symlink_to(Path(corelm.__file__).parent)
    code = "from corelm.cli import main; main()"
    environment = {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, env=environment)
    assert result.returncode == 1
    assert result.stderr == 'the corelm command needs typer and rich: pip install "core[cli]"\n'


# ---------------------------------------------------------------- generate


def test_answers_are_the_models_and_in_the_order_of_the_input(files):
    result = generate(files, "--temperature", 0, "--return-tokens", "--log-probs", "raw", "--batch-size", 2)
    assert result.exit_code == 0, result.output
    assert "5 answers written, 0 were there already" in result.stderr
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
        assert row["provenance"]["backend"] == "toy" and row["provenance"]["mode"] == "raw"


def test_tokens_and_log_probs_are_left_out_unless_asked_for(files):
    generate(files)
    assert set(rows(files[1])[0]) == {"id", "line", "response", "finish_reason", "tokens", "settings"}


def test_a_stop_string_and_an_engine_option_reach_the_engine(files):
    result = generate(files, "--temperature", 0, "--stop", "is", "--option", "max_context=25")
    answers = rows(files[1])
    assert result.exit_code == 1
    assert rows(files[1].with_name("answers.errors.jsonl"))[0]["id"] == "chat"
    assert "line 2: " in result.stderr and "do not fit the context of 25" in result.stderr
    assert len(answers) == 4 and not any("is" in row["response"] for row in answers)


def test_a_seed_and_a_line_make_an_answer_whatever_the_batch(files, tmp_path):
    generate(files, "--seed", 5, "--batch-size", 1)
    other = tmp_path / "other.jsonl"
    generate((files[0], other), "--seed", 5, "--batch-size", 4)
    assert rows(files[1]) == rows(other)
    different = tmp_path / "different.jsonl"
    generate((files[0], different), "--seed", 6)
    assert [row["response"] for row in rows(different)] != [row["response"] for row in rows(other)]


@pytest.mark.parametrize("cut", ["in a line", "at a newline", "before a newline"])
def test_it_goes_on_where_it_stopped(files, cut):
    target = files[1]
    generate(files, "--seed", 5)
    whole = target.read_bytes()
    third = [i for i, byte in enumerate(whole) if byte == ord("\n")][2]
    end = {"in a line": third - 7, "at a newline": third + 1, "before a newline": third}[cut]
    target.write_bytes(whole[:end])
    result = generate(files, "--seed", 5, "--batch-size", 2)
    assert result.exit_code == 0 and target.read_bytes() == whole
    assert f"{3 if cut == 'in a line' else 2} answers written" in result.stderr
    assert generate(files, "--seed", 5).exit_code == 0 and target.read_bytes() == whole


def test_a_line_that_is_added_is_answered_alone(files):
    generate(files, "--seed", 5)
    before = files[1].read_bytes()
    with files[0].open("a") as file:
        file.write('{"id": "new", "prompt": "Who sings"}')
    generate(files, "--seed", 5)
    after = files[1].read_bytes()
    assert after.startswith(before) and [row["id"] for row in rows(files[1])][5:] == ["new"]


def test_more_samples_leave_the_first_ones_as_they_were(files, tmp_path):
    generate(files, "--seed", 5, "--num-samples", 2)
    assert [(row["id"], row["sample"]) for row in rows(files[1])][:3] == [(1, 0), (1, 1), ("chat", 0)]
    generate(files, "--seed", 5, "--num-samples", 3)
    at_once = tmp_path / "at_once.jsonl"
    generate((files[0], at_once), "--seed", 5, "--num-samples", 3)
    key = lambda row: (row["line"], row["sample"])  # noqa: E731
    assert sorted(rows(files[1]), key=key) == rows(at_once)


BAD = {
    b"not json": "no JSON",
    b"[1]": "expected an object, got list",
    b'{"id": "x"}': "either `prompt` or `messages`",
    b'{"prompt": "a", "messages": []}': "either `prompt` or `messages`",
    b'{"prompt": 3}': "prompt: expected a text, got int",
    b'{"messages": []}': "messages: expected a list",
    b'{"messages": [{"content": "a"}]}': "role is missing",
    b'{"id": 1.5, "prompt": "a"}': "id: expected",
    b'{"id": "sea", "prompt": "a"}': "the id 'sea' is line 3's already",
    b'{"prompt": "\xff"}': "no JSON",
}


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.decode(errors="replace"))
def test_a_bad_line_is_reported_and_the_others_are_answered(files, bad):
    with files[0].open("ab") as file:
        file.write(b"\n" + bad + b'\n{"id": "last", "prompt": "It is"}\n')
    result = generate(files)
    (fault,) = rows(files[1].with_name("answers.errors.jsonl"))
    assert result.exit_code == 1
    assert fault["line"] == 7 and BAD[bad] in fault["error"]
    assert f"line 7: {fault['error']}" in result.stderr and "lines that failed: 1, see" in result.stderr
    assert [row["id"] for row in rows(files[1])] == [1, "chat", "sea", 10, "bird", "last"]


def test_the_errors_file_goes_when_the_line_is_mended(files):
    source, target = files
    source.write_text('{"prompt": 3}\n')
    assert generate(files).exit_code == 1
    source.write_text('{"prompt": "3"}\n')
    assert generate(files).exit_code == 0
    assert not target.with_name("answers.errors.jsonl").exists() and len(rows(target)) == 1


def test_a_conversation_that_cannot_be_rendered_fails_alone(files, fabricate):
    fabricate("faulty", "1", {"faulty": "faulty_template:Faulty"}, {"faulty_template": FAULTY})
    with files[0].open("a") as file:
        file.write(json.dumps({"id": "bad", "messages": [{"role": "user", "content": "bad"}]}))
    result = generate(files, backend="faulty")
    (fault,) = rows(files[1].with_name("answers.errors.jsonl"))
    assert result.exit_code == 1 and fault["id"] == "bad" and "not in my template" in fault["error"]
    assert len(rows(files[1])) == 5


def test_an_engine_that_fails_on_the_way_leaves_its_answers(files, fabricate):
    fabricate("faulty", "1", {"faulty": "faulty_engine:Faulty"}, {"faulty_engine": FAULTY})
    result = generate(files, "--batch-size", 2, "--option", "fail_at=2", backend="faulty")
    assert result.exit_code == 3 and "out of memory" in result.stderr and "goes on" in result.stderr
    assert len(rows(files[1])) == 2
    assert generate(files, "--batch-size", 2, backend="faulty").exit_code == 0
    assert len(rows(files[1])) == 5


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--temperature", "0.5"], "made with temperature 1.0, and now it is 0.5"),
        (["--top-k", "3"], "made with top_k None, and now it is 3"),
        (["--seed", "1"], "made with seed None, and now it is 1"),
        (["--stop", "x"], r"made with stop None, and now it is \['x'\]"),
    ],
)
def test_answers_made_otherwise_do_not_get_into_one_file(files, more, message):
    generate(files)
    before = files[1].read_bytes()
    result = generate(files, *more)
    assert result.exit_code == 2 and re.search(message, result.stderr)
    assert files[1].read_bytes() == before


def test_a_file_of_something_else_is_not_written_to(files):
    source = files[0]
    before = source.read_bytes()
    result = generate((source, source))
    assert result.exit_code == 2 and "line 1, is not an answer" in result.stderr
    assert source.read_bytes() == before


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--backend", "tyo"], "Did you mean 'toy'"),
        (["--backend", "vllm"], r'pip install "core\[vllm\]"'),
        (["--input", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--top-p", "1.5"], "top_p"),
        (["--option", "max_contxt=5"], "did you mean 'max_context'"),
        (["--option", "novalue"], "expected KEY=VALUE"),
    ],
)
def test_what_cannot_be_done_is_said(files, more, message):
    result = generate(files, *more)
    assert result.exit_code == 2 and re.search(message, result.stderr)
    assert not files[1].exists()

"""The files of ``corelm generate``: lines at fault, going on where it stopped, and what is never written to."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from corelm import SamplingParams
from corelm.cli.answering import Job
from helpers.command_line import LINES, generate, rows, write_prompts


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return write_prompts(tmp_path)


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
    b'{"id": "\\ud800", "prompt": "a"}': "half of a surrogate pair",
    b'{"prompt": "\\ud800"}': "half of a surrogate pair",
    b'{"messages": [{"role": "user", "content": "a\\udfff"}]}': "half of a surrogate pair",
    b'{"prompt": "a", "metadata": "\\ud800"}': "half of a surrogate pair",
    b'{"\\ud800": 1, "prompt": "a"}': "half of a surrogate pair",
    b"[" * 200_000: "nested more than 100 deep",
    b'{"prompt": "a", "metadata": ' + b"[" * 450 + b"]" * 450 + b"}": "nested more than 100 deep",
    b'{"messages": [{"role": "assistant", "token_ids": [99999999999999999999]}]}': "which no vocabulary holds",
    b'{"prompt": "a", "max_tokens": 3, "model": "b"}': "unknown: max_tokens, model; a line may have id, prompt",
    b'{"prompt": "a", "tools": []}': "tools: a chat template reads them",
    b'{"messages": [{"role": "user", "content": "a"}], "tools": {}}': "tools: expected a list, got dict",
}


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad[:60].decode(errors="replace"))
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


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--temperature", "0.5"], "made with temperature 1.0, and now it is 0.5"),
        (["--top-k", "3"], "made with top_k None, and now it is 3"),
        (["--seed", "1"], "made with seed None, and now it is 1"),
        (["--stop", "x"], r"made with stop None, and now it is \['x'\]"),
        (["--option", "max_context=99"], r"made with options {}, and now it is {'max_context': 99}"),
        (["--log-probs", "raw"], "made with log_probs 'none', and now it is 'raw'"),
        (["--return-tokens"], "made with return_tokens False, and now it is True"),
    ],
)
def test_answers_made_otherwise_do_not_get_into_one_file(files, more, message):
    generate(files)
    before = files[1].read_bytes()
    result = generate(files, *more)
    assert result.exit_code == 2 and re.search(message, result.stderr)
    assert files[1].read_bytes() == before


def test_a_prompt_that_changed_under_its_id_is_not_taken_for_answered(files):
    generate(files, "--seed", 5)
    before = files[1].read_bytes()
    changed = [{**line, "prompt": "The tea"} if line.get("id") == "sea" else line for line in LINES]
    files[0].write_text("".join(json.dumps(line) + "\n" for line in changed))
    result = generate(files, "--seed", 5)
    (fault,) = rows(files[1].with_name("answers.errors.jsonl"))
    assert result.exit_code == 1 and files[1].read_bytes() == before
    assert fault["line"] == 3 and "answers to another prompt under the id 'sea'" in fault["error"]


SOMETHING_ELSE = {
    "prompts": b'{"id": "a", "prompt": "b"}\n{"id": "c", "pro',
    "a text": b"line\nlast, no newline",
    "one line": b"no newline",
    "bytes": bytes(range(128, 256)) * 20,
    "nested": b"[" * 200_000,
}


@pytest.mark.parametrize("name", SOMETHING_ELSE)
def test_a_file_of_something_else_is_not_written_to(files, name):
    files[1].write_bytes(SOMETHING_ELSE[name])
    result = generate(files)
    assert result.exit_code == 2 and "line 1, is not an answer" in result.stderr
    assert files[1].read_bytes() == SOMETHING_ELSE[name]


def test_what_was_made_otherwise_keeps_its_torn_line(files):
    generate(files)
    torn = files[1].read_bytes()[:-9]
    files[1].write_bytes(torn)
    assert generate(files, "--temperature", 0.5).exit_code == 2 and files[1].read_bytes() == torn


def test_a_first_answer_that_was_cut_off_is_asked_again(files):
    generate(files, "--seed", 5)
    whole = files[1].read_bytes()
    files[1].write_bytes(whole[:50])
    assert generate(files, "--seed", 5).exit_code == 0 and files[1].read_bytes() == whole


@pytest.mark.parametrize("output", ["/dev/null", ".", "taken"])
def test_an_output_that_is_no_regular_file_is_refused(files, output, tmp_path):
    (tmp_path / "taken.errors.jsonl").mkdir()
    result = generate((files[0], tmp_path / output))
    assert result.exit_code == 2 and "is not a regular file" in result.stderr


@pytest.mark.parametrize("link", [None, os.symlink, os.link])
@pytest.mark.parametrize("output", ["run.jsonl", "run.errors.jsonl"])
def test_the_input_is_never_written_to(tmp_path, output, link):
    source = tmp_path / "run.errors.jsonl"
    target = tmp_path / output
    source.write_text('{"id": "a", "prompt": "torn')
    if link:
        source = source.rename(tmp_path / "other.jsonl")
        link(source, tmp_path / "run.errors.jsonl")
    result = generate((source, target))
    assert result.exit_code == 2 and "and the input" in result.stderr
    assert source.read_text() == '{"id": "a", "prompt": "torn'


@pytest.mark.parametrize(
    ("output", "errors"), [("a.jsonl", "a.errors.jsonl"), ("a.txt", "a.txt.errors.jsonl"), ("a", "a.errors.jsonl")]
)
def test_each_output_has_its_errors_file(tmp_path, output, errors):
    source = tmp_path / "prompts.jsonl"
    source.write_text("not json\n")
    generate((source, tmp_path / output))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["prompts.jsonl", errors])


def test_one_run_at_a_time(files):
    fcntl = pytest.importorskip("fcntl")
    generate(files)
    before = files[1].read_bytes()
    with files[1].open("ab") as other_run:
        fcntl.flock(other_run, fcntl.LOCK_EX)
        result = generate(files)
        assert result.exit_code == 2 and "another run is writing" in result.stderr
    assert files[1].read_bytes() == before
    assert generate(files).exit_code == 0


def test_a_pipe_is_read_as_a_file_is(files, tmp_path):
    generate(files, "--seed", 5)
    piped = tmp_path / "piped.jsonl"
    command = [sys.executable, "-m", "corelm", "generate", "--backend", "toy", "--input", "/dev/stdin"]
    command += ["--output", str(piped), "--max-new-tokens", "9", "--seed", "5"]
    result = subprocess.run(command, input=files[0].read_bytes(), capture_output=True)
    assert result.returncode == 0 and b"5 answers written" in result.stderr
    assert piped.read_bytes() == files[1].read_bytes()


def test_a_secret_is_not_written_down(tmp_path):
    job = {"source": tmp_path / "in", "target": tmp_path / "out", "backend": "toy"}
    options = {"api_key": "hush", "hf_token": "hush", "tokenizer": "here"}
    settings = Job(**job, options=options).settings(SamplingParams())
    assert settings["options"] == {"tokenizer": "here"} and "hush" not in str(settings)

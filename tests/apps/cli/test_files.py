"""The files of ``corelm generate``: lines that fail, resuming, and files that are never written to."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from corelm_cli.lines import LineError
from corelm_cli.output import AnswersFile, Errors
from helpers.command_line import FAULTY, LINES, corelm_command, generate, rows, write_prompts, write_rows


@pytest.mark.parametrize("cut", ["in a line", "at a newline", "before a newline"])
def test_a_run_resumes_where_it_stopped(files, cut):
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


def test_lines_of_other_programs_are_taken(files):
    """With a byte order mark, an id of null, and contents in parts."""
    chats = [
        [{"role": "user", "content": content}] for content in ("Who sings?", [{"type": "text", "text": "Who sings?"}])
    ]
    write_rows(files[0], [{"id": None, "prompt": "Who sings"}, *({"messages": chat} for chat in chats)])
    files[0].write_bytes(b"\xef\xbb\xbf" + files[0].read_bytes())
    assert generate(files, "--temperature", 0).exit_code == 0
    plain, said, in_parts = rows(files[1])
    assert plain["id"] == 1 and said["response"] == in_parts["response"]


def test_only_an_added_line_is_answered(files):
    generate(files, "--seed", 5)
    before = files[1].read_bytes()
    with files[0].open("a") as file:
        file.write('{"id": "new", "prompt": "Who sings"}')
    generate(files, "--seed", 5)
    after = files[1].read_bytes()
    assert after.startswith(before) and [row["id"] for row in rows(files[1])][5:] == ["new"]


def test_more_samples_keep_the_first_ones(files, tmp_path):
    generate(files, "--seed", 5, "--num-samples", 2)
    assert [(row["id"], row["sample"]) for row in rows(files[1])][:3] == [(1, 0), (1, 1), ("chat", 0)]
    generate(files, "--seed", 5, "--num-samples", 3)
    at_once = tmp_path / "at_once.jsonl"
    generate((files[0], at_once), "--seed", 5, "--num-samples", 3)
    key = lambda row: (row["line"], row["sample"])  # noqa: E731
    assert sorted(rows(files[1]), key=key) == rows(at_once)


BAD = {
    b"not json": "not valid JSON",
    b"[1]": "expected an object, got list",
    b'{"id": "x"}': "expected one of `prompt` and `messages`, got none of them",
    b'{"prompt": "a", "messages": []}': "expected one of `prompt` and `messages`, got prompt and messages",
    b'{"prompt": 3}': "prompt: expected a string, got int",
    b'{"messages": []}': "messages: expected a list",
    b'{"messages": [{"content": "a"}]}': "role is missing",
    b'{"id": 1.5, "prompt": "a"}': "id: expected",
    b'{"id": "sea", "prompt": "a"}': "line 3 already has the id 'sea'",
    b'{"prompt": "\xff"}': "not valid JSON",
    b'{"id": "\\ud800", "prompt": "a"}': "lone surrogate",
    b'{"prompt": "\\ud800"}': "lone surrogate",
    b'{"messages": [{"role": "user", "content": "a\\udfff"}]}': "lone surrogate",
    b'{"prompt": "a", "metadata": "\\ud800"}': "lone surrogate",
    b'{"\\ud800": 1, "prompt": "a"}': "lone surrogate",
    b"[" * 200_000: "nested more than 100 levels deep",
    b'{"prompt": "a", "metadata": ' + b"[" * 450 + b"]" * 450 + b"}": "nested more than 100 levels deep",
    b'{"messages": [{"role": "assistant", "content": "a", "token_ids": [99999999999]}]}': "larger than any vocabulary",
    b'{"promt": "a"}': "a line may have id, prompt, messages, tools, metadata; did you mean 'prompt'?",
    b'{"prompt": "a", "max_tokens": 3, "model": "b"}': "unknown keys: max_tokens, model; a line may have id, prompt",
    b'{"prompt": "a", "metadata": {"x": [NaN]}}': "not valid JSON: JSON has no number for NaN",
    b'{"prompt": "a", "metadata": -Infinity}': "not valid JSON: JSON has no number for -Infinity",
    b'{"prompt": "a", "metadata": 1e999}': "not valid JSON: JSON has no number for 1e999",
    b'{"prompt": "a", "prompt": "b"}': "not valid JSON: the key 'prompt' occurs more than once",
    b'{"prompt": "a", "metadata": [{"x": 1, "y": 1, "x": 1}]}': "not valid JSON: the key 'x' occurs more than once",
    b'{"prompt": "a", "tools": []}': "tools: only a chat template reads tools",
    b'{"messages": [{"role": "user", "content": "a"}], "tools": {}}': "tools: expected a list, got dict",
}


def test_bad_lines_are_reported_and_the_rest_are_answered(files):
    with files[0].open("ab") as file:
        file.write(b"\n" + b"\n".join(BAD) + b'\n{"id": "last", "prompt": "It is"}\n')
    result = generate(files)
    assert result.exit_code == 1 and f"{len(BAD)} lines failed (see " in result.stderr
    faults = rows(files[1].with_name("answers.errors.jsonl"))
    assert [fault["line"] for fault in faults] == list(range(7, 7 + len(BAD)))
    for fault, (bad, said) in zip(faults, BAD.items(), strict=True):
        assert said in fault["error"], bad[:60]
    assert f"line 7: {faults[0]['error']}" in result.stderr
    assert [row["id"] for row in rows(files[1])] == [1, "chat", "sea", 10, "bird", "last"]


def test_the_errors_file_is_removed_once_the_line_is_fixed(files):
    source, target = files
    source.write_text('{"prompt": 3}\n')
    assert generate(files).exit_code == 1
    source.write_text('{"prompt": "3"}\n')
    assert generate(files).exit_code == 0
    assert not target.with_name("answers.errors.jsonl").exists() and len(rows(target)) == 1


def test_answers_with_different_settings_are_not_mixed(files):
    generate(files)
    before = files[1].read_bytes()
    for more, message in (
        (["--temperature", "0.5"], "made with temperature 1.0, but temperature is now 0.5"),
        (["--top-k", "3"], "made with top_k None, but top_k is now 3"),
        (["--seed", "1"], "made with seed None, but seed is now 1"),
        (["--stop", "x"], "made with stop None, but stop is now ['x']"),
        (["--option", "max_context=99"], "made with options {}, but options is now {'max_context': 99}"),
        (["--log-probs", "raw"], "made with log_probs 'none', but log_probs is now 'raw'"),
        (["--return-tokens"], "made with return_tokens False, but return_tokens is now True"),
    ):
        result = generate(files, *more)
        assert result.exit_code == 2 and message in result.stderr, more
        assert files[1].read_bytes() == before


CHANGED = [{**line, "prompt": "The tea"} if line.get("id") == "sea" else line for line in LINES]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (CHANGED, "has answers to another prompt under the id 'sea'"),
        (LINES[:-1], "has answers to other lines than those of the input, such as 'bird'"),
        ([{"id": f"other-{at}", "prompt": "The tea"} for at in range(7)], "has answers to other lines"),
    ],
)
@pytest.mark.parametrize("pipe", [False, True])
def test_another_input_is_refused_unless_it_may_overwrite(files, lines, said, pipe):
    generate(files, "--seed", 5)
    before = files[1].read_bytes()
    write_rows(files[0], lines)
    if pipe and lines is CHANGED:  # other lines than those of a pipe cannot be known before it ends
        result = generate(("-", files[1]), "--seed", 5, stdin=files[0].read_text())
    else:
        result = generate(files, "--seed", 5)
    assert result.exit_code == 2 and said in result.stderr and "give --overwrite" in result.stderr
    assert files[1].read_bytes() == before
    result = generate(files, "--temperature", 0.5, "--overwrite")
    assert result.exit_code == 0 and f"{len(lines)} answers written, 0 already present" in result.stderr
    assert [row["id"] for row in rows(files[1])] == [line.get("id", at) for at, line in enumerate(lines, 1)]
    assert generate(files, "--temperature", 0.5).exit_code == 0


def test_overwriting_drops_failed_lines_and_no_file_of_others(files, fabricate):
    write_rows(files[0], [*LINES, {"prompt": 3}])
    assert generate(files).exit_code == 1
    before = files[1].read_bytes()
    fabricate("faulty", "1", {"faulty": "faulty_again:Faulty"}, {"faulty_again": FAULTY})
    broken = generate(files, "--overwrite", "--model", "broken", backend="faulty")
    assert broken.exit_code != 0 and files[1].read_bytes() == before
    write_rows(files[0], LINES)
    assert generate(files, "--overwrite").exit_code == 0
    assert not files[1].with_name("answers.errors.jsonl").exists() and len(rows(files[1])) == 5
    files[1].write_text("notes\n")
    assert generate(files, "--overwrite").exit_code == 2 and files[1].read_text() == "notes\n"


@pytest.mark.parametrize("name", ["answers.csv", "answers.Parquet", "answers.json", "answers.jsonl.gz"])
def test_a_name_that_promises_another_format_is_refused(files, name):
    target = files[1].with_name(name)
    result = generate((files[0], target))
    assert result.exit_code == 2 and "give a name that ends in .jsonl or .ndjson, or -" in result.stderr
    assert not target.exists()


def test_bytes_in_a_name_say_nothing_of_another_format(tmp_path):
    files = write_prompts(tmp_path)
    source, target = (
        file.rename(tmp_path / f"{file.stem}.bin") if file.exists() else file.with_suffix(".bin") for file in files
    )
    assert generate((source, target)).exit_code == 0 and rows(target)


SOMETHING_ELSE = {
    "prompts": b'{"id": "a", "prompt": "b"}\n{"id": "c", "pro',
    "a text": b"line\nlast, no newline",
    "one line": b"no newline",
    "bytes": bytes(range(128, 256)) * 20,
    "nested": b"[" * 200_000,
}


def test_a_file_that_is_not_answers_is_not_written_to(files):
    for name, content in SOMETHING_ELSE.items():
        files[1].write_bytes(content)
        result = generate(files)
        assert result.exit_code == 2 and "line 1, is not an answer" in result.stderr, name
        assert files[1].read_bytes() == content, name


def test_a_torn_line_made_with_other_settings_is_kept(files):
    generate(files)
    torn = files[1].read_bytes()[:-9]
    files[1].write_bytes(torn)
    assert generate(files, "--temperature", 0.5).exit_code == 2 and files[1].read_bytes() == torn


def test_an_output_that_is_not_a_regular_file_is_refused(files, tmp_path):
    (tmp_path / "taken.errors.jsonl").mkdir()
    for output in ("/dev/null", ".", "taken"):
        result = generate((files[0], tmp_path / output))
        assert result.exit_code == 2 and "is not a regular file" in result.stderr, output


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


def test_each_output_has_its_errors_file(tmp_path):
    source = tmp_path / "prompts.jsonl"
    source.write_text("not json\n")
    names = {"a.jsonl": "a.errors.jsonl", "a.txt": "a.txt.errors.jsonl", "b": "b.errors.jsonl"}
    for output in names:
        generate((source, tmp_path / output))
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.jsonl", *names.values()}


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


def test_a_pipe_is_read_like_a_file(files, tmp_path):
    generate(files, "--seed", 5)
    pipe, piped = tmp_path / "pipe", tmp_path / "piped.jsonl"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(pipe.write_bytes, files[0].read_bytes())
        result = generate((pipe, piped), "--seed", 5)
    assert result.exit_code == 0 and "5 answers written" in result.stderr
    assert piped.read_bytes() == files[1].read_bytes()


# ---------------------------------------------------------------- files of other runs and other programs


FOREIGN_FAULTS = {
    "answers": b'{"id": 1, "line": 1, "prompt_hash": "0", "response": "x", "settings": {}}\n',
    "a text": b"notes\n",
    "other keys": b'{"line": 1, "id": 1, "error": "x", "mine": 2}\n',
    "cut off": b'{"id": 1, "line": 1, "prompt_ha',
    "numbers": b"1\n",
}


def test_a_file_in_place_of_the_errors_file_is_kept(files):
    errors = files[1].with_name("answers.errors.jsonl")
    for name, content in FOREIGN_FAULTS.items():
        errors.write_bytes(content)
        result = generate(files)
        assert result.exit_code == 2 and "line 1, is not a line that failed" in result.stderr, name
        assert errors.read_bytes() == content and not files[1].exists(), name


def test_the_answers_of_another_run_are_kept(files):
    other = files[1].with_name("answers.errors.jsonl")
    assert generate((files[0], other)).exit_code == 0
    before = other.read_bytes()
    assert generate(files).exit_code == 2 and other.read_bytes() == before


def test_the_errors_file_is_locked_like_the_output(files):
    """Another run may have it as its output, still without an answer."""
    with AnswersFile.open(files[1].with_name("answers.errors.jsonl"), {}, {}, {}):
        result = generate(files)
    assert result.exit_code == 2 and "another run is writing" in result.stderr
    assert [path.name for path in files[1].parent.iterdir()] == ["prompts.jsonl"]


def test_an_output_that_is_its_own_errors_file_is_refused(files):
    files[1].touch()
    files[1].with_name("answers.errors.jsonl").symlink_to(files[1])
    result = generate(files)
    assert result.exit_code == 2 and "is the output itself" in result.stderr


def test_an_errors_file_cut_off_anywhere_can_be_continued(tmp_path):
    path = tmp_path / "errors"
    with Errors.open(path) as errors:
        errors.add(LineError(1, 'a"\\', 'why: "this", and more'))
        errors.add(LineError(2, None, 'why: "this", and more'))
    whole = path.read_bytes()
    for cut in range(1, len(whole)):
        path.write_bytes(whole[:cut])
        with Errors.open(path) as errors:
            errors.add(LineError(3, 3, "later"))
        first, second = whole.index(b"\n"), len(whole) - 1
        assert [row["line"] for row in rows(path)] == [1] * (cut >= first) + [2] * (cut >= second) + [3]


def test_an_unfinished_run_keeps_what_was_not_tried_again(tmp_path):
    path = tmp_path / "errors"
    with Errors.open(path) as errors:
        for line in (1, 2, 3):
            errors.add(LineError(line, line, "first run"))
    with Errors.open(path) as errors:
        errors.tried(LineError(1, 1, ""))
        errors.add(LineError(2, 2, "second run"))
    assert [(row["line"], row["error"]) for row in rows(path)] == [(3, "first run"), (2, "second run")]
    with Errors.open(path) as errors:
        errors.add(LineError(3, 3, "third run"))
        errors.finished()
    assert [(row["line"], row["error"]) for row in rows(path)] == [(3, "third run")]


@pytest.mark.parametrize("name", ["plain", 'quoted "\\ é', 7])
def test_an_output_cut_off_anywhere_can_be_continued(files, name):
    write_rows(files[0], [{"id": name, "prompt": "The cat"}])
    settings: dict[str, Any] = {}
    answer = {"id": name, "line": 1, "prompt_hash": "0123456789abcdef", "response": "said"}
    with AnswersFile.open(files[1], settings, {}, {}) as answers:
        answers.write([answer])
    whole = files[1].read_bytes()
    for cut in range(1, len(whole)):
        files[1].write_bytes(whole[:cut])
        with AnswersFile.open(files[1], settings, {}, {}) as answers:
            assert len(answers) == (1 if cut == len(whole) - 1 else 0)
            answers.write([answer])
        assert files[1].read_bytes() == whole


def test_a_cut_off_line_of_another_program_is_kept(files):
    for kept in (b'{"id": "a", "prompt": "b', b'{"id": "a", "line": 3, "text": "b', b'["a', b"\0" * 9):
        files[1].write_bytes(kept)
        assert generate(files).exit_code == 2 and files[1].read_bytes() == kept, kept


def test_zeros_after_a_power_failure_are_dropped(files):
    generate(files, "--seed", 5)
    whole = files[1].read_bytes()
    files[1].write_bytes(whole + b"\0" * 4000)
    assert generate(files, "--seed", 5).exit_code == 0 and files[1].read_bytes() == whole


def test_a_run_never_writes_to_a_removed_file(tmp_path, monkeypatch):
    """The first run ends, and removes its empty output, after the second one has opened it."""
    fcntl = pytest.importorskip("fcntl")
    path, lock = tmp_path / "answers.jsonl", fcntl.flock
    with ExitStack() as first:
        first.enter_context(AnswersFile.open(path, {}, {}, {}))

        def late(file: Any, how: int) -> None:
            first.close()
            lock(file, how)

        monkeypatch.setattr(fcntl, "flock", late)
        with AnswersFile.open(path, {}, {}, {}) as second:
            second.write([{"id": 1, "line": 1, "prompt_hash": "0"}])
    assert len(rows(path)) == 1


def test_a_link_to_a_new_output_is_kept(files, tmp_path):
    files[1].symlink_to(tmp_path / "elsewhere")
    files[0].write_text("not json\n")
    generate(files)
    assert files[1].is_symlink() and not (tmp_path / "elsewhere").exists()


# ---------------------------------------------------------------- what is shown


def test_nothing_in_the_input_drives_the_terminal(files):
    key = "\x1b]0;owned\x07\x9b31m\rx\nline 99: all is well\u202e :boom: [bold]"
    write_rows(files[0], [{"prompt": "a", key: 1}, {"id": key, "prompt": 3}])
    result = generate(files)
    # Each bad line has one line, so that what it repeats hides no other.
    assert (
        "unknown keys: \\x1b]0;owned\\x07\\x9b31m\\rx\\nline 99: all is well\\u202e :boom: [bold]; a line"
        in result.stderr
    )
    assert [line[:7] for line in result.stderr.splitlines()][:2] == ["line 1:", "line 2:"]
    assert "".join(result.stderr.splitlines()).isprintable()
    assert not [line for line in result.stderr.splitlines() if line.startswith("line 99")]


def test_a_file_name_does_not_drive_the_terminal(files, tmp_path):
    target = tmp_path / "a\x1b[31m\nerror: b.jsonl"
    target.write_text("something else")
    result = generate((files[0], target))
    assert result.exit_code == 2 and "\x1b" not in result.stderr and "\n  error: b.jsonl" in result.stderr


def test_a_long_error_is_shortened_on_the_screen_only(files):
    write_rows(files[0], [{"prompt": "a", "x" * 100_000: 1}])
    result = generate(files)
    assert len(result.stderr) < 3000 and "characters)" in result.stderr
    assert len(rows(files[1].with_name("answers.errors.jsonl"))[0]["error"]) > 100_000


def test_a_dash_is_the_standard_input(files):
    assert generate(("-", files[1]), stdin=files[0].read_text()).exit_code == 0 and len(rows(files[1])) == 5


def test_a_table_is_refused_as_input_before_anything_is_opened(tmp_path):
    for name in ("prompts.csv", "prompts.parquet", "prompts.jsonl.gz"):
        (tmp_path / name).write_text("prompt\nHello\n")
        for command in (
            ("generate", "--output", tmp_path / "answers.jsonl", "--input"),
            ("score",),
            ("compare", "--backend", "toy", "--backend", "toy", "--input"),
        ):
            result = corelm_command(*command, tmp_path / name)
            assert result.exit_code == 2 and "only JSON Lines are read" in result.stderr, (command, result.stderr)


def test_a_text_that_is_no_json_lines_is_refused_before_the_engine_opens(files):
    source = files[0].with_suffix(".txt")
    source.write_text("What is your name?\nThe cat\n")
    result = generate((source, files[1]), backend="nonesuch")
    assert result.exit_code == 2 and f"convert it: jq -Rc '{{prompt: .}}' {source} > prompts.jsonl" in result.stderr
    source.write_bytes(files[0].read_bytes())
    assert generate((source, files[1])).exit_code == 0

"""The standard streams: answers and JSON that programs read, messages and progress that a person reads."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.command_line import LINES, corelm_command, generate, rows, settings_of, write_rows
from helpers.processes import PATIENCE, heed_interrupts, read_line

#: A plugin that prints, as engines do: from Python, from C, and from a process that it starts.
LOUD = """
import os, subprocess, sys
from corelm_testing.toy import ToyBackend

class Loud(ToyBackend):
    @classmethod
    def open(cls, model=None):
        print("INFO loading")
        os.write(1, b"INFO from C\\n")
        subprocess.run([sys.executable, "-c", "print('INFO worker')"])
        return super().open()
"""


@pytest.fixture
def loud(tmp_path: Path, fabricate: Any) -> dict[str, str]:
    """Return the environment of a process that sees the plugin `loud`."""
    fabricate("loud", "1", {"loud": "loud:Loud"}, {"loud": LOUD}, site="loud")
    path = os.pathsep.join([str(tmp_path / "loud"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "corelm_cli", *map(str, words)]


def generating(source: object, target: object, *more: object, backend: str = "toy") -> list[str]:
    always = ("--backend", backend, "--max-new-tokens", 9, "--seed", 5)
    return command("generate", "--input", source, "--output", target, *always, *more)


# ---------------------------------------------------------------- the standard output and input


def test_a_dash_writes_the_answers_to_the_standard_output(files):
    generate(files, "--seed", 5, "--log-probs", "raw")
    piped = generate(("-", "-"), "--seed", 5, "--log-probs", "raw", stdin=files[0].read_text())
    assert piped.exit_code == 0, piped.stderr
    made = settings_of(files[1])
    expected = [{**row, "provenance": made["provenance"], "engine": made["engine"]} for row in rows(files[1])]
    for row in expected:
        assert row.pop("settings") == made["fingerprint"]
    assert [json.loads(line) for line in piped.stdout.splitlines()] == expected
    assert "5 answers written" in piped.stderr
    assert sorted(path.name for path in files[0].parent.iterdir()) == [
        "answers.jsonl",
        "answers.settings.json",
        "prompts.jsonl",
    ]


def test_lines_that_fail_are_told_of_where_there_is_no_file(files):
    result = generate((files[0], "-"), "--option", "max_context=25")
    assert result.exit_code == 1 and len(result.stdout.splitlines()) == 4
    assert "line 2: " in result.stderr and "1 line failed (see the messages above)" in result.stderr
    assert [path.name for path in files[0].parent.iterdir()] == ["prompts.jsonl"]


@pytest.mark.process
def test_what_an_engine_prints_does_not_get_among_the_answers(files, loud):
    done = subprocess.run(generating(files[0], "-", backend="loud"), capture_output=True, text=True, env=loud)
    assert done.returncode == 0 and len([json.loads(line) for line in done.stdout.splitlines()]) == 5
    assert all(f"INFO {what}" in done.stderr for what in ("loading", "from C", "worker"))


@pytest.mark.process
def test_a_reader_that_leaves_ends_the_run_with_one_message(files):
    write_rows(files[0], [{"prompt": f"The cat {number}"} for number in range(3000)])
    words = " ".join(f"'{word}'" for word in generating(files[0], "-", "--batch-size", 1))
    done = subprocess.run(
        ["bash", "-c", f"{words} | head -n 2; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True
    )
    assert done.returncode == 2 and len(done.stdout.splitlines()) == 2
    assert "Broken pipe: 'the standard output'" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.process
def test_a_closed_standard_output_is_refused(files):
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *generating(files[0], "-")], capture_output=True, text=True
    )
    assert done.returncode == 2 and "the standard output" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.process
def test_the_input_that_the_shell_opens_is_not_written_to(files):
    with files[0].open("rb") as source:
        done = subprocess.run(generating("-", files[0]), stdin=source, capture_output=True, text=True)
    assert done.returncode == 2 and "is both the output and the input" in done.stderr
    assert rows(files[0]) == LINES


@pytest.mark.process
@pytest.mark.nightly
def test_ctrl_c_while_writing_to_a_pipe_says_how_much_was_written(files):
    write_rows(files[0], [{"prompt": f"The cat {number}"} for number in range(5000)])
    run = subprocess.Popen(
        generating(files[0], "-", "--batch-size", 1),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )
    first = read_line(run)
    run.send_signal(signal.SIGINT)
    rest, said = run.communicate(timeout=PATIENCE)
    assert run.returncode == 130 and "Traceback" not in said
    (written,) = re.findall(r"^interrupted\n([\d,]+) answers? written", said, re.MULTILINE)
    assert abs(len((first + rest).splitlines()) - int(written.replace(",", ""))) <= 1
    assert "Run the same command again" not in said


# ---------------------------------------------------------------- what is said about a run


def test_the_summary_counts_finish_reasons_and_tokens(files):
    said = generate(files, "--seed", 5).stderr
    answers = rows(files[1])
    reasons = {reason: sum(row["finish_reason"] == reason for row in answers) for reason in ("stop", "length")}
    (line,) = re.findall(r"^finish reasons: (.*)$", said, re.MULTILINE)
    assert set(line.split(", ")) == {f"{reason} {count}" for reason, count in reasons.items() if count}
    tokens = sum(row["tokens"] for row in answers)
    assert re.search(rf"^{tokens} tokens sampled in \d+\.\d s, [\d,]+ tokens/s$", said, re.MULTILINE)


def test_a_run_that_only_resumes_counts_what_it_added(files):
    generate(files, "--seed", 5, "--num-samples", 2)
    said = generate(files, "--seed", 5, "--num-samples", 3, "--json")
    summary = json.loads(said.stdout)
    added = [row for row in rows(files[1]) if row["sample"] == 2]
    assert (summary["written"], summary["present"]) == (5, 10)
    assert summary["tokens"] == sum(row["tokens"] for row in added)
    assert sum(summary["finish_reasons"].values()) == 5


def test_json_is_one_line_that_programs_read(files):
    with files[0].open("a") as file:
        file.write("not json\n")
    result = generate(files, "--seed", 5, "--json")
    (line,) = result.stdout.splitlines()
    summary = json.loads(line)
    assert result.exit_code == 1 and "5 answers written" in result.stderr
    assert {name: summary[name] for name in ("command", "status", "written", "present", "failed", "error")} == {
        "command": "generate",
        "status": "finished",
        "written": 5,
        "present": 0,
        "failed": 1,
        "error": None,
    }
    assert summary["output"] == str(files[1])
    assert summary["errors_file"] == str(files[1].with_name("answers.errors.jsonl"))
    assert summary["settings"] == settings_of(files[1])["settings"]
    assert summary["tokens_per_second"] > 0 and summary["seconds"] >= 0


def test_json_goes_after_the_messages_if_the_answers_are_on_the_standard_output(files):
    result = generate((files[0], "-"), "--json")
    assert len(result.stdout.splitlines()) == 5
    summary = json.loads(result.stderr.splitlines()[-1])
    assert (summary["written"], summary["output"], summary["errors_file"]) == (5, None, None)


def test_json_says_how_a_run_failed(files):
    refused = json.loads(generate(files, "--json", backend="tyo").stdout)
    assert refused["status"] == "refused" and "toy" in refused["error"] and refused["written"] == 0
    generate(files)
    mixed = json.loads(generate(files, "--json", "--temperature", 0.5).stdout)
    assert mixed["status"] == "refused" and "made with temperature" in mixed["error"]


# ---------------------------------------------------------------- progress


@pytest.mark.process
def test_no_progress_is_drawn_into_a_pipe(files):
    colour = {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"}
    done = subprocess.run(generating(*files), capture_output=True, text=True, env={**os.environ, **colour})
    assert done.returncode == 0
    # Nothing but the summary: no bar, no carriage return, no escape sequence.
    answers, reasons, tokens = done.stderr.splitlines()
    assert answers == "5 answers written, 0 already present" and re.fullmatch(r"finish reasons: [\w, ]+", reasons)
    assert re.fullmatch(r"\d+ tokens sampled in [\d.]+ s, [\d,]+ tokens/s", tokens)
    assert "\r" not in done.stderr and "\x1b" not in done.stderr


@pytest.mark.process
@pytest.mark.nightly
def test_libraries_draw_no_progress_into_a_pipe(files, tiny_model):
    more = ("--model", tiny_model, "--option", "dtype=float32")
    done = subprocess.run(
        generating(*files, *more, backend="transformers"), capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    assert not re.search(r"%\||it/s|\r", done.stderr), done.stderr


# ---------------------------------------------------------------- what is copied


def test_copy_input_copies_what_was_asked(files):
    generate(files, "--copy-input")
    for line, row in zip(LINES, rows(files[1]), strict=True):
        asked = {key: line[key] for key in ("prompt", "messages", "tools") if key in line}
        assert {key: row.get(key) for key in asked} == asked and not ({"prompt", "messages"} - set(asked)) & set(row)


def test_the_version_and_the_help_have_short_names():
    assert corelm_command("-h").stdout == corelm_command("--help").stdout != ""
    for name in ("backends", "generate", "score", "chat"):
        assert re.search(rf"^  {name} ", corelm_command("-h").stdout, re.MULTILINE)

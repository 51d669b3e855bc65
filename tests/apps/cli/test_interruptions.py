"""The `corelm` command in a separate process: Ctrl-C, a full disk, and a terminal that is gone."""

from __future__ import annotations

import json
import os
import pty
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.command_line import LINES, generate, rows, write_rows
from helpers.processes import PATIENCE, heed_interrupts, wait_until

pytestmark = pytest.mark.process


def command(files: tuple[Path | str, Path], *more: object) -> list[str]:
    always = ("--backend", "toy", "--input", files[0], "--output", files[1], "--max-new-tokens", 9, "--seed", 5)
    return [sys.executable, "-m", "corelm_cli", "generate", *map(str, always + more)]


def test_an_interrupted_run_says_how_to_continue(files):
    write_rows(files[0], [{"prompt": f"The cat {number}"} for number in range(5000)])
    run = subprocess.Popen(
        command(files, "--batch-size", 1, "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )
    assert wait_until(lambda: files[1].exists() and files[1].stat().st_size > 0)
    run.send_signal(signal.SIGINT)
    printed, said = run.communicate(timeout=PATIENCE)
    summary, written = json.loads(printed), len(rows(files[1]))
    assert (run.returncode, summary["status"], summary["written"]) == (130, "interrupted", written)
    assert f"\ninterrupted\n{written:,} answer" in "\n" + said and "written, 0 already present" in said
    assert said.endswith("\nRun the same command again to continue with the remaining lines.\n")
    assert [row["line"] for row in rows(files[1])] == list(range(1, written + 1))
    names = {"answers.jsonl", "answers.settings.json", "prompts.jsonl"}
    assert {path.name for path in files[1].parent.iterdir()} == names


def test_an_interrupt_while_libraries_are_imported_ends_the_command_quietly(files, tmp_path):
    (tmp_path / "torch.py").write_text(
        f"""
import pathlib, time
pathlib.Path({str(tmp_path / "importing")!r}).touch()
try:
    time.sleep({PATIENCE})
except KeyboardInterrupt:
    raise ImportError("the library hides the interrupt")
"""
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    run = subprocess.Popen(
        command(files),
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        preexec_fn=heed_interrupts,
    )
    assert wait_until((tmp_path / "importing").exists)
    run.send_signal(signal.SIGINT)
    assert run.communicate(timeout=PATIENCE)[1] == "" and run.returncode == -signal.SIGINT


def test_a_full_disk_leaves_whole_answers_and_the_run_goes_on_later(files):
    def limit() -> None:
        # More than the settings take, and less than the answers do.
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))

    write_rows(files[0], [{"prompt": f"The cat {number}"} for number in range(40)])
    full = subprocess.run(command(files, "--batch-size", 1), capture_output=True, text=True, preexec_fn=limit)
    assert full.returncode == 2 and f"File too large: '{files[1]}'" in full.stderr and "to continue" in full.stderr
    assert 0 < len(rows(files[1])) < 40
    assert generate(files, "--seed", 5).exit_code == 0
    assert [row["line"] for row in rows(files[1])] == list(range(1, 41))


@pytest.mark.parametrize("stderr", [pytest.param("/dev/full", marks=pytest.mark.nightly), "broken pipe", "closed"])
@pytest.mark.nightly
def test_a_run_does_not_need_its_messages_to_be_read(files, stderr):
    with files[0].open("a") as file:
        file.write("not json\n")
    if stderr == "broken pipe":
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer) as target:
            code = subprocess.run(command(files), stderr=target).returncode
    elif stderr == "closed":
        code = subprocess.run(["sh", "-c", 'exec "$@" 2>&-', "sh", *command(files)]).returncode
    else:
        with open(stderr, "w") as target:
            code = subprocess.run(command(files), stderr=target).returncode
    assert code == 1 and len(rows(files[1])) == len(LINES)
    assert len(rows(files[1].with_name("answers.errors.jsonl"))) == 1


@pytest.mark.nightly
def test_a_run_goes_on_when_its_terminal_is_closed(tmp_path):
    output = tmp_path / "answers.jsonl"
    terminal, stderr = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TTY_COMPATIBLE")}
    # The command runs in a separate session, so it outlives the terminal, as it does under nohup.
    run = subprocess.Popen(
        command(("-", output), "--batch-size", 1),
        stdin=subprocess.PIPE,
        stderr=stderr,
        env={**environment, "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(stderr)
    shown = b""
    while b"answering" not in shown:
        shown += os.read(terminal, 1024)
    os.close(terminal)
    # A bad line is reported at once, by the thread that answers the lines. An error there would end the run.
    run.communicate(b'{"prompt": "The cat"}\nnot json\n{"prompt": "The sea"}\n', timeout=PATIENCE)
    assert run.returncode == 1 and [row["line"] for row in rows(output)] == [1, 3]
    (failed,) = rows(output.with_name("answers.errors.jsonl"))
    assert failed["line"] == 2


def test_a_list_that_cannot_be_printed_is_an_error():
    with open("/dev/full", "w") as full:
        listing = subprocess.run(
            [sys.executable, "-m", "corelm_cli", "backends"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert listing.returncode == 2 and "No space left" in listing.stderr and "Traceback" not in listing.stderr


def test_the_end_of_the_process_waits_for_threads_and_takes_no_module_down(tmp_path):
    code = f"""
import atexit, sys, threading, time
import torch

def note(what):
    with open({str(tmp_path / "ended")!r}, "a") as file:
        file.write(what + " ")

class Module:
    def __del__(self, note=note):
        note("module")

sys.modules["taken_down"] = Module()
atexit.register(note, "atexit")
threading.Thread(target=lambda: (threading.main_thread().join(0.1), note("thread"))).start()
sys.argv[1:] = ["backends", "--nonesuch"]
from corelm_cli import main
main()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 2 and "No such option" in ended.stderr
    assert (tmp_path / "ended").read_text() == "thread atexit "

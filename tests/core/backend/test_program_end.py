"""The end of a program after Ctrl-C, if a call does not end: what was written is kept."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

STUCK = """
import atexit, sys, threading
from corelm.backend import program_end

@program_end.at_program_end
def end_calls():
    print("calls are ended")
    if program_end.interrupted():
        program_end.end_stuck()

class Proxy:
    # It says that it is a file, and fails.
    __class__ = property(lambda self: 1 / 0)
    closed = property(lambda self: 1 / 0)

proxies = [Proxy() for _ in range(3)]
files = [open("text", "w"), open("bytes", "wb"), open("both", "w+b")]
for file in files:
    file.write(b"written" if file.name in ("bytes", "both") else "written")
closed = open("closed", "w")
closed.close()
detached = open("closed", "w")
detached.detach()
atexit.register(print, "saved")
"""


def ended(program: str, folder: Path) -> tuple[int, list[str], str]:
    result = subprocess.run(
        [sys.executable, "-c", STUCK + program],
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return result.returncode, result.stdout.splitlines(), result.stderr


def written(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in ("text", "bytes", "both")]


@pytest.mark.process
def test_open_files_are_written_and_later_exit_functions_called(tmp_path: Path) -> None:
    status, printed, errors = ended("raise KeyboardInterrupt", tmp_path)
    assert status == -signal.SIGINT, errors
    assert printed == ["calls are ended", "saved", "calls are ended"]
    assert written(tmp_path) == [b"written"] * 3
    assert errors.splitlines()[-1] == "KeyboardInterrupt"


@pytest.mark.process
def test_open_files_are_written_while_another_thread_goes_on(tmp_path: Path) -> None:
    status, printed, errors = ended(
        "threading.Thread(target=threading.Event().wait).start(); raise KeyboardInterrupt", tmp_path
    )
    assert (status, printed) == (-signal.SIGINT, ["calls are ended"]), errors
    assert written(tmp_path) == [b"written"] * 3


@pytest.mark.process
def test_a_program_that_is_not_interrupted_ends_by_itself(tmp_path: Path) -> None:
    assert ended("", tmp_path) == (0, ["saved", "calls are ended"], "")
    assert written(tmp_path) == [b"written"] * 3


@pytest.mark.process
@pytest.mark.parametrize("first", ["", "import concurrent.futures"])
def test_threads_of_pools_are_awaited_after_calls_have_ended(tmp_path: Path, first: str) -> None:
    """The pool's thread waits for a call that only `at_program_end` ends."""
    program = f"""
{first}
from corelm.backend import program_end
from concurrent.futures import ThreadPoolExecutor
import threading
ended = threading.Event()
program_end.at_program_end(ended.set)
ThreadPoolExecutor(1).submit(ended.wait)
raise KeyboardInterrupt
"""
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.stderr.splitlines()[-1] == "KeyboardInterrupt"

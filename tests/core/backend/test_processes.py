"""A backend in a forked or spawned process: it refuses what cannot work there, and nothing waits for ever."""

import copy
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from corelm import Backend, DynamicBatcher
from helpers.each import each
from helpers.fakes import Fake

#: The parent has a call in the engine and one in the queue, and forks once for each part. Each child does its part.
PROGRAM = """
import atexit, faulthandler, gc, os, signal, sys, threading
from concurrent.futures import wait
from helpers.batching_fakes import GatedEngine
from corelm import Backend
from corelm.batching import DynamicBatcher
from corelm.errors import BackendClosedError

engine = GatedEngine(permits=0{capabilities})
backend = Backend.from_plugin(engine, "gated")
batcher = DynamicBatcher(backend)
futures = [batcher.submit_generate([[n]], {{"max_new_tokens": 2}}, timeout=500.0) for n in (3, 4)]
engine.wait_for_calls(1)


def refused(call, *arguments):
    try:
        call(*arguments)
    except BackendClosedError as error:
        assert "another process" in str(error) and "get_backend" in str(error), error
    else:
        raise AssertionError("the call was not refused")


def collect():
    global batcher
    del batcher
    gc.collect()


def close():
    batcher.close()
    backend.close()
    assert not engine.requests


def cancel():
    assert futures[1].cancel() and wait(futures[1:], 20).done


short = {{"max_new_tokens": 1}}
parts = [
    close,
    lambda: batcher.close(flush=False),
    lambda: batcher.cleanup(),
    collect,
    lambda: backend.health() and 1 / 0,
    atexit._run_exitfuncs,
    lambda: refused(backend.generate, [[1]], short),
    lambda: refused(batcher.generate, [[1]], short),
    lambda: refused(batcher.submit_generate, [[1]], short),
    lambda: refused(batcher.update_weights, dict()),
    lambda: refused(backend.tokenize, ["1"]),
    lambda: engine.capabilities.abort and refused(batcher.abort, ["x"]),
    lambda: refused(batcher.state),
    cancel,
]
held, ended = threading.Event(), threading.Event()


def hold():
    # A lock that another thread holds when the process forks is never released in the child.
    with batcher.dispatcher._starting, backend.engine.lock._mutex:
        held.set()
        ended.wait()


holder = threading.Thread(target=hold)
holder.start()
held.wait()
for number, part in enumerate(parts):
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        faulthandler.dump_traceback_later(20)
        part()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status:
        print(f"part {{number}} failed: {{status}}", flush=True)
ended.set()
holder.join()
engine.free()
print([future.result(20).ids.tolist() for future in futures])
batcher.close()
"""


@pytest.mark.process
@each("capabilities", ["", ", concurrent_calls=True, abort=True"])
def test_a_fork_is_refused_or_ends_and_leaves_the_parents_requests_alone(capabilities):
    path = ":".join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM.format(capabilities=capabilities)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and done.stdout.startswith("[[["), done.stdout + done.stderr


@each("make", [lambda backend: backend, DynamicBatcher])
@each("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_open_engine_is_not_copied(make, copied):
    with pytest.raises(TypeError, match="cannot be copied or pickled; call get_backend in the process that needs it"):
        copied(make(Backend.from_plugin(Fake(), "fake")))


# The end of a program after Ctrl-C, if a call does not end ------------------------------------------------------------


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

"""However a program with a host ends, nothing is left running, and no file but the log of a host that failed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from apps.hosting.conftest import wait_for_calls
from helpers.processes import all_end, group, heed_interrupts, read_line, runs, sleeps, wait_until

#: Opens a host whose engine starts a child of its own, begins a call, and says which processes there are.
PROGRAM = """
import os, sys, threading, time
import corelm

backend = corelm.get_backend("obedient", python=sys.executable, behaviour=sys.argv[1])
host = backend.engine.plugin.host
print(host.pid, flush=True)
{part}
"""


Program = subprocess.Popen[str]


def start(part: str, environment: dict[str, str], folder: Path, behaviour: str = "") -> tuple[Program, int]:
    """Start a program that does `part` with a host. Return it and the process of its host."""
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(part=part), behaviour],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment | {"TMPDIR": str(folder)},
        preexec_fn=heed_interrupts,
    )
    line = read_line(program)
    assert line, program.communicate()[1]
    return program, int(line)


def log_of(folder: Path) -> Path:
    """Return the log of the only host whose files are in this folder."""
    (log,) = folder.glob("corelm-host-*.log")
    return log


CALL = "backend.generate([[5]], {'max_new_tokens': 2})"


def test_ctrl_c_in_a_block_closes_the_engine(environment: dict[str, str], tmp_path: Path) -> None:
    program, host = start(f"with backend: {CALL}", environment, tmp_path)
    wait_for_calls(log_of(tmp_path))
    assert wait_until(lambda: sleeps(program.pid))
    program.send_signal(signal.SIGINT)
    program.communicate(timeout=60)
    assert program.returncode == -signal.SIGINT and all_end([host])
    assert Path(environment["CLOSED"]).read_text() == "closed "


def test_a_program_that_is_killed_takes_its_host_along(environment: dict[str, str], tmp_path: Path) -> None:
    program, host = start(CALL, environment, tmp_path)
    wait_for_calls(log_of(tmp_path))
    program.kill()
    program.communicate(timeout=60)
    assert wait_until(lambda: not group(host)), "the host outlives its program"
    assert Path(environment["CLOSED"]).read_text() == "closed "


def test_a_program_that_is_killed_while_the_engine_opens_takes_its_host_along(
    environment: dict[str, str], tmp_path: Path
) -> None:
    code = 'import corelm, sys; corelm.get_backend("obedient", python=sys.executable, behaviour="waits")'
    program = subprocess.Popen([sys.executable, "-c", code], env=os.environ | environment | {"TMPDIR": str(tmp_path)})
    opening = lambda: any("opening" in log.read_text() for log in tmp_path.glob("corelm-host-*.log"))  # noqa: E731
    assert wait_until(opening)
    (host,) = [int(pid) for pid in Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()]
    program.kill()
    program.wait()
    assert wait_until(lambda: not runs(host))


def test_a_program_that_forgets_to_close_leaves_nothing(environment: dict[str, str], tmp_path: Path) -> None:
    program, host = start("backend.generate([[20]], {'max_new_tokens': 2})", environment, tmp_path)
    out, err = program.communicate(timeout=60)
    assert program.returncode == 0 and not err, (out, err)
    assert all_end([host])


def test_a_process_that_the_engine_started_ends_with_it(environment: dict[str, str], tmp_path: Path) -> None:
    part = f"""
os.kill(host.pid, 9)
try:
    {CALL}
except corelm.errors.EngineError:
    pass
"""
    program, host = start(part, environment, tmp_path, "parent")
    _, err = program.communicate(timeout=60)
    assert program.returncode == 0, err
    assert wait_until(lambda: not group(host))


def test_a_fork_leaves_the_host_alone(environment: dict[str, str], tmp_path: Path) -> None:
    part = """
child = os.fork()
if not child:
    try:
        backend.generate([[20]])
    except corelm.errors.BackendClosedError:
        pass
    else:
        os._exit(3)
    try:
        backend.tokenizer.decode([70, 71])
    except corelm.errors.BackendClosedError:
        backend.close()
        sys.exit(0)  # with everything that is done at the end of a program
    os._exit(4)
assert os.waitpid(child, 0)[1] == 0
print(len(backend.generate([[20]], {'max_new_tokens': 2}).ids))
backend.close()
"""
    program, host = start(part, environment, tmp_path)
    out, err = program.communicate(timeout=60)
    assert (program.returncode, out) == (0, "1\n"), err
    assert all_end([host]) and not [*tmp_path.glob("corelm-host-*")]


def test_a_fork_does_not_keep_the_host_of_a_killed_program_alive(environment: dict[str, str], tmp_path: Path) -> None:
    part = """
child = os.fork()
if not child:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""
    program, host = start(part, environment, tmp_path)
    fork = int(read_line(program))
    program.kill()
    try:
        assert wait_until(lambda: not group(host))
    finally:
        os.kill(fork, signal.SIGKILL)
        program.communicate()

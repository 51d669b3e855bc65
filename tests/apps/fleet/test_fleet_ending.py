"""However a program with a fleet of processes ends, nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.processes import all_end, children, heed_interrupts, sleeps, wait_until

#: Opens a fleet, waits for a line of input, forks, and begins a call that takes minutes.
PROGRAM = """
import os, sys
import corelm

backend = corelm.get_backend("toy", python=sys.executable, replicas=2)
print("opened", flush=True)
input()
fork = os.fork()
if not fork:
    sys.exit(0)
assert os.waitpid(fork, 0)[1] == 0
assert len(backend.generate([[72]] * 2, {"max_new_tokens": 2}).ids) == 2
print("calls", flush=True)
backend.generate([[72]] * 20_000, {"max_new_tokens": 400, "min_new_tokens": 400})
"""


NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(
    ("how", "stop"),
    [
        pytest.param(signal.SIGINT, False, marks=NIGHTLY),
        (signal.SIGKILL, True),
        pytest.param(signal.SIGINT, True, marks=NIGHTLY),
        pytest.param(signal.SIGKILL, False, marks=NIGHTLY),
    ],
)
def test_a_program_that_ends_in_a_call_takes_its_processes_along(
    how: signal.Signals, stop: bool, tmp_path: Path
) -> None:
    if stop and sys.platform != "linux":
        pytest.skip("only Linux wakes a process whose parent ends")
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        preexec_fn=heed_interrupts,
    )
    assert program.stdin is not None and program.stdout is not None
    assert program.stdout.readline() == "opened\n", program.communicate()[1]
    hosts = sorted(children(program.pid))
    print("go on", file=program.stdin, flush=True)
    assert len(hosts) == 2 and program.stdout.readline() == "calls\n", program.communicate()[1]
    assert wait_until(lambda: sleeps(program.pid))
    if stop:
        os.kill(hosts[0], signal.SIGSTOP)
    program.send_signal(how)
    _, err = program.communicate(timeout=60)
    assert program.returncode == -how, err
    assert all_end(hosts), "a process is left"

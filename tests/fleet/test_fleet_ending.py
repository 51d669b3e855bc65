"""However a program with a fleet of processes ends, nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.processes import all_end, heed_interrupts, sleeps, wait_until

#: Opens a fleet, says which processes it has, forks, and begins a call that takes minutes.
PROGRAM = """
import os, sys
import corelm

backend = corelm.get_backend("toy", python=sys.executable, replicas=2)
running = backend.engine.plugin._runner.lives.running.values()
print(*(replica.backend.engine.plugin.host.pid for replica in running), flush=True)
fork = os.fork()
if not fork:
    sys.exit(0)
assert os.waitpid(fork, 0)[1] == 0
assert len(backend.generate([[72]] * 2, {"max_new_tokens": 2}).ids) == 2
print("calls", flush=True)
backend.generate([[72]] * 20_000, {"max_new_tokens": 400, "min_new_tokens": 400})
"""


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_program_that_ends_in_a_call_takes_its_processes_along(
    how: signal.Signals, stop: bool, tmp_path: Path
) -> None:
    if stop and sys.platform != "linux":
        pytest.skip("only Linux wakes a process whose parent ends")
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        preexec_fn=heed_interrupts,
    )
    assert program.stdout is not None
    hosts = [int(pid) for pid in program.stdout.readline().split()]
    assert len(hosts) == 2 and program.stdout.readline() == "calls\n", program.communicate()[1]
    assert wait_until(lambda: sleeps(program.pid))
    if stop:
        os.kill(hosts[0], signal.SIGSTOP)
    started = time.monotonic()
    program.send_signal(how)
    _, err = program.communicate(timeout=60)
    assert program.returncode == -how, err
    assert all_end(hosts), "a process is left"
    assert time.monotonic() - started < 15, err

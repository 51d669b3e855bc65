"""Actors that are killed and stopped change no answer, and however a program ends, nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import corelm
from corelm.errors import EngineError
from corelm_fleet import FleetLimits
from engines.ray.conftest import Open, await_healthy
from helpers.fault_checks import check_processes
from helpers.fleet_processes import LIMITS
from helpers.insides import pids
from helpers.processes import PATIENCE, all_end, heed_interrupts, runs, sleeps, stopped, wait_until

PROMPTS = [[72, n] for n in range(40, 60)]
SAMPLING: dict[str, Any] = {"max_new_tokens": 8, "seed": 3, "temperature": 0.9}


def test_actors_that_are_killed_under_load_change_no_answer(open_toys: Open) -> None:
    with corelm.get_backend("toy") as one:
        expected = one.generate(PROMPTS, SAMPLING).ids.tolist()
        backend = open_toys(replicas=2)
        answered, wrong, stop = [0], list[Any](), threading.Event()

        def ask() -> None:
            while not stop.is_set():
                try:
                    found = backend.generate(PROMPTS, SAMPLING, timeout=120).ids.tolist()
                except Exception as error:
                    wrong.append(error)
                    return
                if found != expected:
                    wrong.append(found)
                answered[0] += 1

        callers = [threading.Thread(target=ask) for _ in range(6)]
        for caller in callers:
            caller.start()
        killed = []
        for at in (0, 1):
            before = answered[0]
            assert wait_until(lambda before=before: answered[0] > before or bool(wrong))
            killed.append(pids(backend)[at])
            os.kill(killed[-1], signal.SIGKILL)
            await_replaced(backend, killed[-1])
        stop.set()
        for caller in callers:
            caller.join(120)
        assert not wrong, wrong[:2]
        assert answered[0] > 10 and not {*pids(backend)} & {*killed}

        # An actor that is started after an update loads the weights before it serves.
        table = one.engine.plugin.model.table.detach().roll(1, 1)
        one.update_weights({"table": table})
        backend.update_weights({"table": table})
        renewed = one.generate(PROMPTS, SAMPLING).ids.tolist()
        assert renewed != expected
        pid = pids(backend)[0]
        os.kill(pid, signal.SIGKILL)
        assert backend.generate(PROMPTS, SAMPLING).ids.tolist() == renewed
        await_replaced(backend, pid)
        assert [backend.generate(PROMPTS, SAMPLING).ids.tolist() for _ in range(4)] == [renewed] * 4


@pytest.mark.nightly
def test_every_row_is_answered_once_and_right_whatever_happens_to_the_actors(tmp_path: Path) -> None:
    def open_fleet(folder: Path, count: int) -> Any:
        options: dict[str, Any] = {"replicas": count, "num_cpus": 0.2, "fleet_limits": LIMITS}
        return corelm.get_backend("ray", folder, inner="transformers", dtype="float32", **options)

    check_processes(open_fleet, tmp_path)


def await_replaced(backend: Any, pid: int) -> None:
    """Wait until the loss of a process has been noticed and mended."""
    assert wait_until(lambda: pid not in pids(backend))
    await_healthy(backend)


def test_if_all_actors_are_lost_a_call_fails_in_bounded_time(open_toys: Open) -> None:
    backend = open_toys(replicas=2, fleet_limits=FleetLimits(restarts=0))
    for pid in pids(backend):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineError):
        backend.generate(PROMPTS, SAMPLING, timeout=PATIENCE)


def test_closing_ends_actors_that_were_stopped(open_toys: Open) -> None:
    backend = open_toys(replicas=2)
    found = pids(backend)
    os.kill(found[0], signal.SIGSTOP)
    assert wait_until(lambda: stopped(found[0]))
    backend.close()
    assert all_end(found)


#: Opens a fleet in a cluster of its own, says which processes there are, and begins a call that takes minutes.
PROGRAM = """
import sys
sys.path[:0] = PATHS
import corelm
from helpers.insides import pids

backend = corelm.get_backend("ray", inner="toy", replicas=2, num_cpus=0.1)
print(*pids(backend), flush=True)
assert len(backend.generate([[72]] * 2, {"max_new_tokens": 2}).ids) == 2
print("calls", flush=True)
CALL
"""
LONG = 'backend.generate([[72]] * 20_000, {"max_new_tokens": 400, "min_new_tokens": 400})'


@pytest.mark.nightly
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL, None])
def test_a_program_that_ends_leaves_nothing(how: signal.Signals | None) -> None:
    source = PROGRAM.replace("PATHS", repr(sys.path)).replace("CALL", LONG if how else "")
    program = subprocess.Popen(
        [sys.executable, "-c", source],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )
    assert program.stdout is not None
    actors = [int(pid) for pid in program.stdout.readline().split()]
    assert len(actors) == 2 and program.stdout.readline() == "calls\n", program.communicate()[1]
    raylets = {parent_of(pid) for pid in actors}
    if how:
        assert wait_until(lambda: sleeps(program.pid))
        program.send_signal(how)
    _, err = program.communicate(timeout=90)
    assert program.returncode == (-how if how else 0), err
    assert all_end({*actors, *raylets}), [pid for pid in {*actors, *raylets} if runs(pid)]


def parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])

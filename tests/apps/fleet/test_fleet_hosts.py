"""Fleets of real processes, some of which are killed or stopped; and what `get_backend` takes for a fleet."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import corelm
from apps.fleet.conftest import PROMPTS, SAMPLING
from apps.fleet.test_fleet_ids import assert_sets_cross
from corelm import Backend
from corelm.errors import BackendTimeoutError, InvalidRequestError
from corelm_fleet.fleet import FleetEngine
from corelm_fleet.hosting.engine import open_in_process
from corelm_fleet.opening import options_of_each
from corelm_fleet.records import FleetLimits
from corelm_fleet.replica import Member
from corelm_testing.toy import ToyBackend
from helpers.insides import pids
from helpers.processes import wait_until


def await_changed(backend: Any, state: str) -> None:
    """Wait until a replica is in another state."""
    fleet = backend.engine.plugin
    assert wait_until(lambda: any(each.state not in (state, "suspect") for each in fleet.status())), fleet.status()


def await_states(backend: Any, seconds: float = 60.0) -> None:
    fleet = backend.engine.plugin
    assert wait_until(lambda: {each.state for each in fleet.status()} == {"healthy"}, seconds), fleet.status()


def test_processes_that_are_killed_and_stopped_change_no_answer() -> None:
    one = corelm.get_backend("toy")
    expected = one.generate(PROMPTS, SAMPLING).ids.tolist()
    with corelm.get_backend("toy", python=sys.executable, replicas=2) as backend:
        assert backend.generate(PROMPTS, SAMPLING).ids.tolist() == expected
        assert_sets_cross(backend, one)
        first = pids(backend)

        # Killed while a call runs.
        futures = [backend.submit_generate(PROMPTS, SAMPLING) for _ in range(6)]
        os.kill(first[0], signal.SIGKILL)
        assert [future.result(60).ids.tolist() for future in futures] == [expected] * 6
        await_states(backend)
        assert len(set(pids(backend)) - set(first)) == 1 and not Path(f"/proc/{first[0]}").exists()

        # New weights are loaded by an engine that is started after the update.
        table = ToyBackend.open().model.table.detach().roll(1, 1)
        backend.update_weights({"table": table})
        one.update_weights({"table": table})
        renewed = one.generate(PROMPTS, SAMPLING).ids.tolist()
        assert renewed != expected
        # This one was not in a call.
        os.kill(pids(backend)[0], signal.SIGKILL)
        await_changed(backend, "healthy")
        assert backend.generate(PROMPTS, SAMPLING).ids.tolist() == renewed
        await_states(backend)
        assert backend.generate(PROMPTS, SAMPLING).ids.tolist() == renewed

        # Stopped: only the timeout of the call helps at first.
        stopped = pids(backend)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(BackendTimeoutError):
            backend.generate(PROMPTS, SAMPLING, timeout=0.5)
    assert not any(Path(f"/proc/{pid}").exists() for pid in stopped)
    one.close()
    assert wait_until(lambda: not any("fleet" in each.name for each in threading.enumerate()))


@pytest.mark.nightly
def test_the_rows_of_a_process_that_is_stopped_are_answered_by_another() -> None:
    expected = corelm.get_backend("toy").generate(PROMPTS, SAMPLING).ids.tolist()

    def open_it() -> Any:
        return open_in_process("toy", None, sys.executable, None, {})[0]

    members = [Member(name, open_it, lambda engine: engine.host.kill()) for name in ("a", "b")]
    limits = FleetLimits(misses=1, take_back=0.5, give_up=1.0, backoff=0.1)
    with Backend.from_plugin(FleetEngine(members, limits=limits), "toys") as backend:
        first = pids(backend)
        os.kill(first[0], signal.SIGSTOP)
        assert backend.generate(PROMPTS, SAMPLING).ids.tolist() == expected
        await_states(backend)
        assert len(set(pids(backend)) - set(first)) == 1 and not Path(f"/proc/{first[0]}").exists()


#: Options, the number of replicas, the field that is refused, and words of the message that say what to pass.
CONTRADICTIONS: list[tuple[dict[str, Any], Any, str, str]] = [
    ({"base_url": ["http://a", "http://a"]}, None, "base_url", "different URLs"),
    ({"base_url": []}, None, "base_url", "different URLs"),
    ({"base_url": ["http://a"]}, 2, "replicas", "one URL for each"),
    ({}, 2, "replicas", "python="),
    ({}, 0, "replicas", "at least 1"),
    ({"base_url": ["http://a", "http://a/"]}, None, "base_url", "different URLs"),
    ({"base_url": ["http://a", 3]}, None, "base_url", "different URLs"),
    ({"base_url": "http://a"}, 2, "base_url", "a list with one URL for each replica"),
    ({"env": [{}, {}], "python": sys.executable}, 3, "env", "one mapping for each of 3"),
    ({"env": [], "python": sys.executable}, None, "env", "one mapping for each of the replicas, got 0"),
    ({"base_url": ["http://a", "http://b"], "env": [{}], "python": "x"}, None, "env", "for each of 2"),
    ({"python": sys.executable}, "2", "replicas", "at least 1, got '2'"),
    ({"fleet_limits": FleetLimits()}, None, "fleet_limits", "pass replicas="),
    ({"fleet_limits": 3, "python": sys.executable}, 2, "fleet_limits", "FleetLimits"),
]


def test_options_that_contradict_one_another_are_refused() -> None:
    for options, replicas, field, match in CONTRADICTIONS:
        with pytest.raises(InvalidRequestError, match=match) as failure:
            corelm.get_backend("toy", replicas=replicas, **options)
        assert failure.value.field == field, (options, replicas)


def test_each_engine_gets_its_own_options() -> None:
    urls = options_of_each({"base_url": ["http://a", "http://b"], "timeout": 3}, None, hosted=False)
    assert urls == {url: {"base_url": url, "timeout": 3} for url in ("http://a", "http://b")}
    env = [{"CUDA_VISIBLE_DEVICES": str(gpu)} for gpu in range(2)]
    assert [each["env"] for each in options_of_each({"env": env}, None, hosted=True).values()] == env
    assert [each["env"] for each in options_of_each({"env": env[0]}, 2, hosted=True).values()] == [env[0]] * 2
    assert options_of_each({"env": env[0], "x": 1}, 1, hosted=True) == {}
    assert options_of_each({"base_url": ["http://a"], "env": env[:1]}, None, hosted=True) == {
        "http://a": {"base_url": "http://a", "env": env[0]}
    }
    assert options_of_each({"base_url": "http://a"}, None, hosted=False) == {}

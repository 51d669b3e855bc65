"""Faults of real processes under load. ``make test-faults`` runs this for two minutes instead of seconds.

`test_fleet_hosts.py` kills and stops real processes in each change; the same faults of toys are in `test_fleet.py`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import corelm
from corelm import Backend
from corelm.errors import BackendTimeoutError, EngineError
from corelm_fleet.fleet import FleetEngine
from corelm_fleet.hosting.engine import open_in_process
from corelm_fleet.records import FleetLimits
from corelm_fleet.replica import Member
from helpers.fault_checks import SAMPLING, check_processes
from helpers.fleet_faults import SEEDS
from helpers.fleet_processes import LIMITS, Hosts
from helpers.processes import all_end, runs, wait_until

pytestmark = pytest.mark.nightly

#: A plugin that ends its process at a prompt that begins with the id 4.
POISONOUS = """
import os
from dataclasses import replace
from corelm import hookimpl
from corelm_testing.toy import ToyBackend


class Poisonous(ToyBackend):
    @hookimpl
    def generate(self, request):
        if any(ids[0] == 4 for ids in request.prompts.tolist()):
            os.kill(os.getpid(), 9)
        return ToyBackend.generate(self, request)
"""


def test_every_row_is_answered_once_and_right_whatever_happens_to_the_processes(tmp_path: Path) -> None:
    def open_fleet(folder: Path, count: int) -> Backend:
        options: dict[str, Any] = {"python": sys.executable, "replicas": count, "fleet_limits": LIMITS}
        return corelm.get_backend("transformers", folder, dtype="float32", **options)

    check_processes(open_fleet, tmp_path)


@pytest.fixture
def poisonous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Backend]]:
    info = tmp_path / "poisonous_backend-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: poisonous-backend\nVersion: 1.0\n\n")
    (info / "entry_points.txt").write_text("[corelm.backends]\npoisonous = poisonous_plugin:Poisonous\n")
    (tmp_path / "poisonous_plugin.py").write_text(POISONOUS)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    yield lambda **options: corelm.get_backend("poisonous", python=sys.executable, **options)


def test_a_row_that_ends_its_process_fails_alone_after_two(poisonous: Callable[..., Backend]) -> None:
    rows = [[72, n] for n in range(40, 60)]
    with corelm.get_backend("toy") as one:
        expected = one.generate(rows, SAMPLING, seeds=[*range(20)]).ids.tolist()
    with poisonous(replicas=3) as backend:
        processes = Hosts(backend)
        first = processes.victims()
        seeds = [*range(7), 99, *range(7, 20)]
        other = backend.submit_generate(rows, SAMPLING, seeds=[*range(20)])
        found = backend.generate([*rows[:7], [4, 5], *rows[7:]], SAMPLING, seeds=seeds, on_error="skip")
        assert found.errors is not None and [at for at, why in enumerate(found.errors) if why] == [7]
        assert "2 replicas were lost" in found.errors[7] and found.finish_reasons[7] == "error"
        ids = found.ids.tolist()
        assert ids[:7] + ids[8:] == expected == other.result(60).ids.tolist()
        assert sum(runs(pid) for pid in first) == 1, "it took more than two along"


def test_if_no_process_can_be_started_again_every_call_ends_with_an_error() -> None:
    may_open, opened = [True], list[Any]()

    def open_it() -> Any:
        if not may_open[0]:
            raise EngineError("no room")
        opened.append(open_in_process("toy", None, sys.executable, None, {})[0])
        return opened[-1]

    limits = FleetLimits(restarts=1, backoff=2.0)
    members = [
        Member(name, open_it, lambda engine: engine.host.kill(), lambda engine: engine.host.connection.lost)
        for name in ("a", "b")
    ]
    with Backend.from_plugin(FleetEngine(members, limits=limits), "toys") as backend:
        may_open[0] = False
        left = Hosts(backend).victims()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        # Otherwise a row may be in flight at the deaths of both.
        assert wait_until(lambda: all(engine.host.connection.lost for engine in opened))
        with pytest.raises(BackendTimeoutError):
            backend.generate([[72]], SAMPLING, timeout=0.5)
        with pytest.raises(EngineError, match="no room") as failure:
            backend.generate([[72]] * 3, SAMPLING, seeds=[*SEEDS, 3])
        assert failure.value.usable is False
        assert not backend.health()
    assert all_end(left)

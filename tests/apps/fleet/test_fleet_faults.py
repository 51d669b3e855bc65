"""Faults of real processes under load. ``make test-faults`` runs this for two minutes instead of seconds.

`test_fleet_hosts.py` kills and stops real processes in each change; the same faults of toys are in `test_fleet.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import corelm
from corelm import Backend
from helpers.fault_checks import check_processes
from helpers.fleet_processes import LIMITS

pytestmark = pytest.mark.nightly


def test_every_row_is_answered_once_and_right_whatever_happens_to_the_processes(tmp_path: Path) -> None:
    def open_fleet(folder: Path, count: int) -> Backend:
        options: dict[str, Any] = {"python": sys.executable, "replicas": count, "fleet_limits": LIMITS}
        return corelm.get_backend("transformers", folder, dtype="float32", **options)

    check_processes(open_fleet, tmp_path)

"""`FleetKit`: the conformance kit for fleets of real servers. All of it, with ``CORELM_FLEET_KIT=1``, takes minutes.

Without that it is the part whose promises a fleet could break: rows that are split and joined, seeds, streams and
adapters.
"""

from __future__ import annotations

import os
from typing import Any

from corelm.testing import BackendConformance
from corelm.testing.adapters import AdapterPromises
from corelm.testing.faults import FaultPromises
from corelm.testing.logprobs import LogProbPromises
from corelm.testing.seeds import SeedPromises
from corelm.testing.streaming import StreamingPromises


class _Selection(LogProbPromises, SeedPromises, StreamingPromises, AdapterPromises, FaultPromises):
    pass


FleetKit: Any = BackendConformance if os.environ.get("CORELM_FLEET_KIT") else _Selection

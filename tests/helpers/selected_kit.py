"""`SelectedKit`: the part of the conformance kit whose promises a way to an engine could break.

An engine shows the whole kit once. Behind a URL, in an actor, in a fleet or through another protocol, its tests show
ids, log-probs, seeds, streams, adapters and faults. ``CORELM_WHOLE_KIT=1`` makes it the whole kit, as the engines'
targets of make do outside CI.
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
from corelm.testing.tokens import TokenPromises


class _Selection(TokenPromises, LogProbPromises, SeedPromises, StreamingPromises, AdapterPromises, FaultPromises):
    pass


SelectedKit: Any = BackendConformance if os.environ.get("CORELM_WHOLE_KIT") else _Selection

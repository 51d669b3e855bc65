"""`SelectedKit`: the part of the conformance kit that depends on how an engine is reached.

The whole kit runs once on each engine. Behind a URL, in an actor, in a fleet or through another protocol, only the
tests of ids, log-probs, seeds, streams, adapters and faults run. With ``CORELM_WHOLE_KIT=1``, which make sets for the
engines' targets unless ``SELECT=1`` is given, it is the whole kit.
"""

import os
from typing import Any

from corelm_testing import BackendConformance
from corelm_testing.lifecycle import FaultPromises
from corelm_testing.logprobs import LogProbPromises
from corelm_testing.tokens import SeedPromises, StreamingPromises, TokenPromises
from corelm_testing.weights import AdapterPromises


class _Selection(TokenPromises, LogProbPromises, SeedPromises, StreamingPromises, AdapterPromises, FaultPromises):
    pass


SelectedKit: Any = BackendConformance if os.environ.get("CORELM_WHOLE_KIT") else _Selection

"""`BackendConformance`: the tests of all themes in one class."""

from __future__ import annotations

from corelm.testing.adapters import AdapterPromises
from corelm.testing.bad_results import BadResultPromises
from corelm.testing.chat import ChatPromises
from corelm.testing.distribution import DistributionPromises
from corelm.testing.faults import FaultPromises
from corelm.testing.fields import FieldPromises
from corelm.testing.in_flight import InFlightPromises
from corelm.testing.lifecycle import LifecyclePromises
from corelm.testing.logprobs import LogProbPromises
from corelm.testing.parameters import ParameterPromises
from corelm.testing.provenance import ProvenancePromises
from corelm.testing.sampled_logprobs import SampledLogProbPromises
from corelm.testing.scored_fields import ScoredFieldPromises
from corelm.testing.seeds import SeedPromises
from corelm.testing.sleeping import SleepPromises
from corelm.testing.stopping import StoppingPromises
from corelm.testing.streaming import StreamingPromises
from corelm.testing.support import SupportPromises
from corelm.testing.tokens import TokenPromises
from corelm.testing.top_ids import TopIdPromises
from corelm.testing.weights import WeightPromises


class BackendConformance(
    TokenPromises,
    LogProbPromises,
    SampledLogProbPromises,
    DistributionPromises,
    SupportPromises,
    TopIdPromises,
    SeedPromises,
    StoppingPromises,
    ParameterPromises,
    ProvenancePromises,
    FieldPromises,
    ScoredFieldPromises,
    ChatPromises,
    StreamingPromises,
    WeightPromises,
    InFlightPromises,
    SleepPromises,
    AdapterPromises,
    FaultPromises,
    BadResultPromises,
    LifecyclePromises,
):
    """All tests of the kit. Subclass it as ``Test…`` and define `open_backend` and `oracle`."""

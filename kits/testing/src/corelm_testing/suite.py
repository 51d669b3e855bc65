"""`BackendConformance`: the tests of all themes in one class."""

from __future__ import annotations

from corelm_testing.adapters import AdapterPromises
from corelm_testing.chat import ChatPromises
from corelm_testing.distribution import DistributionPromises
from corelm_testing.faults import FaultPromises
from corelm_testing.fields import FieldPromises
from corelm_testing.in_flight import InFlightPromises
from corelm_testing.lifecycle import LifecyclePromises
from corelm_testing.logprobs import LogProbPromises
from corelm_testing.parameters import ParameterPromises
from corelm_testing.provenance import ProvenancePromises
from corelm_testing.sampled_logprobs import SampledLogProbPromises
from corelm_testing.scored_fields import ScoredFieldPromises
from corelm_testing.seeds import SeedPromises
from corelm_testing.sleeping import SleepPromises
from corelm_testing.stopping import StoppingPromises
from corelm_testing.streaming import StreamingPromises
from corelm_testing.support import SupportPromises
from corelm_testing.tokens import TokenPromises
from corelm_testing.top_ids import TopIdPromises
from corelm_testing.weights import WeightPromises


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
    LifecyclePromises,
):
    """All tests of the kit. Subclass it as ``Test…`` and define `open_backend` and `oracle`."""

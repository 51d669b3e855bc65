"""`BackendConformance`: the tests of all themes in one class."""

from __future__ import annotations

from corelm_testing.distribution import DistributionPromises, SupportPromises, TopIdPromises
from corelm_testing.fields import ChatPromises, FieldPromises, ScoredFieldPromises
from corelm_testing.lifecycle import FaultPromises, LifecyclePromises
from corelm_testing.logprobs import LogProbPromises, ProvenancePromises, SampledLogProbPromises
from corelm_testing.parameters import ParameterPromises, StoppingPromises
from corelm_testing.tokens import SeedPromises, StreamingPromises, TokenPromises
from corelm_testing.weights import AdapterPromises, InFlightPromises, SleepPromises, WeightPromises


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
    """All tests of the kit. Subclass it as ``Test…`` and define `open_backend`, and `oracle` or `next_logprobs`."""

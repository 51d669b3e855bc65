"""A toy engine with adapters: each is a table that is added to the model's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from corelm import hookimpl
from corelm.errors import InvalidRequestError
from corelm.spec import Capabilities, GenerateRequest, GenerateResult, ScoreRequest, ScoreResult, WeightUpdate
from corelm_testing.toy import Bigram, ToyBackend

#: The weights of the engine, and two adapters.
TABLE, ADD, OTHER = torch.randn(3, 260, 260, generator=torch.Generator().manual_seed(0))
CONFIG = {"peft_type": "ADDED"}


class AdapterToy(ToyBackend):
    """A toy engine with adapters.

    Attributes:
        added: the adapters by name.
        asked: the requests that it was given.
        fault: raised in the middle of loading an adapter; None loads it.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        values = {name: getattr(self.capabilities, name) for name in Capabilities.__dataclass_fields__}
        self.capabilities = Capabilities(**{**values, "adapters": True})
        self.added: dict[str, Tensor] = {}
        self.asked: list[Any] = []
        self.fault: Exception | None = None

    @classmethod
    def of_table(cls) -> AdapterToy:
        engine = cls.open(Bigram(TABLE.clone()))
        assert isinstance(engine, cls)
        return engine

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        with self._with(request):
            return ToyBackend.generate(self, request)

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        with self._with(request):
            return ToyBackend.score_logprobs(self, request)

    @hookimpl
    def update_weights(self, request: WeightUpdate) -> bool:
        self.asked.append(request)
        if request.adapter is None:
            return bool(ToyBackend.update_weights(self, request))
        if request.unloads:
            if request.adapter not in self.added:
                raise InvalidRequestError(f"adapter: there is no {request.adapter!r}", field="adapter")
            del self.added[request.adapter]
            return True
        assert request.state_dict is not None and request.adapter_config == CONFIG
        table = request.state_dict.get("added")
        if table is None:
            raise InvalidRequestError("state_dict: missing 'added'", field="state_dict")
        if table.shape != TABLE.shape:
            raise InvalidRequestError("state_dict: another shape", field="state_dict")
        self.added[request.adapter] = table.clone()
        if self.fault is not None:
            raise self.fault
        return True

    @contextmanager
    def _with(self, request: GenerateRequest | ScoreRequest) -> Iterator[None]:
        self.asked.append(request)
        if not request.adapter:
            yield
            return
        if request.adapter not in self.added:
            raise InvalidRequestError(f"adapter: there is no {request.adapter!r}", field="adapter")
        model, self.model = self.model, Bigram(self.model.table.detach() + self.added[request.adapter])
        try:
            yield
        finally:
            self.model = model


def true_scores(ids: list[int], added: Tensor | float = 0.0, table: Tensor = TABLE) -> list[float]:
    """Return the log-probabilities of all ids but the first."""
    logprobs = (table + added).double().log_softmax(-1)
    return [float(logprobs[one, other]) for one, other in pairwise(ids)]

"""The conformance suite of the toy backend; its oracle is the closed form of its model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import corelm
from corelm import Backend
from corelm_testing import BackendConformance
from corelm_testing.toy import Bigram
from helpers.adapter_toys import ADD, CONFIG
from helpers.adapter_toys import OTHER as ADD_OTHER

#: Random instead of counted, so that all log-probs differ and a wrong one is noticed.
TABLE, OTHER = 2 * torch.randn(2, 260, 260, generator=torch.Generator().manual_seed(0))


class ToyPromises:
    """What the kit has to know of the toy."""

    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls) -> Callable[[], Backend]:
        return lambda: corelm.get_backend("toy", Bigram(TABLE.clone()))

    def oracle(self, ids: list[int], temperature: float) -> Tensor:
        return of_table(TABLE, ids, temperature)

    def next_logprobs(self, ids: list[int], temperature: float) -> Tensor:
        return (TABLE[ids[-1]] / temperature).log_softmax(-1)

    def new_weights(self) -> tuple[dict[str, Tensor], Callable[[list[int], float], Tensor]]:
        return {"table": OTHER}, lambda ids, temperature: of_table(OTHER, ids, temperature)

    def new_adapters(self) -> list[tuple[dict[str, Any], Callable[[list[int], float], Tensor]]]:
        # Only `AdapterToy` and its broken variants declare adapters.
        return [
            (
                {"weights": {"added": added}, "config": CONFIG},
                lambda ids, temperature, added=added: of_table(TABLE + added, ids, temperature),
            )
            for added in (ADD, ADD_OTHER)
        ]

    def engine_sampling(self) -> dict[str, Any]:
        # Only `Reshaping` and its broken variants declare engine_kwargs.
        return {"engine_kwargs": {"logit_bias": {"7": 8.0}}}


class ToyConformance(ToyPromises, BackendConformance):
    """The whole kit."""


def of_table(table: Tensor, ids: list[int], temperature: float) -> Tensor:
    """Return the log-prob of every id after the previous one; 0 for the first."""
    rows = torch.tensor(ids)
    out = torch.zeros(len(ids))
    out[1:] = (table / temperature).log_softmax(-1)[rows[:-1], rows[1:]]
    return out

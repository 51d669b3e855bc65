"""How many forward passes a call makes: the first one, which tries the model, and one that scores a short row."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from corelm import Backend
from helpers import oracle
from helpers.insides import use_onednn
from helpers.plain_forward import PROMPTS, Forwards, Open
from helpers.tiny_models import random_rows, tiny_model


def test_one_short_row_is_read_by_the_plain_forward(open_model: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    use_onednn(monkeypatch, from_products=math.inf)
    model = tiny_model("llama")
    backend = open_model(model)
    backend.score_logprobs(PROMPTS)
    for row in random_rows(*range(2, 10)):
        with Forwards() as passes:
            scores = backend.score_logprobs([row], return_argmax=True)
        assert passes.count == 1 and backend.info["scoring"] == "alone"
        oracle.close(scores.logprobs.values, oracle.logprobs(model, row))
        assert scores.argmax is not None
        assert scores.argmax.values[1:].tolist() == oracle.next_logits(model, row)[:-1].argmax(-1).tolist()


CALLS: list[Callable[[Backend], object]] = [
    lambda backend: backend.score_logprobs(PROMPTS),
    lambda backend: backend.generate(PROMPTS, {"max_new_tokens": 4, "ignore_eos": True}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_call_makes_at_most_four_forwards_more(open_model: Open, dtype: torch.dtype) -> None:
    for call in CALLS:
        backend, taken = open_model(tiny_model("llama").to(dtype)), []
        for _ in range(2):
            with Forwards() as passes:
                call(backend)
            taken.append(passes.count)
        first, second = taken
        assert second < first <= second + 4

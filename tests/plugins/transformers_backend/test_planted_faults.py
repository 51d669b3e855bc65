"""Whatever goes wrong outside the plain forward of one row: the numbers are right, or the model is refused.

They are compared with the model in float64, which has the same fault: no log-prob may be further off than twice what
the plain forward is in the model's own dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from corelm.errors import CapabilityError
from helpers import planted_faults
from helpers.plain_forward import PROMPTS, Open
from helpers.tiny_models import random_rows, tiny_model

#: The shortest row has nothing before its last token that could be read wrongly.
ROWS = random_rows(30, 7, 19, 2, 30, 12)
DTYPES = (torch.float32, torch.bfloat16)


def step_by_step(model: Any, row: list[int], start: int) -> Tensor:
    """Return the log-probs of a row's tokens from `start` on, each from the plain forward of what comes before it."""
    with torch.no_grad():
        last = [
            model(input_ids=torch.tensor([row[:end]], device=model.device)).logits[0, -1]
            for end in range(start, len(row))
        ]
    return torch.stack(last).double().log_softmax(-1).cpu()[torch.arange(len(last)), torch.tensor(row[start:])]


def at_once(model: Any, row: list[int]) -> Tensor:
    """Return the log-probs of a row's tokens but the first, from one plain forward."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([row[:-1]], device=model.device)).logits[0]
    return logits.double().log_softmax(-1).cpu()[torch.arange(len(row) - 1), torch.tensor(row[1:])]


def assert_right(found: list[Tensor], plain: list[Tensor], exact: list[Tensor]) -> None:
    """Assert that the first are off by at most twice as much as the second."""
    ours, theirs = (torch.cat(each) - torch.cat(exact) for each in (found, plain))
    off, allowed = (float(each.square().mean().sqrt()) for each in (ours, theirs))
    assert off <= 2 * allowed + 1e-5, (off, allowed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("plant", planted_faults.PLANTS, ids=lambda plant: plant.__name__)
def test_a_fault_changes_no_number(open_model: Open, plant: Callable[[Any], None], dtype: torch.dtype) -> None:
    experts = plant is planted_faults.expert_capacity_of_a_batch
    model = tiny_model("mixtral" if experts else "llama").to(dtype)
    # transformers multiplies the experts of a mixture in float32 at most.
    exact: Any = copy.deepcopy(model).to(torch.float32 if experts else torch.float64)
    for each in (model, exact):
        plant(each)
    backend = open_model(model)
    scores = backend.score_logprobs(ROWS).logprobs.split()
    found = [score[1:].double().cpu() for score in scores]
    assert_right(found, [at_once(model, row) for row in ROWS], [at_once(exact, row) for row in ROWS])
    made = backend.generate(PROMPTS, {"max_new_tokens": 12, "ignore_eos": True}, seeds=[1, 2, 3, 4])
    assert made.logprobs is not None
    found = [each.double().cpu() for each in made.logprobs.split()]
    rows = [(prompt + answer, len(prompt)) for prompt, answer in zip(PROMPTS, made.ids.tolist(), strict=True)]
    assert_right(found, [step_by_step(model, *row) for row in rows], [step_by_step(exact, *row) for row in rows])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_a_model_that_adds_noise_is_refused_with_the_cause(open_model: Open, dtype: torch.dtype) -> None:
    model = tiny_model("llama").to(dtype)
    planted_faults.noise(model)
    backend = open_model(model)
    for call in (lambda: backend.score_logprobs(ROWS), lambda: backend.generate(PROMPTS, {"max_new_tokens": 2})):
        with pytest.raises(CapabilityError, match="each time it reads the same ids"):
            call()

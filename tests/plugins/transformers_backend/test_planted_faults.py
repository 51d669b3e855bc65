"""Whatever goes wrong outside the plain forward of one row: the numbers are right, or the model is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from corelm.errors import CapabilityError
from helpers import planted_faults
from helpers.plain_forward import PROMPTS, Open
from helpers.tiny_models import random_rows, tiny_model

#: The shortest row has nothing before its last token that could be read wrongly.
ROWS = random_rows(30, 7, 19, 2, 30, 12)
DTYPES = (torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.nightly))


def check(open_model: Open, model: Any, plant: Callable[[Any], None]) -> None:
    # transformers multiplies the experts of a mixture in float32 at most.
    exact: Any = copy.deepcopy(model).to(torch.float32 if model.config.model_type == "mixtral" else torch.float64)
    for each in (model, exact):
        plant(each)
    planted_faults.check(open_model(model), model, exact, ROWS, PROMPTS, 12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("plant", planted_faults.PLANTS, ids=lambda plant: plant.__name__)
def test_a_fault_changes_no_number(open_model: Open, plant: Callable[[Any], None], dtype: torch.dtype) -> None:
    experts = plant is planted_faults.expert_capacity_of_a_batch
    check(open_model, tiny_model("mixtral" if experts else "llama").to(dtype), plant)


@pytest.mark.parametrize(
    ("name", "layers", "seed", "dtype"),
    [
        ("llama", 2, 2, torch.bfloat16),
        ("llama", 12, 3, torch.float16),
        ("mixtral", 12, 0, torch.float16),
        ("mixtral", 12, 1, torch.float16),
    ],
)
def test_what_a_cache_has_lost_is_not_taken_for_the_rounding_of_a_short_dtype(
    open_model: Open, name: str, layers: int, seed: int, dtype: torch.dtype
) -> None:
    """The log-probs of these models were off by up to 15 times as much as the plain forward's."""
    model = tiny_model(name, num_hidden_layers=layers, seed=seed).to(dtype)
    check(open_model, model, planted_faults.cache_without_a_first_token)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_model_that_adds_noise_is_refused_with_the_cause(open_model: Open, dtype: torch.dtype) -> None:
    model = tiny_model("llama").to(dtype)
    planted_faults.noise(model)
    backend = open_model(model)
    for call in (lambda: backend.score_logprobs(ROWS), lambda: backend.generate(PROMPTS, {"max_new_tokens": 2})):
        with pytest.raises(CapabilityError, match="each time it reads the same ids"):
            call()

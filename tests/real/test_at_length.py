"""More of what the transformers plugin does with a trained model; make test-real runs it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

import corelm
from helpers import oracle
from helpers.peft_models import with_lora
from helpers.real_checks import Rows, check_greedy, check_scores

pytestmark = pytest.mark.nightly


def test_an_adapter_gives_the_numbers_of_merged_weights(copy: Any, model: Any, tokenizer: Any, rows: Rows) -> None:
    few = rows[:6]
    adapted = with_lora(copy, lora_alpha=1)
    merged = deepcopy(adapted).merge_and_unload()
    assert float((oracle.logprobs(merged, few[1]) - oracle.logprobs(model, few[1])).abs().max()) > 0.01
    with corelm.get_backend("transformers", adapted, tokenizer=tokenizer) as backend:
        check_scores(backend, merged, few)
        check_greedy(backend, merged, few, 6)
        check_scores(backend, model, few, adapter=False)

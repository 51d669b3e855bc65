"""SGLang and transformers agree on the same model, token by token, for 64 prompts of very different lengths."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transformers import PreTrainedModel

import corelm
from corelm import Backend
from helpers.tiny_models import random_rows, tiny_tokenizer

LENGTHS = [1, 2, 3, *range(5, 65, 2), *range(70, 460, 12)]
NEW = 32


@pytest.fixture(scope="module")
def reference(model: PreTrainedModel) -> Iterator[Backend]:
    with corelm.get_backend("transformers", model, tokenizer=tiny_tokenizer()) as backend:
        yield backend


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_rows(*LENGTHS[:64])


def test_greedy_answers_are_identical_and_their_log_probs_agree(shared, reference, prompts, record_property):
    assert len(prompts) == 64
    sampling = {"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True}
    sglang, transformers = (backend.generate(prompts, sampling, logprobs="raw") for backend in (shared, reference))
    assert sglang.ids.tolist() == transformers.ids.tolist()
    difference = float((sglang.logprobs.values - transformers.logprobs.values).abs().max())
    record_property("largest difference", difference)
    assert difference < 1e-4


def test_scores_agree(shared, reference, prompts, record_property):
    sglang, transformers = (backend.score_logprobs(prompts) for backend in (shared, reference))
    assert sglang.scored.tolist() == transformers.scored.tolist()
    difference = float((sglang.logprobs.values - transformers.logprobs.values).abs().max())
    record_property("largest difference", difference)
    assert difference < 1e-4

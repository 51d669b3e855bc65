"""vLLM and transformers give the same results for the same model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import corelm
from corelm import Backend
from helpers.tiny_models import random_rows

#: 64 unordered lengths, from one token to nearly the whole context.
LENGTHS = [1 + (37 * i * i) % 440 for i in range(64)]
PROMPTS = random_rows(*LENGTHS, seed=3)
SAMPLING = {"max_new_tokens": 48, "temperature": 0.0}


@pytest.fixture(scope="module")
def reference(tiny_folder: Path) -> Iterator[Backend]:
    with corelm.get_backend("transformers", tiny_folder, dtype="float32") as backend:
        yield backend


@pytest.fixture(scope="module", params=["async", "sync"])
def vllm(request: pytest.FixtureRequest, open_vllm: Callable[..., Backend]) -> Iterator[Backend]:
    if request.param == "async":
        yield request.getfixturevalue("shared")
    else:
        with open_vllm(engine="sync") as backend:
            yield backend


def test_greedy_answers_are_the_same_ids_with_the_same_log_probs(
    vllm: Backend, reference: Backend, record_property: Callable[[str, object], None]
) -> None:
    found, expected = vllm.generate(PROMPTS, SAMPLING), reference.generate(PROMPTS, SAMPLING)
    assert len({*LENGTHS}) > 40 and min(LENGTHS) == 1 and max(LENGTHS) > 400
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.finish_reasons == expected.finish_reasons
    assert found.logprobs is not None and expected.logprobs is not None
    record_property("difference", float((found.logprobs.values - expected.logprobs.values).abs().max()))
    torch.testing.assert_close(found.logprobs.values, expected.logprobs.values, rtol=0, atol=1e-4)


def test_scores_are_equal(vllm: Backend, reference: Backend, record_property: Callable[[str, object], None]) -> None:
    found, expected = vllm.score_logprobs(PROMPTS), reference.score_logprobs(PROMPTS)
    assert torch.equal(found.scored.values, expected.scored.values)
    record_property("difference", float((found.logprobs.values - expected.logprobs.values).abs().max()))
    torch.testing.assert_close(found.logprobs.values, expected.logprobs.values, rtol=0, atol=1e-4)

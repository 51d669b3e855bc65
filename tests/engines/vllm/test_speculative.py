"""Speculative decoding: vLLM takes no bias then, so each scored row is a prompt."""

from __future__ import annotations

import pytest
import torch

from corelm import Backend
from engines.vllm.conftest import Open

NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
ROWS = [[5, 17, 300, 5, 17, 300, 5, 17], [8, 9], [40, 41, 40, 41, 40]]


@pytest.mark.nightly
def test_scores_are_those_of_an_engine_without_drafts(shared: Backend, open_vllm: Open) -> None:
    # In a process of its own: drafts import llvmlite, and vLLM 0.32 opens no further engine next to that.
    with open_vllm(engine="async", speculative_config=NGRAM) as backend:
        plain, context = shared.capabilities.max_context, backend.capabilities.max_context
        assert plain is not None and context == plain - 1
        for rows in (ROWS, [[5 + place % 7 for place in range(context)]]):
            found, expected = (each.score_logprobs(rows, return_argmax=True) for each in (backend, shared))
            assert found.errors is None and found.argmax.tolist() == expected.argmax.tolist()
            torch.testing.assert_close(found.logprobs.values, expected.logprobs.values, atol=1e-4, rtol=0)

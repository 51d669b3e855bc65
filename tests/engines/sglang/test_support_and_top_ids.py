"""The ids that truncation had left, and the most probable ids, agree with a plain float32 forward of one row."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from corelm import Backend
from corelm.spec import GenerateResult
from helpers import oracle
from helpers.tiny_models import VOCAB, random_rows

PROMPTS = random_rows(3, 70, 9)
#: Closer to a threshold than this, rounding decides whether an id is kept.
NEAR = 1e-5
#: How far the two models' float32 log-probs may be apart. The largest difference seen was 1.1e-5, at temperature 0.6.
APART = 5e-5


def generated(backend: Backend, sampling: dict[str, Any], **arguments: Any) -> GenerateResult:
    return backend.generate(PROMPTS, {"max_new_tokens": 12, "ignore_eos": True} | sampling, **arguments)


def tables(model: PreTrainedModel, found: GenerateResult, temperature: float) -> Tensor:
    """Return float32[total, V]: the log-probs of all ids where each token was sampled."""
    rows = zip(PROMPTS, found.ids.tolist(), strict=True)
    logits = [oracle.next_logits(model, [*prompt, *ids])[len(prompt) - 1 : -1] for prompt, ids in rows]
    return (torch.cat(logits) / temperature).log_softmax(-1)


def check_kept(found: GenerateResult, table: Tensor, top_p: float) -> None:
    """Check that top-p has left these ids, except where rounding decides."""
    assert found.kept_ids is not None
    for position, kept in enumerate(found.kept_ids.ids.tolist()):
        values, ids = table[position].exp().double().sort(descending=True)
        before = values.cumsum(0) - values
        assert {*kept} ^ {*ids[before < top_p].tolist()} <= {*ids[(before - top_p).abs() < NEAR].tolist()}


@pytest.mark.nightly
def test_seeded_answers_have_sets_as_well(seeded: Backend, model):
    sampling = {"temperature": 0.8, "top_p": 0.7, "seed": 5}
    first, again = (generated(seeded, sampling, logprobs="processed", return_support=True) for _ in range(2))
    assert first.ids.tolist() == again.ids.tolist() and first.kept_ids.tolist() == again.kept_ids.tolist()
    check_kept(first, tables(model, first, 0.8), 0.7)


def test_a_stream_has_what_the_whole_answer_has(shared: Backend, model):
    sampling = {"temperature": 0.7, "top_p": 0.8, "max_new_tokens": 12, "ignore_eos": True}
    stream = shared.stream(PROMPTS, sampling, logprobs="processed", return_support=True, top_logprobs=2)
    told = {row: [] for row in range(len(PROMPTS))}
    for chunk in stream:
        told[chunk.row] += chunk.logprobs
    found = stream.result
    assert [*told.values()] == found.logprobs.tolist()
    table = tables(model, found, 0.7)
    for position, kept in enumerate(found.kept_ids.ids.tolist()):
        mass = table[position][kept].logsumexp(0)
        torch.testing.assert_close(found.kept_log_mass.values[position], mass, rtol=0, atol=APART)


def test_rows_with_and_without_sets_share_a_batch(shared: Backend, model):
    # SGLang copies the sets of some rows of a batch only, and samples in another way if one of them has min_p.
    with ThreadPoolExecutor(3) as pool:
        plain = pool.submit(generated, shared, {"min_p": 0.3, "max_new_tokens": 40}, logprobs="raw")
        greedy = pool.submit(generated, shared, {"temperature": 0.0, "max_new_tokens": 40}, logprobs="raw")
        found = pool.submit(
            generated, shared, {"top_p": 0.6, "max_new_tokens": 40}, logprobs="processed", return_support=True
        ).result()
        plain.result(), greedy.result()
    check_kept(found, tables(model, found, 1.0), 0.6)


@pytest.mark.nightly
def test_which_servers_return_sets(shared: Backend, original: Backend, seeded: Backend):
    assert [each.capabilities.return_support for each in (shared, original, seeded)] == [True, False, True]
    assert [each.capabilities.top_logprobs for each in (shared, original, seeded)] == [VOCAB] * 3

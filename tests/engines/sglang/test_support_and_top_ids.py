"""The ids that truncation had left, and the most probable ids, agree with a plain float32 forward of one row."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import corelm
from corelm import Backend
from corelm.spec import GenerateResult
from helpers import oracle
from helpers.tiny_models import VOCAB, random_rows, tiny_tokenizer

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


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=APART)


def kept_by(probs: Tensor, top_k: int | None, top_p: float, min_p: float) -> tuple[set[int], set[int]]:
    """Return the ids that truncation keeps, and those for which rounding decides."""
    values, ids = probs.double().sort(descending=True)
    before = values.cumsum(0) - values
    keep = (torch.arange(VOCAB) < (top_k or VOCAB)) & (before < top_p) & (values >= min_p * values[0])
    near = ((before - top_p).abs() < NEAR) | ((values - min_p * values[0]).abs() < NEAR)
    return set(ids[keep].tolist()), set(ids[near].tolist())


def test_scores_under_the_support_are_the_samplers_numbers(shared: Backend, model, record_property):
    with corelm.get_backend("transformers", model, tokenizer=tiny_tokenizer()) as trainer:
        for sampling in ({"top_p": 0.8}, {"top_k": 6, "temperature": 0.7}, {"min_p": 0.1, "temperature": 1.5}):
            found = generated(shared, sampling, logprobs="processed", return_support=True)
            rows = [prompt + ids for prompt, ids in zip(PROMPTS, found.ids.tolist(), strict=True)]
            starts = [len(prompt) for prompt in PROMPTS]
            scores = trainer.score_logprobs(
                rows, score_from=starts, temperature=sampling.get("temperature", 1.0), support=found.kept_ids
            )
            difference = float((scores.logprobs.values[scores.scored.values] - found.logprobs.values).abs().max())
            record_property(str(sampling), difference)
            assert difference < APART


@pytest.mark.nightly
def test_seeded_answers_have_sets_as_well(seeded: Backend, model):
    sampling = {"temperature": 0.8, "top_p": 0.7, "seed": 5}
    first, again = (generated(seeded, sampling, logprobs="processed", return_support=True) for _ in range(2))
    assert first.ids.tolist() == again.ids.tolist() and first.kept_ids.tolist() == again.kept_ids.tolist()
    table = tables(model, first, 0.8)
    for position, kept in enumerate(first.kept_ids.ids.tolist()):
        expected, near = kept_by(table[position].exp(), None, 0.7, 0.0)
        assert {*kept} ^ expected <= near


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
        close(found.kept_log_mass.values[position], table[position][kept].logsumexp(0))


def test_rows_with_and_without_sets_share_a_batch(shared: Backend, model):
    # SGLang copies the sets of some rows of a batch only, and samples in another way if one of them has min_p.
    with ThreadPoolExecutor(3) as pool:
        plain = pool.submit(generated, shared, {"min_p": 0.3, "max_new_tokens": 40}, logprobs="raw")
        greedy = pool.submit(generated, shared, {"temperature": 0.0, "max_new_tokens": 40}, logprobs="raw")
        found = pool.submit(
            generated, shared, {"top_p": 0.6, "max_new_tokens": 40}, logprobs="processed", return_support=True
        ).result()
        plain.result(), greedy.result()
    table = tables(model, found, 1.0)
    for position, kept in enumerate(found.kept_ids.ids.tolist()):
        expected, near = kept_by(table[position].exp(), None, 0.6, 0.0)
        assert {*kept} ^ expected <= near


@pytest.mark.nightly
def test_which_servers_return_sets(shared: Backend, original: Backend, seeded: Backend):
    assert [each.capabilities.return_support for each in (shared, original, seeded)] == [True, False, True]
    assert [each.capabilities.top_logprobs for each in (shared, original, seeded)] == [VOCAB] * 3


def test_the_most_probable_ids_of_a_server_with_raw_log_probs(original: Backend, model):
    found = generated(original, {"temperature": 0.5, "top_k": 7}, logprobs="raw", top_logprobs=VOCAB)
    _check_top(found, tables(model, found, 1.0), VOCAB)


def _check_top(found: Any, table: Tensor, k: int) -> None:
    values, ids = table.topk(k)
    torch.testing.assert_close(found.top_logprobs.values, values, rtol=0, atol=1e-4)
    # Of ids that are nearly equally probable, either may come first.
    torch.testing.assert_close(table.gather(-1, found.top_ids.values), values, rtol=0, atol=1e-4)
    tail = 1 - table.double().exp().gather(-1, ids).sum(-1)
    torch.testing.assert_close(found.tail_log_mass.values.exp().double(), tail.clamp(min=0), rtol=0, atol=1e-5)


def test_the_most_probable_ids_of_scores(shared: Backend, model):
    rows = [*random_rows(5, 90, 1), [VOCAB - 1] * 2]
    starts = [1, 60, 1, 1]
    found = shared.score_logprobs(rows, score_from=starts, return_argmax=True, top_k=64)
    pairs = zip(rows, starts, strict=True)
    table = torch.cat([oracle.next_logits(model, row)[start - 1 : -1] for row, start in pairs]).log_softmax(-1)
    counted = found.scored.values
    assert int(counted.sum()) == 4 + 30 + 0 + 1
    values = table.topk(64).values
    torch.testing.assert_close(found.top_logprobs.values[counted], values, rtol=0, atol=1e-4)
    torch.testing.assert_close(table.gather(-1, found.top_ids.values[counted]), values, rtol=0, atol=1e-4)
    tail = (1 - values.double().exp().sum(-1)).clamp(min=0)
    torch.testing.assert_close(found.tail_log_mass.values[counted].exp().double(), tail, rtol=0, atol=1e-5)
    assert torch.equal(found.argmax.values[counted], found.top_ids.values[counted, 0])

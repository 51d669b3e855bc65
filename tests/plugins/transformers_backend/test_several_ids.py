"""Scores over sets of ids, of the most probable ids and of given ones, fast and plain, against sums in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from corelm import Ragged, TokenSets
from helpers import oracle
from helpers.peft_models import with_lora
from helpers.plain_forward import Open, assert_same_gradients, gradients
from helpers.scoring_path import scoring_path
from helpers.several_ids import check_top, over_set
from helpers.tiny_models import VOCAB, random_rows, tiny_model

#: Ragged rows, three of them with a common start, and one of a single id.
ROWS = [*random_rows(30, 1, 2, 57), *(random_rows(24, seed=2)[0] + end for end in random_rows(5, 9, 1, seed=3))]
#: More positions than the head is asked for by the model's own forward, in a vocabulary that has several tiles.
WIDE = {"vocab_size": 2_600, "num_hidden_layers": 1}


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.nightly)], ids=["fast", "plain"])
def fast(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def sets_for(rows: list[list[int]], vocab: int = VOCAB, size: int = 20, *, empty: bool = True) -> TokenSets:
    """Return random sets with the given token in each; every fifth is empty."""
    generator = torch.Generator().manual_seed(7)

    def one(token: int, place: int) -> list[int]:
        if empty and place % 5 == 3:
            return []
        others = torch.randint(vocab, (place % size,), generator=generator).tolist()
        return sorted({token, *others})

    return TokenSets.from_list([[one(token, place) for place, token in enumerate(row)] for row in rows])


def ids_for(rows: list[list[int]], k: int, vocab: int = VOCAB) -> Ragged:
    """Return k distinct random ids for each token; the second of them is missing at every third."""
    generator = torch.Generator().manual_seed(8)
    total = sum(map(len, rows))
    ids = torch.stack([torch.randperm(vocab, generator=generator)[:k] for _ in range(total)])
    ids[::3, 1] = -1
    return Ragged(ids, torch.tensor([len(row) for row in rows]))


def check_sets(
    found: Ragged, model: nn.Module, rows: list[list[int]], sets: TokenSets, temperature: float, atol: float = 1e-5
) -> None:
    for row, log_probs, own in zip(rows, found.split(), sets.tolist(), strict=True):
        logits = oracle.next_logits(model, row)
        wanted = [over_set(logits[t - 1], row[t], own[t], temperature) if t else 0.0 for t in range(len(row))]
        torch.testing.assert_close(log_probs.detach(), torch.tensor(wanted), rtol=1e-7, atol=atol)


def test_a_small_vocabulary_is_enumerated(open_model: Open) -> None:
    """Probabilities of a set sum to 1, and so do those of the most probable ids and the rest."""
    model = tiny_model(vocab_size=12)
    backend, (row,) = open_model(model), random_rows(20, vocab=12)
    ids = [0, 3, 4, 11]
    log_probs = [
        backend.score_logprobs([[*row[:t], token]], score_from=t, support=[[ids]]).logprobs.values[-1]
        for t in (1, 7, 19)
        for token in ids
    ]
    mass = torch.stack(log_probs).reshape(3, 4).double().exp().sum(1)
    torch.testing.assert_close(mass, torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-6)
    for k in range(1, 13):
        out = backend.score_logprobs([row], top_k=k)
        assert out.top_logprobs is not None and out.tail_log_mass is not None
        everything = torch.cat([out.top_logprobs.values[1:], out.tail_log_mass.values[1:, None]], 1).double()
        torch.testing.assert_close(everything.exp().sum(1), torch.ones(19).double(), rtol=0, atol=1e-6)
        check_top(out, 0, oracle.next_logits(model, row), 1.0)
    assert (out.tail_log_mass.values[1:] == -math.inf).all()


def test_all_ids_and_no_ids_are_the_whole_vocabulary(open_model: Open) -> None:
    backend = open_model(tiny_model())
    whole = backend.score_logprobs(ROWS).logprobs.values
    lengths = torch.tensor([len(row) for row in ROWS])
    every = TokenSets.from_list([[list(range(VOCAB))] * len(row) for row in ROWS])
    for sets in (every, TokenSets.empty(lengths)):
        found = backend.score_logprobs(ROWS, support=sets).logprobs.values
        torch.testing.assert_close(found, whole, rtol=1e-7, atol=1e-6)


@pytest.mark.parametrize("family", ["qwen2-tied", "gemma2", "phi-biased"])
def test_gradients_are_those_of_a_plain_forward(open_model: Open, family: str) -> None:
    model, temperature = tiny_model(family), 0.7
    backend, sets, ids = open_model(model), sets_for(ROWS), ids_for(ROWS, 4)
    lengths = torch.tensor([len(row) for row in ROWS])
    known = backend.score_logprobs(ROWS, temperature=temperature, top_k=4).top_ids
    assert known is not None
    generator = torch.Generator().manual_seed(5)
    total = int(lengths.sum())
    by_token, by_id, by_tail = (torch.randn(shape, generator=generator) for shape in ((total,), (total, 4), (total,)))

    def plain(tops: Tensor | None) -> Tensor:
        loss, at = torch.zeros(()), 0
        for row, own in zip(ROWS, sets.tolist(), strict=True):
            logits = oracle.own_logits(model, row) / temperature
            for t in range(1, len(row)):
                scores, place = logits[t - 1], at + t
                if tops is None:
                    chosen = torch.tensor(own[t] or range(VOCAB))
                    loss = loss + by_token[place] * (scores[row[t]] - scores[chosen].logsumexp(0))
                    continue
                log_probs, here = scores.log_softmax(0), tops[place]
                rest = torch.ones(VOCAB, dtype=torch.bool)
                rest[here[here >= 0]] = False
                loss = loss + by_token[place] * log_probs[row[t]] + by_tail[place] * log_probs[rest].logsumexp(0)
                loss = loss + (by_id[place] * log_probs[here.clamp_min(0)])[here >= 0].sum()
            at += len(row)
        return loss

    def ours(**options: Any) -> Tensor:
        out = backend.score_logprobs(ROWS, temperature=temperature, grad=True, **options)
        if out.top_logprobs is None:
            return (out.logprobs.values * by_token).sum()
        given = (out.top_ids.values >= 0) & out.scored.values[:, None]
        loss = (out.logprobs.values * by_token).sum() + (out.tail_log_mass.values * by_tail).sum()
        return loss + (out.top_logprobs.values * by_id)[given].sum()

    cases: list[tuple[dict[str, Any], Tensor | None]] = [
        ({"support": sets}, None),
        ({"top_k": 4}, known.values),
        ({"top_ids": ids}, ids.values),
    ]
    for options, tops in cases:
        found, expected = gradients(model, ours(**options)), gradients(model, plain(tops))
        assert_same_gradients(found, expected)


@pytest.mark.parametrize("family", ["qwen2", pytest.param("gemma2", marks=pytest.mark.nightly)])
def test_bfloat16_models_are_reduced_in_float32(open_model: Open, family: str) -> None:
    """Against a plain bfloat16 forward of one row, of which one logit may be rounded to the other side."""
    model = tiny_model(family, **WIDE).to(torch.bfloat16)
    backend, rows = open_model(model), random_rows(40, 50, 9, vocab=2_600)
    sets, ids = sets_for(rows, 2_600), ids_for(rows, 5, 2_600)
    out = backend.score_logprobs(rows, support=sets)
    top, named = backend.score_logprobs(rows, top_k=5), backend.score_logprobs(rows, top_ids=ids)
    apart: list[Tensor] = []
    for number, (row, own) in enumerate(zip(rows, sets.tolist(), strict=True)):
        logits = oracle.next_logits(model, row)
        wanted = torch.tensor([over_set(logits[t - 1], row[t], own[t]) for t in range(1, len(row))])
        apart.append((out.logprobs.split()[number][1:] - wanted).abs())
        for scores in (top, named):
            check_top(scores, number, logits, 1.0, atol=0.3)
            some = scores.top_ids.split()[number][1:]
            own_logs = logits[:-1].log_softmax(-1).gather(1, some.clamp_min(0))
            apart.append((scores.top_logprobs.split()[number][1:] - own_logs)[some >= 0].abs())
    assert float(torch.cat(apart).max()) < 0.3 and float(torch.cat(apart).median()) < 0.02
    # A bfloat16 softmax would round the results to three digits.
    assert float((out.logprobs.values - out.logprobs.values.bfloat16().float()).abs().max()) > 0


# With other arguments -------------------------------------------------------------------------------------------------


def test_only_the_positions_that_are_scored_have_numbers(open_model: Open) -> None:
    model, start = tiny_model(), [25, 1, 1, 40, 20, 30, 1]
    backend, sets = open_model(model), sets_for(ROWS)
    out = backend.score_logprobs(ROWS, score_from=start, support=sets)
    top = backend.score_logprobs(ROWS, score_from=start, top_k=3)
    whole = backend.score_logprobs(ROWS, support=sets).logprobs.values
    scored = out.scored.values
    torch.testing.assert_close(out.logprobs.values, whole * scored, rtol=0, atol=1e-5)
    for number, row in enumerate(ROWS):
        check_top(top, number, oracle.next_logits(model, row), 1.0, first=min(start[number], len(row)))


def test_logits_and_the_argmax_are_those_of_the_whole_vocabulary(open_model: Open) -> None:
    model = tiny_model()
    backend = open_model(model)
    for given in ({"support": sets_for(ROWS)}, {"top_k": 3}, {"top_ids": ids_for(ROWS, 4)}):
        one = backend.score_logprobs(ROWS, temperature=0.7, return_argmax=True, **given)
        both = backend.score_logprobs(ROWS, temperature=0.7, return_argmax=True, return_logits=True, **given)
        torch.testing.assert_close(one.logprobs.values, both.logprobs.values, rtol=1e-7, atol=1e-5)
        assert one.argmax is not None and both.argmax is not None and both.logits is not None
        assert torch.equal(one.argmax.values, both.argmax.values)
        for row, best, logits in zip(ROWS, one.argmax.split(), both.logits.split(), strict=True):
            expected = oracle.next_logits(model, row)[:-1]
            torch.testing.assert_close(logits[1:], expected, rtol=0, atol=1e-4)
            assert torch.equal(best[1:], expected.argmax(-1))


def test_rows_that_share_their_start_have_their_own_sets(open_model: Open) -> None:
    """The same state and the same token, but other sets."""
    model, (start,) = tiny_model(), random_rows(40, seed=4)
    rows = [[*start, end] for end in (5, 6, 7)]
    backend, sets = open_model(model), sets_for(rows, empty=False)
    assert sets.tolist()[0][19] != sets.tolist()[1][19]
    check_sets(backend.score_logprobs(rows, support=sets).logprobs, model, rows, sets, 1.0)
    named = backend.score_logprobs(rows, top_ids=ids_for(rows, 4))
    for number, row in enumerate(rows):
        check_top(named, number, oracle.next_logits(model, row), 1.0)


def test_adapters_are_applied(open_model: Open) -> None:
    model: Any = with_lora(tiny_model(), "q_proj", "lm_head")
    backend, sets = open_model(model), sets_for(ROWS)
    check_sets(backend.score_logprobs(ROWS, support=sets, adapter="default").logprobs, model, ROWS, sets, 1.0)
    out = backend.score_logprobs(ROWS, top_k=3, adapter=False)
    with model.disable_adapter():
        check_top(out, 0, oracle.next_logits(model, ROWS[0]), 1.0)


def test_a_head_that_cannot_be_taken_apart(open_model: Open) -> None:
    """Its logits are more than a matrix product, so they are made by the model's own forward."""

    model = tiny_model()
    head = model.lm_head
    model.lm_head = nn.Sequential(head, nn.Softplus())
    backend, sets = open_model(model), sets_for(ROWS)
    check_sets(backend.score_logprobs(ROWS, support=sets).logprobs, model, ROWS, sets, 1.0)
    out = backend.score_logprobs(ROWS, top_k=3)
    assert scoring_path(backend).head != "tiled"
    check_top(out, 0, oracle.next_logits(model, ROWS[0]), 1.0)


def test_ids_that_the_model_rules_out(open_model: Open, fast: bool) -> None:
    """They have no probability, so they are not among the most probable ones, and all others together have none."""
    model = tiny_model("phi-biased", vocab_size=12)
    with torch.no_grad():
        model.lm_head.bias[:9] = -math.inf
    backend, rows = open_model(model, fast=fast), [[9, 10, 11, 10], [11, 9]]
    out = backend.score_logprobs(rows, top_k=5, grad=True)
    assert out.top_ids is not None and out.top_logprobs is not None and out.tail_log_mass is not None
    scored = out.scored.values
    assert (out.top_ids.values[scored].sort(1, descending=True).values == torch.tensor([11, 10, 9, -1, -1])).all()
    assert (out.top_logprobs.values[scored][:, 3:] == -math.inf).all()
    assert (out.tail_log_mass.values[scored] == -math.inf).all()
    (out.top_logprobs.values[scored][:, :3].sum() + out.tail_log_mass.values[scored].exp().sum()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or not parameter.grad.isnan().any(), name


def test_capabilities(open_model: Open) -> None:
    for vocab, most in ((12, 12), (2_600, 1_024)):
        found = open_model(tiny_model(vocab_size=vocab)).capabilities
        assert (found.score_support, found.score_top_k, found.score_top_ids) == (True, most, True)

"""Check what a hook returned of more ids than the given ones: those that truncation had left, and the most probable.

The functions take `fail`, as in `corelm.backend.check_fields`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from corelm.backend.check_fields import Fail, check_lengths, check_logprobs, check_rows, check_tensor, check_type
from corelm.backend.check_requests import outside_vocabulary
from corelm.spec.records import GenerateRequest, GenerateResult, ScoreRequest, ScoreResult
from corelm.tensors.ragged import Ragged
from corelm.tensors.token_sets import TokenSets

#: How far two log-probs of the same id at the same position may be apart. An engine may compute them in two ways, in
#: bfloat16; what is to be found here are other positions and other ids.
_APART = 0.1


def check_kept(batch: GenerateResult, request: GenerateRequest, vocab_size: int, fail: Fail) -> None:
    """Check the ids that truncation had left, and their mass."""
    kept, mass, ids = batch.kept_ids, batch.kept_log_mass, batch.ids
    if not request.return_support:
        if kept is not None or mass is not None:
            raise fail("returned the ids that truncation had left, but they were not asked for")
        return
    if kept is None or mass is None:
        raise fail("returned no kept_ids or no kept_log_mass, but return_support was asked for")
    check_type("kept_ids", kept, TokenSets, fail)
    check_rows("kept_ids", kept.ids, torch.int64, fail)
    if not torch.equal(kept.lengths, ids.lengths):
        raise fail("kept_ids and ids differ in length")
    problems = set_problems(kept, ids, vocab_size, torch.ones(len(kept.ids), dtype=torch.bool))
    if problems:
        row = min(problems)
        raise fail(f"row {row}, position {problems[row][0]}: {problems[row][1]}")
    check_rows("kept_log_mass", mass, torch.float32, fail)
    if not torch.equal(mass.lengths, ids.lengths):
        raise fail("kept_log_mass and ids differ in length")
    check_logprobs(mass, fail)
    alone = (kept.ids.lengths == 1).to(ids.values.device)
    if batch.logprobs is not None and batch.mode == "processed":
        wrong = alone & (batch.logprobs.values < -_APART)
        if bool(wrong.any()):
            index = int(wrong.nonzero()[0])
            raise fail(
                f"row {int(ids.row_index[index])}, position {int(ids.positions[index])}: no other id was left, so the "
                f"log-prob should be 0, but it is {float(batch.logprobs.values[index]):.3g}"
            )


def set_problems(
    sets: TokenSets, tokens: Ragged, vocab_size: int, checked: Tensor, *, empty: bool = False
) -> dict[int, tuple[int, str]]:
    """Return, for each row with a wrong set, its first position with one, and what is wrong with it.

    Args:
        sets: one set a position; the ids of each are expected to be ascending.
        tokens: int64, as long as the sets: the id that the set at each position must have.
        vocab_size: ids are below it.
        checked: bool[positions], on the CPU: the positions that matter.
        empty: whether a set may be empty.
    """
    ids, at, needed = sets.ids.values.cpu(), sets.ids.row_index, tokens.values.cpu()
    found: dict[int, tuple[int, str]] = {}

    def note(wrong: Tensor, what: str) -> None:
        places = wrong.nonzero().flatten()
        rows = tokens.row_index[places]
        # Places ascend, and rows with them.
        first = places[rows.diff(prepend=rows.new_full((1,), -1)) != 0]
        for place, row in zip(first.tolist(), tokens.row_index[first].tolist(), strict=True):
            told = (int(tokens.positions[place]), what.format(token=int(needed[place])))
            found[row] = min(found.get(row, told), told)

    def at_positions(wrong: Tensor, positions: Tensor) -> Tensor:
        marks = torch.zeros(len(checked), dtype=torch.bool)
        marks[positions[wrong]] = True
        return marks & checked

    note(at_positions((ids < 0) | (ids >= vocab_size), at), f"the set has an id outside the vocabulary of {vocab_size}")
    same, step = at[1:] == at[:-1], ids.diff()
    note(at_positions(same & (step == 0), at[1:]), "the set has an id twice")
    note(at_positions(same & (step < 0), at[1:]), "the ids of the set are not in ascending order")
    some = sets.ids.lengths > 0
    if not empty:
        note(checked & ~some, "the set is empty")
    note(checked & some & ~sets.contains(needed), "the set lacks the token {token} that is at this position")
    return found


def check_top(
    batch: GenerateResult | ScoreResult,
    request: GenerateRequest | ScoreRequest,
    tokens: Ragged,
    counted: Tensor,
    vocab_size: int,
    fail: Fail,
) -> None:
    """Check the most probable ids, or those that a `ScoreRequest` names, their log-probs and the mass of the others.

    Args:
        tokens: the ids that were sampled or scored.
        counted: bool[total], on the CPU: where there is something to return.
    """
    named = request.top_ids if isinstance(request, ScoreRequest) else None
    k = request.top_logprobs if isinstance(request, GenerateRequest) else request.top_k
    k = k if named is None else named.values.shape[1]
    ids, logprobs, tail = batch.top_ids, batch.top_logprobs, batch.tail_log_mass
    if not k:
        if not (ids is None and logprobs is None and tail is None):
            raise fail("returned log-probs of the most probable ids, but they were not asked for")
        return
    if ids is None or logprobs is None or tail is None:
        raise fail(
            "returned not all of top_ids, top_logprobs and tail_log_mass, but the most probable ids were asked for"
        )
    grad = isinstance(request, ScoreRequest) and request.grad
    shape = [tokens.values.shape[0], k]
    for name, rows, dtype in (("top_ids", ids, torch.int64), ("top_logprobs", logprobs, torch.float32)):
        check_type(name, rows, Ragged, fail)
        check_tensor(name, rows.values, fail, may_have_graph=grad)
        if rows.values.dtype != dtype or list(rows.values.shape) != shape:
            raise fail(f"{name} are {rows.values.dtype}{list(rows.values.shape)}, expected {dtype}{shape}")
        check_lengths(name, rows, fail)
    check_rows("tail_log_mass", tail, torch.float32, fail, may_have_graph=grad)
    if any(not torch.equal(rows.lengths, tokens.lengths) for rows in (ids, logprobs, tail)):
        raise fail("the most probable ids and the ids differ in length")
    if grad and not logprobs.values.requires_grad and bool(counted.any()):
        raise fail("returned log-probs of the most probable ids without a gradient, but one was asked for")

    def refuse(wrong: Tensor, what: str) -> None:
        if bool(wrong.any()):
            index = int(wrong.nonzero()[0])
            raise fail(f"row {int(tokens.row_index[index])}, position {int(tokens.positions[index])}: {what}")

    best, values = ids.values.cpu(), logprobs.values.detach().cpu()
    rest, own = tail.values.detach().cpu(), batch.logprobs
    blank = ((best == -1) & (values == 0.0)).all(-1) & (rest == 0.0)
    refuse(~counted & ~blank, "nothing was scored here, so top_ids must be -1 and the log-probs 0.0")
    best, values, rest = best[counted], values[counted], rest[counted]
    where = counted.nonzero().flatten()

    def refuse_some(wrong: Tensor, what: str) -> None:
        refuse(torch.zeros_like(counted).index_fill_(0, where[wrong], True), what)

    absent = best == -1
    if outside_vocabulary(best[~absent], vocab_size):
        raise fail(f"returned one of the most probable ids outside the vocabulary of {vocab_size}")
    # Keep the `~(...)`: NaN fails every comparison and must be refused.
    refuse_some((~(values <= _APART)).any(-1) | ~(rest <= _APART), "a log-prob is nan or above 0")
    refuse_some((absent & (values != -math.inf)).any(-1), "an id of -1 must have the log-prob -inf")
    ordered = best.sort(-1).values
    refuse_some(((ordered.diff(dim=-1) == 0) & (ordered[:, 1:] >= 0)).any(-1), "one of the most probable ids is twice")
    if named is None:
        refuse_some((~absent & (values == -math.inf)).any(-1), "an id without a probability must be -1")
        refuse_some((values[:, 1:] > values[:, :-1]).any(-1), "the most probable ids are not in descending order")
    elif not torch.equal(best, named.values.cpu()[counted]):
        raise fail("returned other top_ids than the request names")
    total = torch.cat([values, rest[:, None]], -1).double().exp().sum(-1)
    refuse_some((total - 1.0).abs() > _APART, "the probabilities of the top ids and of the tail do not add up to 1")
    # "raw" scores of an engine whose sampled tokens have none are not compared: it was not asked for any.
    if own is None or (isinstance(request, ScoreRequest) and request.support is not None):
        return
    given, mine = tokens.values.cpu()[counted], own.values.detach().cpu()[counted]
    there = best == given[:, None]
    differ = (there & ((values - mine[:, None]).abs() > _APART) & (values > -math.inf)).any(-1)
    refuse_some(differ, "the log-prob of the token is not the one that top_logprobs has for the same id")
    if named is None:
        missing = ~there.any(-1) & (mine > values[:, -1] + _APART)
        refuse_some(missing, "the token is more probable than the last of the most probable ids, but not among them")

"""Read what a hook returned: checked against the specification, and in storage that the engine does not hold.

Core does this for every plugin. `fail` makes an `EngineError` that names the plugin and the hook. An error of another
kind, from a result that cannot be read at all, becomes one in `OpenEngine.call`.

An engine may reuse its buffers for the next call, but containers create rows from a result much later, so tensors are
copied: 12 bytes a token, and more where other ids were asked for. Logits and what carries gradients are large and are
not copied: a plugin promises not to modify them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from corelm.errors import EngineError, spelled_out
from corelm.spec.answer_text import StopStrings
from corelm.spec.capabilities import Capabilities
from corelm.spec.provenance import Provenance
from corelm.spec.records import (
    FINISH_REASONS,
    GenerateRequest,
    GenerateResult,
    ScoreRequest,
    ScoreResult,
    TokenizeResult,
)
from corelm.spec.version_runs import check_runs
from corelm.tensors.ragged import Ragged, unreadable, value_range
from corelm.tensors.token_sets import TokenSets
from corelm.validate import shown

Fail = Callable[[str], EngineError]

#: Rounding may put a log-probability above 0, but by no more than this. The same for float32 and float64.
_ABOVE_ZERO = 2.0**-10
#: An id with a higher log-prob has more than half of the probability, even after rounding.
_MOST_PROBABLE = -0.65
#: How far two log-probs of the same id at the same position may be apart. An engine may compute them in two ways, in
#: bfloat16; what is to be found here are other positions and other ids.
_APART = 0.1


def checked_tokens(batch: TokenizeResult, texts: Sequence[str], fail: Fail) -> TokenizeResult:
    """Return the result of `tokenize` for these texts."""
    _typed("the result", batch, TokenizeResult, fail)
    ids = _rows("ids", batch.ids, torch.int64, None, fail)
    if len(ids) != len(texts):
        raise fail(f"returned {len(ids)} rows for {len(texts)} texts")
    if batch.offsets is None:
        return replace(batch, ids=ids)
    # Each id covers characters of its own text. Assistant masks are computed from these offsets.
    _check_tensor("offsets", batch.offsets, torch.int64, (2,), fail)
    offsets = ids.with_values(batch.offsets.clone()) if len(batch.offsets) == len(ids.values) else None
    if offsets is None:
        raise fail(f"returned {len(batch.offsets)} offsets for {len(ids.values)} ids")
    start, end = offsets.values.cpu().unbind(-1)
    sizes = torch.tensor([len(text) for text in texts], dtype=torch.int64)[ids.row_index]
    _refuse(
        (start < 0) | (end < start) | (end > sizes), ids, "the id covers other characters than those of its text", fail
    )
    return replace(batch, ids=ids, offsets=offsets.values)


def checked_generation(
    batch: GenerateResult, request: GenerateRequest, capabilities: Capabilities, tokenizer: Any, fail: Fail
) -> GenerateResult:
    """Return the result of `generate`."""
    _typed("the result", batch, GenerateResult, fail)
    answers, vocab = len(request.prompts.lengths), capabilities.vocab_size
    ids = _rows("ids", batch.ids, torch.int64, None, fail)
    lengths = ids.lengths
    if len(lengths) != answers:
        raise fail(f"returned {len(lengths)} rows for {answers} answers")
    _one_a_row(batch, answers, fail, "finish_reasons", "texts", "cached_tokens")
    for row, reason in enumerate(batch.finish_reasons):
        if reason not in FINISH_REASONS:
            raise fail(f"row {row}: finish reason {shown(reason)} is not one of {', '.join(FINISH_REASONS)}")
    _check_vocabulary("an id", ids.values, vocab, fail)
    limit = request.sampling.max_new_tokens
    if limit is not None and value_range(lengths)[1] > limit:
        raise fail(f"row {int(lengths.argmax())}: {int(lengths.max())} tokens, but max_new_tokens is {limit}")
    for row, (count, most) in enumerate(zip(batch.cached_tokens or (), request.prompts.lengths.tolist(), strict=False)):
        if count is not None and not (type(count) is int and 0 <= count <= most):
            raise fail(f"row {row}: cached_tokens {shown(count)}, expected None or a number of at most {most}")
    batch = replace(batch, ids=ids)
    if batch.version_runs is not None:
        check_runs(batch, fail)
    _check_ends(batch, request, capabilities, tokenizer, fail)
    if batch.logprobs is not None or request.logprobs != "none":
        batch = replace(batch, logprobs=_answer_logprobs(batch, request, fail))
    if request.return_support or batch.kept_ids is not None or batch.kept_log_mass is not None:
        batch = _with_kept(batch, request, vocab, fail)
    everywhere = torch.ones(ids.values.shape[0], dtype=torch.bool)
    return replace(batch, **_top(batch, request, ids, everywhere, vocab, fail))


def checked_scores(batch: ScoreResult, request: ScoreRequest, vocab_size: int, fail: Fail) -> ScoreResult:
    """Return the result of `score_logprobs`."""
    _typed("the result", batch, ScoreResult, fail)
    sequences, grad = request.sequences, request.grad
    logprobs = _rows("logprobs", batch.logprobs, torch.float32, sequences, fail, grad=grad)
    scored_rows = _rows("scored", batch.scored, torch.bool, sequences, fail, grad=grad)
    _check_logprobs(logprobs, fail)
    _one_a_row(batch, len(sequences), fail)
    scored = scored_rows.values.cpu()
    asked = sequences.positions >= request.score_from[sequences.row_index]
    failed = torch.tensor([bool(text) for text in batch.errors or [""] * len(sequences)], dtype=torch.bool)
    _refuse(asked & ~scored & ~failed[sequences.row_index], sequences, "not every position asked for was scored", fail)
    _refuse(scored & (sequences.positions == 0), sequences, "is marked as scored, but no token precedes it", fail)
    not_zero = (logprobs.values.detach() != 0).cpu()
    _refuse(not_zero & ~scored, sequences, "the log-prob of what was not scored must be 0.0", fail)
    if batch.temperature != request.temperature:
        raise fail(f"scored at temperature {batch.temperature}, but {request.temperature} was asked for")
    truncated = request.support is not None
    own = request.temperature == 1.0 and not truncated
    _choice("mode", batch.mode, ("raw", "processed") if own else ("processed",), fail)
    _choice("support", batch.support, ("truncated" if truncated else "full",), fail)
    if grad and not logprobs.values.requires_grad and bool(scored.any()):
        raise fail("returned log-probs without a gradient, but one was asked for")
    batch = replace(batch, logprobs=logprobs, scored=scored_rows)
    if request.return_logits:
        _check_logits(batch, request, vocab_size, fail)
    if request.return_argmax:
        batch = replace(batch, argmax=_argmax(batch, request, vocab_size, fail))
    elif batch.argmax is not None:
        raise fail("returned an argmax, but none was asked for")
    return replace(batch, **_top(batch, request, sequences, scored, vocab_size, fail))


def every_row_was_served(batch: GenerateResult | ScoreResult, samples: int, backend: str) -> None:
    """Check that the engine served every row.

    Raises:
        EngineError: some rows failed; `problems` names the prompts or sequences.
    """
    errors: Sequence[str] = batch.errors or ()
    if isinstance(batch, GenerateResult):
        if "error" not in batch.finish_reasons:
            return
        texts = errors or ("",) * len(batch.ids)
        errors = [
            text or "failed, and the engine gave no reason" if reason == "error" else ""
            for text, reason in zip(texts, batch.finish_reasons, strict=True)
        ]
    problems = {row // samples: text for row, text in enumerate(errors) if text}
    if problems:
        raise EngineError(f"backend {backend!r}: {spelled_out(problems)}", usable=True, problems=problems)


# Fields ---------------------------------------------------------------------------------------------------------------


def _typed(name: str, value: Any, kind: type | tuple[type, ...], fail: Fail) -> None:
    if not isinstance(value, kind):
        expected = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
        raise fail(f"{name} is a {type(value).__name__}, expected a {expected}")


def _choice(name: str, value: Any, legal: tuple[str, ...], fail: Fail) -> None:
    if value not in legal:
        raise fail(f"reports {name} {shown(value)}, expected {' or '.join(map(repr, legal))}")


def _refuse(wrong: Tensor, rows: Ragged, what: str, fail: Fail) -> None:
    """Refuse a result of which a position is wrong: bool[total], on the CPU."""
    if bool(wrong.any()):
        index = int(wrong.nonzero()[0])
        raise fail(f"row {int(rows.row_index[index])}, position {int(rows.positions[index])}: {what}")


def _one_a_row(batch: Any, rows: int, fail: Fail, *more: str) -> None:
    """Check the fields with one entry a row: texts, but for `cached_tokens`."""
    for name in ("weight_versions", "errors", *more):
        values = getattr(batch, name)
        if values is None and name != "finish_reasons":
            continue
        _typed(name, values, (tuple, list), fail)
        if len(values) != rows:
            raise fail(f"returned {len(values)} {name} for {rows} rows")
        for row, value in enumerate(values):
            if not isinstance(value, str) and name != "cached_tokens":
                raise fail(f"row {row}: {name}: expected a str, got {type(value).__name__}")


def _rows(
    name: str,
    given: Any,
    dtype: torch.dtype | None,
    like: Ragged | None,
    fail: Fail,
    *,
    shape: tuple[int, ...] = (),
    grad: bool = False,
) -> Ragged:
    """Return a field as rows of its own.

    Args:
        dtype: that of the values; None for any floating-point type.
        like: has as many values in each row; None for any number.
        shape: that of the values of one position.
        grad: whether the values may carry gradients. They are then not copied.
    """
    _typed(name, given, Ragged, fail)
    _check_tensor(name, given.values, dtype, shape, fail, grad=grad)
    if why := unreadable(given.lengths):
        raise fail(f"the lengths of {name} are {why}")
    try:
        # Not a clone of the `Ragged`: its lengths may have been changed after it was made.
        rows = Ragged(given.values if grad or dtype is None else given.values.clone(), given.lengths.clone())
    except ValueError as error:
        raise fail(f"{name}: {error}") from None
    if like is not None and not torch.equal(rows.lengths, like.lengths):
        raise fail(f"{name} and the ids differ in length")
    return rows


def _check_tensor(
    name: str, values: Any, dtype: torch.dtype | None, shape: tuple[int, ...], fail: Fail, *, grad: bool = False
) -> None:
    if why := unreadable(values):
        raise fail(f"{name} is {why}")
    if values.is_inference():
        raise fail(
            f"{name} is an inference tensor, which autograd cannot use later; compute it under torch.no_grad() and not "
            "under torch.inference_mode()"
        )
    if values.requires_grad and not grad:
        raise fail(f"{name} carries a graph, but no gradient was asked for; compute it under torch.no_grad()")
    right = values.is_floating_point() if dtype is None else values.dtype == dtype
    if not right or not values.ndim or tuple(values.shape[1:]) != shape:
        expected = f"{dtype or 'a floating-point type'}[{', '.join(map(str, ('total', *shape)))}]"
        raise fail(f"{name} are {values.dtype}{list(values.shape)}, expected {expected}")


def _check_vocabulary(name: str, ids: Tensor, vocab_size: int, fail: Fail) -> None:
    low, high = value_range(ids)
    if not 0 <= low <= high < vocab_size:
        raise fail(f"returned {name} outside the vocabulary of {vocab_size}")


def _check_logprobs(rows: Ragged, fail: Fail) -> None:
    """Check that log-probs are finite and not above 0."""
    values = rows.values.detach()
    low, high = value_range(values)
    # Keep the `not (...)`: NaN fails every comparison and must be refused.
    if not (low > -math.inf and high <= _ABOVE_ZERO):
        wrong = ~torch.isfinite(values) | (values > _ABOVE_ZERO)
        found = float(values[wrong][0])
        _refuse(wrong.cpu(), rows, f"the log-prob is {found}, expected a finite number of at most 0", fail)


# Answers --------------------------------------------------------------------------------------------------------------


def _check_ends(
    batch: GenerateResult, request: GenerateRequest, capabilities: Capabilities, tokenizer: Any, fail: Fail
) -> None:
    """Check that every answer ends where it has to, for the reason that it reports.

    Core does not know which ends `engine_kwargs` ask for, so they excuse any end.
    """
    ids, sampling = batch.ids, request.sampling
    is_stop = torch.isin(ids.values.cpu(), torch.tensor(sorted(request.stop_ids), dtype=torch.int64))
    some = ids.lengths > 0
    last = ids.offsets[1:][some] - 1
    _refuse(is_stop.index_fill(0, last, False), ids, "a stop id must end the answer, and tokens follow it", fail)
    if sampling.engine_kwargs:
        return
    ended = torch.zeros_like(some).masked_scatter_(some, is_stop[last]).tolist()
    limit, context = sampling.max_new_tokens, capabilities.max_context
    for row, (reason, length, stopped) in enumerate(
        zip(batch.finish_reasons, ids.lengths.tolist(), ended, strict=True)
    ):
        if reason == "length" and stopped:
            raise fail(f"row {row}: finish reason 'length', but the answer ends with a stop id")
        if reason == "length" and (limit is not None or context is not None):
            most = limit if limit is not None else (context or 0) - int(request.prompts.lengths[row])
            if length != most:
                raise fail(f"row {row}: finish reason 'length' after {length} tokens, but the limit is {most}")
        if reason == "stop" and not stopped and not _at_stop_string(batch, row, request, tokenizer):
            end = f"ends with id {int(ids.values[ids.offsets[row + 1] - 1])}" if length else "has no tokens"
            raise fail(
                f"row {row}: finish reason 'stop', but the answer {end}, and neither a stop id nor a stop string ended "
                "it; keep the token that ended the answer in the ids"
            )


def _at_stop_string(batch: GenerateResult, row: int, request: GenerateRequest, tokenizer: Any) -> bool:
    """Return whether a stop string can have ended an answer: its text holds one.

    At which token is not asked: an engine that holds half a character back finds a stop string a few tokens late, and
    may then count one that was complete before `min_new_tokens`. Texts of the engine's own may differ from what the
    ids decode to: core takes the engine's word for its stop strings.
    """
    if not request.sampling.stop:
        return False
    start, end = batch.ids.offsets[row : row + 2].tolist()
    ids = batch.ids.values[start:end].tolist()
    return batch.texts is not None or StopStrings.of_rows(request, tokenizer)[row].occurs_in(ids)


def _answer_logprobs(batch: GenerateResult, request: GenerateRequest, fail: Fail) -> Ragged:
    if batch.logprobs is None:
        raise fail(f"returned no log-probs, but {request.logprobs} ones were asked for")
    logprobs = _rows("logprobs", batch.logprobs, torch.float32, batch.ids, fail)
    if request.logprobs == "none":
        return logprobs
    _check_logprobs(logprobs, fail)
    _choice("mode", batch.mode, ("raw", "processed"), fail)
    _choice("support", batch.support, ("full", "truncated"), fail)
    if batch.mode != request.logprobs:
        raise fail(f"returned {batch.mode} log-probs, but {request.logprobs} ones were asked for")
    label = Provenance.label(request.logprobs, request.sampling)
    if batch.mode == "processed" and batch.temperature != label["temperature"]:
        raise fail(f"reports temperature {batch.temperature}, but {label['temperature']} was asked for")
    if label["support"] == "truncated" and batch.support == "full":
        raise fail("reports full support, but truncation, min_new_tokens or engine_kwargs were asked for")
    return logprobs


def _with_kept(batch: GenerateResult, request: GenerateRequest, vocab_size: int, fail: Fail) -> GenerateResult:
    """Return the result with the ids that truncation had left, and their mass."""
    kept, mass, ids = batch.kept_ids, batch.kept_log_mass, batch.ids
    if not request.return_support:
        raise fail("returned the ids that truncation had left, but they were not asked for")
    if kept is None or mass is None:
        raise fail("returned no kept_ids or no kept_log_mass, but return_support was asked for")
    _typed("kept_ids", kept, TokenSets, fail)
    if not torch.equal(kept.lengths, ids.lengths):
        raise fail("kept_ids and ids differ in length")
    kept = TokenSets(_rows("kept_ids", kept.ids, torch.int64, None, fail), kept.lengths.clone())
    if problems := set_problems(kept, ids, vocab_size, torch.ones(len(kept.ids), dtype=torch.bool)):
        row = min(problems)
        raise fail(f"row {row}, position {problems[row][0]}: {problems[row][1]}")
    mass = _rows("kept_log_mass", mass, torch.float32, ids, fail)
    _check_logprobs(mass, fail)
    if batch.logprobs is not None and batch.mode == "processed":
        alone = (kept.ids.lengths == 1) & (batch.logprobs.values < -_APART).cpu()
        _refuse(alone, ids, "no other id was left, so the log-prob should be 0", fail)
    return replace(batch, kept_ids=kept, kept_log_mass=mass)


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
        return torch.zeros_like(checked).index_fill(0, positions[wrong], True) & checked

    note(at_positions((ids < 0) | (ids >= vocab_size), at), f"the set has an id outside the vocabulary of {vocab_size}")
    same, step = at[1:] == at[:-1], ids.diff()
    note(at_positions(same & (step == 0), at[1:]), "the set has an id twice")
    note(at_positions(same & (step < 0), at[1:]), "the ids of the set are not in ascending order")
    some = sets.ids.lengths > 0
    if not empty:
        note(checked & ~some, "the set is empty")
    note(checked & some & ~sets.contains(needed), "the set lacks the token {token} that is at this position")
    return found


# Scores ---------------------------------------------------------------------------------------------------------------


def _argmax(batch: ScoreResult, request: ScoreRequest, vocab_size: int, fail: Fail) -> Ragged:
    sequences, scored = request.sequences, batch.scored.values.cpu()
    if batch.argmax is None:
        raise fail("returned no argmax, but it was asked for")
    argmax = _rows("argmax", batch.argmax, torch.int64, sequences, fail)
    found = argmax.values.cpu()
    _refuse(~scored & (found != -1), sequences, "the argmax of what was not scored must be -1", fail)
    _check_vocabulary("an argmax", found[scored], vocab_size, fail)
    # With a support, the most probable id of all may be outside the ids over which the log-probs were normalised.
    if request.support is None:
        likely = scored & (batch.logprobs.values.detach().cpu() > _MOST_PROBABLE)
        what = "the given id has more than half of the probability, but it is not the argmax"
        _refuse(likely & (found != sequences.values.cpu()), sequences, what, fail)
    return argmax


def _check_logits(batch: ScoreResult, request: ScoreRequest, vocab_size: int, fail: Fail) -> None:
    if batch.logits is None:
        raise fail("returned no logits, but they were asked for")
    logits = _rows("logits", batch.logits, None, request.sequences, fail, shape=(vocab_size,), grad=request.grad)
    values = logits.values.detach()
    # Keep the `not (...)`: NaN fails every comparison and must be refused. -inf is an id that cannot follow.
    if not value_range(values)[1] < math.inf:
        _refuse((~(values < math.inf)).any(-1).cpu(), request.sequences, "the logits hold nan or inf", fail)


def _top(
    batch: GenerateResult | ScoreResult,
    request: GenerateRequest | ScoreRequest,
    tokens: Ragged,
    counted: Tensor,
    vocab_size: int,
    fail: Fail,
) -> dict[str, Any]:
    """Return the fields of the most probable ids, or of those that a `ScoreRequest` names, by name.

    Args:
        tokens: the ids that were sampled or scored.
        counted: bool[total], on the CPU: where there is something to return.
    """
    named = request.top_ids if isinstance(request, ScoreRequest) else None
    k = request.top_logprobs if isinstance(request, GenerateRequest) else request.top_k
    k = k if named is None else named.values.shape[1]
    given = batch.top_ids, batch.top_logprobs, batch.tail_log_mass
    if not k:
        if given != (None, None, None):
            raise fail("returned log-probs of the most probable ids, but they were not asked for")
        return {}
    if None in given:
        raise fail("returned not all of top_ids, top_logprobs and tail_log_mass, but they were asked for")
    grad = isinstance(request, ScoreRequest) and request.grad
    ids = _rows("top_ids", given[0], torch.int64, tokens, fail, shape=(k,))
    logprobs = _rows("top_logprobs", given[1], torch.float32, tokens, fail, shape=(k,), grad=grad)
    tail = _rows("tail_log_mass", given[2], torch.float32, tokens, fail, grad=grad)
    if grad and not logprobs.values.requires_grad and bool(counted.any()):
        raise fail("returned log-probs of the most probable ids without a gradient, but one was asked for")
    best, values, rest = ids.values.cpu(), logprobs.values.detach().cpu(), tail.values.detach().cpu()
    blank = ((best == -1) & (values == 0.0)).all(-1) & (rest == 0.0)
    _refuse(~counted & ~blank, tokens, "nothing was scored here, so top_ids must be -1 and the log-probs 0.0", fail)
    best, values, rest = best[counted], values[counted], rest[counted]

    def refuse(wrong: Tensor, what: str) -> None:
        _refuse(torch.zeros_like(counted).masked_scatter_(counted, wrong), tokens, what, fail)

    absent = best == -1
    _check_vocabulary("one of the most probable ids", best[~absent], vocab_size, fail)
    # Keep the `~(...)`: NaN fails every comparison and must be refused.
    refuse((~(values <= _APART)).any(-1) | ~(rest <= _APART), "a log-prob is nan or above 0")
    refuse((absent & (values != -math.inf)).any(-1), "an id of -1 must have the log-prob -inf")
    ordered = best.sort(-1).values
    refuse(((ordered.diff(dim=-1) == 0) & (ordered[:, 1:] >= 0)).any(-1), "one of the most probable ids is twice")
    if named is None:
        refuse((~absent & (values == -math.inf)).any(-1), "an id without a probability must be -1")
        refuse((values[:, 1:] > values[:, :-1]).any(-1), "the most probable ids are not in descending order")
    elif not torch.equal(best, named.values.cpu()[counted]):
        raise fail("returned other top_ids than the request names")
    total = torch.cat([values, rest[:, None]], -1).double().exp().sum(-1)
    refuse((total - 1.0).abs() > _APART, "the probabilities of the top ids and of the tail do not add up to 1")
    # "raw" scores of an engine whose sampled tokens have none are not compared: it was not asked for any.
    if batch.logprobs is not None and not (isinstance(request, ScoreRequest) and request.support is not None):
        there = best == tokens.values.cpu()[counted, None]
        own = batch.logprobs.values.detach().cpu()[counted, None]
        differ = (there & ((values - own).abs() > _APART) & (values > -math.inf)).any(-1)
        refuse(differ, "the log-prob of the token is not the one that top_logprobs has for the same id")
        if named is None:
            missing = ~there.any(-1) & (own[:, 0] > values[:, -1] + _APART)
            refuse(missing, "the token is more probable than the last of the most probable ids, but not among them")
    return {"top_ids": ids, "top_logprobs": logprobs, "tail_log_mass": tail}

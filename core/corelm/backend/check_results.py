"""Read what a hook returned: checked against the specification, and in storage that the engine does not hold.

Core does this for every plugin. It checks what is cheap and fatal: rows, lengths, types, ids in the
vocabulary, log-probs that are finite and at most 0, finish reasons, labels. The conformance kit checks the
numbers. `OpenEngine.call` makes an `EngineError` of a `WrongResult`, and of an error of another kind, from a
result that cannot be read at all.

An engine may reuse its buffers for the next call, but containers create rows from a result much later, so
tensors are copied: 12 bytes a token, and more where other ids were asked for. Logits and what carries
gradients are large and are not copied: a plugin promises not to modify them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, zip_longest
from typing import Any

import torch
from torch import Tensor

from corelm.errors import EngineError, spelled_out
from corelm.spec.capabilities import Capabilities
from corelm.spec.provenance import Provenance
from corelm.spec.records import (
    FINISH_REASONS,
    GenerateRequest,
    GenerateResult,
    ScoreRequest,
    ScoreResult,
    TokenizeRequest,
    TokenizeResult,
)
from corelm.spec.version_runs import check_runs
from corelm.tensors.ragged import Ragged, unreadable, value_range
from corelm.tensors.token_sets import TokenSets
from corelm.validate import shown

#: Rounding may put a log-probability above 0, but by no more than this. The same for float32 and float64.
ABOVE_ZERO = 2.0**-10


class WrongResult(Exception):
    """A result breaks the specification."""


def refuse_failed(batch: GenerateResult | ScoreResult, samples: int, backend: str) -> None:
    """Raise an `EngineError` for rows that the engine did not serve, by prompt or sequence with so many `samples`."""
    errors: Sequence[str] = batch.errors or ()
    if isinstance(batch, GenerateResult):
        rows = zip_longest(batch.finish_reasons, errors, fillvalue="")
        unsaid = "failed, and the engine gave no reason"
        errors = [(text or unsaid) if reason == "error" else "" for reason, text in rows]
    problems = {row // samples: text for row, text in enumerate(errors) if text}
    if problems:
        raise EngineError(f"backend {backend!r}: {spelled_out(problems)}", usable=True, problems=problems)


def _refuse(wrong: Tensor, rows: Ragged, what: str) -> None:
    if bool(wrong.any()):
        index = int(wrong.nonzero()[0])
        raise WrongResult(f"row {int(rows.row_index[index])}, position {int(rows.positions[index])}: {what}")


def _one_a_row(batch: Any, rows: int, *names: str) -> None:
    """Check the fields with one entry a row: texts, but for `cached_tokens`."""
    for name in names:
        values = getattr(batch, name)
        if values is None and name != "finish_reasons":
            continue
        if not isinstance(values, (tuple, list)):
            raise WrongResult(f"{name} is a {type(values).__name__}, expected a tuple or list")
        if len(values) != rows:
            raise WrongResult(f"returned {len(values)} {name} for {rows} rows")
        for row, value in enumerate(values):
            if not isinstance(value, str) and name != "cached_tokens":
                raise WrongResult(f"row {row}: {name}: expected a str, got {type(value).__name__}")


def _not_a(kind: type, batch: Any) -> WrongResult:
    return WrongResult(f"the result is a {type(batch).__name__}, expected a {kind.__name__}")


def _rows(
    name: str,
    given: Any,
    dtype: torch.dtype | None,
    like: Ragged | None = None,
    *,
    vocab_size: int | None = None,
    finite: bool = False,
    shape: tuple[int, ...] = (),
    grad: bool = False,
    copy: bool = True,
) -> Ragged:
    """Return a field as rows of this `dtype`, or of any floating-point type, with as many values as those of `like`.

    Ids must be below `vocab_size`, and log-probs be `finite` and at most 0. `shape` is that of the values of
    one position. They are copied out of the engine's buffers if asked for, and if they may carry no gradients.
    """
    if given is None:
        raise WrongResult(f"returned no {name}, but they were asked for")
    if not isinstance(given, Ragged):
        raise WrongResult(f"{name} is a {type(given).__name__}, expected a Ragged")
    values = given.values
    if why := unreadable(values):
        raise WrongResult(f"{name} is {why}")
    if values.is_inference():
        advice = "compute it under torch.no_grad() and not under torch.inference_mode()"
        raise WrongResult(f"{name} is an inference tensor, which autograd cannot use later; {advice}")
    if values.requires_grad and not grad:
        raise WrongResult(f"{name} carries a graph, but no gradient was asked for; compute it under torch.no_grad()")
    right = values.is_floating_point() if dtype is None else values.dtype == dtype
    if not right or not values.ndim or tuple(values.shape[1:]) != shape:
        expected = f"{dtype or 'a floating-point type'}[{', '.join(map(str, ('total', *shape)))}]"
        raise WrongResult(f"{name} are {values.dtype}{list(values.shape)}, expected {expected}")
    if not isinstance(given.lengths, Tensor):
        raise WrongResult(f"the lengths of {name} are a {type(given.lengths).__name__}, which is not a tensor")
    try:
        # The lengths may have been changed after they were checked.
        rows = Ragged(values.clone() if copy and not grad else values, given.lengths.clone())
    except ValueError as error:
        raise WrongResult(f"{name}: {error}") from None
    if like is not None and not torch.equal(rows.lengths, like.lengths):
        raise WrongResult(f"{name} and the ids differ in length")
    if (finite or vocab_size is not None) and values.shape[0]:
        values = rows.values.detach()
        low, high = torch.stack(values.aminmax()).tolist()
        if vocab_size is not None and not 0 <= low <= high < vocab_size:
            raise WrongResult(f"returned an id outside the vocabulary of {vocab_size}")
        # NaN fails every comparison, so this is how it is refused.
        if finite and not -math.inf < low <= high <= ABOVE_ZERO:
            wrong = ~((values > -math.inf) & (values <= ABOVE_ZERO))
            found = float(values[wrong][0])
            _refuse(wrong.cpu(), rows, f"the log-prob is {found}, expected a finite number of at most 0")
    return rows


def _check_vocabulary(name: str, ids: Tensor, vocab_size: int) -> None:
    if bool(((ids < 0) | (ids >= vocab_size)).any()):
        raise WrongResult(f"returned {name} outside the vocabulary of {vocab_size}")


def _tokens(batch: Any, request: TokenizeRequest, _: Capabilities) -> TokenizeResult:
    if not isinstance(batch, TokenizeResult):
        raise _not_a(TokenizeResult, batch)
    ids = _rows("ids", batch.ids, torch.int64)
    if len(ids) != len(request.texts):
        raise WrongResult(f"returned {len(ids)} rows for {len(request.texts)} texts")
    if batch.offsets is None:
        return replace(batch, ids=ids)
    # Each id covers characters of its own text. Assistant masks are computed from these offsets.
    offsets = _rows("offsets", Ragged(batch.offsets, ids.lengths), torch.int64, shape=(2,)).values
    start, end = offsets.cpu().unbind(-1)
    sizes = torch.tensor(list(map(len, request.texts)), dtype=torch.int64)[ids.row_index]
    wrong = (start < 0) | (end < start) | (end > sizes)
    _refuse(wrong, ids, "the id covers other characters than those of its text")
    return replace(batch, ids=ids, offsets=offsets)


def _answers(batch: Any, request: GenerateRequest, capabilities: Capabilities) -> GenerateResult:
    if not isinstance(batch, GenerateResult):
        raise _not_a(GenerateResult, batch)
    vocab = capabilities.vocab_size
    ids = _rows("ids", batch.ids, torch.int64, vocab_size=vocab)
    given = request.prompts.lengths.tolist()
    if ids.lengths.shape[0] != len(given):
        raise WrongResult(f"returned {ids.lengths.shape[0]} rows for {len(given)} answers")
    _one_a_row(batch, len(given), "weight_versions", "errors", "finish_reasons", "texts", "cached_tokens")
    for row, (count, most) in enumerate(zip(batch.cached_tokens or (), given, strict=False)):
        if count is not None and not (type(count) is int and 0 <= count <= most):
            raise WrongResult(f"row {row}: cached_tokens {shown(count)}, expected None or a number of at most {most}")
    if batch.version_runs is not None:
        check_runs(replace(batch, ids=ids), WrongResult)
    _check_ends(batch, ids, given, request, capabilities.max_context)
    changed: dict[str, Any] = {"ids": ids, "logprobs": None}
    if request.logprobs != "none":
        changed["logprobs"] = _rows("logprobs", batch.logprobs, torch.float32, ids, finite=True)
        label = Provenance.label(request.logprobs, request.sampling)
        if batch.mode != label["mode"]:
            raise WrongResult(f"returned {batch.mode} log-probs, but {request.logprobs} ones were asked for")
        if batch.support not in ("full", "truncated"):
            raise WrongResult(f"reports support {shown(batch.support)}, expected 'full' or 'truncated'")
        if batch.mode == "processed" and batch.temperature != label["temperature"]:
            raise WrongResult(f"reports temperature {batch.temperature}, but {label['temperature']} was asked for")
        if label["support"] == "truncated" and batch.support == "full":
            raise WrongResult("reports full support, but truncation, min_new_tokens or engine_kwargs were asked for")
    if request.return_support or batch.kept_ids is not None:
        changed |= _kept(batch, ids, request, vocab)
    if request.top_logprobs or batch.top_ids is not None:
        everywhere = torch.ones(ids.values.shape[0], dtype=torch.bool)
        changed |= _top(batch, request.top_logprobs, ids, everywhere, vocab)
    return replace(batch, **changed)


def _check_ends(
    batch: GenerateResult, ids: Ragged, given: Sequence[int], request: GenerateRequest, context: int | None
) -> None:
    """Check that every answer, to prompts of `given` lengths, ends where it has to, for the reason that it reports.

    Core does not know which ends `engine_kwargs` ask for, so they excuse any end.
    """
    sampling, lengths = request.sampling, ids.lengths.tolist()
    is_stop = torch.isin(ids.values.cpu(), torch.tensor(list(request.stop_ids), dtype=torch.int64))
    stops = {*is_stop.nonzero().flatten().tolist()}
    last = [*accumulate(lengths, initial=-1)][1:]
    if not stops.issubset(last):
        inside = is_stop.index_fill(0, torch.tensor(last), False)
        _refuse(inside, ids, "a stop id must end the answer, and tokens follow it")
    most = sampling.max_new_tokens
    if most is not None and max(lengths, default=0) > most:
        raise WrongResult(f"row {lengths.index(max(lengths))}: {max(lengths)} tokens, but max_new_tokens is {most}")
    for row, (reason, length, prompt) in enumerate(zip(batch.finish_reasons, lengths, given, strict=True)):
        if reason not in FINISH_REASONS:
            raise WrongResult(f"row {row}: finish reason {shown(reason)} is not one of {', '.join(FINISH_REASONS)}")
        stopped = length > 0 and last[row] in stops
        if sampling.engine_kwargs:
            continue
        if reason == "length":
            if stopped:
                raise WrongResult(f"row {row}: finish reason 'length', but the answer ends with a stop id")
            limit = context - prompt if most is None and context is not None else most
            if limit is not None and length != limit:
                raise WrongResult(f"row {row}: finish reason 'length' after {length} tokens, but the limit is {limit}")
        if reason == "stop" and not stopped and not sampling.stop:
            end = f"ends with id {int(ids.values[ids.offsets[row + 1] - 1])}" if length else "has no tokens"
            why = f"finish reason 'stop', but the answer {end}, and neither a stop id nor a stop string ended it"
            raise WrongResult(f"row {row}: {why}; keep the token that ended the answer in the ids")


def _kept(batch: GenerateResult, ids: Ragged, request: GenerateRequest, vocab_size: int) -> dict[str, Any]:
    kept, mass = batch.kept_ids, batch.kept_log_mass
    if not request.return_support:
        raise WrongResult("returned the ids that truncation had left, but they were not asked for")
    if kept is None:
        raise WrongResult("returned no kept_ids, but return_support was asked for")
    if not isinstance(kept, TokenSets):
        raise WrongResult(f"kept_ids is a {type(kept).__name__}, expected a TokenSets")
    if not torch.equal(kept.lengths, ids.lengths):
        raise WrongResult("kept_ids and ids differ in length")
    kept = TokenSets(_rows("kept_ids", kept.ids, torch.int64), ids.lengths)
    if problems := set_problems(kept, ids, vocab_size, torch.ones(len(kept.ids), dtype=torch.bool)):
        row = min(problems)
        raise WrongResult(f"row {row}, position {problems[row][0]}: {problems[row][1]}")
    return {"kept_ids": kept, "kept_log_mass": _rows("kept_log_mass", mass, torch.float32, ids, finite=True)}


def set_problems(
    sets: TokenSets, tokens: Ragged, vocab_size: int, checked: Tensor, *, empty: bool = False
) -> dict[int, tuple[int, str]]:
    """Return, for each row with a wrong set, its first position with one, and what is wrong with it.

    The ids of each set are expected to be ascending and to have that of `tokens` at the position, an int64 below
    `vocab_size`. Only positions that are True in `checked`, on the CPU, matter. A set may be `empty` or not.
    """
    ids, at, needed = sets.ids.values.cpu(), sets.ids.row_index, tokens.values.cpu()
    found: dict[int, tuple[int, str]] = {}

    def note(wrong: Tensor, what: str) -> None:
        found_at = wrong.nonzero().flatten()
        rows = tokens.row_index[found_at]
        # Positions ascend, and rows with them.
        first = found_at[rows.diff(prepend=rows.new_full((1,), -1)) != 0]
        for index, row in zip(first.tolist(), tokens.row_index[first].tolist(), strict=True):
            told = (int(tokens.positions[index]), what.format(token=int(needed[index])))
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


def _scores(batch: Any, request: ScoreRequest, capabilities: Capabilities) -> ScoreResult:
    if not isinstance(batch, ScoreResult):
        raise _not_a(ScoreResult, batch)
    sequences, grad, vocab = request.sequences, request.grad, capabilities.vocab_size
    logprobs = _rows("logprobs", batch.logprobs, torch.float32, sequences, finite=True, grad=grad)
    changed: dict[str, Any] = {"logprobs": logprobs, "scored": _rows("scored", batch.scored, torch.bool, sequences)}
    _one_a_row(batch, sequences.lengths.shape[0], "weight_versions", "errors")
    scored, positions, row_index = changed["scored"].values.cpu(), sequences.positions, sequences.row_index
    asked = positions >= request.score_from[row_index]
    if not torch.equal(scored, asked):
        failed = torch.tensor(list(map(bool, batch.errors or ("",) * len(sequences))), dtype=torch.bool)
        _refuse(asked & ~scored & ~failed[row_index], sequences, "not every position asked for was scored")
        _refuse(scored & (positions == 0), sequences, "is marked as scored, but no token precedes it")
    not_zero = (logprobs.values.detach() != 0).cpu() & ~scored
    if bool(not_zero.any()):
        _refuse(not_zero, sequences, "the log-prob of what was not scored must be 0.0")
    label = Provenance.label_of_scores(request.temperature, truncated=request.support is not None)
    if batch.temperature != label["temperature"]:
        raise WrongResult(f"scored at temperature {batch.temperature}, but {request.temperature} was asked for")
    # Where the label says raw, both modes are the same numbers.
    if batch.mode != label["mode"] and (label["mode"], batch.mode) != ("raw", "processed"):
        raise WrongResult(f"reports mode {shown(batch.mode)}, expected {label['mode']!r}")
    if batch.support != label["support"]:
        raise WrongResult(f"reports support {shown(batch.support)}, expected {label['support']!r}")
    if grad and not logprobs.values.requires_grad and bool(scored.any()):
        raise WrongResult("returned log-probs without a gradient, but one was asked for")
    if request.return_logits:
        logits = _rows("logits", batch.logits, None, sequences, shape=(vocab,), grad=grad, copy=False).values.detach()
        # Keep the `not (...)`: NaN fails every comparison and must be refused. -inf is an id that cannot follow.
        if not value_range(logits)[1] < math.inf:
            _refuse((~(logits < math.inf)).any(-1).cpu(), sequences, "the logits hold nan or inf")
    if request.return_argmax:
        changed["argmax"] = _rows("argmax", batch.argmax, torch.int64, sequences)
        best = changed["argmax"].values.cpu()
        _refuse(~scored & (best != -1), sequences, "the argmax of what was not scored must be -1")
        _check_vocabulary("an argmax", best[scored], vocab)
    elif batch.argmax is not None:
        raise WrongResult("returned an argmax, but none was asked for")
    if request.top_k or request.top_ids is not None or batch.top_ids is not None:
        changed |= _top(batch, request.top_k, sequences, scored, vocab, request.top_ids, grad=grad)
    return replace(batch, **changed)


def _top(
    batch: GenerateResult | ScoreResult,
    k: int,
    tokens: Ragged,
    counted: Tensor,
    vocab_size: int,
    named: Ragged | None = None,
    *,
    grad: bool = False,
) -> dict[str, Any]:
    """Return the fields of the most probable ids, or of those that a `ScoreRequest` has `named`, by name.

    `k` were asked for where `counted`, a bool for each of the sampled or scored `tokens`, on the CPU, is True.
    """
    k = k if named is None else named.values.shape[1]
    if not k:
        raise WrongResult("returned log-probs of the most probable ids, but they were not asked for")
    ids = _rows("top_ids", batch.top_ids, torch.int64, tokens, shape=(k,))
    logprobs = _rows("top_logprobs", batch.top_logprobs, torch.float32, tokens, shape=(k,), grad=grad)
    tail = _rows("tail_log_mass", batch.tail_log_mass, torch.float32, tokens, grad=grad)
    if grad and not logprobs.values.requires_grad and bool(counted.any()):
        raise WrongResult("returned log-probs of the most probable ids without a gradient, but one was asked for")
    best, values, rest = ids.values.cpu(), logprobs.values.detach().cpu(), tail.values.detach().cpu()
    blank = ((best == -1) & (values == 0.0)).all(-1) & (rest == 0.0)
    _refuse(~counted & ~blank, tokens, "nothing was scored here, so top_ids must be -1 and the log-probs 0.0")
    # Keep the `not (…)` and the `~(…)`: NaN fails every comparison and must be refused.
    if not (value_range(values)[1] <= ABOVE_ZERO and value_range(rest)[1] <= ABOVE_ZERO):
        wrong = ~(values <= ABOVE_ZERO).all(-1) | ~(rest <= ABOVE_ZERO)
        _refuse(wrong, tokens, "a log-prob of the top ids or of the tail is nan or above 0")
    if named is None:
        _check_vocabulary("one of the most probable ids", best[best != -1], vocab_size)
    else:
        wrong = counted & (best != named.values.cpu()).any(-1)
        _refuse(wrong, tokens, "returned other top_ids than the request names")
    return {"top_ids": ids, "top_logprobs": logprobs, "tail_log_mass": tail}


#: The check of each hook's result. It takes what the engine returned, the request and the engine's capabilities,
#: and returns the result in storage of its own; it raises `WrongResult`.
CHECKS: dict[str, Callable[[Any, Any, Capabilities], Any]] = {
    "tokenize": _tokens,
    "generate": _answers,
    "score_logprobs": _scores,
}

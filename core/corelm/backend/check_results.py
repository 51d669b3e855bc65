"""Check what a hook returned against the specification. Core does this for every plugin.

The functions take `fail`, which makes an `EngineError` that names the plugin and the hook.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, ParamSpec, TypeVar

import torch

from corelm.backend.check_fields import (
    Fail,
    check_choice,
    check_counts,
    check_lengths,
    check_logprobs,
    check_rows,
    check_tensor,
    check_type,
)
from corelm.backend.check_requests import outside_vocabulary
from corelm.backend.check_sets import check_kept, check_top
from corelm.errors import CoreLMError, EngineError, described, spelled_out
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
from corelm.spec.stop_strings import StopStrings
from corelm.spec.version_runs import check_runs
from corelm.tensors.ragged import Ragged, value_range
from corelm.tensors.token_sets import TokenSets
from corelm.validate import shown

P = ParamSpec("P")
R = TypeVar("R", GenerateResult, ScoreResult)

#: An id with a higher log-prob has more than half of the probability, even after rounding.
_MOST_PROBABLE = -0.65

# Results of hooks ----------------------------------------------------------------------------------------------------


def _typed(check: Callable[P, None]) -> Callable[P, None]:
    """Make a check raise an `EngineError` if the check itself fails because it cannot read the result."""

    @functools.wraps(check)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            check(*args, **kwargs)
        except CoreLMError:
            raise
        except Exception as error:
            fail: Any = args[-1]
            raise fail(f"returned a result that cannot be read: {described(error)}") from error

    return checked


@_typed
def check_tokens(batch: TokenizeResult, texts: Sequence[str], fail: Fail) -> None:
    """Check the result of `tokenize` for these texts."""
    check_type("the result", batch, TokenizeResult, fail)
    check_rows("ids", batch.ids, torch.int64, fail)
    if len(batch.ids) != len(texts):
        raise fail(f"returned {len(batch.ids)} rows for {len(texts)} texts")
    if batch.offsets is not None:
        _check_offsets(batch.offsets, batch.ids, texts, fail)


def _check_offsets(offsets: Any, ids: Ragged, texts: Sequence[str], fail: Fail) -> None:
    """Check that each id covers characters of its own text. Assistant masks are computed from these offsets."""
    check_tensor("offsets", offsets, fail, may_have_graph=False)
    expected = [ids.values.shape[0], 2]
    if offsets.dtype != torch.int64 or list(offsets.shape) != expected:
        raise fail(f"offsets are {offsets.dtype}{list(offsets.shape)}, expected torch.int64{expected}")
    start, end = offsets.cpu().unbind(-1)
    sizes = torch.tensor([len(text) for text in texts], dtype=torch.int64)[ids.row_index]
    bad = (start < 0) | (end < start) | (end > sizes)
    if bool(bad.any()):
        index = int(bad.nonzero()[0])
        row, position = int(ids.row_index[index]), int(ids.positions[index])
        raise fail(
            f"row {row}, position {position}: the id covers the characters {offsets[index].tolist()} of a text of "
            f"{len(texts[row])}; expected 0 <= start <= end <= {len(texts[row])}"
        )


@_typed
def check_generation(
    batch: GenerateResult, request: GenerateRequest, capabilities: Capabilities, tokenizer: Any, fail: Fail
) -> None:
    """Check the result of `generate`."""
    check_type("the result", batch, GenerateResult, fail)
    answers = len(request.prompts)
    ids = batch.ids
    check_rows("ids", ids, torch.int64, fail)
    if len(ids) != answers:
        raise fail(f"returned {len(ids)} rows for {answers} answers")
    check_type("finish_reasons", batch.finish_reasons, (tuple, list), fail)
    if len(batch.finish_reasons) != answers:
        raise fail(f"returned {len(batch.finish_reasons)} finish reasons for {answers} answers")
    for row, reason in enumerate(batch.finish_reasons):
        if reason not in FINISH_REASONS:
            raise fail(f"row {row}: finish reason {shown(reason)} is not one of {', '.join(FINISH_REASONS)}")
    if outside_vocabulary(ids.values, capabilities.vocab_size):
        raise fail(f"returned an id outside the vocabulary of {capabilities.vocab_size}")
    check_runs(batch, fail)
    limit = request.sampling.max_new_tokens
    if limit is not None and bool((ids.lengths > limit).any()):
        raise fail(f"row {int(ids.lengths.argmax())}: {int(ids.lengths.max())} tokens, but max_new_tokens is {limit}")
    _check_labels(batch, answers, fail)
    if batch.cached_tokens is not None:
        check_counts("cached_tokens", batch.cached_tokens, request.prompts.lengths.tolist(), answers, fail)
    _check_ends(batch, request, capabilities, tokenizer, fail)
    if request.logprobs != "none":
        _check_answer_logprobs(batch, request, fail)
    check_kept(batch, request, capabilities.vocab_size, fail)
    counted = torch.ones(ids.values.shape[0], dtype=torch.bool)
    check_top(batch, request, ids, counted, capabilities.vocab_size, fail)


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
    early = is_stop.clone()
    early[last] = False
    if bool(early.any()):
        raise fail(f"row {int(ids.row_index[early][0])}: has tokens after a stop id, which must end the answer")
    if sampling.engine_kwargs:
        return
    at_stop_id = torch.zeros_like(some).masked_scatter_(some, is_stop[last]).tolist()
    limits = _limits(request, capabilities)
    for row, (reason, length, stopped) in enumerate(
        zip(batch.finish_reasons, ids.lengths.tolist(), at_stop_id, strict=True)
    ):
        if reason == "length" and stopped:
            raise fail(f"row {row}: finish reason 'length', but the answer ends with a stop id")
        if reason == "length" and limits is not None and length != limits[row]:
            raise fail(f"row {row}: finish reason 'length' after {length} tokens, but the limit is {limits[row]}")
        if reason == "stop" and not stopped and not _at_stop_string(batch, row, request, tokenizer):
            end = f"ends with id {int(ids.values[ids.offsets[row + 1] - 1])}" if length else "has no tokens"
            raise fail(
                f"row {row}: finish reason 'stop', but the answer {end}, and neither a stop id nor a stop string ended "
                "it; keep the token that ended the answer in the ids"
            )


def _limits(request: GenerateRequest, capabilities: Capabilities) -> list[int] | None:
    """Return the most tokens that each answer may have; None if nothing limits them."""
    limit, context = request.sampling.max_new_tokens, capabilities.max_context
    lengths = request.prompts.lengths.tolist()
    if limit is not None:
        return [limit] * len(lengths)
    return None if context is None else [context - length for length in lengths]


def _at_stop_string(batch: GenerateResult, row: int, request: GenerateRequest, tokenizer: Any) -> bool:
    """Return whether a stop string can have ended an answer: its text holds one.

    At which token is not asked: an engine that holds half a character back finds a stop string a few tokens late, and
    may then count one that was complete before `min_new_tokens`. Texts of the engine's own may differ from what the
    ids decode to: core takes the engine's word for its stop strings.
    """
    if not request.sampling.stop:
        return False
    if batch.texts is not None:
        return True
    start, end = batch.ids.offsets[row : row + 2].tolist()
    ids = batch.ids.values[start:end].tolist()
    return StopStrings.of_rows(request, tokenizer)[row].occurs_in(ids)


def _check_answer_logprobs(batch: GenerateResult, request: GenerateRequest, fail: Fail) -> None:
    if batch.logprobs is None:
        raise fail(f"returned no log-probs, but {request.logprobs} ones were asked for")
    check_rows("logprobs", batch.logprobs, torch.float32, fail)
    if not torch.equal(batch.logprobs.lengths, batch.ids.lengths):
        raise fail("log-probs and ids differ in length")
    check_logprobs(batch.logprobs, fail)
    check_choice("mode", batch.mode, ("raw", "processed"), fail)
    check_choice("support", batch.support, ("full", "truncated"), fail)
    if batch.mode != request.logprobs:
        raise fail(f"returned {batch.mode} log-probs, but {request.logprobs} ones were asked for")
    label = Provenance.label(request.logprobs, request.sampling)
    if batch.mode == "processed" and batch.temperature != label["temperature"]:
        raise fail(f"reports temperature {batch.temperature}, but {label['temperature']} was asked for")
    if label["support"] == "truncated" and batch.support == "full":
        raise fail("reports full support, but truncation, min_new_tokens or engine_kwargs were asked for")


@_typed
def check_scores(batch: ScoreResult, request: ScoreRequest, vocab_size: int, fail: Fail) -> None:
    """Check the result of `score_logprobs`."""
    check_type("the result", batch, ScoreResult, fail)
    sequences = request.sequences
    for name, rows, dtype in (("logprobs", batch.logprobs, torch.float32), ("scored", batch.scored, torch.bool)):
        check_rows(name, rows, dtype, fail, may_have_graph=request.grad)
        if not torch.equal(rows.lengths, sequences.lengths):
            raise fail(f"{name} and sequences differ in length")
    check_logprobs(batch.logprobs, fail)
    _check_labels(batch, len(sequences), fail)
    scored = batch.scored.values.cpu()
    asked = sequences.positions >= request.score_from[sequences.row_index]
    failed = torch.tensor([bool(text) for text in batch.errors or [""] * len(sequences)], dtype=torch.bool)
    missing = asked & ~scored & ~failed[sequences.row_index]
    if bool(missing.any()):
        raise fail(f"row {int(sequences.row_index[missing][0])}: not every position asked for was scored")
    if bool((scored & (sequences.positions == 0)).any()):
        raise fail("position 0 is marked as scored, but no token precedes it")
    if bool((batch.logprobs.values.detach()[~batch.scored.values] != 0).any()):
        raise fail("the log-prob of a position that was not scored must be 0.0")
    if batch.temperature != request.temperature:
        raise fail(f"scored at temperature {batch.temperature}, but {request.temperature} was asked for")
    truncated = request.support is not None
    own = request.temperature == 1.0 and not truncated
    check_choice("mode", batch.mode, ("raw", "processed") if own else ("processed",), fail)
    check_choice("support", batch.support, ("truncated" if truncated else "full",), fail)
    if request.grad and not batch.logprobs.values.requires_grad and bool(scored.any()):
        raise fail("returned log-probs without a gradient, but one was asked for")
    if request.return_logits:
        _check_logits(batch, request, vocab_size, fail)
    if request.return_argmax:
        _check_argmax(batch, request, vocab_size, fail)
    elif batch.argmax is not None:
        raise fail("returned an argmax, but none was asked for")
    check_top(batch, request, sequences, scored, vocab_size, fail)


def _check_argmax(batch: ScoreResult, request: ScoreRequest, vocab_size: int, fail: Fail) -> None:
    argmax, sequences = batch.argmax, request.sequences
    if argmax is None:
        raise fail("returned no argmax, but it was asked for")
    check_rows("argmax", argmax, torch.int64, fail)
    if not torch.equal(argmax.lengths, sequences.lengths):
        raise fail("argmax and sequences differ in length")
    found, scored = argmax.values.cpu(), batch.scored.values.cpu()
    if bool((found[~scored] != -1).any()):
        raise fail("the argmax of a position that was not scored must be -1")
    if outside_vocabulary(found[scored], vocab_size):
        raise fail(f"returned an argmax outside the vocabulary of {vocab_size}")
    if request.support is not None:
        # The most probable id of all may be outside the ids over which the log-probs were normalised.
        return
    likely = scored & (batch.logprobs.values.detach().cpu() > _MOST_PROBABLE)
    if request.support is not None:
        # Among the ids of a set, one may be probable that is not in the whole vocabulary, of which the argmax is.
        likely &= request.support.counts.values == 0
    odd = likely & (found != sequences.values.cpu())
    if bool(odd.any()):
        index = int(odd.nonzero()[0])
        row, position = int(sequences.row_index[index]), int(sequences.positions[index])
        raise fail(
            f"row {row}, position {position}: id {int(sequences.values[index])} has the log-prob "
            f"{float(batch.logprobs.values[index]):.3g}, so it is the most probable one, but the argmax is "
            f"{int(found[index])}"
        )


def _check_logits(batch: ScoreResult, request: ScoreRequest, vocab_size: int, fail: Fail) -> None:
    logits, sequences = batch.logits, request.sequences
    if not isinstance(logits, Ragged):
        raise fail("returned no logits, but they were asked for")
    check_tensor("logits", logits.values, fail, may_have_graph=request.grad)
    if logits.values.shape != (sequences.values.shape[0], vocab_size):
        raise fail(f"logits are {tuple(logits.values.shape)}, expected {(sequences.values.shape[0], vocab_size)}")
    if not logits.values.is_floating_point():
        raise fail(f"logits are {logits.values.dtype}, expected a floating-point type")
    check_lengths("logits", logits, fail)
    if not torch.equal(logits.lengths, sequences.lengths):
        raise fail("logits and sequences differ in length")
    values = logits.values.detach()
    # Keep the `not (...)`: NaN fails every comparison and must be refused. -inf is an id that cannot follow.
    if not value_range(values)[1] < math.inf:
        index = int((~(values < math.inf)).any(-1).nonzero()[0])
        row, position = int(sequences.row_index[index]), int(sequences.positions[index])
        raise fail(f"row {row}, position {position}: the logits hold nan or inf")


# Storage -------------------------------------------------------------------------------------------------------------


def owned(batch: R) -> R:
    """Return a checked result in storage that the engine does not hold.

    An engine may reuse its buffers for the next call, but containers create rows from a result much later. The copy
    takes 12 bytes a token, and more where other ids were asked for. Logits and results with gradients are not copied:
    they are large, and a plugin promises not to modify them.
    """
    if isinstance(batch, ScoreResult) and batch.logprobs.values.requires_grad:
        return batch
    copies: dict[str, Any] = {}
    for each in fields(batch):
        value = getattr(batch, each.name)
        if isinstance(value, (Ragged, TokenSets)) and each.name != "logits":
            copies[each.name] = value.clone()
    return replace(batch, **copies)


def owned_tokens(batch: TokenizeResult) -> TokenizeResult:
    """Return a checked result of `tokenize` in storage that the engine does not hold."""
    return replace(batch, ids=batch.ids.clone(), offsets=None if batch.offsets is None else batch.offsets.clone())


# Rows that failed ----------------------------------------------------------------------------------------------------


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


def _check_labels(batch: GenerateResult | ScoreResult, rows: int, fail: Fail) -> None:
    """Check that fields with one str per row have one for every row."""
    labels = {"weight_versions": batch.weight_versions, "errors": batch.errors}
    if isinstance(batch, GenerateResult):
        labels["texts"] = batch.texts
    for name, values in labels.items():
        if values is None:
            continue
        check_type(name, values, (tuple, list), fail)
        if len(values) != rows:
            raise fail(f"returned {len(values)} {name} for {rows} rows")
        for row, value in enumerate(values):
            if not isinstance(value, str):
                raise fail(f"row {row}: {name}: expected a str, got {type(value).__name__}")

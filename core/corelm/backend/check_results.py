"""Check what a hook returned against the specification. Core does this for every plugin.

The functions take `fail`, which makes an `EngineError` that names the plugin and the hook.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from corelm.backend.check_requests import outside_vocabulary
from corelm.errors import EngineError, spelled_out
from corelm.spec.provenance import Provenance
from corelm.spec.records import (
    FINISH_REASONS,
    GenerateRequest,
    GenerateResult,
    ScoreRequest,
    ScoreResult,
    TokenizeResult,
)
from corelm.tensors.ragged import Ragged, value_range

Fail = Callable[[str], EngineError]

#: Rounding may put a log-probability above 0, but by no more than this. The same for float32 and float64.
_ABOVE_ZERO = 2.0**-10

# Results of hooks ----------------------------------------------------------------------------------------------------


def check_tokens(batch: TokenizeResult, texts: int, fail: Fail) -> None:
    """Check the result of `tokenize` for this number of texts."""
    _check_type("the result", batch, TokenizeResult, fail)
    _check_rows("ids", batch.ids, torch.int64, fail)
    if len(batch.ids) != texts:
        raise fail(f"returned {len(batch.ids)} rows for {texts} texts")


def check_generation(
    batch: GenerateResult, request: GenerateRequest, answers: int, vocab_size: int, fail: Fail
) -> None:
    """Check the result of `generate`, which must have this number of rows."""
    _check_type("the result", batch, GenerateResult, fail)
    ids = batch.ids
    _check_rows("ids", ids, torch.int64, fail)
    if len(ids) != answers:
        raise fail(f"returned {len(ids)} rows for {answers} answers")
    _check_type("finish_reasons", batch.finish_reasons, (tuple, list), fail)
    if len(batch.finish_reasons) != answers:
        raise fail(f"returned {len(batch.finish_reasons)} finish reasons for {answers} answers")
    for row, reason in enumerate(batch.finish_reasons):
        if reason not in FINISH_REASONS:
            raise fail(f"row {row}: finish reason {reason!r} is not one of {', '.join(FINISH_REASONS)}")
    if outside_vocabulary(ids.values, vocab_size):
        raise fail(f"returned an id outside the vocabulary of {vocab_size}")
    limit = request.sampling.max_new_tokens
    if limit is not None and bool((ids.lengths > limit).any()):
        raise fail(f"row {int(ids.lengths.argmax())}: {int(ids.lengths.max())} tokens, but max_new_tokens is {limit}")
    if request.stop_ids:
        early = torch.isin(ids.values.cpu(), torch.tensor(sorted(request.stop_ids), dtype=torch.int64))
        early[ids.offsets[1:][ids.lengths > 0] - 1] = False
        if bool(early.any()):
            raise fail(f"row {int(ids.row_index[early][0])}: has tokens after a stop id, which must end the answer")
    _check_labels(batch, answers, fail)
    if request.logprobs != "none":
        _check_answer_logprobs(batch, request, fail)


def _check_answer_logprobs(batch: GenerateResult, request: GenerateRequest, fail: Fail) -> None:
    if batch.logprobs is None:
        raise fail(f"returned no log-probs, but {request.logprobs} ones were asked for")
    _check_rows("logprobs", batch.logprobs, torch.float32, fail)
    if not torch.equal(batch.logprobs.lengths, batch.ids.lengths):
        raise fail("log-probs and ids differ in length")
    _check_logprobs(batch.logprobs, fail)
    _check_choice("mode", batch.mode, ("raw", "processed"), fail)
    _check_choice("support", batch.support, ("full", "truncated"), fail)
    if batch.mode != request.logprobs:
        raise fail(f"returned {batch.mode} log-probs, but {request.logprobs} ones were asked for")
    label = Provenance.label(request.logprobs, request.sampling)
    if batch.mode == "processed" and batch.temperature != label["temperature"]:
        raise fail(f"reports temperature {batch.temperature}, but {label['temperature']} was asked for")
    if label["support"] == "truncated" and batch.support == "full":
        raise fail("reports full support, but truncation, min_new_tokens or engine_kwargs were asked for")


def check_scores(batch: ScoreResult, request: ScoreRequest, vocab_size: int, fail: Fail) -> None:
    """Check the result of `score_logprobs`."""
    _check_type("the result", batch, ScoreResult, fail)
    sequences = request.sequences
    for name, rows, dtype in (("logprobs", batch.logprobs, torch.float32), ("scored", batch.scored, torch.bool)):
        _check_rows(name, rows, dtype, fail)
        if not torch.equal(rows.lengths, sequences.lengths):
            raise fail(f"{name} and sequences differ in length")
    _check_logprobs(batch.logprobs, fail)
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
    _check_choice("mode", batch.mode, ("raw", "processed") if request.temperature == 1.0 else ("processed",), fail)
    _check_choice("support", batch.support, ("full",), fail)
    if request.grad and not batch.logprobs.values.requires_grad and bool(scored.any()):
        raise fail("returned log-probs without a gradient, but one was asked for")
    if request.return_logits:
        logits = batch.logits
        if not isinstance(logits, Ragged):
            raise fail("returned no logits, but they were asked for")
        if logits.values.shape != (sequences.values.shape[0], vocab_size):
            raise fail(f"logits are {tuple(logits.values.shape)}, expected {(sequences.values.shape[0], vocab_size)}")


# Rows that failed ----------------------------------------------------------------------------------------------------


def every_row_was_served(batch: GenerateResult | ScoreResult, samples: int, backend: str) -> None:
    """Check that the engine served every row.

    Raises:
        EngineError: some rows failed; `problems` names the prompts or sequences.
    """
    errors: Sequence[str] = batch.errors or ()
    if isinstance(batch, GenerateResult):
        texts = errors or ("",) * len(batch.ids)
        errors = [
            text or "failed, and the engine gave no reason" if reason == "error" else ""
            for text, reason in zip(texts, batch.finish_reasons, strict=True)
        ]
    problems = {row // samples: text for row, text in enumerate(errors) if text}
    if problems:
        raise EngineError(f"backend {backend!r}: {spelled_out(problems)}", usable=True, problems=problems)


# Fields of a result --------------------------------------------------------------------------------------------------


def _check_type(name: str, value: Any, kind: type | tuple[type, ...], fail: Fail) -> None:
    if not isinstance(value, kind):
        expected = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise fail(f"{name} is a {type(value).__name__}, expected a {expected}")


def _check_choice(name: str, value: Any, legal: tuple[str, ...], fail: Fail) -> None:
    if value not in legal:
        raise fail(f"reports {name} {value!r}, expected {' or '.join(map(repr, legal))}")


def _check_labels(batch: GenerateResult | ScoreResult, rows: int, fail: Fail) -> None:
    """Check that fields with one str per row have one for every row."""
    labels = {"weight_versions": batch.weight_versions, "errors": batch.errors}
    if isinstance(batch, GenerateResult):
        labels["texts"] = batch.texts
    for name, values in labels.items():
        if values is not None and len(values) != rows:
            raise fail(f"returned {len(values)} {name} for {rows} rows")


def _check_rows(name: str, rows: Any, dtype: torch.dtype, fail: Fail) -> None:
    """Check for a `Ragged` of single values of `dtype`, usable in later computations."""
    _check_type(name, rows, Ragged, fail)
    if rows.values.dtype != dtype or rows.values.ndim != 1:
        raise fail(f"{name} are {rows.values.dtype}{list(rows.values.shape)}, expected one {dtype} per position")
    if rows.values.is_inference():
        raise fail(
            f"{name} is an inference tensor, which autograd cannot use later; compute it under torch.no_grad() and not "
            "under torch.inference_mode()"
        )


def _check_logprobs(rows: Ragged, fail: Fail) -> None:
    """Check that the log-probs are finite and not above 0."""
    values = rows.values.detach()
    low, high = value_range(values)
    # Keep the `not (...)`: NaN fails every comparison and must be rejected.
    if not (low > -math.inf and high <= _ABOVE_ZERO):
        bad = ~torch.isfinite(values) | (values > _ABOVE_ZERO)
        index = int(bad.nonzero()[0])
        row, position = int(rows.row_index[index]), int(rows.positions[index])
        raise fail(
            f"row {row}, position {position}: the log-prob is {float(rows.values[index])}, expected a finite number of "
            "at most 0"
        )

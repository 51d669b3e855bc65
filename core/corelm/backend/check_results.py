"""What an engine returned, held against the specification: once, here, for every plugin."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from corelm.backend.check_requests import outside_vocabulary, value_range
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
from corelm.tensors.ragged import Ragged


def check_tokens(batch: TokenizeResult, texts: int, fail: Callable[[str], EngineError]) -> None:
    _is(batch, TokenizeResult, "the result", fail)
    _rows("ids", batch.ids, torch.int64, fail)
    if len(batch.ids) != texts:
        raise fail(f"returned {len(batch.ids)} rows for {texts} texts")


def check_generation(
    batch: GenerateResult, request: GenerateRequest, answers: int, vocab_size: int, fail: Callable[[str], EngineError]
) -> None:
    """Hold an engine's answers against the specification. `fail` names the plugin and the hook."""
    _is(batch, GenerateResult, "the result", fail)
    ids = batch.ids
    _rows("ids", ids, torch.int64, fail)
    if len(ids) != answers:
        raise fail(f"returned {len(ids)} rows for {answers} answers")
    _is(batch.finish_reasons, (tuple, list), "finish_reasons", fail)
    if len(batch.finish_reasons) != answers:
        raise fail(f"returned {len(batch.finish_reasons)} finish reasons for {answers} answers")
    for row, reason in enumerate(batch.finish_reasons):
        if reason not in FINISH_REASONS:
            raise fail(f"row {row}: finish reason {reason!r} is none of {', '.join(FINISH_REASONS)}")
    if outside_vocabulary(ids.values, vocab_size):
        raise fail(f"returned an id outside the vocabulary of {vocab_size}")
    limit = request.sampling.max_new_tokens
    if limit is not None and bool((ids.lengths > limit).any()):
        raise fail(f"row {int(ids.lengths.argmax())}: {int(ids.lengths.max())} tokens, but max_new_tokens is {limit}")
    if request.stop_ids:
        early = torch.isin(ids.values.cpu(), torch.tensor(sorted(request.stop_ids), dtype=torch.int64))
        early[ids.offsets[1:][ids.lengths > 0] - 1] = False
        if bool(early.any()):
            raise fail(f"row {int(ids.row_index[early][0])}: goes on after a stop id, which ends an answer")
    _labels(batch, answers, fail)
    if request.logprobs == "none":
        return
    if batch.logprobs is None:
        raise fail(f"returned no log-probs, but {request.logprobs} ones were asked for")
    _rows("logprobs", batch.logprobs, torch.float32, fail)
    if not torch.equal(batch.logprobs.lengths, ids.lengths):
        raise fail("log-probs and ids differ in length")
    _finite(batch.logprobs, fail)
    _one_of("mode", batch.mode, ("raw", "processed"), fail)
    _one_of("support", batch.support, ("full", "truncated"), fail)
    if batch.mode != request.logprobs:
        raise fail(f"returned {batch.mode} log-probs, but {request.logprobs} ones were asked for")
    label = Provenance.label(request.logprobs, request.sampling)
    if batch.mode == "processed" and batch.temperature != label["temperature"]:
        raise fail(f"says temperature {batch.temperature}, but sampled at {label['temperature']}")
    if label["support"] == "truncated" and batch.support == "full":
        raise fail("says full support, but sampled under truncation, min_new_tokens or engine_kwargs")


def every_row_was_served(batch: GenerateResult | ScoreResult, samples: int, backend: str) -> None:
    """Raises:
    EngineError: the engine served some rows only; `problems` names the prompts of the others.
    """
    errors: Sequence[str] = batch.errors or ()
    if isinstance(batch, GenerateResult):
        texts = errors or ("",) * len(batch.ids)
        errors = [
            text or "failed, and the engine does not say why" if reason == "error" else ""
            for text, reason in zip(texts, batch.finish_reasons, strict=True)
        ]
    problems = {row // samples: text for row, text in enumerate(errors) if text}
    if problems:
        raise EngineError(f"backend {backend!r}: {spelled_out(problems)}", usable=True, problems=problems)


def check_scores(
    batch: ScoreResult, request: ScoreRequest, vocab_size: int, fail: Callable[[str], EngineError]
) -> None:
    _is(batch, ScoreResult, "the result", fail)
    sequences = request.sequences
    for name, rows, dtype in (("logprobs", batch.logprobs, torch.float32), ("scored", batch.scored, torch.bool)):
        _rows(name, rows, dtype, fail)
        if not torch.equal(rows.lengths, sequences.lengths):
            raise fail(f"{name} and sequences differ in length")
    _finite(batch.logprobs, fail)
    _labels(batch, len(sequences), fail)
    scored = batch.scored.values.cpu()
    asked = sequences.positions >= request.score_from[sequences.row_index]
    failed = torch.tensor([bool(text) for text in batch.errors or [""] * len(sequences)], dtype=torch.bool)
    missing = asked & ~scored & ~failed[sequences.row_index]
    if bool(missing.any()):
        raise fail(f"row {int(sequences.row_index[missing][0])}: not every position asked for was scored")
    if bool((scored & (sequences.positions == 0)).any()):
        raise fail("position 0 is marked as scored; nothing precedes it")
    if bool((batch.logprobs.values.detach()[~batch.scored.values] != 0).any()):
        raise fail("an unscored position holds something other than 0.0")
    if batch.temperature != request.temperature:
        raise fail(f"scored at temperature {batch.temperature}, but {request.temperature} was asked for")
    _one_of("mode", batch.mode, ("raw", "processed") if request.temperature == 1.0 else ("processed",), fail)
    _one_of("support", batch.support, ("full",), fail)
    if request.grad and not batch.logprobs.values.requires_grad and bool(scored.any()):
        raise fail("returned log-probs without a gradient, but one was asked for")
    if request.return_logits:
        logits = batch.logits
        if not isinstance(logits, Ragged):
            raise fail("returned no logits, but they were asked for")
        if logits.values.shape != (sequences.values.shape[0], vocab_size):
            raise fail(f"logits are {tuple(logits.values.shape)}, expected {(sequences.values.shape[0], vocab_size)}")


def _labels(batch: GenerateResult | ScoreResult, rows: int, fail: Callable[[str], EngineError]) -> None:
    named = {"weight_versions": batch.weight_versions, "errors": batch.errors}
    if isinstance(batch, GenerateResult):
        named["texts"] = batch.texts
    for name, values in named.items():
        if values is not None and len(values) != rows:
            raise fail(f"returned {len(values)} {name} for {rows} rows")


def _is(value: Any, kind: type | tuple[type, ...], name: str, fail: Callable[[str], EngineError]) -> None:
    if not isinstance(value, kind):
        expected = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise fail(f"{name} is a {type(value).__name__}, expected a {expected}")


def _one_of(name: str, value: Any, legal: tuple[str, ...], fail: Callable[[str], EngineError]) -> None:
    if value not in legal:
        raise fail(f"says {name} {value!r}, expected {' or '.join(map(repr, legal))}")


def _rows(name: str, rows: Any, dtype: torch.dtype, fail: Callable[[str], EngineError]) -> None:
    """A Ragged of single values of that dtype, fit for later computations."""
    _is(rows, Ragged, name, fail)
    if rows.values.dtype != dtype or rows.values.ndim != 1:
        raise fail(f"{name} are {rows.values.dtype}{list(rows.values.shape)}, expected one {dtype} per position")
    if rows.values.is_inference():
        raise fail(f"{name} is an inference tensor, which no later computation may use; compute under torch.no_grad()")


#: A log-probability may come out above 0 by rounding, not by more than this (the same number in float32 and float64).
_ABOVE_ZERO = 2.0**-10


def _finite(rows: Ragged, fail: Callable[[str], EngineError]) -> None:
    values = rows.values.detach()
    low, high = value_range(values)
    # Not the other way about: NaN is less than nothing and more than nothing.
    if not (low > -math.inf and high <= _ABOVE_ZERO):
        bad = ~torch.isfinite(values) | (values > _ABOVE_ZERO)
        index = int(bad.nonzero()[0])
        row, position = int(rows.row_index[index]), int(rows.positions[index])
        raise fail(f"row {row}, position {position}: the log-prob is {float(rows.values[index])}")

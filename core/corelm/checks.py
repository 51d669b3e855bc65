"""What is checked before a hook is called and after it has answered: once, here, for every plugin.

The functions ending in `_problems` return ``{row: what is wrong}``, so that the caller may refuse all of them
together or serve the others. Everything else raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from corelm.capabilities import Capabilities
from corelm.errors import CapabilityError, EngineError, InvalidRequestError
from corelm.messages import FINISH_REASONS, GenerateRequest, GenerationBatch, ScoreBatch, ScoreRequest, TokenBatch
from corelm.provenance import Mode
from corelm.rows import Ragged
from corelm.sampling import SamplingParams

Problems = dict[int, str]

#: How many rows a message spells out; `InvalidRequestError.problems` always holds them all.
_SPELLED_OUT = 5


# Before -------------------------------------------------------------------------------------------------------------


def refuse(problems: Mapping[int, str], field: str) -> None:
    """Raise one `InvalidRequestError` for all `problems`; return if there are none."""
    if problems:
        raise InvalidRequestError(f"{field}: {_spelled_out(problems)}", field=field, problems=problems)


def _spelled_out(problems: Mapping[int, str]) -> str:
    rows = sorted(problems)
    lines = [f"row {row}: {problems[row]}" for row in rows[:_SPELLED_OUT]]
    if len(rows) > _SPELLED_OUT:
        lines.append(f"and {len(rows) - _SPELLED_OUT} more rows")
    return "; ".join(lines)


def sequence_problems(rows: Ragged, capabilities: Capabilities, *, may_be_empty: bool, room: int = 0) -> Problems:
    """Ids outside the vocabulary, rows without a token, rows too long to leave `room` tokens of the context."""
    problems: Problems = {}
    if _outside(rows.values, capabilities.vocab_size):
        outside = (rows.values < 0) | (rows.values >= capabilities.vocab_size)
        for index in outside.nonzero().flatten().tolist()[::-1]:
            row, position = int(rows.row_index[index]), int(rows.positions[index])
            found, size = int(rows.values[index]), capabilities.vocab_size
            problems[row] = f"id {found} at position {position} is outside the vocabulary of {size}"
    shortest, longest = _range(rows.lengths)
    if not (may_be_empty or shortest):
        problems |= dict.fromkeys((rows.lengths == 0).nonzero().flatten().tolist(), "has no tokens; give at least one")
    limit = capabilities.max_context
    if limit is not None and longest + room > limit:
        for row in (rows.lengths + room > limit).nonzero().flatten().tolist():
            asked = f" + {room} new" if room else ""
            problems[row] = f"{int(rows.lengths[row])} tokens{asked} do not fit the context of {limit}; shorten it"
    return problems


def prompt_problems(prompts: Ragged, capabilities: Capabilities, sampling: SamplingParams) -> Problems:
    # Without a limit the answer fills the context, and there must be something left to fill.
    room = 1 if sampling.max_new_tokens is None else sampling.max_new_tokens
    return sequence_problems(prompts, capabilities, may_be_empty=capabilities.empty_prompt, room=room)


def sampling_is_honoured(sampling: SamplingParams, capabilities: Capabilities, backend: str) -> None:
    """Raises:
    CapabilityError: a parameter in force that the engine did not declare.
    InvalidRequestError: a value outside the engine's declared range, or a stop id outside the vocabulary.
    """
    for name, value in sampling.engine_parameters().items():
        if name not in capabilities.sampling:
            known = ", ".join(sorted(capabilities.sampling)) or "none"
            raise CapabilityError(
                f"backend {backend!r} does not honour {name}={value!r}; it honours: {known}", capability=name
            )
        legal = capabilities.sampling[name]
        if legal is not None and not legal[0] <= value <= legal[1]:
            raise InvalidRequestError(
                f"sampling parameter {name!r}: backend {backend!r} takes {legal[0]} to {legal[1]}, got {value}",
                field=name,
            )
    for token in sampling.stop_token_ids:
        if token >= capabilities.vocab_size:
            raise InvalidRequestError(
                f"stop_token_ids: {token} is outside the vocabulary of {capabilities.vocab_size}",
                field="stop_token_ids",
            )


def generation_mode(
    wanted: Literal["none", "raw", "processed"], sampling: SamplingParams, capabilities: Capabilities, backend: str
) -> Literal["none", "raw", "processed"]:
    """The mode to ask the engine for: `wanted`, or the other one where both are the same numbers.

    Raises:
        CapabilityError: the engine cannot give it, and what it gives cannot be converted exactly.
    """
    if wanted == "none":
        return wanted
    if wanted not in ("raw", "processed"):
        raise InvalidRequestError(f"logprobs: expected 'none', 'raw' or 'processed', got {wanted!r}", field="logprobs")
    if sampling.num_beams > 1:
        raise CapabilityError(
            "a beam's tokens were not sampled one by one: there is no log-prob to report; use logprobs='none'",
            capability="num_beams",
        )
    if wanted in capabilities.generation_modes:
        return wanted
    if "scaled" in capabilities.generation_modes and scaled_is(wanted, sampling):
        return wanted
    other: Mode = "processed" if wanted == "raw" else "raw"
    if untouched(sampling) and other in capabilities.generation_modes:
        return other
    has = ", ".join(sorted(capabilities.generation_modes)) or "none"
    raise CapabilityError(
        f"backend {backend!r} returns no {wanted} log-probs with this sampling (it has: {has}); at temperature 1 "
        "without truncation and penalties raw and processed are the same numbers",
        capability="generation_modes",
    )


def untouched(sampling: SamplingParams) -> bool:
    """Whether what is sampled from is the model's own distribution, so that raw and processed are the same numbers."""
    return sampling.temperature == 1.0 and not (sampling.truncates or _reshaped(sampling))


def scaled_is(mode: Mode, sampling: SamplingParams) -> bool:
    """Whether log-probs of the logits over the temperature, greedy ones over 1, are those of `mode`."""
    if _reshaped(sampling):
        # Whether penalties and forbidden ids come before the number is made is each engine's own affair.
        return False
    if mode == "raw":
        return sampling.temperature in (0.0, 1.0)
    return sampling.temperature > 0.0 and not sampling.truncates


def _reshaped(sampling: SamplingParams) -> bool:
    """Whether something beside temperature and truncation changes what is sampled from."""
    return bool(sampling.penalties or sampling.min_new_tokens or sampling.engine_kwargs)


# After --------------------------------------------------------------------------------------------------------------


def check_tokens(batch: TokenBatch, texts: int, fail: Callable[[str], EngineError]) -> None:
    _is(batch, TokenBatch, "the result", fail)
    _rows("ids", batch.ids, torch.int64, fail)
    if len(batch.ids) != texts:
        raise fail(f"returned {len(batch.ids)} rows for {texts} texts")


def check_generation(
    batch: GenerationBatch, request: GenerateRequest, answers: int, vocab_size: int, fail: Callable[[str], EngineError]
) -> None:
    """Hold an engine's answers against the specification. `fail` names the plugin and the hook."""
    _is(batch, GenerationBatch, "the result", fail)
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
    if _outside(ids.values, vocab_size):
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
    if batch.mode == "processed" and batch.temperature != request.sampling.temperature:
        raise fail(f"says temperature {batch.temperature}, but sampled at {request.sampling.temperature}")
    if batch.mode == "processed" and request.sampling.truncates and batch.support == "full":
        raise fail("says full support, but sampled under truncation")


def every_row_was_served(batch: GenerationBatch | ScoreBatch, samples: int, backend: str) -> None:
    """Raises:
    EngineError: the engine served some rows only; `problems` names the prompts of the others.
    """
    errors: Sequence[str] = batch.errors or ()
    if isinstance(batch, GenerationBatch):
        texts = errors or ("",) * len(batch.ids)
        errors = [
            text or "failed, and the engine does not say why" if reason == "error" else ""
            for text, reason in zip(texts, batch.finish_reasons, strict=True)
        ]
    problems = {row // samples: text for row, text in enumerate(errors) if text}
    if problems:
        raise EngineError(f"backend {backend!r}: {_spelled_out(problems)}", usable=True, problems=problems)


def check_scores(batch: ScoreBatch, request: ScoreRequest, vocab_size: int, fail: Callable[[str], EngineError]) -> None:
    _is(batch, ScoreBatch, "the result", fail)
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


def _outside(ids: Tensor, vocab_size: int) -> bool:
    low, high = _range(ids)
    return not 0 <= low <= high < vocab_size


def _range(values: Tensor) -> tuple[float, float]:
    """The least and the greatest; NaN if there is one, 0 of nothing."""
    if not values.numel():
        return 0, 0
    low, high = values.aminmax()
    return low.item(), high.item()


def _labels(batch: GenerationBatch | ScoreBatch, rows: int, fail: Callable[[str], EngineError]) -> None:
    named = {"weight_versions": batch.weight_versions, "errors": batch.errors}
    if isinstance(batch, GenerationBatch):
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
    low, high = _range(values)
    # Not the other way about: NaN is less than nothing and more than nothing.
    if not (low > -math.inf and high <= _ABOVE_ZERO):
        bad = ~torch.isfinite(values) | (values > _ABOVE_ZERO)
        index = int(bad.nonzero()[0])
        row, position = int(rows.row_index[index]), int(rows.positions[index])
        raise fail(f"row {row}, position {position}: the log-prob is {float(rows.values[index])}")

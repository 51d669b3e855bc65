"""What is checked before a hook is called and after it has answered: once, here, for every plugin.

The functions ending in `_problems` return ``{row: what is wrong}``, so that the caller may refuse all of them
together or serve the others. Everything else raises.
"""

from __future__ import annotations

import math
import uuid
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


def as_ragged(ids: Any, field: str) -> Ragged:
    """Rows of token ids from a Ragged, a list of lists or tensors, or an integer tensor ``[rows, time]``.

    Raises:
        InvalidRequestError: anything else, naming the row.
    """
    if isinstance(ids, Ragged):
        rows = ids
    elif isinstance(ids, Tensor):
        if ids.ndim != 2:
            raise InvalidRequestError(
                f"{field}: expected one row per sequence, got a tensor of shape {tuple(ids.shape)}", field=field
            )
        rows = Ragged(ids.reshape(-1), torch.full((ids.shape[0],), ids.shape[1]))
    else:
        ids = list(ids)
        wrong = {
            row: f"expected a list of token ids, got {value!r}" for row, value in enumerate(ids) if not _is_row(value)
        }
        refuse(wrong, field)
        try:
            rows = Ragged.from_list(ids)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise InvalidRequestError(f"{field}: the ids cannot be read as int64: {error}", field=field) from error
    if rows.values.dtype.is_floating_point or rows.values.dtype == torch.bool or rows.values.ndim != 1:
        raise InvalidRequestError(f"{field}: token ids are integers, got {rows.values.dtype}", field=field)
    return Ragged(rows.values.to(torch.int64), rows.lengths)


def _is_row(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 1 and not value.dtype.is_floating_point and value.dtype != torch.bool
    return isinstance(value, (list, tuple)) and all(isinstance(i, int) and not isinstance(i, bool) for i in value)


def refuse(problems: Mapping[int, str], field: str) -> None:
    """Raise one `InvalidRequestError` for all `problems`; return if there are none."""
    if problems:
        rows = sorted(problems)
        lines = [f"row {row}: {problems[row]}" for row in rows[:_SPELLED_OUT]]
        if len(rows) > _SPELLED_OUT:
            lines.append(f"and {len(rows) - _SPELLED_OUT} more rows")
        raise InvalidRequestError(f"{field}: " + "; ".join(lines), field=field, problems=problems)


def sequence_problems(rows: Ragged, capabilities: Capabilities, *, may_be_empty: bool, room: int = 0) -> Problems:
    """Ids outside the vocabulary, rows without a token, rows too long to leave `room` tokens of the context."""
    problems: Problems = {}
    outside = (rows.values < 0) | (rows.values >= capabilities.vocab_size)
    if bool(outside.any()):
        for index in outside.nonzero().flatten().tolist()[::-1]:
            row, position = int(rows.row_index[index]), int(rows.positions[index])
            found, size = int(rows.values[index]), capabilities.vocab_size
            problems[row] = f"id {found} at position {position} is outside the vocabulary of {size}"
    if not may_be_empty:
        problems |= dict.fromkeys((rows.lengths == 0).nonzero().flatten().tolist(), "has no tokens; give at least one")
    if capabilities.max_context is not None:
        limit = capabilities.max_context
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
    restricted = sampling.min_new_tokens > 0 or sampling.engine_kwargs
    return sampling.temperature == 1.0 and not (sampling.truncates or sampling.penalties or restricted)


def request_ids(given: Sequence[str] | None, rows: int) -> tuple[str, ...]:
    """One unique name per row, made up here unless given."""
    if given is None:
        return tuple(uuid.uuid4().hex for _ in range(rows))
    if len(given) != rows or len(set(given)) != rows:
        raise InvalidRequestError(
            f"request_ids: expected {rows} different names, got {len(given)}", field="request_ids"
        )
    return tuple(given)


def scoring_temperature(temperature: float) -> float:
    """A temperature that given tokens can be scored at."""
    # At 0 the distribution is a point mass: almost every given token would have log-prob -inf.
    if not (isinstance(temperature, (int, float)) and math.isfinite(temperature) and temperature > 0):
        raise InvalidRequestError(
            f"temperature: expected a finite number above 0, got {temperature!r}", field="temperature"
        )
    return float(temperature)


def starts(score_from: Any, rows: int) -> Tensor:
    """int64[rows]: where scoring starts. Nothing precedes position 0, so it is never scored."""
    if score_from is None:
        return torch.ones(rows, dtype=torch.int64)
    first = torch.as_tensor(score_from, dtype=torch.int64)
    first = first.expand(rows) if first.ndim == 0 else first
    if first.shape != (rows,):
        raise InvalidRequestError(
            f"score_from: expected {rows} positions, got {tuple(first.shape)}", field="score_from"
        )
    return first.clamp_min(1)


# After --------------------------------------------------------------------------------------------------------------


def check_tokens(batch: TokenBatch, texts: int, fail: Callable[[str], EngineError]) -> None:
    if len(batch.ids) != texts:
        raise fail(f"returned {len(batch.ids)} rows for {texts} texts")


def check_generation(
    batch: GenerationBatch, request: GenerateRequest, answers: int, vocab_size: int, fail: Callable[[str], EngineError]
) -> None:
    """Hold an engine's answers against the specification. `fail` names the plugin and the hook."""
    ids = batch.ids
    if len(ids) != answers:
        raise fail(f"returned {len(ids)} rows for {answers} answers")
    _owned("ids", ids, torch.int64, fail)
    if len(batch.finish_reasons) != answers:
        raise fail(f"returned {len(batch.finish_reasons)} finish reasons for {answers} answers")
    for row, reason in enumerate(batch.finish_reasons):
        if reason not in FINISH_REASONS:
            raise fail(f"row {row}: finish reason {reason!r} is none of {', '.join(FINISH_REASONS)}")
    if bool(((ids.values < 0) | (ids.values >= vocab_size)).any()):
        raise fail(f"returned an id outside the vocabulary of {vocab_size}")
    limit = request.sampling.max_new_tokens
    if limit is not None and bool((ids.lengths > limit).any()):
        raise fail(f"row {int(ids.lengths.argmax())}: {int(ids.lengths.max())} tokens, but max_new_tokens is {limit}")
    _labels(batch, answers, fail)
    if request.logprobs == "none":
        return
    if batch.logprobs is None:
        raise fail(f"returned no log-probs, but {request.logprobs} ones were asked for")
    if not torch.equal(batch.logprobs.lengths, ids.lengths):
        raise fail("log-probs and ids differ in length")
    _owned("logprobs", batch.logprobs, torch.float32, fail)
    _finite(batch.logprobs, fail)
    if batch.mode != request.logprobs:
        raise fail(f"returned {batch.mode} log-probs, but {request.logprobs} ones were asked for")
    if batch.mode == "processed" and batch.temperature != request.sampling.temperature:
        raise fail(f"says temperature {batch.temperature}, but sampled at {request.sampling.temperature}")


def check_scores(batch: ScoreBatch, request: ScoreRequest, vocab_size: int, fail: Callable[[str], EngineError]) -> None:
    sequences = request.sequences
    for name, rows in (("logprobs", batch.logprobs), ("scored", batch.scored)):
        if not torch.equal(rows.lengths, sequences.lengths):
            raise fail(f"{name} and sequences differ in length")
    _owned("logprobs", batch.logprobs, torch.float32, fail)
    _owned("scored", batch.scored, torch.bool, fail)
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
    if request.return_logits:
        logits = batch.logits
        if logits is None:
            raise fail("returned no logits, but they were asked for")
        if logits.values.shape != (sequences.values.shape[0], vocab_size):
            raise fail(f"logits are {tuple(logits.values.shape)}, expected {(sequences.values.shape[0], vocab_size)}")


def _labels(batch: GenerationBatch | ScoreBatch, rows: int, fail: Callable[[str], EngineError]) -> None:
    named = {"weight_versions": batch.weight_versions, "errors": batch.errors}
    if isinstance(batch, GenerationBatch):
        named["texts"] = batch.texts
    for name, values in named.items():
        if values is not None and len(values) != rows:
            raise fail(f"returned {len(values)} {name} for {rows} rows")


def _owned(name: str, rows: Ragged, dtype: torch.dtype, fail: Callable[[str], EngineError]) -> None:
    if rows.values.dtype != dtype:
        raise fail(f"{name} are {rows.values.dtype}, expected {dtype}")
    if rows.values.is_inference():
        raise fail(f"{name} is an inference tensor, which no later computation may use; compute under torch.no_grad()")


def _finite(rows: Ragged, fail: Callable[[str], EngineError]) -> None:
    bad = ~torch.isfinite(rows.values.detach())
    if bool(bad.any()):
        index = int(bad.nonzero()[0])
        row, position = int(rows.row_index[index]), int(rows.positions[index])
        raise fail(f"row {row}, position {position}: the log-prob is {float(rows.values[index])}")

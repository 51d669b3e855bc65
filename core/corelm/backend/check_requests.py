"""Check a request before its hook is called: its rows, its sampling parameters, and the log-probs it asks for.

Core does this for every plugin. Functions that end in `_problems` return ``{row: what is wrong}``, so that the caller
can refuse all bad rows together or skip them. The other functions raise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from corelm.errors import CapabilityError, InvalidRequestError, Problems
from corelm.spec.answer_text import skipped_texts
from corelm.spec.capabilities import Capabilities
from corelm.spec.provenance import Mode
from corelm.spec.sampling import SamplingParams
from corelm.tensors.ragged import Ragged, value_range
from corelm.validate import one_of, shown

_DEFAULT_MAX_NEW_TOKENS = next(
    each.default for each in dataclasses.fields(SamplingParams) if each.name == "max_new_tokens"
)

# Rows ----------------------------------------------------------------------------------------------------------------


def prompt_problems(prompts: Ragged, capabilities: Capabilities, sampling: SamplingParams) -> Problems:
    """Return the problems of prompts, which must leave room in the context for the answer."""
    new, limit = sampling.max_new_tokens, capabilities.max_context

    def too_long(tokens: int) -> str:
        left = (limit or 0) - tokens
        if new is None or left < 1:
            answer = "an answer" if new is None else f"an answer of max_new_tokens={new}"
            return (
                f"{tokens} tokens leave no room for {answer} in the context of {limit}; "
                "shorten the prompt, or give the policy truncation='left', which drops its first tokens"
            )
        default = f" ({new} is the default)" if new == _DEFAULT_MAX_NEW_TOKENS else ""
        return (
            f"{tokens} tokens and max_new_tokens={new}{default} do not fit the context of {limit}; give max_new_tokens="
            f"{left} or less, or shorten the prompt, or give the policy truncation='left', which drops its first tokens"
        )

    # Without a limit the answer fills the context, so there must be room for at least one token.
    room = 1 if new is None else new
    return _row_problems(prompts, capabilities, capabilities.empty_prompt, room, too_long)


def sequence_problems(sequences: Ragged, capabilities: Capabilities) -> Problems:
    """Return the problems of sequences to score, which may fill the context."""
    limit = capabilities.max_context
    too_long = "{} tokens do not fit the context of {}; shorten it"
    return _row_problems(sequences, capabilities, False, 0, lambda tokens: too_long.format(tokens, limit))


def _row_problems(
    rows: Ragged, capabilities: Capabilities, may_be_empty: bool, room: int, too_long: Callable[[int], str]
) -> Problems:
    """Return the problems of rows: ids outside the vocabulary, no tokens, too long for the context.

    Args:
        may_be_empty: whether a row may have no tokens.
        room: number of tokens of the context that a row must leave free.
        too_long: makes the message for a row of this many tokens.
    """
    problems: Problems = {}
    if outside_vocabulary(rows.values, capabilities.vocab_size):
        outside = (rows.values < 0) | (rows.values >= capabilities.vocab_size)
        # In reverse, so that the first bad id of a row is reported.
        for index in outside.nonzero().flatten().tolist()[::-1]:
            row, position = int(rows.row_index[index]), int(rows.positions[index])
            found, size = int(rows.values[index]), capabilities.vocab_size
            problems[row] = f"id {found} at position {position} is outside the vocabulary of {size}"
    shortest, longest = value_range(rows.lengths)
    if not (may_be_empty or shortest):
        problems |= dict.fromkeys((rows.lengths == 0).nonzero().flatten().tolist(), "has no tokens; give at least one")
    limit = capabilities.max_context
    if limit is not None and longest + room > limit:
        for row in (rows.lengths > max(limit - room, -1)).nonzero().flatten().tolist():
            problems[row] = too_long(int(rows.lengths[row]))
    return problems


def outside_vocabulary(ids: Tensor, vocab_size: int) -> bool:
    """Return whether an id is outside ``[0, vocab_size)``."""
    low, high = value_range(ids)
    return not 0 <= low <= high < vocab_size


# Sampling parameters -------------------------------------------------------------------------------------------------


def sampling_is_honoured(sampling: SamplingParams, capabilities: Capabilities, backend: str) -> None:
    """Check that the engine honours every sampling parameter in force.

    Raises:
        CapabilityError: the engine does not declare a parameter, or one of them has no meaning in a beam search.
        InvalidRequestError: a value is outside the range that the engine declares, or a stop id outside the vocabulary.
    """
    for name, value in sampling.engine_parameters().items():
        if name not in capabilities.sampling:
            known = ", ".join(sorted(capabilities.sampling)) or "none"
            raise CapabilityError(
                f"backend {backend!r} does not honour {name}={shown(value)}; it honours: {known}", capability=name
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
    if sampling.num_beams > 1:
        names: list[str] = [name for name in ("top_k", "top_p", "min_p") if name in sampling.engine_parameters()]
        # 1 is the default, which a caller may have left alone.
        names += [] if sampling.temperature in (0.0, 1.0) else ["temperature"]
        if names:
            raise CapabilityError(
                f"beam search does not sample, so {', '.join(names)} would have no effect; drop {', '.join(names)} or "
                "num_beams",
                capability=names[0],
            )


def stop_strings_can_match(sampling: SamplingParams, tokenizer: Any) -> None:
    """Refuse a stop string that contains a special token while special tokens are left out of the text.

    Raises:
        InvalidRequestError: such a stop string could never be found; `field` is `stop`.
    """
    if not (sampling.stop and sampling.skip_special_tokens):
        return
    specials = skipped_texts(tokenizer)
    for stop in sampling.stop:
        if any(special in stop for special in specials):
            raise InvalidRequestError(
                f"stop: {shown(stop)} contains a special token, and special tokens are left out of the text; give its "
                "id in stop_token_ids, or skip_special_tokens=False",
                field="stop",
            )


# Log-probs -----------------------------------------------------------------------------------------------------------


def generation_mode(
    wanted: Literal["none", "raw", "processed"],
    sampling: SamplingParams,
    capabilities: Capabilities,
    backend: str,
    with_support: bool = False,
) -> Literal["none", "raw", "processed"]:
    """Return the mode to request from the engine: `wanted`, or the other one if both give the same numbers.

    Args:
        with_support: whether the engine is asked for the ids that truncation has left as well.

    Raises:
        CapabilityError: the engine cannot return `wanted`, and none of its modes equals it here.
    """
    one_of("logprobs", wanted, ("none", "raw", "processed"))
    if wanted == "none":
        return wanted
    if sampling.num_beams > 1:
        raise CapabilityError(
            "beam search does not sample token by token, so its tokens have no log-probs; give the policy "
            "return_log_probs=False, or backend.generate logprobs='none'",
            capability="num_beams",
        )
    if wanted in capabilities.generation_modes:
        return wanted
    if "scaled" in capabilities.generation_modes and scaled_is(wanted, sampling, with_support):
        return wanted
    other: Mode = "processed" if wanted == "raw" else "raw"
    if untouched(sampling) and other in capabilities.generation_modes:
        return other
    modes = ", ".join(sorted(capabilities.generation_modes)) or "none"
    raise CapabilityError(
        f"backend {backend!r} returns no {wanted} log-probs with these sampling parameters (its modes: {modes}); at "
        "temperature 1 without truncation and penalties, raw and processed log-probs are the same",
        capability="generation_modes",
    )


def untouched(sampling: SamplingParams) -> bool:
    """Return whether tokens are drawn from the model's own distribution: raw and processed log-probs are then equal."""
    return sampling.temperature == 1.0 and not (sampling.truncates_support or sampling.penalties)


def scaled_is(mode: Mode, sampling: SamplingParams, with_support: bool = False) -> bool:
    """Return whether an engine with `scaled` log-probs has those of `mode`.

    Scaled log-probs are those of the logits divided by the temperature, or by 1 in greedy decoding. Those after
    truncation are these minus the log of the mass that truncation has left, which comes with the kept ids.
    """
    if _reshapes(sampling):
        # Engines differ in whether penalties and forbidden ids are applied before or after they compute the number.
        return False
    if mode == "raw":
        return sampling.temperature in (0.0, 1.0)
    return sampling.temperature > 0.0 and (with_support or not sampling.truncates)


def _reshapes(sampling: SamplingParams) -> bool:
    """Return whether anything other than temperature and truncation changes the distribution."""
    return bool(sampling.penalties or sampling.min_new_tokens or sampling.engine_kwargs)

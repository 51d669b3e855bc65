"""What is checked before a hook is called and after it has answered: once, here, for every plugin.

The functions ending in `_problems` return ``{row: what is wrong}``, so that the caller may refuse all of them
together or serve the others. Everything else raises.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from corelm.errors import CapabilityError, InvalidRequestError, Problems
from corelm.spec.capabilities import Capabilities
from corelm.spec.provenance import Mode
from corelm.spec.sampling import SamplingParams
from corelm.tensors.ragged import Ragged

# Before -------------------------------------------------------------------------------------------------------------


def sequence_problems(rows: Ragged, capabilities: Capabilities, *, may_be_empty: bool, room: int = 0) -> Problems:
    """Ids outside the vocabulary, rows without a token, rows too long to leave `room` tokens of the context."""
    problems: Problems = {}
    if outside_vocabulary(rows.values, capabilities.vocab_size):
        outside = (rows.values < 0) | (rows.values >= capabilities.vocab_size)
        for index in outside.nonzero().flatten().tolist()[::-1]:
            row, position = int(rows.row_index[index]), int(rows.positions[index])
            found, size = int(rows.values[index]), capabilities.vocab_size
            problems[row] = f"id {found} at position {position} is outside the vocabulary of {size}"
    shortest, longest = value_range(rows.lengths)
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


def stop_strings_can_match(sampling: SamplingParams, tokenizer: Any) -> None:
    """Refuse a stop string that contains a special token while special tokens are left out of the text.

    Raises:
        InvalidRequestError: such a stop string could never be found; `field` is `stop`.
    """
    if not (sampling.stop and sampling.skip_special_tokens):
        return
    specials = getattr(tokenizer, "all_special_tokens", ())
    for stop in sampling.stop:
        if any(special in stop for special in specials):
            raise InvalidRequestError(
                f"stop: {stop!r} contains a special token, and special tokens are left out of the text; give its id "
                "in stop_token_ids, or skip_special_tokens=False",
                field="stop",
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
    return sampling.temperature == 1.0 and not (sampling.truncates_support or sampling.penalties)


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


def outside_vocabulary(ids: Tensor, vocab_size: int) -> bool:
    low, high = value_range(ids)
    return not 0 <= low <= high < vocab_size


def value_range(values: Tensor) -> tuple[float, float]:
    """The least and the greatest; NaN if there is one, 0 of nothing."""
    if not values.numel():
        return 0, 0
    low, high = values.aminmax()
    return low.item(), high.item()

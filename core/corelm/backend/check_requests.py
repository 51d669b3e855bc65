"""Check a request before its hook is called: its rows, its sampling parameters, and the log-probs it asks for.

Core does this for every plugin. Functions that end in `_problems` return ``{row: what is wrong}``, so that the caller
can refuse all bad rows together or skip them. The other functions raise.
"""

from __future__ import annotations

from typing import Literal

from corelm.backend.engine import OpenEngine
from corelm.errors import CapabilityError, InvalidRequestError, Problems
from corelm.spec.answer_text import skipped_texts
from corelm.spec.capabilities import Capabilities
from corelm.spec.provenance import Mode
from corelm.spec.sampling import SamplingParams
from corelm.tensors.ragged import Ragged
from corelm.validate import invalid, one_of, shown

_DEFAULT_MAX_NEW_TOKENS = SamplingParams().max_new_tokens

# Rows ----------------------------------------------------------------------------------------------------------------


def row_problems(rows: Ragged, capabilities: Capabilities, sampling: SamplingParams | None = None) -> Problems:
    """Return the rows with ids outside the vocabulary, without tokens, or without room in the context.

    Args:
        sampling: what the rows are prompts for, which must leave room for the answer; None for rows to score.
    """
    may_be_empty, room = sampling is not None and capabilities.empty_prompt, 0
    if sampling is not None:
        # Without a limit the answer fills the context, so there must be room for at least one token.
        room = 1 if sampling.max_new_tokens is None else sampling.max_new_tokens
    limit, size, lengths = capabilities.max_context, capabilities.vocab_size, rows.lengths.tolist()
    outside = (rows.values < 0) | (rows.values >= size)
    too_long = limit is not None and max(lengths, default=0) + room > limit
    if not (too_long or bool(outside.any())) and (may_be_empty or 0 not in lengths):
        return {}
    problems: Problems = {}
    # In reverse, so that the first bad id of a row is reported.
    for index in outside.nonzero().flatten().tolist()[::-1]:
        row, position, found = (int(each[index]) for each in (rows.row_index, rows.positions, rows.values))
        problems[row] = f"id {found} at position {position} is outside the vocabulary of {size}"
    for row, length in enumerate(lengths):
        if not (length or may_be_empty):
            problems[row] = "has no tokens; give at least one"
        elif limit is not None and length + room > limit:
            problems[row] = _too_long(length, limit, sampling)
    return problems


def _too_long(tokens: int, limit: int, sampling: SamplingParams | None) -> str:
    if sampling is None:
        return f"{tokens} tokens do not fit the context of {limit}; shorten it"
    new, left = sampling.max_new_tokens, limit - tokens
    shorter = "shorten the prompt, or give the policy truncation='left', which drops its first tokens"
    if new is None or left < 1:
        answer = "an answer" if new is None else f"an answer of max_new_tokens={new}"
        return f"{tokens} tokens leave no room for {answer} in the context of {limit}; {shorter}"
    default = f" ({new} is the default)" if new == _DEFAULT_MAX_NEW_TOKENS else ""
    return (
        f"{tokens} tokens and max_new_tokens={new}{default} do not fit the context of {limit}; give max_new_tokens="
        f"{left} or less, or {shorter}"
    )


# Sampling parameters -------------------------------------------------------------------------------------------------


def sampling_is_honoured(sampling: SamplingParams, engine: OpenEngine) -> None:
    """Refuse a sampling parameter that the engine does not honour, or that could have no effect."""
    capabilities, given = engine.capabilities, sampling.engine_parameters()
    for name, value in given.items():
        if name not in capabilities.sampling:
            known = ", ".join(sorted(capabilities.sampling)) or "none"
            raise CapabilityError(
                f"backend {engine.name!r} does not honour {name}={shown(value)}; it honours: {known}", capability=name
            )
        legal = capabilities.sampling[name]
        if legal is not None and not legal[0] <= value <= legal[1]:
            raise InvalidRequestError(
                f"sampling parameter {name!r}: backend {engine.name!r} takes {legal[0]} to {legal[1]}, got {value}",
                field=name,
            )
    for token in sampling.stop_token_ids:
        if token >= capabilities.vocab_size:
            raise invalid("stop_token_ids", f"{token} is outside the vocabulary of {capabilities.vocab_size}")
    if sampling.stop and sampling.skip_special_tokens:
        specials = skipped_texts(engine.tokenizer)
        for stop in sampling.stop:
            if any(special in stop for special in specials):
                raise invalid(
                    "stop",
                    f"{shown(stop)} contains a special token, and special tokens are left out of the text; give its id "
                    "in stop_token_ids, or skip_special_tokens=False",
                )
    if sampling.num_beams > 1:
        # A temperature of 1 is the default, which a caller may have left alone.
        drawn = [name for name in ("top_k", "top_p", "min_p", "temperature") if name in given and given[name] != 0.0]
        if drawn:
            names = ", ".join(drawn)
            raise CapabilityError(
                f"beam search does not sample, so {names} would have no effect; drop {names} or num_beams",
                capability=drawn[0],
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
    if not isinstance(wanted, str) or wanted not in ("none", "raw", "processed"):
        one_of("logprobs", wanted, ("none", "raw", "processed"))
    if wanted == "none":
        return wanted
    if sampling.num_beams > 1:
        raise CapabilityError(
            "beam search does not sample token by token, so its tokens have no log-probs; give the policy "
            "return_log_probs=False, or backend.generate logprobs='none'",
            capability="num_beams",
        )
    modes = capabilities.generation_modes
    if wanted in modes or ("scaled" in modes and _scaled_is(wanted, sampling, with_support)):
        return wanted
    other: Mode = "processed" if wanted == "raw" else "raw"
    if other in modes and sampling.temperature == 1.0 and not (sampling.truncates_support or sampling.penalties):
        # Tokens are drawn from the model's own distribution.
        return other
    raise CapabilityError(
        f"backend {backend!r} returns no {wanted} log-probs with these sampling parameters (its modes: "
        f"{', '.join(sorted(modes)) or 'none'}); at temperature 1 without truncation and penalties, raw and processed "
        "log-probs are the same",
        capability="generation_modes",
    )


def _scaled_is(mode: Mode, sampling: SamplingParams, with_support: bool) -> bool:
    """Return whether an engine with `scaled` log-probs has those of `mode`.

    Scaled log-probs are those of the logits divided by the temperature, or by 1 in greedy decoding. Those after
    truncation are these minus the log of the mass that truncation has left, which comes with the kept ids.
    """
    if sampling.penalties or sampling.min_new_tokens or sampling.engine_kwargs:
        # Engines differ in whether penalties and forbidden ids are applied before or after they compute the number.
        return False
    if mode == "raw":
        return sampling.temperature in (0.0, 1.0)
    return sampling.temperature > 0.0 and (with_support or not sampling.truncates)

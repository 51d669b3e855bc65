"""Translate `SamplingParams` into SGLang's sampling parameters, and refuse those that it would change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from corelm.errors import CapabilityError
from corelm.spec import Range, SamplingParams, stops_without_specials
from corelm.validate import invalid
from corelm_engine_kit import refuse_settled

#: The sampling parameters that SGLang honours, each with its legal range, or None for the range of `SamplingParams`.
#: `repetition_penalty` is missing: SGLang applies it to ids of the answer only, not to those of the prompt.
HONOURED: dict[str, Range | None] = {
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "min_p": None,
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "min_new_tokens": None,
    "stop": None,
    "engine_kwargs": None,
}

#: The lowest temperature above 0. SGLang silently decodes greedily below it.
COLDEST = 1e-6
#: The most stop strings that a request may have. `protocol` finds the others.
MAX_STOP_STRINGS = 32
#: Fields that engine_kwargs may not hold, in addition to corelm's own names: the plugin decides what SGLang returns.
SETTLED = frozenset({"beam_width", "no_stop_trim", "sampling_seed", "stop_regex", "stream_interval"})


def parameters(
    sampling: SamplingParams,
    *,
    max_new_tokens: int,
    seed: int | None,
    stop_ids: frozenset[int],
    eos_token_ids: frozenset[int],
    vocab_size: int,
    stop: Sequence[str],
    top_k: int | None = None,
) -> dict[str, Any]:
    """Return all of `sampling` for one answer. Defaults are included, since a server may have different ones.

    The server either ends an answer at its own EOS and at `stop_ids`, or at no id. Where neither gives what was asked
    for, the server is told to go on, and `protocol` cuts the answer off at its end.

    Args:
        eos_token_ids: the ids that the server ends every answer with, unless it is told to ignore them.
        stop: the stop strings that the server may look for; see `safe_stops`.
        top_k: the top_k to send, if another one than that of `sampling`; see `kept.top_k_of`.
    """
    _check(sampling, stop_ids, eos_token_ids)
    refuse_settled(sampling.engine_kwargs, SETTLED)
    ends_by_id = bool(stop_ids) and eos_token_ids <= stop_ids
    # Greedy decoding draws nothing, so truncation has no effect.
    truncation = SamplingParams() if sampling.greedy else sampling
    # SGLang draws in another order if a row of the batch is truncated, greedy or only scored, so that a seed would give
    # another answer. A seeded row asks for the whole vocabulary, so that it is always drawn in that order.
    everything = -1 if seed is None else vocab_size
    if top_k is None:
        # A top_k that does not fit into 32 bits ends the server's scheduler.
        top_k = everything if truncation.top_k is None else min(truncation.top_k, vocab_size)
    return {
        "n": 1,
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": min(sampling.min_new_tokens, max_new_tokens) if ends_by_id else 0,
        "temperature": sampling.temperature,
        "top_k": top_k,
        "top_p": truncation.top_p,
        "min_p": truncation.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": list(stop),
        "stop_token_ids": sorted(stop_ids) if ends_by_id else [],
        "ignore_eos": not ends_by_id,
        "skip_special_tokens": sampling.skip_special_tokens,
        **({} if seed is None else {"sampling_seed": seed}),
        **sampling.engine_kwargs,
    }


def safe_stops(sampling: SamplingParams, tokenizer: Any) -> tuple[str, ...]:
    """Return the stop strings that the server may look for. `protocol` finds all of them in the answer.

    The server does not hold a stop string back until `min_new_tokens`. It also looks for it in a text with all special
    tokens, even if the text of the answer has none, and so would stop for one that is a piece of a special token.
    """
    if sampling.min_new_tokens:
        return ()
    return stops_without_specials(sampling, tokenizer)[:MAX_STOP_STRINGS]


def _check(sampling: SamplingParams, stop_ids: frozenset[int], eos_token_ids: frozenset[int]) -> None:
    """Refuse combinations for which SGLang would sample from another distribution, and values that it would change."""
    if sampling.top_k is not None and sampling.top_p < 1.0 and not sampling.greedy:
        raise CapabilityError(
            "SGLang applies top_p to the probabilities of all tokens, but corelm promises those that top_k has kept, "
            "renormalised; give one of them",
            capability="top_p",
        )
    if sampling.min_new_tokens and stop_ids and not eos_token_ids <= stop_ids:
        raise CapabilityError(
            "SGLang forbids EOS before min_new_tokens even if ignore_eos makes it a token like any other; leave out "
            "min_new_tokens or ignore_eos",
            capability="min_new_tokens",
        )
    if 0 < sampling.temperature < COLDEST:
        raise invalid(
            "temperature", f"SGLang would decode greedily at {sampling.temperature}; give 0 or at least {COLDEST}"
        )

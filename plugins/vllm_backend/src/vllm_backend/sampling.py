"""Sampling parameters under vLLM's names, those that its `SamplingParams` and its server's requests have in common."""

from __future__ import annotations

from typing import Any

from corelm.errors import CapabilityError, InvalidRequestError
from corelm.spec import ALIASES, FIELDS, Range, SamplingParams

#: The lowest temperature above 0. vLLM raises anything between to this one, and says nothing.
COLDEST = 0.01

#: Sampling parameters honoured, each with its legal range or None for the range that `SamplingParams` itself allows.
HONOURED: dict[str, Range | None] = {
    "temperature": (0.0, 2.0),
    "top_p": None,
    "top_k": None,
    "min_p": None,
    "repetition_penalty": None,
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "min_new_tokens": None,
    "stop": None,
    "engine_kwargs": None,
}

#: What engine_kwargs may not hold, beside the names of core: what is returned, and how, is settled already.
SETTLED = frozenset(
    {
        "detokenize",
        "flat_logprobs",
        "include_stop_str_in_output",
        "logprob_token_ids",
        "logprobs",
        "output_kind",
        "prompt_logprob_start",
        "prompt_logprob_token_ids",
        "prompt_logprobs",
        "skip_clone",
        "skip_reading_prefix_cache",
        "stream",
        "stream_interval",
        "trace_decode_token_ids",
    }
)


def parameters(sampling: SamplingParams, stop_ids: frozenset[int], max_tokens: int, seed: int | None) -> dict[str, Any]:
    """All of `sampling` for one answer of at most `max_tokens`, defaults included: a server has others of its own.

    Core has put EOS among `stop_ids`, so vLLM's own handling of it is switched off.

    Raises:
        CapabilityError: top-p and min-p together. vLLM cuts by min-p first, which leaves another distribution.
        InvalidRequestError: a temperature that vLLM would change; engine_kwargs that say again what is said already.
    """
    if sampling.min_p > 0 and sampling.top_p < 1:
        raise CapabilityError(
            "vLLM applies min_p before top_p, and renormalises in between, where corelm promises top_p first; "
            "give one of them",
            capability="min_p",
        )
    if 0 < sampling.temperature < COLDEST:
        raise InvalidRequestError(
            f"temperature: vLLM would make {COLDEST} of {sampling.temperature}; give 0 or at least {COLDEST}",
            field="temperature",
        )
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "min_tokens": sampling.min_new_tokens,
        "max_tokens": max_tokens,
        "stop": list(sampling.stop),
        "stop_token_ids": sorted(stop_ids),
        "ignore_eos": True,
        "skip_special_tokens": sampling.skip_special_tokens,
        # Nothing is drawn at temperature 0.
        "seed": None if sampling.greedy else seed,
        **_extras(sampling),
    }


def _extras(sampling: SamplingParams) -> dict[str, Any]:
    for name in sampling.engine_kwargs:
        ours = ALIASES.get(name, name)
        if ours in FIELDS or name in SETTLED:
            hint = f"give it as {ours}" if ours in FIELDS else "corelm decides it"
            raise InvalidRequestError(f"engine_kwargs: {name!r} does not belong here; {hint}", field="engine_kwargs")
    return dict(sampling.engine_kwargs)

"""Sampling parameters under SGLang's names, and which of core's promises its server can keep."""

from __future__ import annotations

from typing import Any

from corelm.errors import CapabilityError, InvalidRequestError
from corelm.spec import ALIASES, FIELDS, Range, SamplingParams

#: Sampling parameters honoured, each with its legal range or None for the range that `SamplingParams` itself allows.
#: Not among them: `repetition_penalty`, which SGLang takes from the answer's ids alone and not from the prompt's.
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

#: Below this SGLang decodes greedily, and says nothing.
COLDEST = 1e-6
#: The most stop strings a request may have.
MOST_STOPS = 32
#: What engine_kwargs may not hold, beside the names of core: what is returned, and how, is settled already.
SETTLED = frozenset({"beam_width", "no_stop_trim", "sampling_seed", "stop_regex", "stream_interval"})


def parameters(
    sampling: SamplingParams,
    *,
    max_new_tokens: int,
    seed: int | None,
    stop_ids: frozenset[int],
    eos_token_ids: frozenset[int],
    vocab_size: int,
) -> dict[str, Any]:
    """All of `sampling` for one answer, defaults included: a server may have others of its own.

    The server ends an answer at its own EOS and at `stop_ids`, or at no id at all; `min_new_tokens` does not hold its
    stop strings back. Where that is not what was asked for, it is told to go on, and `ending.cut` ends the answer.

    Args:
        stop_ids: what ends this answer. eos_token_ids: what the server ends any answer with.

    Raises:
        CapabilityError: a combination that SGLang would sample another distribution for.
        InvalidRequestError: a temperature that SGLang would change; engine_kwargs that say again what is said already.
    """
    _check(sampling, stop_ids, eos_token_ids)
    ends_by_id = bool(stop_ids) and eos_token_ids <= stop_ids
    # At temperature 0 nothing is drawn, and nothing is to be cut off.
    cut = SamplingParams() if sampling.greedy else sampling
    return {
        "n": 1,
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": min(sampling.min_new_tokens, max_new_tokens) if ends_by_id else 0,
        "temperature": sampling.temperature,
        # The server's scheduler cannot hold a larger number.
        "top_k": -1 if cut.top_k is None else min(cut.top_k, vocab_size),
        "top_p": cut.top_p,
        "min_p": cut.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": [] if sampling.min_new_tokens else list(sampling.stop[:MOST_STOPS]),
        "stop_token_ids": sorted(stop_ids) if ends_by_id else [],
        "ignore_eos": not ends_by_id,
        "skip_special_tokens": sampling.skip_special_tokens,
        **({} if seed is None else {"sampling_seed": seed}),
        **_extras(sampling),
    }


def _check(sampling: SamplingParams, stop_ids: frozenset[int], eos_token_ids: frozenset[int]) -> None:
    if sampling.top_k is not None and sampling.top_p < 1.0 and not sampling.greedy:
        raise CapabilityError(
            "SGLang measures top_p against all tokens and not against what top_k has left, as corelm promises; "
            "give one of them",
            capability="top_p",
        )
    if sampling.min_new_tokens and stop_ids and not eos_token_ids <= stop_ids:
        raise CapabilityError(
            "SGLang keeps EOS from being sampled before min_new_tokens, also where it is to be a token like any other; "
            "leave out min_new_tokens or ignore_eos",
            capability="min_new_tokens",
        )
    if 0 < sampling.temperature < COLDEST:
        raise InvalidRequestError(
            f"temperature: SGLang would decode greedily at {sampling.temperature}; give 0 or at least {COLDEST}",
            field="temperature",
        )


def _extras(sampling: SamplingParams) -> dict[str, Any]:
    for name in sampling.engine_kwargs:
        ours = ALIASES.get(name, name)
        if ours in FIELDS or name in SETTLED:
            hint = f"give it as {ours}" if ours in FIELDS else "corelm decides it"
            raise InvalidRequestError(f"engine_kwargs: {name!r} does not belong here; {hint}", field="engine_kwargs")
    return dict(sampling.engine_kwargs)

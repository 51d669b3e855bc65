"""Translate `SamplingParams` into the fields of a completion request, and refuse what the server would change.

A server ignores fields that it does not know. So a parameter is declared only if `probing` has seen it work, or the
caller says so (`honours=`).
"""

from __future__ import annotations

from typing import Any

from corelm.errors import CapabilityError, InvalidRequestError
from corelm.spec import GenerateRequest, Range, SamplingParams, stops_without_specials
from openai_backend.server_info import ServerInfo

#: The range of temperatures in the protocol, and the lowest one above 0: servers raise lower ones, or decode greedily.
HOTTEST, COLDEST = 2.0, 0.01
#: The parameters that a caller may vouch for, with their ranges, and their names in requests.
VOUCHED: dict[str, tuple[Range | None, str]] = {
    "presence_penalty": ((-2.0, 2.0), "presence_penalty"),
    "frequency_penalty": ((-2.0, 2.0), "frequency_penalty"),
    "repetition_penalty": (None, "repetition_penalty"),
    "top_k": (None, "top_k"),
    "min_p": (None, "min_p"),
    "min_new_tokens": (None, "min_tokens"),
}
#: The parameters of the protocol that are tried.
PENALTIES = ("presence_penalty", "frequency_penalty")
#: Fields for which a server may have defaults that change the distribution, at the values that change nothing. They are
#: sent to servers that do not refuse them.
NEUTRAL: dict[str, Any] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


def parameters(request: GenerateRequest, info: ServerInfo, limit: int, seed: int | None) -> dict[str, Any]:
    """Return the fields for one answer.

    Args:
        request: the call.
        info: what the server can do.
        limit: the most tokens of the answer.
        seed: the answer's seed, or None.
    """
    sampling = request.sampling
    fields: dict[str, Any] = {"max_tokens": limit, "temperature": sampling.temperature, "top_p": sampling.top_p}
    for name in VOUCHED.keys() & sampling.engine_parameters().keys():
        fields[VOUCHED[name][1]] = getattr(sampling, name)
    if sampling.greedy:
        # Greedy decoding draws nothing, so truncation has no effect.
        fields["top_p"] = 1.0
    elif seed is not None:
        fields["seed"] = seed
    # A server that is told all stop ids needs not know which of them is its own EOS.
    if info.ignores_eos and (info.stops_at_ids or not info.eos_token_ids <= request.stop_ids):
        fields["ignore_eos"] = True
    if info.stops_at_ids:
        fields["stop_token_ids"] = sorted(request.stop_ids)
    # `protocol` finds all stop strings in the answer, those that the server is not told as well.
    stops = stops_without_specials(sampling, info.tokenizer)[: info.most_stops]
    if info.stops_at_strings and stops and not sampling.min_new_tokens:
        fields["stop"] = list(stops)
    return fields


def check(request: GenerateRequest, info: ServerInfo) -> None:
    """Refuse a request that the server would serve differently.

    Raises:
        CapabilityError: what the server cannot do. InvalidRequestError: a temperature that it would change.
    """
    sampling = request.sampling
    if not sampling.greedy and not info.samples:
        raise CapabilityError(
            "the server answers greedily at every temperature; give temperature=0, or have it sample with a field that "
            "every request carries (extra_body=)",
            capability="temperature",
        )
    if 0 < sampling.temperature < COLDEST:
        raise InvalidRequestError(
            f"temperature: servers raise {sampling.temperature} or decode greedily; give 0 or at least {COLDEST}",
            field="temperature",
        )
    if len([name for name in ("top_k", "top_p", "min_p") if name in sampling.engine_parameters()]) > 1:
        raise CapabilityError(
            "servers apply top_k, top_p and min_p in different orders; give one of them", capability="top_p"
        )
    _check_ends(request, info)
    if request.logprobs != "none":
        _check_logprobs(sampling, info)


def _check_ends(request: GenerateRequest, info: ServerInfo) -> None:
    """Refuse ends of answers that neither the server nor this plugin can bring about."""
    if not info.ignores_eos and not info.eos_token_ids <= request.stop_ids:
        raise CapabilityError(
            "the server ends every answer at EOS, and was not seen to honour ignore_eos; leave it out",
            capability="ignore_eos",
        )
    if info.naming is None and not info.states_ids and not request.stop_ids <= info.eos_token_ids:
        raise CapabilityError(
            "the server does not say which ids it sampled, so that an answer cannot end with one of stop_token_ids; "
            "give stop",
            capability="stop_token_ids",
        )
    if request.sampling.min_new_tokens and not info.stops_at_ids and not request.stop_ids <= info.eos_token_ids:
        raise CapabilityError(
            "the server does not know the stop ids, so it cannot hold them back; leave out min_new_tokens",
            capability="min_new_tokens",
        )


def _check_logprobs(sampling: SamplingParams, info: ServerInfo) -> None:
    """Refuse log-probs of a distribution that was not tried."""
    given = sampling.engine_parameters()
    touched = [name for name in given if name in ("temperature", "top_p", "top_k", "min_p")]
    if info.logprobs == "untouched" and touched:
        raise CapabilityError(
            f"it could not be found out whether the server's log-probs are the model's own with {touched[0]}; give "
            "temperature=1 and no truncation, or logprobs='none'",
            capability="generation_modes",
        )
    untried = sorted((VOUCHED.keys() & given.keys()) - info.tried - {"top_k", "min_p"})
    if untried:
        raise CapabilityError(
            f"it is not known whether the server's log-probs include {', '.join(untried)}; leave it out, or ask for "
            "logprobs='none'",
            capability="generation_modes",
        )

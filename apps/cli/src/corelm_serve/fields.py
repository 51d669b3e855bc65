"""The fields of a request body: each is read, accepted because it changes no answer, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from corelm.errors import brief
from corelm.spec import SamplingParams
from corelm.spec.sampling import LARGEST
from corelm.validate import count, did_you_mean, flag, invalid, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """The body of a request, checked: the model that the client names, and how to sample."""

    model: str | None
    sampling: SamplingParams


#: What a client may tell about itself. It changes no answer and is not kept.
METADATA = frozenset({"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
#: How to sample, under the names of the protocol and of `SamplingParams`.
SAMPLING = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    }
)
#: Fields of the protocol that may only have the value that changes nothing, and what to do otherwise.
NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "logit_bias": (({},), "it would change the distribution that log-probs are of; leave it out"),
    "response_format": (({"type": "text"},), 'answers are not constrained; give {"type": "text"} or leave it out'),
    "service_tier": (("auto", "default"), 'give "auto" or leave it out'),
    "modalities": ((["text"],), 'answers are texts; give ["text"] or leave it out'),
    "parallel_tool_calls": ((True,), "a model calls as many tools as it likes; give true or leave it out"),
    "functions": (([],), "give tools instead"),
    "function_call": (("none", "auto"), "give tool_choice instead"),
    "best_of": ((1,), "give n and choose"),
    "suffix": (("",), "nothing is inserted into a text; leave it out"),
    "reasoning_effort": ((), "give chat_template_kwargs with the variable that the model's template reads"),
    "verbosity": ((), "leave it out"),
    "prediction": ((), "leave it out"),
    "audio": ((), "answers are texts; leave it out"),
    "web_search_options": ((), "the server searches nothing; give tools"),
}
#: Fields that only one path reads, which are sent to another one by mistake.
_PATHS = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "prompt_token_ids": "/v1/tokens",
}
#: The largest number of answers to one prompt, as in the protocol.
MOST_SAMPLES = 128


def parsed(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body, without the fields that are null: the protocol takes null for "not given".

    Raises:
        InvalidRequestError: the body is not a JSON object.
    """
    try:
        found = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise invalid("body", f"expected a JSON object, got what is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise invalid("body", f"expected a JSON object, got {shown(found)}")
    return {name: value for name, value in found.items() if value is not None}


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def check_names(given: Mapping[str, Any], known: Collection[str], where: str = "") -> None:
    """Refuse fields that would be ignored.

    Args:
        where: the object that holds the fields, if that is not the body: ``"messages[0]"``.

    Raises:
        InvalidRequestError: a field that is neither read nor without effect; `field` names it.
    """
    for name, value in given.items():
        if name in known or (not where and name in METADATA):
            continue
        if not where and name in NEUTRAL:
            legal, advice = NEUTRAL[name]
            # An int equals a bool, and 1 is not true.
            if any(value == each and type(value) is type(each) for each in legal):
                continue
            raise invalid(name, f"{shown(value)} is not supported: {advice}")
        if not where and (path := _PATHS.get(name)):
            raise invalid(name, f"this path does not read it; send it to {path}")
        # A client may send any text as a name, however long.
        field = brief(f"{where}.{name}" if where else name)
        raise invalid(field, f"the server does not know this field{did_you_mean(name, known) or '; leave it out'}")


def sampling_of(given: Mapping[str, Any], *, default_max_tokens: int | None) -> SamplingParams:
    """Return how to sample. `num_samples` is the protocol's `n`.

    Args:
        default_max_tokens: the length limit of an answer if the request sets none; None fills the context.

    Raises:
        InvalidRequestError: an illegal value; `field` is the name that the client typed.
    """
    longest = {name: count(name, given[name], 1, LARGEST) for name in LENGTHS if name in given}
    if len({*longest.values()}) > 1:
        raise invalid("max_tokens", f"it and max_completion_tokens differ: {longest}; give one of them")
    samples = count("n", given.get("n", 1), 1, MOST_SAMPLES)
    least = count("min_tokens", given.get("min_tokens", 0), 0, LARGEST)
    most = next(iter(longest.values()), default_max_tokens)
    if most is not None and least > most:
        raise invalid("min_tokens", f"{least} is more than max_tokens={most}")
    return SamplingParams(
        **{name: given[name] for name in SAMPLING if name in given},
        max_new_tokens=most,
        min_new_tokens=least,
        num_samples=samples,
    )


#: The fields that limit the length of an answer.
LENGTHS = ("max_tokens", "max_completion_tokens")


def streaming_of(given: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether to stream, and whether to end the stream with the usage."""
    stream = flag("stream", given.get("stream", False))
    options = given.get("stream_options")
    if options is None:
        return stream, False
    if not stream:
        raise invalid("stream_options", "they belong to streams; give stream=true, or leave them out")
    if not isinstance(options, dict):
        raise invalid("stream_options", f"expected an object, got {shown(options)}")
    check_names(options, ("include_usage", "include_obfuscation"), "stream_options")
    if options.get("include_obfuscation"):
        raise invalid("stream_options.include_obfuscation", "events are not padded; give false or leave it out")
    return stream, flag("stream_options.include_usage", options.get("include_usage") or False)


def model_of(given: Mapping[str, Any]) -> str | None:
    """Return the model that the client names; None if it names none."""
    name = given.get("model")
    if name is not None and not isinstance(name, str):
        raise invalid("model", f"expected a text, got {shown(name)}")
    return name

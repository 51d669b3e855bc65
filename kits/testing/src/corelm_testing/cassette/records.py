"""What a cassette holds of the records of the hooks: of a request, what decides about its answer; of a result, all."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from corelm.errors import CoreLMError, EngineError, described, error_from, plain_error
from corelm.spec import FIELDS, GenerateResult, SamplingParams, ScoreResult, TokenChunk, TokenizeResult, WeightUpdate
from corelm.validate import invalid, shown
from corelm_engine_kit.redaction import MASK, is_secret
from corelm_testing.cassette.errors import CassetteError
from corelm_testing.cassette.values import as_json, from_json

#: The hooks whose calls come in an order.
ORDERED = ("generate", "score_logprobs", "update_weights", "sleep", "wake")
#: What of a request decides about its answer. Names of requests, time limits and listeners do not.
_DECIDING = {
    "tokenize": ("texts", "add_special_tokens", "parse_special", "offsets"),
    "generate": (
        *("prompts", "sampling", "logprobs", "seeds", "stop_ids"),
        *("adapter", "return_support", "top_logprobs"),
    ),
    "score_logprobs": (
        *("sequences", "score_from", "temperature", "return_logits", "return_argmax"),
        *("adapter", "support", "top_k", "top_ids"),
    ),
    "sleep": ("level", "when"),
    "wake": ("tags", "last"),
    "abort": (),
}
_RESULTS: Mapping[str, type[Any]] = {
    "tokenize": TokenizeResult,
    "generate": GenerateResult,
    "score_logprobs": ScoreResult,
}
#: Fields that core sets.
_OF_CORE = ("adapter", "sampling")


def request_json(hook: str, request: Any, weights: str | None = None) -> dict[str, Any]:
    """Return what decides about the answer to a request.

    Args:
        weights: the fingerprint of new weights; None if there are none, or for another hook.

    Raises:
        InvalidRequestError: `engine_kwargs` hold something that cannot be written.
    """
    if isinstance(request, WeightUpdate):
        config = (
            None if request.adapter_config is None else json.loads(json.dumps(request.adapter_config, default=repr))
        )
        return {
            "version": request.version,
            "when": request.when,
            "adapter": request.adapter,
            "adapter_config": config,
            "weights": weights,
        }
    found = {}
    for name in _DECIDING[hook]:
        value = getattr(request, name)
        if name == "seeds" and request.sampling.greedy:
            # Nothing is drawn, and core sends other seeds each time.
            value = None
        found[name] = _sampling(value) if isinstance(value, SamplingParams) else as_json(value)
    return found


def result_json(hook: str, result: Any) -> Any:
    """Return a result as JSON.

    Raises:
        TypeError: it is not what the hook returns.
    """
    kind = _RESULTS.get(hook)
    if kind is None:
        return bool(result)
    if not isinstance(result, kind):
        raise TypeError(f"expected a {kind.__name__}, got a {type(result).__name__}")
    named = [each for each in fields(kind) if each.name not in _OF_CORE]
    values = {each.name: getattr(result, each.name) for each in named}
    # None is the default of fields that were not asked for. `logprobs` of answers has none.
    return {each.name: as_json(values[each.name]) for each in named if values[each.name] is not each.default}


def result_of(hook: str, form: Any) -> Any:
    """Return the result that `result_json` wrote.

    Raises:
        CassetteError: it is damaged, or has fields that this version of core does not know.
    """
    kind = _RESULTS.get(hook)
    if kind is None:
        return bool(form)
    try:
        return kind(**{name: from_json(value) for name, value in form.items()})
    except (AttributeError, TypeError, ValueError) as error:
        raise CassetteError(
            f"the result of a call of {hook} cannot be read: {described(error)}. It is damaged, or was recorded by "
            "another version of core; record it again"
        ) from error


def error_json(error: BaseException, backend: str, hook: str) -> dict[str, Any]:
    """Return an exception as JSON: of a class that will be known, the one that the caller gets from core."""
    kind, text, details = plain_error(error)
    known = type(error).__name__ == kind or isinstance(error, (CoreLMError, TimeoutError))
    if not (kind and known):
        # As core says it of an exception that it does not know.
        kind, text, details = EngineError.__name__, f"backend {backend!r}, hook {hook}: {described(error)}", {}
    return {"type": kind, "message": text, "details": as_json(details)}


def error_of(form: Mapping[str, Any]) -> Exception:
    """Return the exception that `error_json` wrote.

    Raises:
        CassetteError: it is damaged.
    """
    try:
        details = dict(form.get("details", {}))
        if "problems" in details:
            details["problems"] = {int(row): why for row, why in details["problems"].items()}
        error = error_from(form["type"], form["message"], **details)
    except (AttributeError, KeyError, TypeError, ValueError) as damage:
        raise CassetteError(f"a recorded error cannot be read: {described(damage)}") from damage
    return error or CoreLMError(f"{form['type']}: {form['message']}")


def chunk_json(chunk: TokenChunk) -> list[Any]:
    """Return a chunk as ``[row, ids, log-probs, finish reason]``. Log-probs are decimals that are exact as doubles."""
    logprobs = [value if math.isfinite(value) else str(value) for value in map(float, chunk.logprobs)]
    return [int(chunk.row), [int(token) for token in chunk.ids], logprobs, chunk.finish_reason]


def chunk_of(form: Any, row: int | None = None) -> TokenChunk:
    """Return the chunk that `chunk_json` wrote, of another row if one is given."""
    try:
        at, ids, logprobs, reason = form
        values = tuple(map(float, logprobs))
        return TokenChunk(row=at if row is None else row, ids=tuple(ids), logprobs=values, finish_reason=reason)
    except (TypeError, ValueError) as damage:
        raise CassetteError(f"recorded tokens of a stream cannot be read: {described(damage)}") from damage


def digest(value: Any) -> str:
    """Return a short name for a value of JSON types: equal values have equal names."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def _sampling(sampling: SamplingParams) -> dict[str, Any]:
    """Return the parameters that are not at their default, and two more. Seeds of answers follow from `seed`."""
    neutral, never = SamplingParams(), ("do_sample", "seed", "engine_kwargs")
    found = {
        name: as_json(getattr(sampling, name))
        for name in FIELDS
        if name in ("max_new_tokens", "temperature")
        or (name not in never and getattr(sampling, name) != getattr(neutral, name))
    }
    if sampling.engine_kwargs:
        found["engine_kwargs"] = {name: _own(name, value) for name, value in sampling.engine_kwargs.items()}
    return found


def _own(name: str, value: Any) -> Any:
    """Return a parameter of the engine, with a fingerprint in place of a secret."""

    def written(key: str, given: Any, inner: Callable[[Any], Any]) -> Any:
        return f"{MASK} {digest(repr(given))[:8]}" if is_secret(key, given) else inner(given)

    def walked(given: Any) -> Any:
        if isinstance(given, Mapping):
            return {str(key): written(str(key), each, walked) for key, each in given.items()}
        return [walked(each) for each in given] if isinstance(given, (list, tuple)) else given

    try:
        return json.loads(json.dumps(written(name, value, walked), allow_nan=False))
    except (TypeError, ValueError):
        raise invalid(
            "engine_kwargs",
            f"{name}={shown(value)} cannot be written to a cassette: give finite numbers, texts and lists",
        ) from None

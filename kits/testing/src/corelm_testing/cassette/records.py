"""What a cassette holds of the records of the hooks: of a request, what decides about its answer; of a result, all.

Values are written bit for bit; `docs/cassette-format.md` describes how. Whole numbers are written as numbers, so that a
person can read them and a program can search for them. Floats are written as the base64 of their bytes, little-endian:
a decimal fraction would have to be parsed to the last bit, and JSON has no infinity.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from corelm import Ragged, TokenSets
from corelm.errors import CoreLMError, EngineError, described, error_from, plain_error
from corelm.spec import (
    FIELDS,
    Adapter,
    GenerateResult,
    SamplingParams,
    ScoreResult,
    TokenChunk,
    TokenizeResult,
    WeightUpdate,
)
from corelm.validate import invalid, shown
from corelm_engine_kit.redaction import MASK, is_secret
from corelm_testing.cassette.file import CassetteError

#: What of a request decides about its answer. Names of requests, time limits and listeners do not.
_DECIDING = {
    "tokenize": "texts add_special_tokens parse_special offsets",
    "generate": "prompts sampling logprobs seeds stop_ids adapter return_support top_logprobs",
    "score_logprobs": "sequences score_from temperature return_logits return_argmax adapter support top_k top_ids",
    "sleep": "level when",
    "wake": "tags last",
    "abort": "",
}
_RESULTS: dict[str, type[Any]] = {"tokenize": TokenizeResult, "generate": GenerateResult, "score_logprobs": ScoreResult}
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
        config = json.loads(json.dumps(request.adapter_config, default=repr))
        named = {name: getattr(request, name) for name in ("version", "when", "adapter")}
        return {**named, "adapter_config": config, "weights": weights}
    found = {}
    for name in _DECIDING[hook].split():
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
    # None is the default of fields that were not asked for. `logprobs` of answers has none.
    return {
        each.name: as_json(value)
        for each in fields(kind)
        if each.name not in _OF_CORE and (value := getattr(result, each.name)) is not each.default
    }


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


def chunk_of(form: Any) -> TokenChunk:
    """Return the chunk that `chunk_json` wrote."""
    try:
        row, ids, logprobs, reason = form
        return TokenChunk(row=row, ids=tuple(ids), logprobs=tuple(map(float, logprobs)), finish_reason=reason)
    except (TypeError, ValueError) as damage:
        raise CassetteError(f"recorded tokens of a stream cannot be read: {described(damage)}") from damage


def digest(value: Any) -> str:
    """Return a short name for a value of JSON types: equal values have equal names."""
    return hash_of(json.dumps(value, sort_keys=True, separators=(",", ":")))


def hash_of(text: str, size: int = 16) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=size).hexdigest()


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


# Values ---------------------------------------------------------------------------------------------------------------


def as_json(value: Any) -> Any:
    """Return a value as what `json` can write.

    Raises:
        TypeError: the value, or one inside it, has no form in a cassette.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Ragged):
        if value.values.ndim == 1 and not value.values.is_floating_point():
            return {"dtype": _name(value.values.dtype), "rows": [_numbers(row) for row in value.to("cpu").split()]}
        return {"lengths": value.lengths.tolist(), "values": _tensor(value.values)}
    if isinstance(value, TokenSets):
        return {"sets": value.to("cpu").tolist()}
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, Mapping):
        return {str(key): as_json(each) for key, each in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(as_json, value))
    if isinstance(value, (list, tuple)):
        return [as_json(each) for each in value]
    raise TypeError(f"a {type(value).__name__} has no form in a cassette")


def from_json(value: Any) -> Any:
    """Return the value that `as_json` wrote. Sequences are tuples.

    Raises:
        ValueError: the value is damaged.
    """
    if isinstance(value, list):
        return tuple(map(from_json, value))
    if not isinstance(value, dict):
        return value
    try:
        if "rows" in value:
            return Ragged.from_list(value["rows"], dtype=_dtype(value["dtype"]))
        if "sets" in value:
            return TokenSets.from_list(value["sets"])
        if "lengths" in value:
            lengths = torch.tensor(value["lengths"], dtype=torch.int64)
            return Ragged(_tensor_from(value["values"]), lengths)
        if "dtype" in value:
            return _tensor_from(value)
    except (KeyError, TypeError, RuntimeError, binascii.Error) as error:
        raise ValueError(f"a value cannot be read: {error}") from error
    return {key: from_json(each) for key, each in value.items()}


def _tensor(tensor: Tensor) -> dict[str, Any]:
    plain = tensor.detach().cpu().contiguous()
    form: dict[str, Any] = {"dtype": _name(plain.dtype), "shape": list(plain.shape)}
    if plain.is_floating_point():
        data = _little_endian(plain.reshape(-1).view(torch.uint8), plain.element_size())
        return {**form, "base64": base64.b64encode(data.numpy().tobytes()).decode()}
    return {**form, "data": _numbers(plain.reshape(-1))}


def _tensor_from(form: Mapping[str, Any]) -> Tensor:
    dtype, shape = _dtype(form["dtype"]), form["shape"]
    if "data" in form:
        return torch.tensor(form["data"], dtype=dtype).reshape(shape)
    data = bytearray(base64.b64decode(form["base64"], validate=True))
    if not data:
        return torch.empty(shape, dtype=dtype)
    size = torch.empty(0, dtype=dtype).element_size()
    return _little_endian(torch.frombuffer(data, dtype=torch.uint8), size).view(dtype).reshape(shape)


def _numbers(tensor: Tensor) -> list[int]:
    # 0 and 1 take a third of the place of true and false.
    numbers: list[int] = (tensor.to(torch.int64) if tensor.dtype == torch.bool else tensor).tolist()
    return numbers


def _little_endian(data: Tensor, size: int) -> Tensor:
    return data.reshape(-1, size).flip(-1).reshape(-1) if sys.byteorder == "big" else data


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not the name of a dtype")
    return found


# Weights --------------------------------------------------------------------------------------------------------------

# A recording does not hold weights. It holds a hash of every byte of them, so a run that has computed other weights
# than the recorded run is found out when it loads them.

#: Bytes read from a file at a time.
_PIECE = 1 << 22


class TensorHashes:
    """The hashes of named tensors, in any order."""

    def __init__(self, tensors: Mapping[str, Any] | None = None) -> None:
        self._found: dict[str, str] = {}
        for name, tensor in (tensors or {}).items():
            self.add(name, tensor)

    def add(self, name: str, tensor: Any) -> None:
        """Add a tensor. Of one that is sharded, this process's part counts: gathering it is a call to all ranks."""
        if not isinstance(tensor, Tensor):
            # The engine refuses it.
            self._found[name] = type(tensor).__name__
            return
        local: Any = tensor.detach()
        plain = (local.to_local() if hasattr(local, "to_local") else local).cpu().contiguous()
        whole = hashlib.blake2b(f"{plain.dtype} {tuple(plain.shape)} ".encode(), digest_size=16)
        whole.update(plain.reshape(-1).view(torch.uint8).numpy())
        self._found[name] = whole.hexdigest()

    def reading(self, stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield what the stream yields, and add it."""
        for name, tensor in stream:
            self.add(name, tensor)
            yield name, tensor

    @property
    def joined(self) -> str:
        """One fingerprint of them all. That of a stream is known when it has been read."""
        return hash_of("".join(f"{name} {self._found[name]}\n" for name in sorted(self._found)))


def fingerprint(update: WeightUpdate) -> str | None:
    """Return a fingerprint of the weights of an update; None if there are none, or if they are a stream.

    The same tensors have the same fingerprint in a state dict and in a stream. A folder has that of its files: their
    names and all their bytes.
    """
    if (path := update.path) is None:
        return None if update.state_dict is None else TensorHashes(update.state_dict).joined
    whole = hashlib.blake2b(digest_size=16)
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    for file in files:
        whole.update(f"{file.relative_to(path).as_posix() if file != path else ''}\n".encode(errors="surrogatepass"))
        with file.open("rb") as opened:
            while piece := opened.read(_PIECE):
                whole.update(piece)
    return whole.hexdigest()


class WeightsHistory:
    """Names the state of the weights by the updates that led to it: answers of two states are never mixed up."""

    def __init__(self) -> None:
        self._base = ""
        self._adapters: dict[str, str] = {}

    def state(self, adapter: Adapter) -> str:
        """Return the state of the weights that answer a call with this adapter; "" as long as nothing has changed."""
        name = self._adapters.get(adapter, "") if isinstance(adapter, str) else ""
        return f"{self._base}+{name}" if name else self._base

    def update(self, form: Mapping[str, Any], *, failed: bool = False) -> None:
        """Take note of an update.

        Args:
            form: the request, see `request_json`.
            failed: whether the engine said that it failed half-way. Nobody knows the weights then.
        """
        told = f"{form['weights']} {form['adapter_config']} {failed}"
        adapter = form["adapter"]
        if adapter is None:
            self._base = hash_of(f"{self._base} {told}", 8)
        elif form["weights"] is None and not failed:
            self._adapters.pop(adapter, None)
        else:
            self._adapters[adapter] = hash_of(f"{self._adapters.get(adapter, '') if failed else ''} {told}", 8)

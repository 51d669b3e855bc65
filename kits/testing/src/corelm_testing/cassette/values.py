"""Values as JSON and back, bit for bit: tensors, ragged rows, sets of ids. `docs/cassette-format.md` describes it.

Whole numbers are written as numbers, so that a person can read them and a program can search for them. Floats are
written as the base64 of their bytes, little-endian: a decimal fraction would have to be parsed to the last bit, and
JSON has no infinity.
"""

from __future__ import annotations

import base64
import binascii
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from corelm import Ragged, TokenSets


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

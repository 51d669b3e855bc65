"""`from_json`: a comparison that was saved, as records again."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from corelm.validate import invalid, one_of, shown
from corelm_compare.records import FORMAT, Comparison, Gap

R = TypeVar("R")
_INDEXES = ("rows", "positions")


def from_json(found: Mapping[str, Any]) -> Comparison:
    """Return the comparison that `Comparison.to_json` made this of.

    The arrays of its gaps are empty unless it was made with ``arrays=True``. Null is NaN where a number is expected.

    Raises:
        InvalidRequestError: it is not such a comparison, or of another version of the format; `field` names the place.
    """
    if not isinstance(found, Mapping):
        raise invalid("comparison", f"expected an object, got {shown(found)}")
    if found.get("format") != FORMAT:
        raise invalid("format", f"expected {FORMAT!r}, got {shown(found.get('format'))}")
    return _record(Comparison, found, "comparison")


def _record(kind: Callable[..., R], found: Any, path: str) -> R:
    """Return a record of a dataclass."""
    if not isinstance(found, Mapping):
        raise invalid(path, f"expected an object, got {shown(found)}")
    values = {}
    hints = get_type_hints(kind)
    for each in dataclasses.fields(kind):  # type: ignore[arg-type]
        hint, where = hints[each.name], f"{path}.{each.name}"
        if hint is Tensor:
            dtype = torch.int64 if kind is Gap and each.name in _INDEXES else torch.float32
            numbers = [math.nan if value is None else value for value in found.get(each.name, ())]
            values[each.name] = torch.tensor(numbers, dtype=dtype)
        elif each.name not in found:
            raise invalid(where, "is missing")
        else:
            values[each.name] = _value(hint, found[each.name], where)
    return kind(**values)


def _value(hint: Any, found: Any, path: str) -> Any:
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return found
    if origin in (Union, types.UnionType):
        if found is None and type(None) in parts:
            return None
        return _value(next(part for part in parts if part is not type(None)), found, path)
    if origin is Literal:
        one_of(path, found, parts)
        return found
    if origin is tuple:
        if not isinstance(found, list):
            raise invalid(path, f"expected a list, got {shown(found)}")
        return tuple(_value(parts[0], each, f"{path}[{at}]") for at, each in enumerate(found))
    if origin is Mapping:
        if not isinstance(found, Mapping):
            raise invalid(path, f"expected an object, got {shown(found)}")
        return {str(key): _value(parts[1], each, f"{path}.{key}") for key, each in found.items()}
    if dataclasses.is_dataclass(hint):
        return _record(cast(Callable[..., Any], hint), found, path)
    if hint is float:
        # JSON has neither NaN nor infinities; and 1 may stand for 1.0.
        if found is None:
            return math.nan
        return float(_of_type((int, float), found, path))
    return _of_type(hint, found, path)


def _of_type(kind: Any, found: Any, path: str) -> Any:
    if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
        raise invalid(path, f"expected {getattr(kind, '__name__', 'a number')}, got {shown(found)}")
    return found

"""Checks of single arguments. Each raises an `InvalidRequestError` that names the field."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any

import torch

from corelm.errors import InvalidRequestError


def positive(given: Any, field: str) -> float:
    """A finite number above 0."""
    try:
        if isinstance(given, bool) or not isinstance(given, (int, float)) or not math.isfinite(given) or given <= 0:
            raise TypeError
    except (TypeError, OverflowError):
        raise InvalidRequestError(
            f"{field}: expected a finite number above 0, got {reprlib.repr(given)}", field=field
        ) from None
    return float(given)


def device(given: Any) -> torch.device | None:
    try:
        return None if given is None else torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise InvalidRequestError(f"device: {error}", field="device") from error


def one_of(field: str, given: Any, legal: tuple[Any, ...]) -> None:
    if given not in legal:
        raise invalid(field, f"expected one of {', '.join(map(repr, legal))}, got {given!r}")


def subset(field: str, given: Mapping[str, Any] | None, known: tuple[str, ...]) -> dict[str, Any]:
    """A dict of the caller's own, with no other keys than the known ones."""
    unknown = [key for key in given or {} if key not in known]
    if unknown:
        raise invalid(field, f"unknown: {', '.join(map(repr, unknown))}; it takes {', '.join(known)}")
    return dict(given or {})


def invalid(field: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {message}", field=field)

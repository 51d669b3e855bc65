"""Checks of single arguments: the value to use, or an `InvalidRequestError` that names the field.

Every message says what was expected and what was given: ``top_p: expected a number above 0 and up to 1, got 1.5``.
Importing this module does not import torch, so that backends can be listed without it.
"""

from __future__ import annotations

import difflib
import math
import reprlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from corelm.errors import InvalidRequestError

if TYPE_CHECKING:
    import torch


def number(field: str, given: Any, low: float = -math.inf, high: float = math.inf, *, above: bool = False) -> float:
    """Return `given` as a finite float from `low` to `high`.

    Args:
        given: a number, or a tensor or array that holds one; not a bool and not a text.
        above: `low` itself is refused as well.
    """
    value = math.nan
    if hasattr(given, "__float__") and not isinstance(given, bool):
        try:
            value = float(given)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            value = math.nan
    # NaN fails every comparison, so it is refused here too.
    if not (math.isfinite(value) and low <= value <= high) or (above and value == low):
        raise invalid(field, f"expected {_range(low, high, above)}, got {reprlib.repr(given)}")
    return value


def positive(field: str, given: Any) -> float:
    """Return `given` as a finite float above 0."""
    return number(field, given, 0.0, above=True)


def count(field: str, given: Any, low: int | None = 0) -> int:
    """Return `given` as an int of at least `low`; None sets no bound. 3.0 is 3, True is refused."""
    expected = "a whole number" if low is None else f"a whole number of at least {low}"
    try:
        value = int(given)
        if isinstance(given, bool) or value != given or (low is not None and value < low):
            raise ValueError
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise invalid(field, f"expected {expected}, got {reprlib.repr(given)}") from None
    return value


def flag(field: str, given: Any) -> bool:
    """Return `given` if it is True or False."""
    if not isinstance(given, bool):
        raise invalid(field, f"expected True or False, got {reprlib.repr(given)}")
    return given


def one_of(field: str, given: Any, legal: tuple[Any, ...]) -> None:
    """Refuse a value that is not among the `legal` ones."""
    if given not in legal:
        raise invalid(field, f"expected one of {', '.join(map(repr, legal))}, got {given!r}")


def subset(field: str, given: Mapping[str, Any] | None, known: tuple[str, ...]) -> dict[str, Any]:
    """Return a copy of `given`, whose keys must all be among the `known` ones."""
    unknown = [key for key in given or {} if key not in known]
    if unknown:
        hint = did_you_mean(unknown[0], known)
        raise invalid(field, f"unknown keys: {', '.join(map(repr, unknown))}; known keys: {', '.join(known)}{hint}")
    return dict(given or {})


def device(given: Any) -> torch.device | None:
    """Return a `torch.device`, or None for None."""
    import torch

    try:
        return None if given is None else torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise invalid("device", str(error)) from error


def invalid(field: str, message: str) -> InvalidRequestError:
    """Return the error that names the field."""
    return InvalidRequestError(f"{field}: {message}", field=field)


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """Return a hint to append to a message about an unknown name; "" if no known name is close.

    >>> did_you_mean("temprature", ["top_p", "temperature"])
    "; did you mean 'temperature'?"
    """
    near = nearest(name, known)
    return "" if near is None else f"; did you mean {near!r}?"


def nearest(name: Any, known: Iterable[str]) -> str | None:
    """Return the known name that is spelt most like `name`; None if none is close."""
    return next(iter(difflib.get_close_matches(str(name), list(known), n=1)), None)


def _range(low: float, high: float, above: bool) -> str:
    if low == -math.inf:
        return "a finite number" if high == math.inf else f"a finite number of at most {high:g}"
    if high == math.inf:
        return f"a finite number {'above' if above else 'of at least'} {low:g}"
    return f"a number above {low:g} and up to {high:g}" if above else f"a number from {low:g} to {high:g}"

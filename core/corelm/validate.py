"""Checks of single arguments: the value to use, or an `InvalidRequestError` that names the field.

Every message says what was expected and what was given: ``top_p: expected a number above 0 and up to 1, got 1.5``.
Importing this module does not import torch, so that backends can be listed without it.
"""

from __future__ import annotations

import difflib
import inspect
import math
import operator
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from corelm.errors import InvalidRequestError

if TYPE_CHECKING:
    import torch

F = TypeVar("F", bound=Callable[..., Any])

#: Token ids are below this: no vocabulary is larger, and engines keep ids in 32 bits.
ANY_VOCABULARY = 2**31
#: How deep objects and lists may be nested. Deeper ones exhaust the stack of code that walks them later.
DEEPEST = 100
#: How many values nested objects and lists may hold. One that is in several places counts once for each.
MOST_VALUES = 1_000_000
#: The longest timeout in seconds, 23 days. Locks, sockets and event loops each refuse longer ones, at different limits.
LONGEST = 2_000_000.0


def number(field: str, given: Any, low: float = -math.inf, high: float = math.inf, *, above: bool = False) -> float:
    """Return `given` as a finite float from `low` to `high`.

    Args:
        given: a number, or a tensor or array that holds one; not a bool and not a text.
        above: `low` itself is refused as well.
    """
    value = math.nan
    if hasattr(given, "__float__") and not is_bool(given):
        try:
            value = float(given)
        except Exception:
            value = math.nan
    # NaN fails every comparison, so it is refused here too.
    if not (math.isfinite(value) and low <= value <= high) or (above and value == low):
        raise invalid(field, f"expected {_range(low, high, above)}, got {shown(given)}")
    return value


def positive(field: str, given: Any) -> float:
    """Return `given` as a finite float above 0."""
    return number(field, given, 0.0, above=True)


def seconds(field: str, given: Any) -> float:
    """Return `given` as a number of seconds above 0 that every wait accepts. More than `LONGEST` becomes `LONGEST`."""
    return min(positive(field, given), LONGEST)


def factor(field: str, given: Any, *, zero: bool = False) -> float:
    """Return `given` as a float that engines can multiply and divide logits by in float32, or 0 if `zero` is legal."""
    value = number(field, given, 0.0, above=not zero)
    if value and not 1e-30 <= value <= 1e30:
        expected = "0 or a number" if zero else "a number"
        raise invalid(
            field, f"expected {expected} from 1e-30 to 1e+30, because engines compute in float32, got {shown(given)}"
        )
    return value


def count(field: str, given: Any, low: int | None = 0, high: int | None = None) -> int:
    """Return `given` as an int from `low` to `high`; None sets no bound. 3.0 is 3; True and texts are refused."""
    expected = "a whole number" + ("" if low is None else f" of at least {low}")
    expected += "" if high is None else f" and at most {high}"
    try:
        value = int(given)
        if type(given) is not int and (is_bool(given) or isinstance(given, (str, bytes)) or not bool(value == given)):
            raise ValueError
        if (low is not None and value < low) or (high is not None and value > high):
            raise ValueError
    except Exception:
        raise invalid(field, f"expected {expected}, got {shown(given)}") from None
    return value


def token_ids(field: str, given: Any) -> tuple[int, ...]:
    """Return a sequence, tensor or array of token ids as ints from 0 to below `ANY_VOCABULARY`."""
    try:
        ids = tuple(given.tolist() if hasattr(given, "__array__") else given)
        # Two passes in C for the usual case: a rollout's history has thousands of ids.
        if not set(map(type, ids)) <= {int}:
            if any(map(is_bool, ids)):
                raise TypeError
            ids = tuple(map(operator.index, ids))
    except Exception:
        raise invalid(field, f"expected a sequence of token ids, got {type(given).__name__} {shown(given)}") from None
    if ids and min(ids) < 0:
        raise invalid(field, f"expected ids of at least 0, got {shown(min(ids))}")
    if ids and max(ids) >= ANY_VOCABULARY:
        raise invalid(field, f"{shown(max(ids))} is larger than any vocabulary")
    return ids


def is_bool(given: Any) -> bool:
    """Return whether `given` is True or False, or an array or tensor of them: Python would take these for 1 and 0."""
    return isinstance(given, bool) or str(getattr(given, "dtype", "")).endswith("bool")


def is_index(given: Any) -> bool:
    """Return whether `given` is meant as one integer: an int, or a scalar of NumPy or torch; not a bool."""
    return hasattr(given, "__index__") and getattr(given, "ndim", 0) == 0 and not is_bool(given)


def flag(field: str, given: Any) -> bool:
    """Return `given` if it is True or False."""
    if not isinstance(given, bool):
        raise invalid(field, f"expected True or False, got {shown(given)}")
    return given


def unencodable(text: str) -> str | None:
    """Return what keeps a text from being encoded as UTF-8, as tokenizers do; None if nothing does.

    >>> unencodable("a whole emoji: \\U0001f600") is None, "lone surrogate" in unencodable("a cut one: \\ud83d")
    (True, True)
    """
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return (
            f"{text[error.start]!r} at character {error.start} is a lone surrogate, half of a character, which cannot "
            "be encoded; remove it"
        )
    return None


def nested_texts(field: str, given: Any, *, most: float = MOST_VALUES) -> list[str]:
    """Return every str in nested mappings, lists and tuples, keys included.

    Raises:
        InvalidRequestError: it is nested more than `DEEPEST` levels deep, as an object that holds itself is, or it
            holds more than `most` values.
    """
    found: list[str] = []
    waiting: list[tuple[Any, int]] = [([given], -1)]
    walked = 0
    while waiting:
        one, depth = waiting.pop()
        if depth >= DEEPEST:
            raise invalid(field, f"objects and lists are nested more than {DEEPEST} levels deep, or hold themselves")
        # The check for Mapping alone takes ten times as long for a dict.
        if isinstance(one, (dict, Mapping)):
            found += [key for key in one if isinstance(key, str)]
            one = one.values()
        walked += len(one)
        if walked > most:
            raise invalid(field, f"objects and lists hold more than {most:,} values")
        for part in one:
            if isinstance(part, str):
                found.append(part)
            elif isinstance(part, (dict, Mapping, list, tuple)):
                waiting.append((part, depth + 1))
    return found


def one_of(field: str, given: Any, legal: tuple[Any, ...]) -> None:
    """Refuse a value that is not among the `legal` ones."""
    try:
        known = given in legal
    except Exception:  # a tensor's ==, for example, has no truth value
        known = False
    if not known:
        raise invalid(field, f"expected one of {', '.join(map(repr, legal))}, got {shown(given)}")


def as_list(given: Any) -> Any:
    """Return a sequence as a list, and anything else unchanged. What the list holds is not converted.

    Sequences are lists, tuples, deques, numpy arrays, the Series of pandas and polars, and the columns of `datasets`
    and Arrow. Texts, tensors, mappings, sets and iterators are not.

    >>> as_list(("a", "b")), as_list("ab"), as_list({"a": 1})
    (['a', 'b'], 'ab', {'a': 1})
    """
    if isinstance(given, (list, str, bytes, bytearray, Mapping)):
        return given
    if isinstance(given, Sequence):
        return list(given)
    if not hasattr(given, "__array__"):
        return given
    import torch

    if isinstance(given, torch.Tensor):
        return given
    # numpy and pandas have the first, polars the second, Arrow the third.
    for name in ("tolist", "to_list", "to_pylist"):
        if callable(convert := getattr(given, name, None)):
            return convert()
    return given


def read_once(given: Any) -> str:
    """Return what to add to a message about an iterator, such as a generator; "" for anything else."""
    return ", which can be read only once; pass list(…) of it" if isinstance(given, Iterator) else ""


def subset(field: str, given: Mapping[str, Any] | None, known: tuple[str, ...]) -> dict[str, Any]:
    """Return a copy of `given`, a mapping or None, whose keys must all be among the `known` ones."""
    if given is not None and not isinstance(given, Mapping):
        raise invalid(field, f"expected a mapping with keys of {', '.join(known)}; got {shown(given)}")
    unknown = [key for key in given or {} if key not in known]
    if unknown:
        hint = did_you_mean(unknown[0], known)
        raise invalid(field, f"unknown keys: {', '.join(map(repr, unknown))}; known keys: {', '.join(known)}{hint}")
    return dict(given or {})


def device(given: Any, field: str = "device") -> torch.device | None:
    """Return a `torch.device` that this process can use, or None for None."""
    import torch

    if given is None:
        return None
    try:
        found = torch.device(given)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise invalid(field, f"{shown(given)} is not a device of torch, such as 'cpu' or 'cuda:0': {error}") from error
    if found.type in ("cpu", "meta"):
        return found
    # Whether there is an mps device is known to another module than torch.mps.
    module: Any = torch.backends.mps if found.type == "mps" else getattr(torch, found.type, None)
    if not callable(available := getattr(module, "is_available", None)):
        return found
    if not available():
        raise invalid(field, f"torch finds no {found.type} device here, got {shown(str(given))}; give 'cpu'")
    devices = module.device_count() if hasattr(module, "device_count") else None
    if devices is not None and found.index is not None and found.index >= devices:
        raise invalid(field, f"torch finds {devices} devices of the type {found.type}, numbered from 0; got {found}")
    return found


def shown(given: Any) -> str:
    """Return a short text for a message about `given`, also if its own `repr` fails, as that of a huge int does."""
    try:
        return reprlib.repr(given)
    except Exception:
        return f"a value of type {type(given).__name__}"


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
    return _nearest(str(name), tuple(known))


# `hasattr` and the keys of many messages ask for the same few names again and again.
@lru_cache(256)
def _nearest(name: str, known: tuple[str, ...]) -> str | None:
    # One letter is a large part of a short name.
    return next(iter(difflib.get_close_matches(name, known, 1, 0.8 if len(name) > 4 else 0.65)), None)


def checks_names(*others: Callable[..., Any]) -> Callable[[F], F]:
    """Decorate a function: a keyword that it does not have raises a `TypeError` that says what was meant.

    Args:
        others: the functions that its ``**options`` are for.
    """

    def decorate(function: F) -> F:
        takers: list[Callable[..., Any]] = [function, *others]
        known = [name for each in takers for name in inspect.signature(each).parameters]

        @wraps(function)
        def checked(*args: Any, **given: Any) -> Any:
            for name in given:
                if name not in known:
                    what = function.__qualname__.removesuffix(".__init__")
                    raise TypeError(f"{what} has no argument {name!r}{did_you_mean(name, known)}")
            return function(*args, **given)

        return cast(F, checked)

    return decorate


def _range(low: float, high: float, above: bool) -> str:
    if low == -math.inf:
        return "a finite number" if high == math.inf else f"a finite number of at most {high:g}"
    if high == math.inf:
        return f"a finite number {'above' if above else 'of at least'} {low:g}"
    return f"a number above {low:g} and up to {high:g}" if above else f"a number from {low:g} to {high:g}"

"""Hints for error messages of plugins, and checks of their options, the same as core's."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

# Plugins take these from `corelm_engine_kit`.
from corelm.spec.other_libraries import instead_of
from corelm.validate import device as torch_device
from corelm.validate import did_you_mean as did_you_mean
from corelm.validate import invalid, shown

if TYPE_CHECKING:
    import torch

__all__ = [
    "did_you_mean", "refuse_missing_path", "refuse_settled", "refuse_unknown_arguments", "torch_device", "torch_dtype",
    "why_unreadable",
]  # fmt: skip


def refuse_unknown_arguments(engine: str, given: Iterable[str], known: Collection[str]) -> None:
    """Refuse arguments that an engine does not have, before it starts.

    Args:
        engine: its name, for the message.
        given: the names of the arguments.
        known: the names that it has.

    Raises:
        InvalidRequestError: the message says what to give instead; `field` is the unknown one.
    """
    for name in given:
        if name not in known:
            raise invalid(name, f"{engine} has no argument of this name{instead_of(name, known)}")


def why_unreadable(error: Exception) -> str:
    """Return why a file of a model cannot be read, to follow the file's name in a message.

    Args:
        error: what transformers raised.
    """
    # transformers names its option if it would have to run code that comes with the file.
    if "trust_remote_code" in str(error):
        return "comes with Python code that is not trusted"
    return "cannot be read on this machine"


#: Names of dtypes in other libraries and configurations, and torch's own.
_DTYPES = {
    **dict.fromkeys(("fp16", "f16"), "float16"),
    **dict.fromkeys(("bf16", "bfloat"), "bfloat16"),
    **dict.fromkeys(("fp32", "f32", "single", "full"), "float32"),
    **dict.fromkeys(("fp64", "f64"), "float64"),
}


def torch_dtype(given: Any, field: str = "dtype") -> torch.dtype | None:
    """Return a floating-point `torch.dtype`, given it or its name; None for None and "auto".

    >>> torch_dtype("bfloat16")
    torch.bfloat16
    """
    import torch

    if given is None or given == "auto":
        return None
    name = given.strip().lower().removeprefix("torch.") if isinstance(given, str) else ""
    found = getattr(torch, name, None) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        advice = f"{field}={_DTYPES[name]!r}" if name in _DTYPES else "'auto', 'float32', 'bfloat16' or 'float16'"
        raise invalid(field, f"{shown(given)} is not a floating-point dtype of torch; give {advice}")
    return found


def refuse_missing_path(field: str, given: Any) -> None:
    """Refuse a text or path that names a file or folder that is not there, before anyone looks for it on a hub.

    A text is meant as a path if it begins with ``.``, ``~`` or a separator, ends with one, or has more than one; any
    other text is the name of a model on a hub. An address has a scheme.
    """
    if not isinstance(given, (str, os.PathLike)) or os.path.exists(given):
        return
    name = os.fspath(given)
    if not isinstance(name, str) or "://" in name:
        return
    parts = name.split("/")
    on_hub = all(parts) and len(parts) <= 2 and name[0] not in ".~" and "\\" not in name
    if on_hub and isinstance(given, str):
        return
    home = os.path.expanduser(name)
    if home != name and os.path.exists(home):
        raise invalid(field, f"'~' is not expanded in {name!r}; give {home!r}")
    there = os.path.abspath(name)
    while not os.path.exists(there):
        there = os.path.dirname(there)
    raise invalid(field, f"there is no file or folder {name!r}; the path exists up to {there!r}")


def refuse_settled(engine_kwargs: Iterable[str], settled: Collection[str]) -> None:
    """Refuse names in engine_kwargs that a plugin sets itself.

    Raises:
        InvalidRequestError: one of them is `settled`; `field` is ``engine_kwargs``.
    """
    for name in engine_kwargs:
        if name in settled:
            raise invalid("engine_kwargs", f"{name!r} is not allowed here; corelm decides it")

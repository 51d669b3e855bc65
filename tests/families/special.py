"""Special cases: settings, adapters, hooks and folders that have given wrong numbers before."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from . import cases, configs

Maker = Callable[[], "cases.Case"]

SPECIAL: dict[str, Maker] = {}


def maker(name: str) -> Maker:
    """Return the function that makes the case of that name."""
    return SPECIAL[name] if name in SPECIAL else partial(cases.case_of_type, name)


def names() -> list[str]:
    """Return the names of all cases: every model type, then the special cases."""
    return [*configs.MODEL_TYPES, *SPECIAL]

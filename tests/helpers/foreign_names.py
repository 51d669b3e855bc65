"""The names of other libraries in the tables of docs/, looked up in the libraries themselves.

A table about a class names it in its first heading, with the library: ``| `vllm.SamplingParams` | here |``. Each name
in the first column is then a parameter, a field or an attribute of that class, or of one of several.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

from helpers.pages import Page

_TABLE = re.compile(r"^\| ?(?P<owners>`[\w.]+`(?:, `[\w.]+`)*) ?\|.*\n\|[-| ]+\|\n(?P<rows>(?:\|.*\n?)+)", re.MULTILINE)
_SPAN = re.compile(r"`([^`]+)`")
_NAME = re.compile(r"[A-Za-z_]\w*")


def unknown_names(page: Page, library: str) -> list[str]:
    """Return the names on the page that the installed library does not have."""
    dotted = re.findall(rf"`({library}\.[\w.]+)`", page.text)
    missing = [name for name in dict.fromkeys(dotted) if not _found(name)]
    for owners, name in names_in_tables(page, library):
        known = [owner for owner in map(_found, owners) if owner]
        if known and not any(_has(owner[0], name) for owner in known):
            missing.append(f"{' or '.join(owners)}: {name}")
    return missing


def names_in_tables(page: Page, library: str) -> Iterator[tuple[list[str], str]]:
    """Yield each name of a first column with the classes of its table."""
    for table in _TABLE.finditer(page.text):
        owners = _SPAN.findall(table["owners"])
        if all(owner.startswith(f"{library}.") for owner in owners):
            for row in table["rows"].splitlines():
                for name in _SPAN.findall(row.split("|")[1]):
                    yield owners, name


def _found(dotted: str) -> tuple[Any, ...]:
    """Return the object of that name, in a tuple; an empty tuple if there is none."""
    try:
        return (pkgutil.resolve_name(dotted),)
    except (ImportError, AttributeError):
        return ()


def _has(owner: Any, name: str) -> bool:
    """Return whether a class has this attribute, field or parameter; some have fields only as objects."""
    if not _NAME.fullmatch(name):
        return False
    if hasattr(owner, name) or name in inspect.signature(owner).parameters:
        return True
    if any(name in getattr(each, "__annotations__", ()) for each in owner.__mro__):
        return True
    try:
        return hasattr(owner(), name)
    except TypeError:  # it needs arguments
        return False

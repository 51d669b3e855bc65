"""Listening to what crosses a hook while it works: tokens on their way to the caller, weights on their way in.

pluggy hands every hook the same request, and a wrapper cannot replace it. So the field is changed in place, and put
back when the hook has ended: core may send the same request again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(request: Any, field: str, value: Any) -> Iterator[None]:
    """Give a field of a request another value for the ``with`` block."""
    before = getattr(request, field)
    object.__setattr__(request, field, value)
    try:
        yield
    finally:
        object.__setattr__(request, field, before)

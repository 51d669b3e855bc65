"""Where a request differs from a recorded one: the first row, and what is different there."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from corelm.validate import shown

#: How many values of a row a message repeats.
_LONGEST = 8


def difference(recorded: Any, given: Any) -> tuple[int | None, str]:
    """Return the first row in which two values differ, None if they have no rows, and what differs."""
    rows, others = _rows(recorded), _rows(given)
    if rows is None or others is None:
        return None, _differ(recorded, given)
    if len(rows) != len(others):
        return None, f"recorded {len(rows)} rows, got {len(others)}"
    row = next((row for row, pair in enumerate(zip(rows, others, strict=True)) if pair[0] != pair[1]), None)
    return (None, _differ(recorded, given)) if row is None else (row, _differ(rows[row], others[row]))


def _rows(form: Any) -> list[Any] | None:
    """Return a value by row, if it has rows: ragged rows, sets, or one number for each."""
    if isinstance(form, dict):
        found = form.get("rows", form.get("sets", form.get("data") if len(form.get("shape", ())) == 1 else None))
        return found if isinstance(found, list) else None
    return form if isinstance(form, list) and form and all(isinstance(each, str) for each in form) else None


def _differ(recorded: Any, given: Any) -> str:
    if isinstance(recorded, dict) and isinstance(given, dict):
        for name in [*recorded, *(name for name in given if name not in recorded)]:
            if recorded.get(name) != given.get(name):
                missing = "its default"
                was, now = recorded.get(name, missing), given.get(name, missing)
                return f"{name}: recorded {_short(was)}, got {_short(now)}"
    if isinstance(recorded, list) and isinstance(given, list):
        place = next(at for at, (was, now) in enumerate(zip_longest(recorded, given)) if was != now)
        was, now = _short(recorded[place : place + _LONGEST]), _short(given[place : place + _LONGEST])
        return f"from position {place} on: recorded {was}, got {now}"
    return f"recorded {_short(recorded)}, got {_short(given)}"


def _short(value: Any) -> str:
    return value if value == "its default" else shown(value)

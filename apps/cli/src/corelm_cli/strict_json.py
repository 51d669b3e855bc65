"""JSON as the standard has it. Python's own reader accepts more, and would write what no other program can read."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any


def loads(text: str | bytes) -> Any:
    """Return what a JSON text says.

    Raises:
        ValueError: it is not JSON, or a key occurs more than once in an object, or a number is not finite.
        RecursionError: it is nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_object, parse_float=_number, parse_constant=_number)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {twice!r} occurs more than once in an object")
    return row


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"JSON has no number for {text}; write null or a string")
    return number

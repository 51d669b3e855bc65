"""Decode the bodies of replies. Most of the client's time for a long answer with log-probs is spent here."""

from __future__ import annotations

import json
from typing import Any

import orjson


def decoded(body: bytes | bytearray) -> Any:
    """Return what a body in JSON says, as `json.loads` does, in about a third of the time.

    ``NaN`` and ``Infinity`` are numbers, as they are for Python and some servers. What orjson refuses is therefore left
    to `json`, which also decides whether it is JSON at all.

    An integer that does not fit 64 bits may become a float. No id and no log-prob is such a number.

    Args:
        body: the whole text, in UTF-8.

    Raises:
        ValueError: it is not JSON.
        RecursionError: it is nested too deeply.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return json.loads(body)

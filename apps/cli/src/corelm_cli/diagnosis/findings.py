"""`Finding`: one thing that `corelm doctor` looked at, and what to type if it is not as it should be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        about: what was looked at, such as ``torch`` or ``backend 'vllm'``.
        level: `ok`; `warning`, if some calls may fail or be slow; `problem`, if something cannot work.
        text: what was found.
        remedy: what to type or do; "" if there is nothing to do.
    """

    about: str
    level: Level
    text: str
    remedy: str = ""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Finding:
        """Return the finding of another process."""
        return cls(**{name: values[name] for name in ("about", "level", "text", "remedy")})

"""How many examples hypothesis draws: ten times as many in ``make nightly``."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

_FACTOR = 10 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 1


def examples(number: int, **options: Any) -> settings:
    """Return the settings of a test that draws this many examples. They decorate the test, as `settings` does."""
    return settings(max_examples=number * _FACTOR, deadline=None, **options)

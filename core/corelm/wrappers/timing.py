"""`Timing`: how long the calls of an engine take, and what they yield, in bounded memory."""

from __future__ import annotations


class Timing:
    """Measures the calls of one engine, or of several together."""

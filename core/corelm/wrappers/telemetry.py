"""`Telemetry`: spans and metrics of OpenTelemetry for the calls of an engine."""

from __future__ import annotations


class Telemetry:
    """Reports the calls of an engine to OpenTelemetry."""

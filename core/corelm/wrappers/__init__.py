"""What can be wrapped around any engine's hooks: timing, OpenTelemetry, and recordings of calls."""

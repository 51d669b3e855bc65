"""What can be wrapped around any engine's hooks: timing, OpenTelemetry, and recordings of calls.

- `Timing` in `corelm.wrappers.timing`: how long calls take and what they yield, in bounded memory.
- `Telemetry` in `corelm.wrappers.telemetry`: the same as spans and metrics of OpenTelemetry; needs the extra `otel`.
- `Observer` in `corelm.wrappers.observer`: the class of both, for an observer of your own.
- `current_call` in `corelm.backend.engine_call`: who made the call that a wrapper is in.
- `CassetteRecorder` in `corelm.wrappers.cassette_recorder`: writes every call to a cassette.
- `CassetteBackend` in `corelm.wrappers.cassette_backend`: ``get_backend("cassette", path)``, a replay of these calls.

The names are imported on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

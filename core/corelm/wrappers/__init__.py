"""What can be wrapped around any engine's hooks: timing, OpenTelemetry, and recordings of calls.

- `CassetteRecorder` in `corelm.wrappers.cassette_recorder`: writes every call to a cassette.
- `CassetteBackend` in `corelm.wrappers.cassette_backend`: ``get_backend("cassette", path)``, a replay of these calls.

The names are imported on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

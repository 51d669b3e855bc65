"""Cassettes: calls of an engine, recorded in a file and replayed from it, so that a test needs no engine.

- `CassetteRecorder`: a wrapper that writes every call to a cassette.
- `CassetteBackend`: ``get_backend("cassette", path)``, a replay of these calls.

The names are imported on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

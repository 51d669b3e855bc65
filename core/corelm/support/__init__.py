"""What several backends share: the HTTP client of a server behind a URL, and an event loop on a thread.

The names are listed in ``__init__.pyi`` and imported on first use: the HTTP client needs httpx (``core[http]``).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

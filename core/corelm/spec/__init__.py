"""The specification of a backend: hooks, their requests and results, and declared capabilities. Start here.

Read `hookspecs.py` first, then `records.py`. A plugin imports every name from ``corelm.spec``. The names are
listed in ``__init__.pyi`` and are imported on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

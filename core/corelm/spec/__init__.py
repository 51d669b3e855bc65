"""What a backend implements: the hooks, the records that cross them, and what a backend declares. Start here.

Read `hookspecs.py` first, then `records.py`. A plugin imports every name from ``corelm.spec``; the names are listed in
``__init__.pyi`` and imported on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

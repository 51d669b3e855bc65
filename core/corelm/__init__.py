"""Sample from and score with any language-model engine: pick a backend by name, get TensorDicts back.

The public names are listed once, in ``__init__.pyi``. They are imported on first use, so that listing backends and
``--help`` never import torch.
"""

import lazy_loader

from corelm._version import __version__

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

# The packages are attributes, but `import *` does not bring them.
__all__ = [name for name in __all__ if name not in ("batching", "containers", "errors", "kl", "spec", "__version__")]
__all__ += ["__version__"]

"""What applications import of the kernel's inside: fleets, servers, command lines, adapters for other libraries.

The other packages that they import are public to everyone: `corelm`, `corelm.spec`, `corelm.containers`, `corelm.kl`,
`corelm.tensors`, `corelm.errors` and `corelm.validate`. A plugin needs none of the names here. They are listed in
``application.pyi``, are imported on first use, and may change between minor releases.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub("corelm", __file__)

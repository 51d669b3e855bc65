"""Let a server load LoRA adapters on a CPU. For tests; not part of the plugin.

SGLang pins the tensors of adapters to memory that a GPU can read, and torch refuses that without one. So this module
makes torch ignore the wish. It is a plugin of SGLang, which finds it on PYTHONPATH.
"""

from __future__ import annotations

import functools
from typing import Any


def install() -> None:
    import torch

    for name in ("arange", "empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self


def _unpinned(function: Any) -> Any:
    @functools.wraps(function)
    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return unpinned

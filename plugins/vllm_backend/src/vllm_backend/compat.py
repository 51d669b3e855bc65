"""What differs between the versions of vLLM that the plugin supports, 0.26 to 0.33."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def refusals() -> tuple[type[Exception], ...]:
    """Return the exceptions with which vLLM refuses one request and goes on with the others.

    vLLM 0.26 has no class for them: it raises ValueError, or a subclass.
    """
    from vllm import exceptions

    names = ("VLLMClientError", "GracefulHTTPError")
    found = tuple(getattr(exceptions, name) for name in names if hasattr(exceptions, name))
    return found or (ValueError,)


def packer() -> Any:
    """Return what packs tensors into GPU memory that other processes can open; None if vLLM has nothing for it."""
    try:
        from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer
    except ImportError:
        return None
    return packed_ipc_producer

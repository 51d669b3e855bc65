"""What differs between the versions of vLLM that the plugin supports, 0.26 to 0.33."""

from __future__ import annotations

import functools


@functools.cache
def refusals() -> tuple[type[Exception], ...]:
    """Return the exceptions with which vLLM refuses one request and goes on with the others.

    vLLM 0.26 has no class for them: it raises ValueError, or a subclass.
    """
    from vllm import exceptions

    names = ("VLLMClientError", "GracefulHTTPError")
    found = tuple(getattr(exceptions, name) for name in names if hasattr(exceptions, name))
    return found or (ValueError,)

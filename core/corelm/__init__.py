"""One way to sample from and score with any language-model engine: pick a backend by name, get TensorDicts back.

Names are handed on lazily, so that listing backends and ``--help`` never import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "BackendInfo": "registry",
    "list_backends": "registry",
    "Backend": "backend",
    "get_backend": "backend",
    "Capabilities": "capabilities",
    "Provenance": "provenance",
    "SamplingParams": "sampling",
    "Ragged": "rows",
    "Text": "containers",
    "Tokens": "containers",
    "Masks": "containers",
    "LogProbs": "containers",
    "ragged": "containers",
    "Message": "history",
    "History": "history",
    "ChatHistory": "containers",
    "LLMPolicy": "policy",
    "API_VERSION": "hookspecs",
    "hookimpl": "hookspecs",
}
__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from corelm.backend import Backend, get_backend
    from corelm.capabilities import Capabilities
    from corelm.containers import ChatHistory, LogProbs, Masks, Text, Tokens, ragged
    from corelm.history import History, Message
    from corelm.hookspecs import API_VERSION, hookimpl
    from corelm.policy import LLMPolicy
    from corelm.provenance import Provenance
    from corelm.rows import Ragged
    from corelm.registry import BackendInfo, list_backends
    from corelm.sampling import SamplingParams


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"corelm.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'corelm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

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
    "DynamicBatcher": "batching",
    "MaskedCategorical": "distributions",
    "Keys": "inputs",
    "API_VERSION": "hookspecs",
    "hookimpl": "hookspecs",
}
__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from corelm.backend import Backend as Backend
    from corelm.backend import get_backend as get_backend
    from corelm.batching import DynamicBatcher as DynamicBatcher
    from corelm.capabilities import Capabilities as Capabilities
    from corelm.containers import (
        ChatHistory as ChatHistory,
    )
    from corelm.containers import (
        LogProbs as LogProbs,
    )
    from corelm.containers import (
        Masks as Masks,
    )
    from corelm.containers import (
        Text as Text,
    )
    from corelm.containers import (
        Tokens as Tokens,
    )
    from corelm.containers import (
        ragged as ragged,
    )
    from corelm.distributions import MaskedCategorical as MaskedCategorical
    from corelm.history import History as History
    from corelm.history import Message as Message
    from corelm.hookspecs import API_VERSION as API_VERSION
    from corelm.hookspecs import hookimpl as hookimpl
    from corelm.inputs import Keys as Keys
    from corelm.policy import LLMPolicy as LLMPolicy
    from corelm.provenance import Provenance as Provenance
    from corelm.registry import BackendInfo as BackendInfo
    from corelm.registry import list_backends as list_backends
    from corelm.rows import Ragged as Ragged
    from corelm.sampling import SamplingParams as SamplingParams


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"corelm.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'corelm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

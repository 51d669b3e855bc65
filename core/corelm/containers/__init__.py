"""What users get back: `Text`, `Tokens`, `Masks`, `LogProbs`, `ChatHistory`, `History`, `PerToken`: TensorClasses."""

from corelm.containers.classes import (
    SAFE_GLOBALS,
    ChatHistory,
    LogProbs,
    Masks,
    PerToken,
    Text,
    Tokens,
    ragged,
)
from corelm.containers.history import History

__all__ = ["SAFE_GLOBALS", "ChatHistory", "History", "LogProbs", "Masks", "PerToken", "Text", "Tokens", "ragged"]

"""TensorClasses that users get back: `Text`, `Tokens`, `Masks`, `LogProbs`, `PerToken`, `ChatHistory`, `History`."""

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

# Saved files name a class by its module. They name this package, so that its modules can be reorganised.
for _container in (ChatHistory, History, LogProbs, Masks, PerToken, Text, Tokens):
    _container.__module__ = __name__

__all__ = ["SAFE_GLOBALS", "ChatHistory", "History", "LogProbs", "Masks", "PerToken", "Text", "Tokens", "ragged"]

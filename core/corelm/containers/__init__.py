"""TensorClasses that users get back: `Text`, `Tokens`, `Masks`, `LogProbs`, `PerToken`, `ChatHistory`, `History`.

`ragged` reads their fields without pads, `merge_turns` makes one training row of several turns.
"""

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
from corelm.containers.turns import merge_turns

# Saved files name a class by its module. They name this package, so that its modules can be reorganised.
for _container in (ChatHistory, History, LogProbs, Masks, PerToken, Text, Tokens):
    _container.__module__ = __name__

__all__ = [
    "SAFE_GLOBALS",
    "ChatHistory",
    "History",
    "LogProbs",
    "Masks",
    "PerToken",
    "Text",
    "Tokens",
    "merge_turns",
    "ragged",
]

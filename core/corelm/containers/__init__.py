"""TensorClasses that users get back: `Text`, `Tokens`, `Masks`, `LogProbs`, `PerToken`, `ChatHistory`, `History`.

`ragged` reads their fields without pads, `token_sets` the ids that truncation left. `repad` and `collate`
change their layout, `merge_turns` makes one row of several turns, and `to_records` makes plain dicts.
"""

from corelm.containers.classes import SAFE_GLOBALS, ChatHistory, LogProbs, Masks, PerToken, Text, Tokens
from corelm.containers.fields import short
from corelm.containers.history import History
from corelm.containers.padding import collate, repad
from corelm.containers.reading import ragged, token_sets
from corelm.containers.records import to_records
from corelm.containers.turns import merge_turns

# Saved files name a class by its module. They name this package, so that its modules can be reorganised.
for _container in (ChatHistory, History, LogProbs, Masks, PerToken, Text, Tokens):
    _container.__module__ = __name__
    _container.__repr__ = short  # type: ignore[method-assign]

__all__ = [
    "SAFE_GLOBALS",
    "ChatHistory",
    "History",
    "LogProbs",
    "Masks",
    "PerToken",
    "Text",
    "Tokens",
    "collate",
    "merge_turns",
    "ragged",
    "repad",
    "to_records",
    "token_sets",
]

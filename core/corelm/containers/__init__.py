"""TensorClasses that users get back: `Text`, `Tokens`, `Masks`, `LogProbs`, `PerToken`, `ChatHistory`, `History`.

`ragged` reads their fields without pads, `token_sets` the ids that truncation left. `repad` and `collate` change their
layout, and `merge_turns` makes one row of several turns. `to_records` makes plain dicts, and `summary` shows a result.
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
from corelm.containers.html import container_html
from corelm.containers.kept_sets import token_sets
from corelm.containers.notebook import show_results
from corelm.containers.overview import summary
from corelm.containers.padding import collate, repad
from corelm.containers.printing import print_in_words, short
from corelm.containers.records import to_records
from corelm.containers.turns import merge_turns

# Saved files name a class by its module. They name this package, so that its modules can be reorganised.
_containers = (ChatHistory, History, LogProbs, Masks, PerToken, Text, Tokens)
for _container in _containers:
    _container.__module__ = __name__
    _container.__repr__ = short  # type: ignore[method-assign]
    _container._repr_html_ = container_html

print_in_words(_containers)
show_results()

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
    "summary",
    "to_records",
    "token_sets",
]

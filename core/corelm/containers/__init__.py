"""TensorClasses that users get back: `Text`, `Tokens`, `Masks`, `LogProbs`, `PerToken`, `ChatHistory`, `History`.

`ragged` reads their fields without pads, `token_sets` the ids that truncation left. `repad` and `collate`
change their layout, `merge_turns` makes one row of several turns, and `to_records` makes plain dicts.
"""

import copyreg

from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from corelm.containers.classes import LogProbs, Masks, PerToken, Text, Tokens, short
from corelm.containers.history import ChatHistory, History
from corelm.containers.padding import collate, repad
from corelm.containers.reading import ragged, token_sets
from corelm.containers.records import to_records
from corelm.containers.turns import merge_turns

# Saved files name a class by its module. They name this package, so that its modules can be reorganised.
for _container in (ChatHistory, History, LogProbs, Masks, PerToken, Text, Tokens):
    _container.__module__ = __name__
    _container.__repr__ = short  # type: ignore[method-assign]

#: Pass these to ``torch.serialization.add_safe_globals``, so that ``torch.load(file, weights_only=True)`` can
#: read containers.
SAFE_GLOBALS = (
    *(Text, Tokens, Masks, LogProbs, PerToken, ChatHistory, History),
    *(TensorDict, LazyStackedTensorDict, NonTensorData, NonTensorStack),
    copyreg.dispatch_table[TensorDict](TensorDict({}))[0],  # the function with which tensordict unpickles
)

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

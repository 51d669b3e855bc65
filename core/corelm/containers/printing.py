"""The ``repr`` of a container: one line or two that say what it holds, and never an exception."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from corelm.containers.classes import LogProbs, Text
from corelm.containers.field_shapes import KEPT, TOP
from corelm.containers.history import History, last_turns
from corelm.containers.reading import head
from corelm.errors import printable
from corelm.spec.provenance import Provenance
from corelm.tensors.lazy_rows import FlatRows, flat_source
from corelm.tensors.ragged import Ragged

#: Fields that the repr leaves out: those without a value per token, and those about ids that were not sampled.
_NOT_NAMED = frozenset({"padded", "provenance", *KEPT, *TOP})
#: How many characters are shown of a text.
_CHARACTERS = 36


def short(container: Any) -> str:
    """Return what a container holds: rows, fields with the number of their values in a row, and its first text."""
    try:
        count = math.prod(container.batch_size)
        rows = f"{count:,} row{'' if count == 1 else 's'}"
        if len(container.batch_size) > 1:
            rows += f" as {tuple(container.batch_size)}"
        names = ", ".join(_named(container, name) for name in container.keys() if name not in _NOT_NAMED)
        return f"{type(container).__name__}({rows}: {names}{_more(container)})"
    except Exception as error:
        # If this raised, the user would not see what is wrong with the contents.
        return f"{type(container).__name__}(not shown, {type(error).__name__})"


def _named(container: Any, name: str) -> str:
    """Return a field's name, and how many values its rows have, as far as no row has to be made for that."""
    source = flat_source(container._tensordict)
    if isinstance(source, FlatRows) and isinstance(field := source.fields[name], Ragged) and len(field):
        low, high = int(field.lengths.min()), int(field.lengths.max())
        return f"{name} {low:,}" if low == high else f"{name} {low:,}–{high:,}"
    value = None if source is not None else container._tensordict.get(name, None)
    return f"{name} {value.shape[-1]:,}" if isinstance(value, Tensor) and value.ndim else name


def _more(container: Any) -> str:
    if isinstance(container, LogProbs):
        found = container.provenance
        found = found[0] if isinstance(found, tuple) else found
        return f"; {_label(found)}" if isinstance(found, Provenance) else "; unknown distribution"
    if not isinstance(container, (Text, History)) or not math.prod(container.batch_size):
        return ""
    first = type(container).from_tensordict(head(container._tensordict, 1))
    if isinstance(container, Text):
        texts = [getattr(first, name)[0] for name in ("prompt", "response", "full") if name in first.keys()]
        return ": " + " → ".join(map(_cut, texts[:2])) if texts else ""
    ((messages, last),) = last_turns(first, 1)
    return f"; {messages} messages in the first" + "".join(f", {one.role}: {_cut(one.content)}" for one in last)


def _label(found: Provenance) -> str:
    weights = ", ".join(dict.fromkeys(version for version, _ in found.version_runs)) or found.weight_version
    return printable(f"{found.mode}, {found.backend}, model '{found.model}', weights '{weights}'")


def _cut(text: Any) -> str:
    shown = printable(str(text or "")[: _CHARACTERS + 1])
    return f"'{shown}'" if len(shown) <= _CHARACTERS else f"'{shown[:_CHARACTERS]}…'"

"""What there is to show of a container or a result: its first rows and a few facts, found quickly and without fail.

Nothing here makes the lazily created rows of a batch. Rows that were made are read up to `MOST`.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_non_tensor
from torch import Tensor

from corelm.application import CONTAINERS, COUNTS, SETS, Path, entries, masks_of, objects
from corelm.containers import ChatHistory, History, LogProbs, Masks, Text, ragged
from corelm.errors import printable
from corelm.spec.provenance import Provenance
from corelm.tensors.lazy_rows import flat_source
from corelm_interop.display.first_rows import head, row_tensors

#: How many rows are read at most, once the rows of a batch have been made one by one.
MOST = 200


def attempt(read: Callable[..., Any], *given: Any, otherwise: Any) -> Any:
    """Return ``read(*given)``, or `otherwise` if it fails: what is printed may be broken."""
    try:
        return read(*given)
    except Exception:
        return otherwise


# Text ----------------------------------------------------------------------------------------------------------------


def cut(text: str, width: int) -> str:
    """Return `text` on one line and at most `width` columns wide, with escape sequences for what is not printable.

    >>> cut("one\\ntwo", 20), cut("a long sentence", 8)
    ('one\\\\ntwo', 'a long …')
    """
    shown = printable(text[: max(width, 1)])
    if len(text) <= width and columns(shown) <= width:
        return shown
    room, kept = width - 1, []
    for character in shown:
        room -= columns(character)
        if room < 0:
            break
        kept.append(character)
    return "".join(kept) + "…"


def columns(text: str) -> int:
    """Return how many columns of a terminal the text takes: two for a wide character, none for a combining one."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def padded_to(text: str, width: int, right: bool = False) -> str:
    """Return the text with spaces up to `width` columns, on its left if it is to stand on the right."""
    spaces = " " * max(0, width - columns(text))
    return spaces + text if right else text + spaces


def span(numbers: Sequence[int]) -> str:
    """Return the smallest and the largest number: "3", "1–3", or "none".

    >>> span([1, 3, 2]), span([2, 2]), span([])
    ('1–3', '2', 'none')
    """
    if not numbers:
        return "none"
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def decimal(value: float | None) -> str:
    """Return a log-probability with three decimals; "–" if there is none."""
    return "–" if value is None else f"{value:.3f}"


def label(provenance: Any) -> str:
    """Return a provenance in a few words; of several, the first and how many more."""
    if isinstance(provenance, tuple):
        return f"{label(provenance[0])}; and {len(provenance) - 1} more"
    if not isinstance(provenance, Provenance):
        return "unknown distribution"
    how: str = provenance.mode
    if provenance.temperature != 1.0 or provenance.support != "full" or provenance.penalties:
        parts = [f"temperature {provenance.temperature:g}", f"{provenance.support} support"]
        parts += [f"{name} {value:g}" for name, value in provenance.penalties]
        how += f" ({', '.join(parts)})"
    model = printable(provenance.model)
    if len(model) > 40:  # a path, whose end is the name
        model = f"…{model[-39:]}"
    # The weight version is that of the first token only.
    weights = ", ".join(dict.fromkeys(version for version, _ in provenance.version_runs)) or provenance.weight_version
    return f"{how}, {cut(provenance.backend, 20)}, model '{model}', weights '{cut(weights, 20)}'"


def row_count(batch_size: Sequence[int]) -> str:
    """Return how many rows there are: "1 row", "4 rows", "6 rows as (2, 3)"."""
    count = math.prod(batch_size)
    words = f"{count:,} row{'' if count == 1 else 's'}"
    return words if len(batch_size) == 1 else f"{words} as {tuple(batch_size)}"


# Rows ----------------------------------------------------------------------------------------------------------------


def first(container: Any, count: int) -> Any:
    """Return the first `count` rows of a container, under one batch dimension."""
    return type(container).from_tensordict(head(container._tensordict, count))


def row_means(log_probs: LogProbs, count: int, masks: Masks | None = None) -> list[float | None]:
    """Return the mean log-prob of each of the first `count` rows, over its scored tokens; None if it is not known.

    Without a `scored_mask` all tokens are scored. In dense rows `masks` then tells tokens from pads.
    """
    means: list[float | None] = []
    shown: Iterable[Any] = [{}] * count if masks is None else row_tensors(first(masks, count))
    for row, of_row in zip(row_tensors(first(log_probs, count)), shown, strict=False):
        values, scored = row.get("full"), row.get("scored_mask")
        if scored is None:
            scored = of_row.get("all_attention_mask")
        if values is None:
            # The mask is as wide as all tokens, and a response is at their end.
            values = row["response"]
            scored = None if scored is None else scored[scored.shape[-1] - values.shape[-1] :]
        if scored is not None:
            values = values[scored]
        known = values.numel() and (scored is not None or not log_probs.padded)
        means.append(values.detach().double().mean().item() if known else None)
    return means


def row_means_at(td: TensorDictBase, path: Path, count: int) -> list[float | None]:
    """Return the `row_means` of the log-probs at `path`, whose masks are in `td`."""
    masks = td.get(masks_of(td, path), None)
    return row_means(td.get(path), count, masks if isinstance(masks, Masks) else None)


def support_facts(log_probs: LogProbs) -> list[str]:
    """Return what the log-probs say about ids, a line each: "support: kept ids, mean 12.3 a token", "top 64 ids"."""
    fields, lines = set(log_probs.keys()), []
    if {SETS, COUNTS} <= fields:
        rows_of = [row[COUNTS].flatten() for row in row_tensors(log_probs)]
        counts = torch.cat(rows_of) if rows_of else torch.zeros(0)
        counts = counts[counts > 0]
        mean = f"mean {counts.double().mean().item():,.1f} a token" if counts.numel() else "none was cut"
        lines.append(f"support: kept ids, {mean}")
    if "top_ids" in fields:
        widths = [row["top_ids"].shape[-1] for row in row_tensors(first(log_probs, 1))]
        lines.append(f"top {span(widths)} ids" + (" with the tail" if "tail_log_mass" in fields else ""))
    return lines


def overall_mean(td: TensorDictBase, path: Path) -> tuple[float | None, int]:
    """Return the mean of all scored log-probs of a container, and how many there are; None if there are none."""
    container, masks = td.get(path), masks_of(td, path)
    name = "full" if "full" in container.keys() else "response"
    if name == "response" or "scored_mask" not in container.keys():
        values = ragged(td, (*path, name), masks=masks).values
    elif td.get(masks, None) is None and container.padded:
        values = container.full[container.scored_mask]
    else:
        scored = ragged(td, (*path, "scored_mask"), masks=masks).values
        values = ragged(td, (*path, "full"), masks=masks).values[scored]
    return (values.detach().double().mean().item() if values.numel() else None), values.numel()


# A result ------------------------------------------------------------------------------------------------------------


def bounded(td: TensorDictBase) -> tuple[TensorDictBase, bool]:
    """Return `td`, or its first `MOST` rows if rows were made one by one and are many; and whether it was cut."""
    if math.prod(td.batch_size) <= MOST:
        return td, False
    # A stack of rows is not asked for its containers, because it would stack those of all rows.
    stored = [td] if _made(td) else [value._tensordict for value in containers_of(td).values()]
    return (head(td, MOST), True) if any(map(_made, stored)) else (td, False)


def _made(td: Any) -> bool:
    """Return whether `td` is a stack whose rows were made one by one."""
    return isinstance(td, LazyStackedTensorDict) and flat_source(td) is None


def containers_of(td: TensorDictBase, kind: Any = CONTAINERS) -> dict[Path, Any]:
    """Return the containers of one class, or of any, by path."""
    return {path: value for path, value in _readable(td) if isinstance(value, kind)}


def _readable(td: TensorDictBase) -> Iterator[tuple[Path, Any]]:
    """Yield the entries up to the first that cannot be read."""
    try:
        yield from entries(td)
    except Exception:  # what is printed must not fail
        return


def prompts_of(td: TensorDictBase) -> list[str]:
    """Return what was asked in every row: the last message of a conversation, else the text of the prompt."""
    for chats in containers_of(td, ChatHistory).values():
        if isinstance(chats.prompt, History):
            return [chat[-1].content or "" if chat else "" for chat in chats.prompt.chats]
    return _texts(td, ("prompt", "full"))


def responses_of(td: TensorDictBase) -> list[str]:
    """Return the response of every row; nothing if there are none."""
    return _texts(td, ("response",))


def _texts(td: TensorDictBase, names: Sequence[str]) -> list[str]:
    for text in containers_of(td, Text).values():
        for name in names:
            if name in text.keys():
                return [str(one) for one in _leaves(getattr(text, name))]
    return []


def strings_of(td: TensorDictBase, name: str) -> list[str]:
    """Return an entry with one str per row; nothing if there is none."""
    value = td.get(name) if name in td.keys() else None
    return [str(one) for one in objects(value, len(td.batch_size))] if is_non_tensor(value) else []


def tally(values: Sequence[str]) -> str:
    """Return how often each value occurs, the most frequent first: "stop 3, length 1"."""
    return ", ".join(f"{cut(value, 20)} {count:,}" for value, count in Counter(values).most_common(6))


def others(td: TensorDictBase) -> list[str]:
    """Return the names of the entries that are not shown otherwise, tensors with dtype and shape."""
    names = []
    for path, value in _readable(td):
        name = cut(".".join(path), 40)
        if isinstance(value, Tensor):
            names.append(f"{name} {str(value.dtype).removeprefix('torch.')}{list(value.shape)}")
        elif not isinstance(value, CONTAINERS) and path not in (("finish_reason",), ("errors",)):
            names.append(name)
    return names


def _leaves(value: Any) -> list[Any]:
    return [leaf for part in value for leaf in _leaves(part)] if isinstance(value, list) else [value]

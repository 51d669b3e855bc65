"""How containers are printed: a few lines for people, whatever the batch holds, and never an exception."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from tensordict import TensorDict, TensorDictBase

from corelm.containers.classes import ChatHistory, LogProbs, Masks, PerToken, Text, Tokens
from corelm.containers.field_shapes import KEPT, TOP
from corelm.containers.glance import (
    attempt,
    cut,
    decimal,
    few,
    field_lengths,
    first,
    label,
    last_words,
    row_count,
    row_means,
    span,
    support_facts,
)
from corelm.containers.history import History, last_turns
from corelm.errors import InvalidRequestError, described

#: How many rows a container shows, and how wide its lines are. TensorDict indents them.
_ROWS, _WIDTH = 3, 88
#: Fields whose widths are not shown: those with no values a token, and those that `support_facts` sums up.
_NOT_COUNTED = frozenset({"padded", "provenance", *KEPT, *TOP})
#: How many means a line shows.
_MEANS = 4
#: The functions of tensordict that show a TensorDict or a TensorClass.
_SHOW = frozenset({"__repr__", "_repr", "_repr_html_", "_repr_html"})
#: Those that show each entry's own ``repr`` if tensordict cannot build its tree. A TensorClass fails.
_FALL_BACK = [getattr(getattr(TensorDictBase, name, None), "__code__", None) for name in ("__repr__", "_repr_html_")]


def short(container: Any) -> str:
    """Return the ``repr`` of a container: what it holds in a few lines."""
    name = type(container).__name__
    try:
        show = next(show for kind, show in _SHOWN.items() if isinstance(container, kind))
        return f"{name}({show(few(container), row_count(container.batch_size))})"
    except Exception as error:
        # Of meta or broken contents. A repr that raises would hide what is wrong.
        fields = attempt(lambda one: ", ".join(map(str, one.keys())), container, otherwise="no readable fields")
        rows = attempt(lambda one: row_count(one.batch_size), container, otherwise="unknown batch")
        return f"{name}({rows}: {fields}; not shown, {cut(described(error), 60)})"


def _text(text: Text, count: str) -> str:
    lines = []
    for number, row in enumerate(first(text, _ROWS).unbind(0)):
        sides = [getattr(row, name) for name in ("prompt", "response") if name in row.keys()] or [row.full]
        room = _WIDTH // len(sides) - 6
        lines.append(f"{number}: " + " → ".join(f"'{cut(str(side), room)}'" for side in sides))
    return _with_rows(text, f"{count}: {', '.join(text.keys())}", lines)


def _tokens(tokens: Any, count: str) -> str:
    return f"{count}, {_layout(tokens)}: {_widths(tokens)}"


def _masks(masks: Masks, count: str) -> str:
    return f"{count}, {_layout(masks)}: {_widths(masks)}"


def _log_probs(log_probs: LogProbs, count: str) -> str:
    lines = [label(log_probs.provenance)]
    means = attempt(row_means, log_probs, _MEANS, otherwise=[])
    if means:
        more = ", …" if _total(log_probs) > _MEANS else ""
        lines.append(f"mean of each row {', '.join(map(decimal, means))}{more}")
    lines += attempt(support_facts, log_probs, otherwise=[])
    return "\n    ".join([f"{count}, {_layout(log_probs)}: {_widths(log_probs)}", *lines])


def _chat_history(chats: ChatHistory, count: str) -> str:
    shown = next((one for one in (chats.full, chats.prompt, chats.response) if isinstance(one, History)), None)
    return _with_rows(chats, f"{count}: {', '.join(chats.keys())}", [] if shown is None else _chat_lines(shown))


def _history(history: History, count: str) -> str:
    return _with_rows(history, count, _chat_lines(history))


def _chat_lines(history: History) -> list[str]:
    turns = last_turns(first(history, _ROWS), 2)
    return [f"{number}: {last_words(*row, _WIDTH)}" for number, row in enumerate(turns)]


def _with_rows(container: Any, top: str, lines: list[str]) -> str:
    rest = _total(container) - len(lines)
    more = [f"… {rest:,} more"] if rest > 0 and lines else []
    return "\n    ".join([top, *lines, *more])


def _total(container: Any) -> int:
    return int(container.batch_size.numel())


def _layout(container: Any) -> str:
    try:
        return "padded" if container.padded else "not padded"
    except InvalidRequestError:
        return "some rows padded"


def _widths(container: Any) -> str:
    """Return every field with the number of its values in a row: one number if dense, else the smallest and largest."""
    shown = []
    for name in container.keys():
        if name not in _NOT_COUNTED:
            shown.append(f"{name} {span(field_lengths(container, name))}")
    return ", ".join(shown)


_SHOWN: dict[type, Callable[[Any, str], str]] = {
    Text: _text,
    Tokens: _tokens,
    Masks: _masks,
    LogProbs: _log_probs,
    PerToken: _tokens,
    ChatHistory: _chat_history,
    History: _history,
}


# Inside a TensorDict -------------------------------------------------------------------------------------------------


class _InWords:
    """The ``Field.repr`` of every field of a container, which tensordict reads as a bool.

    tensordict 0.15.3 prints a TensorDict as a tree of dtypes and shapes, for which it makes and reads every row of a
    container. If it cannot build the tree, it prints the ``repr`` of each entry, as 0.14 does. So the code that builds
    the tree of a TensorDict gets an error here. Every other caller, such as a TensorClass that holds a container, gets
    True, the usual value.
    """

    refuses = True

    def __bool__(self) -> bool:
        if self.refuses and _falls_back():
            raise TypeError("a container prints itself")
        return True


def _falls_back() -> bool:
    """Return whether the nearest caller that shows something is one of `_FALL_BACK`."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name not in _SHOW:
        frame = frame.f_back
    return frame is not None and frame.f_code in _FALL_BACK


def print_in_words(containers: Iterable[type]) -> None:
    """Let a TensorDict print what its containers print, with tensordict 0.15.3 as well as with 0.14.

    One TensorDict is printed as a test. If tensordict does not catch the error, containers are part of its tree.
    """
    in_words: Any = _InWords()
    for container in containers:
        for field in dataclasses.fields(container):
            field.repr = in_words
    try:
        repr(TensorDict(text=Text()))
    except Exception:
        in_words.refuses = False

"""How results are shown: `summary` prints a screen, and `show_results` lets a notebook show every token.

Only the first rows of a batch are read, and no lazily created row is made, so this is fast for any batch.
Nothing here raises because of what a batch holds: an entry that cannot be read is left out. Everything that
comes from a model or a file is escaped.
"""

from __future__ import annotations

import io
import math
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from html import escape
from itertools import islice, product
from pathlib import PurePath
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text as Line
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase, is_non_tensor
from torch import Tensor

from corelm import to_records
from corelm.application import CONTAINERS, Path, TokenRows, entries, non_tensors
from corelm.containers import LogProbs, Masks, PerToken, Tokens
from corelm.errors import printable
from corelm.spec import Provenance
from corelm.tensors.lazy_rows import FlatObjects, FlatRows, flat_source, lazy_rows
from corelm.tensors.ragged import Ragged
from corelm.validate import invalid

__all__ = ["Summary", "container_html", "show_results", "summary"]

#: Rows that facts are about, rows that a terminal shows at most, and the widest line there.
_READ, _LINES, _WIDEST = 200, 20, 140
#: Columns of texts, and how wide they are together, unless other columns are wide even without repeated means.
_TEXTS, _ROOM = ("prompt", "response"), 26
#: Rows, tokens of a row (of the prompt the last ones), and characters of a text that a page shows.
_ROWS, _TOKENS, _PROMPT_TOKENS, _CHARACTERS = 8, 200, 50, 600

_LEGEND = (
    '<p style="opacity:.7">Pale: the prompt. Underlined: the assistant\'s. The deeper the orange, the less '
    "likely the token. Point at a token for its numbers.</p>"
)

Columns = Mapping[str, Sequence[Any]]


class Summary:
    """What a result holds. ``print`` it, or let a notebook show it. Made by `summary`."""

    def __init__(self, td: TensorDictBase, tokenizer: Any = None) -> None:
        self._td, self._tokenizer = td, tokenizer

    def __str__(self) -> str:
        width, height = shutil.get_terminal_size((80, 24))
        # In a kernel of Jupyter, rich would display the lines by itself and write none.
        out = Console(file=io.StringIO(), width=min(max(width, 60), _WIDEST), color_system=None, force_jupyter=False)
        facts = _facts(self._td)
        for fact in [*facts, ""]:
            out.print(Line(printable(fact)), no_wrap=True, overflow="ellipsis")
        # A prompt of a shell takes two lines, and the table three more than its rows.
        room = max(1, min(_LINES, height - len(facts) - 5))
        columns = {
            title: [_cell(cell) for cell in cells]
            for title, cells in _columns_to_show(self._td, _head(self._td, room)).items()
        }
        # Texts need room, and the facts above hold all the means.
        widths = {title: 2 + max(map(len, [title, *cells])) for title, cells in columns.items() if title not in _TEXTS}
        for title in [title for title in widths if title.startswith("mean ")][:0:-1]:
            if sum(widths.values()) > out.width - _ROOM:
                del columns[title], widths[title]
        table = Table(box=None, pad_edge=False, expand=True, header_style="")
        for title in columns:
            is_text = title in _TEXTS
            is_left = is_text or not title
            table.add_column(
                Line(printable(title)),
                justify="left" if is_left else "right",
                no_wrap=True,
                overflow="ellipsis",
                ratio=1 if is_text else None,
            )
        for cells in zip(*columns.values(), strict=True):
            table.add_row(*(Line(printable(cell[:_WIDEST])) for cell in cells))
        out.print(table)
        if (rest := math.prod(self._td.batch_size) - room) > 0:
            out.print(f"… {rest:,} more rows", highlight=False)
        return "\n".join(line.rstrip() for line in out.file.getvalue().splitlines())  # type: ignore[attr-defined]

    __repr__ = __str__

    def _repr_html_(self) -> str:
        facts = _facts(self._td)
        top = _head(self._td, _ROWS)
        columns: dict[str, Sequence[str]] = {
            title: [_text_cell(_cell(cell)) for cell in cells]
            for title, cells in _columns_to_show(self._td, top).items()
        }
        with suppress(Exception):
            if cells := _token_cells(top, self._tokenizer):
                columns["tokens"] = cells
        rest = math.prod(self._td.batch_size) - _ROWS
        more = f"<p>… {rest:,} more rows</p>" if rest > 0 else ""
        lines = "".join(f"<br>{escape(fact)}" for fact in facts[1:])
        return f"<div><b>{escape(facts[0])}</b>{lines}{_table(columns)}{more}{_LEGEND}</div>"


def summary(td: TensorDictBase, *, tokenizer: Any = None) -> Summary:
    """Return what a result holds, in at most a screen: rows, texts, lengths, log-probs, finish reasons, provenance.

    ``print(corelm_interop.summary(result))`` fits the terminal. In a notebook, the summary shows every token, its role,
    its mask and its log-prob. Only the first rows are read; a summary of a broken result shows what can be read.

    Args:
        td: what a policy returned, or any TensorDict with containers.
        tokenizer: shows the text of each token in a notebook instead of its id.

    Raises:
        InvalidRequestError: `td` is not a TensorDict.
    """
    if not isinstance(td, TensorDictBase):
        raise invalid("td", f"expected a TensorDict, such as a policy returns, got {type(td).__name__}")
    return Summary(td, tokenizer)


def container_html(container: Any) -> str:
    """Return the first rows of a container: the values of each field."""
    body = f"<pre>{escape(repr(container))}</pre>"
    with suppress(Exception):  # of meta or broken contents
        body = _table(_fields(type(container).from_tensordict(_head(container._tensordict, _ROWS))))
    return f"<div><b>{type(container).__name__}</b> {escape(_row_count(container))}{body}</div>"


def show_results(tokenizer: Any = None) -> None:
    """Let a running IPython show containers, and a TensorDict with some, as HTML, unless it has a way.

    Args:
        tokenizer: as for `summary`. Call again with another one.
    """
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None:
        return
    formatter = shell.display_formatter.formatters["text/html"]
    result = partial(result_or_none, tokenizer=tokenizer)
    for kind, show in ((TensorDictBase, result), *((each, container_html) for each in CONTAINERS)):
        if kind not in formatter.type_printers or (show is result and tokenizer is not None):
            formatter.for_type(kind, show)


def result_or_none(td: TensorDictBase, tokenizer: Any = None) -> str | None:
    """Return the HTML of a TensorDict with containers; of another what tensordict returns, if it does."""
    with suppress(Exception):  # IPython would print the traceback above the result
        if any(isinstance(value, CONTAINERS) for _, value in entries(_head(td, 1))):
            return Summary(td, tokenizer)._repr_html_()
        of_tensordict: Callable[[], str | None] = getattr(td, "_repr_html_", lambda: None)
        return of_tensordict()
    return None


# What there is to show


def _facts(td: TensorDictBase) -> list[str]:
    """Return what holds for all rows, a line each."""
    top = _head(td, _READ)
    left_out = math.prod(td.batch_size) > _READ
    lines = [_row_count(td) + (f"; below, the first {_READ}" if left_out else "")]
    columns, others = _columns(top), []
    for path, value in _entries(top):
        name = ".".join(path)
        if isinstance(value, Tokens):
            prefix = "" if path == ("tokens",) else f"{name}_"
            lengths = {part: columns.get(f"{prefix}{part}length") for part in ("prompt_", "response_", "")}
            spans = [f"{part.rstrip('_')} {_span(found)}".strip() for part, found in lengths.items() if found]
            layout = _attempt(lambda one: "padded" if one.padded else "not padded", value, "of both layouts")
            lines.append(f"{name}: {', '.join([*spans, layout])}" if spans else f"{name}: cannot be read")
        elif isinstance(value, LogProbs):
            numbers = [number for row in columns.get(name, ()) for number in row if number is not None]
            mean = f"mean {_decimal(math.fsum(numbers) / len(numbers))} over {len(numbers):,}" if numbers else "no"
            known = name in columns
            lines.append(
                f"{name}: {mean} scored tokens" if known else f"{name}: scored tokens cannot be told from pads"
            )
            lines.append(f"    {_attempt(lambda one: _label(one.provenance), value, 'unknown distribution')}")
            if about := [field for field in ("kept_ids", "top_ids", "tail_log_mass") if field in value.keys()]:
                lines.append(f"    with {', '.join(about)}")
        elif not isinstance(value, CONTAINERS) and path not in (("finish_reason",), ("errors",)):
            shape = f" {str(value.dtype).removeprefix('torch.')}{[*td.batch_size, *value.shape[1:]]}"
            others.append(name[:40] + (shape if isinstance(value, Tensor) else ""))
    if reasons := columns.get("finish_reason"):
        tally = Counter(map(str, reasons)).most_common(6)
        lines.append("finish_reason: " + ", ".join(f"{reason} {count:,}" for reason, count in tally))
    if wrong := [error for error in columns.get("errors", ()) if error]:
        lines.append(f"errors: {len(wrong):,}, the first: {wrong[0]}")
    if others:
        more = f" and {len(others) - 8} more" if len(others) > 8 else ""
        lines.append(f"also: {', '.join(others[:8])}{more}")
    return [printable(line) for line in lines]


def _columns_to_show(td: TensorDictBase, top: TensorDictBase) -> dict[str, Sequence[Any]]:
    columns = _columns(top)
    index = islice(product(*map(range, td.batch_size)), len(top))
    found: dict[str, Sequence[Any]] = {"": [", ".join(map(str, row)) or "0" for row in index]}
    chats = columns.get("prompt_messages") or [chat[:-1] for chat in columns.get("messages", ())]
    asked: list[str] = []
    with suppress(Exception):  # an entry of another library may hold messages in another format
        asked = [chat[-1]["content"] or "" if chat else "" for chat in chats]
    found["prompt"] = asked if any(asked) else columns.get("prompt") or columns.get("text") or []
    answers = columns.get("response", [])
    errors = columns.get("errors") or [""] * len(answers)
    found["response"] = [f"({why})" if why else answer for answer, why in zip(answers, errors, strict=False)]
    lengths = [columns[name] for name in ("prompt_length", "response_length", "length") if name in columns]
    found["tokens"] = [" + ".join(map(str, row)) for row in zip(*lengths, strict=True)]
    for path, value in _entries(top):
        if isinstance(value, LogProbs):
            name = ".".join(path)
            title = "mean log-prob" if name == "log_probs" else f"mean {name}"
            found[title] = columns.get(f"{name}_mean", ())
    found["finish"] = columns.get("finish_reason", ())
    return {title: list(cells) for title, cells in found.items() if len(cells)}


def _columns(td: TensorDictBase) -> dict[str, list[Any]]:
    """Return the columns of `to_records` for every entry that can be read."""
    found: dict[str, list[Any]] = {}
    masks = [path[0] for path, value in _entries(td) if isinstance(value, Masks) and len(path) == 1]
    for name in td.keys():
        with suppress(Exception):
            given = {each: td.get(each) for each in dict.fromkeys((name, *masks))}
            given = {each: _without_ids(value) for each, value in given.items()}
            records = to_records(TensorDict(given, batch_size=td.batch_size))
            found |= {key: [record[key] for record in records] for key in records[0]}
    return found


def _without_ids(value: Any) -> Any:
    """Return log-probs without ids of other tokens, of which there may be many for each token."""
    return value.exclude("kept_ids", "kept_counts", "top_ids") if isinstance(value, LogProbs) else value


def _entries(td: TensorDictBase) -> Iterator[tuple[Path, Any]]:
    """Yield the entries up to the first that cannot be read."""
    with suppress(Exception):
        yield from entries(td)


def _label(provenance: Any) -> str:
    """Return a provenance in a few words; of several, the first and how many more."""
    if isinstance(provenance, tuple):
        return f"{_label(provenance[0])}; and {len(provenance) - 1} more"
    if not isinstance(provenance, Provenance):
        return "unknown distribution"
    how: str = provenance.mode
    if provenance.temperature != 1.0 or provenance.support != "full" or provenance.penalties:
        parts = [f"temperature {provenance.temperature:g}", f"{provenance.support} support"]
        parts += [f"{name} {value:g}" for name, value in provenance.penalties]
        how += f" ({', '.join(parts)})"
    # The weight version is that of the first token only. The end of a path is the name of the model.
    model = provenance.model if len(provenance.model) <= 24 else PurePath(provenance.model).name[-40:]
    weights = ", ".join(dict.fromkeys(version for version, _ in provenance.version_runs)) or provenance.weight_version
    return f"{how}, {provenance.backend}, model '{model}', weights '{weights[:20]}'"


def _row_count(value: Any) -> str:
    """Return how many rows there are: "1 row", "4 rows", "6 rows as (2, 3)"."""
    count = math.prod(value.batch_size)
    words = f"{count:,} row{'' if count == 1 else 's'}"
    return words if len(value.batch_size) == 1 else f"{words} as {tuple(value.batch_size)}"


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def _decimal(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _cell(value: Any) -> str:
    return _decimal(value) if value is None or isinstance(value, (int, float)) else str(value)


def _attempt(read: Callable[[Any], str], value: Any, otherwise: str) -> str:
    try:
        return read(value)
    except Exception:
        return otherwise


# The first rows


def _head(td: TensorDictBase, count: int) -> Any:
    """Return the first `count` rows, in C order, under one batch dimension.

    Makes no other lazily created row. Entries that cannot be read are left out. Values are not copied.
    """
    source = flat_source(td)
    count = min(count, math.prod(td.batch_size))
    if isinstance(source, FlatRows):
        fields = {
            name: value.first(count) if isinstance(value, Ragged) else value[:count]
            for name, value in source.fields.items()
        }
        return lazy_rows(fields, (count,)) if count else TensorDict({}, batch_size=[0])
    if isinstance(td, LazyStackedTensorDict):
        found = list(islice(_rows(td), count))
        return type(td)(*found, stack_dim=0) if found else TensorDict({}, batch_size=[0])
    out = TensorDict({}, batch_size=[count])
    for name in td.keys():
        with suppress(Exception):
            out.set(name, _head_of(td.get(name), len(td.batch_size), count))
    return out


def _rows(td: Any) -> Iterator[Any]:
    """Yield the rows one by one, in C order."""
    if not td.batch_dims:
        yield td
        return
    for index in range(td.shape[0]):
        yield from _rows(td[index])


def _head_of(value: Any, dims: int, count: int) -> Any:
    if isinstance(value, Tensor):
        return value.reshape(math.prod(value.shape[:dims]), *value.shape[dims:])[:count]
    if is_non_tensor(value):
        source = flat_source(value)
        if isinstance(source, FlatObjects):
            return non_tensors(source.values[:count], (count,))
        if isinstance(value, NonTensorData):
            return NonTensorData(value.data, batch_size=[count])
        return _head(value, count)
    if isinstance(value, TensorDictBase):
        return _head(value, count)
    return type(value).from_tensordict(_head(value._tensordict, count))


# HTML


def _token_cells(td: TensorDictBase, tokenizer: Any) -> list[str]:
    """Return the tokens of each row: the end of a long prompt and the beginning of a long response."""
    if (found := TokenRows.of(td)) is None:
        return []
    tokens, split = found.ids()
    lengths = tokens.lengths
    start = torch.zeros_like(lengths)
    if split is not None:
        start = (split - _PROMPT_TOKENS).clamp_min(0) * (lengths > _TOKENS)
    stop = lengths.minimum(start + _TOKENS)

    def shown(rows: Ragged) -> list[list[Any]]:
        return rows.slice(start, stop).tolist()

    scores = [tuple(map(shown, found.log_probs(path))) for path in found.paths_of(LogProbs)]
    marks = found.assistant()
    assistant = None if marks is None else shown(marks)
    numbers = {".".join(path): shown(found.read((*path, "full"))) for path in found.paths_of(PerToken)}
    cells = []
    for row, ids in enumerate(shown(tokens)):
        first, pieces = int(start[row]), []
        for at, token in enumerate(ids):
            facts = [f"position {first + at}", f"id {token}"]
            facts += [f"{key} {values[row][at]:.6g}" for key, values in numbers.items()]
            role = "" if split is None else "prompt" if first + at < int(split[row]) else "response"
            style = ["padding:0 1px", "white-space:pre-wrap", *(["opacity:.6"] if role == "prompt" else [])]
            if assistant is not None:
                role += ", assistant" if assistant[row][at] else ", not the assistant"
                style += ["border-bottom:2px solid #3b82f6"] if assistant[row][at] else []
            facts += [role] if role else []
            if own := [values[row][at] for values, scored in scores if scored[row][at]]:
                probability = 0.0 if math.isnan(own[0]) else math.exp(min(own[0], 0.0))
                facts.append(f"log-prob {own[0]:.6g}, probability {probability:.4g}")
                style.append(f"background:rgba(230,120,0,{0.65 * (1 - probability):.2f})")
            text = f"{token} " if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)
            title = escape(", ".join(facts))
            pieces.append(f'<span title="{title}" style="{";".join(style)}">{_escaped(text)}</span>')
        before = f"… {first:,} before " if first else ""
        rest = int(lengths[row] - stop[row])
        cells.append(before + "".join(pieces) + (f" … {rest:,} more" if rest else ""))
    return cells


def _fields(container: Any) -> dict[str, list[str]]:
    columns: dict[str, list[str]] = {}
    for name in container.keys():
        value = getattr(container, name)
        if type(value) in CONTAINERS:
            columns |= {f"{name} {each}".strip(): cells for each, cells in _fields(value).items()}
        elif name not in ("padded", "provenance") and isinstance(value, (list, Tensor)):
            columns[name] = [_text_cell(_plain(row)) for row in value]
    if hasattr(container, "chats"):
        chats = ["\n".join(f"{one.role}: {one.content}" for one in chat) for chat in container.chats]
        return {"": list(map(_text_cell, chats))}
    return columns


def _plain(row: Any) -> str:
    if not isinstance(row, Tensor):
        return str(row)
    rest = len(row) - _TOKENS
    values = row[:_TOKENS].int() if row.dtype == torch.bool else row[:_TOKENS]
    return " ".join(f"{value:.4g}" if isinstance(value, float) else f"{value}" for value in values.tolist()) + (
        f" … {rest:,} more" if rest > 0 else ""
    )


def _table(columns: Columns) -> str:
    """Return a table. Cells are HTML; titles are not."""
    style = 'style="text-align:left;vertical-align:top"'
    titles = "".join(f"<th {style}>{escape(title)}</th>" for title in columns)
    lines = zip(*columns.values(), strict=False)
    body = "".join("<tr>" + "".join(f"<td {style}>{cell}</td>" for cell in line) + "</tr>" for line in lines)
    return f"<table><tr>{titles}</tr>{body}</table>"


def _text_cell(text: str) -> str:
    more = f" … {len(text) - _CHARACTERS:,} more characters" if len(text) > _CHARACTERS else ""
    return f'<span style="white-space:pre-wrap">{_escaped(text[:_CHARACTERS])}</span>{more}'


def _escaped(text: str) -> str:
    """Escape text for HTML. Unprintable characters other than newlines and tabs become escape sequences."""
    return escape(printable(text, keep="\n\t"))

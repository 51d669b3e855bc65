"""Containers and results as HTML for notebooks: every token with its role, its mask and its log-prob.

The first rows and tokens only, so that a page stays small. Everything that comes from a model or a file is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from corelm.application import TokenColumns, token_lengths, tokens_path
from corelm.containers import ChatHistory, History, LogProbs, Masks, PerToken, Text, Tokens
from corelm.errors import printable
from corelm_interop.display.first_rows import head, row_tensors, window
from corelm_interop.display.glance import (
    attempt,
    containers_of,
    cut,
    decimal,
    first,
    prompts_of,
    responses_of,
    row_count,
    row_means_at,
    strings_of,
)

#: Rows, tokens of a row (of the prompt the last ones), and characters of a text that a page shows.
_ROWS, _TOKENS, _PROMPT_TOKENS, _CHARACTERS = 8, 200, 50, 600

_LEGEND = (
    '<p style="opacity:.7">Pale: the prompt. Underlined: the assistant\'s. The deeper the orange, the less likely the '
    "token. Point at a token for its numbers.</p>"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Token:
    """A token to be shown.

    Attributes:
        label: its text, its id or its number.
        role: "prompt", "response" or "".
        assistant: whether it is the assistant's; None if that is not known.
        log_prob: None where it is not scored.
        hover: more to show when it is pointed at.
    """

    label: str
    role: str = ""
    assistant: bool | None = None
    log_prob: float | None = None
    hover: str = ""

    def html(self, position: int) -> str:
        """Return a span."""
        facts = [f"position {position}", self.hover, self.role]
        style = ["padding:0 1px", "white-space:pre-wrap"]
        if self.assistant is not None:
            facts.append("assistant" if self.assistant else "not the assistant")
            style += ["border-bottom:2px solid #3b82f6"] if self.assistant else []
        if self.role == "prompt":
            style.append("opacity:.6")
        if self.log_prob is not None:
            probability = 0.0 if math.isnan(self.log_prob) else math.exp(min(self.log_prob, 0.0))
            facts.append(f"log-prob {self.log_prob:.6g}, probability {probability:.4g}")
            style.append(f"background:rgba(230,120,0,{0.65 * (1 - probability):.2f})")
        title = escape(", ".join(filter(None, facts)))
        return f'<span title="{title}" style="{";".join(style)}">{_escaped(self.label)}</span>'


def container_html(container: Any) -> str:
    """Return the first rows of a container."""
    try:
        body = _BODIES[type(container)](container)
    except Exception:  # of meta or broken contents
        body = f"<pre>{escape(repr(container))}</pre>"
    count = attempt(lambda one: row_count(one.batch_size), container, otherwise="")
    return f"<div><b>{type(container).__name__}</b> {escape(count)}{body}</div>"


def result_html(td: TensorDictBase, facts: Sequence[str], tokenizer: Any = None) -> str:
    """Return a result: what holds for all rows, and a table of the first rows.

    Args:
        facts: what holds for all rows, a line each.
        tokenizer: shows the text of each token instead of its id.
    """
    lines = "".join(f"<br>{escape(line)}" for line in facts[1:])
    top = attempt(head, td, _ROWS, otherwise=None)
    body = "" if top is None else attempt(_rows_table, top, tokenizer, otherwise="")
    rest = math.prod(td.batch_size) - _ROWS
    more = f"<p>… {rest:,} more rows</p>" if rest > 0 else ""
    return f"<div><b>{escape(facts[0])}</b>{lines}{body}{more}{_LEGEND if body else ''}</div>"


def _rows_table(td: TensorDictBase, tokenizer: Any) -> str:
    count = td.batch_size[0]
    columns: dict[str, list[str]] = {"": [str(row) for row in range(count)]}
    for title, read in (("prompt", prompts_of), ("response", responses_of)):
        columns[title] = [_text_cell(text) for text in attempt(read, td, otherwise=[])]
    columns["tokens"] = attempt(_token_cells, td, tokenizer, otherwise=[])
    for path in containers_of(td, LogProbs):
        means = attempt(row_means_at, td, path, count, otherwise=[])
        columns[f"mean {'.'.join(path)}"] = [decimal(one) for one in means]
    for name in ("finish_reason", "errors"):
        values = attempt(strings_of, td, name, otherwise=[])
        if any(values):
            columns[name] = [_text_cell(one) for one in values]
    return _table({title: cells for title, cells in columns.items() if len(cells) == count})


def _token_cells(td: TensorDictBase, tokenizer: Any) -> list[str]:
    path = tokens_path(td)
    if path is None:
        return []
    lengths, prompt_lengths = token_lengths(td, path)
    splits = [None] * len(lengths) if prompt_lengths is None else prompt_lengths.tolist()
    shown = [_shown(count, split) for count, split in zip(lengths.tolist(), splits, strict=True)]
    reduced = attempt(window, td, lengths, prompt_lengths, shown, otherwise=None)
    # Rows of both layouts are read whole.
    found = TokenColumns.of(td if reduced is None else reduced)
    assert found is not None
    left_out = [0 if reduced is None else positions.start for positions in shown]
    log_probs = {key: (values.tolist(), scored.tolist()) for key, (values, scored) in found.log_probs.items()}
    assistant = None if found.assistant is None else found.assistant.tolist()
    numbers = {key: values.tolist() for key, values in found.numbers.items()}
    cells = []
    for row, (tokens, positions, split) in enumerate(zip(found.ids.tolist(), shown, splits, strict=True)):
        pieces = []
        for position in positions:
            at = position - left_out[row]
            scores = [values[row][at] for values, scored in log_probs.values() if scored[row][at]]
            hover = [f"id {tokens[at]}"]
            hover += [f"{key} {values[row][at]:.6g}" for key, values in numbers.items()]
            text = str(tokens[at]) if tokenizer is None else tokenizer.decode([tokens[at]], skip_special_tokens=False)
            one = _Token(
                label=text if tokenizer is not None else f"{text} ",
                role="" if split is None else "prompt" if position < split else "response",
                assistant=None if assistant is None else assistant[row][at],
                log_prob=scores[0] if scores else None,
                hover=", ".join(hover),
            )
            pieces.append(one.html(position))
        cells.append(_joined(pieces, positions, int(lengths[row])))
    return cells


def _shown(count: int, split: int | None) -> range:
    """Return the positions to show: the end of the prompt and the beginning of the response."""
    start = max(0, split - _PROMPT_TOKENS) if split is not None and count > _TOKENS else 0
    return range(start, min(count, start + _TOKENS))


def _joined(pieces: Sequence[str], shown: range, count: int) -> str:
    before = f"… {shown.start:,} before " if shown.start else ""
    after = f" … {count - shown.stop:,} more" if shown.stop < count else ""
    return before + "".join(pieces) + after


# One container -------------------------------------------------------------------------------------------------------


def _text_body(text: Text) -> str:
    found = first(text, _ROWS)
    parts = {name: getattr(found, name) for name in ("prompt", "response", "full") if name in found.keys()}
    if "prompt" in parts and "response" in parts:
        parts.pop("full", None)
    return _table({name: [_text_cell(one) for one in values] for name, values in parts.items()})


def _tokens_body(container: Any) -> str:
    """Show the values of all positions, and as their roles whether they are in the prompt or in the response."""
    cells = []
    for row in row_tensors(first(container, _ROWS)):
        parts: dict[str, Tensor] = {name: row[name] for name in ("prompt", "response") if name in row}
        if len(parts) < 2 and "full" in row:
            parts = {"": row["full"]}
        count = sum(part.shape[0] for part in parts.values())
        scored = row.get("scored_mask") if isinstance(container, LogProbs) else None
        known = None if scored is None or scored.shape[-1] != count else scored[:_TOKENS].tolist()
        values = [(role, value) for role, part in parts.items() for value in part.detach()[:_TOKENS].tolist()]
        shown = range(min(count, _TOKENS))
        pieces = []
        for at in shown:
            role, value = values[at]
            counts = known is None or known[at]
            is_log_prob = isinstance(container, LogProbs) and counts
            shown_as = str(value) if isinstance(value, int) else f"{value:.3g}" if counts else "·"
            one = _Token(label=f"{shown_as} ", role=role, log_prob=value if is_log_prob else None, hover=f"{value}")
            pieces.append(one.html(at))
        cells.append(_joined(pieces, shown, count))
    return _table({"": [str(row) for row in range(len(cells))], "values": cells})


def _masks_body(masks: Masks) -> str:
    """Show a letter per position: p for the prompt, r for the response, a dot for a pad."""
    cells = []
    for row in row_tensors(first(masks, _ROWS)):
        count = row["all_attention_mask"].shape[-1]
        shown = range(min(count, _TOKENS))
        here = row["all_attention_mask"][:_TOKENS].tolist()
        answered, assistant = (
            row[name][:_TOKENS].tolist() if name in row else None
            for name in ("all_response_mask", "all_assistant_mask")
        )
        pieces = []
        for at in shown:
            role = "" if answered is None else "response" if answered[at] else "prompt"
            letter = (role or "token")[0] if here[at] else "·"
            one = _Token(
                label=letter,
                role=role if here[at] else "",
                assistant=None if assistant is None else assistant[at],
                hover="" if here[at] else "pad",
            )
            pieces.append(one.html(at))
        cells.append(_joined(pieces, shown, count))
    return _table({"": [str(row) for row in range(len(cells))], "p prompt, r response, · pad": cells})


def _chats_body(history: History) -> str:
    cells = []
    for chat in first(history, _ROWS).chats:
        turns = chat[-6:]
        before = f"<p>… {len(chat) - len(turns)} messages before</p>" if len(turns) < len(chat) else ""
        said = "".join(f"<p><b>{_escaped(cut(one.role, 40))}</b> {_text_cell(one.content or '')}</p>" for one in turns)
        cells.append(before + said)
    return _table({"": [str(row) for row in range(len(cells))], "messages": cells})


def _chat_history_body(chats: ChatHistory) -> str:
    found = next((one for one in (chats.full, chats.prompt, chats.response) if isinstance(one, History)), None)
    return "" if found is None else _chats_body(found)


_BODIES: dict[type, Any] = {
    Text: _text_body,
    Tokens: _tokens_body,
    LogProbs: _tokens_body,
    PerToken: _tokens_body,
    Masks: _masks_body,
    History: _chats_body,
    ChatHistory: _chat_history_body,
}

# Pieces --------------------------------------------------------------------------------------------------------------


def _table(columns: dict[str, list[str]]) -> str:
    """Return a table. Cells are HTML; titles are not."""
    style = 'style="text-align:left;vertical-align:top"'
    titles = "".join(f"<th {style}>{escape(title)}</th>" for title in columns)
    lines = zip(*columns.values(), strict=False)
    body = "".join("<tr>" + "".join(f"<td {style}>{cell}</td>" for cell in line) + "</tr>" for line in lines)
    return f"<table><tr>{titles}</tr>{body}</table>"


def _text_cell(text: Any) -> str:
    text = str(text)
    more = f" … {len(text) - _CHARACTERS:,} more characters" if len(text) > _CHARACTERS else ""
    return f'<span style="white-space:pre-wrap">{_escaped(text[:_CHARACTERS])}</span>{more}'


def _escaped(text: str) -> str:
    """Return text as HTML, with escape sequences for characters that are not printable, except newlines and tabs."""
    return escape(printable(text, keep="\n\t"))

"""`summary`: what a result holds, on one screen, for a terminal or a notebook."""

from __future__ import annotations

import math
import shutil
from typing import Any

from tensordict import TensorDictBase

from corelm.application import token_lengths
from corelm.containers import LogProbs, Tokens
from corelm.validate import invalid
from corelm_interop.display.first_rows import head
from corelm_interop.display.glance import (
    attempt,
    bounded,
    containers_of,
    cut,
    decimal,
    label,
    others,
    overall_mean,
    padded_to,
    prompts_of,
    responses_of,
    row_count,
    row_means_at,
    span,
    strings_of,
    support_facts,
    tally,
)
from corelm_interop.display.html import result_html

#: Rows that are shown at most, in however large a terminal.
_ROWS = 20
#: Lines that a prompt of a shell takes after the summary.
_LEFT_FREE = 2
_WIDEST = 140


class Summary:
    """What a result holds. ``print`` it, or let a notebook show it. Made by `summary`."""

    def __init__(self, td: TensorDictBase, tokenizer: Any = None) -> None:
        self._td, self._tokenizer = td, tokenizer

    def __str__(self) -> str:
        width, height = shutil.get_terminal_size((80, 24))
        width = min(max(width, 60), _WIDEST)
        top = [cut(line, width) for line in facts(self._td)]
        room = max(1, min(_ROWS, height - len(top) - _LEFT_FREE - 3))
        return "\n".join([*top, "", *_table(self._td, room, width)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return result_html(self._td, facts(self._td), self._tokenizer)


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


def facts(td: TensorDictBase) -> list[str]:
    """Return what holds for all rows, a line each."""
    seen, partial = attempt(bounded, td, otherwise=(td, False))
    lines = [row_count(td.batch_size) + (f"; below, the first {seen.batch_size[0]:,}" if partial else "")]
    for path, tokens in containers_of(seen, Tokens).items():
        lines.append(f"{'.'.join(path)}: {attempt(_lengths, seen, path, tokens, otherwise='cannot be read')}")
    for path, log_probs in containers_of(seen, LogProbs).items():
        mean = attempt(overall_mean, seen, path, otherwise=None)
        if mean is None:
            number = "the scored tokens cannot be told from pads"
        else:
            number = f"mean {decimal(mean[0])} over {mean[1]:,} scored tokens" if mean[1] else "no scored tokens"
        lines.append(f"{'.'.join(path)}: {number}")
        lines.append(f"    {attempt(lambda one: label(one.provenance), log_probs, otherwise='unknown distribution')}")
        lines += [f"    {line}" for line in attempt(support_facts, log_probs, otherwise=[])]
    reasons = attempt(strings_of, seen, "finish_reason", otherwise=[])
    if reasons:
        lines.append(f"finish_reason: {tally(reasons)}")
    wrong = [text for text in attempt(strings_of, seen, "errors", otherwise=[]) if text]
    if wrong:
        lines.append(f"errors: {len(wrong):,}, the first: {cut(wrong[0], 100)}")
    rest = attempt(others, seen, otherwise=[])
    if rest:
        lines.append("also: " + ", ".join(rest[:8]) + (f" and {len(rest) - 8} more" if len(rest) > 8 else ""))
    return lines


def _lengths(td: TensorDictBase, path: tuple[str, ...], tokens: Tokens) -> str:
    lengths, prompt_lengths = token_lengths(td, path)
    layout = "padded" if tokens.padded else "not padded"
    if prompt_lengths is None:
        return f"{span(lengths.tolist())} a row, {layout}"
    response = (lengths - prompt_lengths).tolist()
    return f"prompt {span(prompt_lengths.tolist())}, response {span(response)}, {layout}"


def _table(td: TensorDictBase, room: int, width: int) -> list[str]:
    """Return a line of headings and one per row, at most `room` rows."""
    count = math.prod(td.batch_size)
    top = attempt(head, td, room, otherwise=None)
    if top is None or not count:
        return ["no rows" if not count else "the rows cannot be read"]
    shown = min(room, count)
    narrow: dict[str, list[str]] = {"": [_index(td, row) for row in range(shown)]}
    for path, _ in list(containers_of(top, Tokens).items())[:1]:
        narrow["tokens"] = attempt(_row_lengths, top, path, otherwise=[])
    for path in list(containers_of(top, LogProbs))[:2]:
        key = ".".join(path)
        title = "mean log-prob" if key == "log_probs" else cut(f"mean {key}", 18)
        narrow[title] = [decimal(one) for one in attempt(row_means_at, top, path, shown, otherwise=[])]
    narrow["finish"] = [cut(one, 10) for one in attempt(strings_of, top, "finish_reason", otherwise=[])]
    texts = {"prompt": attempt(prompts_of, top, otherwise=[]), "response": attempt(responses_of, top, otherwise=[])}
    errors = attempt(strings_of, top, "errors", otherwise=[])
    if len(errors) == len(texts["response"]):
        texts["response"] = [
            f"({error})" if error else one for one, error in zip(texts["response"], errors, strict=True)
        ]
    narrow = {title: cells for title, cells in narrow.items() if len(cells) == shown}
    texts = {title: cells for title, cells in texts.items() if len(cells) == shown}
    widths = {title: max(len(title), *map(len, cells)) for title, cells in narrow.items()}
    left = width - sum(widths.values()) - 2 * len(widths) - 2 * max(len(texts) - 1, 0)
    wide = max(10, left // max(len(texts), 1))
    index, *numbers = narrow
    lines = []
    for row in [None, *range(shown)]:
        cells = [padded_to(index if row is None else narrow[index][row], widths[index])]
        cells += [padded_to(title if row is None else cut(texts[title][row], wide), wide) for title in texts]
        cells += [
            padded_to(title if row is None else narrow[title][row], widths[title], right=True) for title in numbers
        ]
        lines.append("  ".join(cells).rstrip())
    if count > shown:
        lines.append(f"… {count - shown:,} more rows")
    return lines


def _index(td: TensorDictBase, number: int) -> str:
    """Return the index of a row in the batch: "3", or "1, 0"."""
    parts = []
    for width in reversed(td.batch_size):
        number, rest = divmod(number, width)
        parts.append(str(rest))
    return ", ".join(reversed(parts)) or "0"


def _row_lengths(td: TensorDictBase, path: tuple[str, ...]) -> list[str]:
    lengths, prompt_lengths = token_lengths(td, path)
    if prompt_lengths is None:
        return [str(length) for length in lengths.tolist()]
    both = zip(prompt_lengths.tolist(), (lengths - prompt_lengths).tolist(), strict=True)
    return [f"{prompt} + {response}" for prompt, response in both]

"""What a line of ``corelm score`` asks: the log-probability of a text, of completions, or of an assistant's turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from corelm.errors import InvalidRequestError
from corelm.spec import Chat
from corelm_cli import lines
from corelm_cli.lines import Id, Line

#: The keys that hold one completion. `response` is what ``corelm generate`` writes.
ONE = ("completion", "response")
ASKED = ("text", "prompt", "messages", "tools", "completions", *ONE)
KEYS = ("id", *ASKED, "metadata")
#: Other keys that ``corelm generate --copy-input`` writes, so that its output can be scored.
FROM_ANSWERS = (
    "line",
    "prompt_hash",
    "sample",
    "finish_reason",
    "tokens",
    "token_ids",
    "log_probs",
    "kept_ids",
    "kept_log_mass",
    "top_ids",
    "top_log_probs",
    "tail_log_mass",
    "provenance",
    "settings",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToScore(Line):
    """A line to score.

    Attributes:
        text: a text to score as a whole.
        prompt: the text that the completions continue.
        chat: a conversation. Its assistant's turns are scored, or, with `completions`, those as its next turn.
        tools: tools for the chat template.
        completions: the completions, each scored by itself; empty if the line has none.
        single: whether the line has one completion that is not in a list, or none.
    """

    text: str | None = None
    prompt: str | None = None
    chat: Chat | None = None
    tools: list[Any] | None = None
    completions: tuple[str, ...] = ()
    single: bool = True


def read_to_score(number: int, name: Id, row: dict[str, Any]) -> ToScore:
    """Read a line with `text`, with `messages`, or with `prompt` or `messages` and completions."""
    lines.check_keys(row, KEYS, FROM_ANSWERS)
    given = [key for key in ("text", "prompt", "messages") if key in row]
    found = [key for key in ("completions", *ONE) if key in row]
    if len(given) != 1:
        raise InvalidRequestError(
            f"expected one of `text`, `prompt` and `messages`, got {' and '.join(given) or 'none of them'}"
        )
    if len(found) > 1:
        raise InvalidRequestError(f"expected one of `completions`, `completion` and `response`, got {', '.join(found)}")
    if "prompt" in row and not found:
        raise InvalidRequestError("prompt: nothing to score; give `completion` or `completions`, or `text` instead")
    if "text" in row and found:
        raise InvalidRequestError(f"{found[0]}: a `text` is scored as a whole; give `prompt` instead of `text`")
    sample = row.get("sample")
    if sample is not None and (isinstance(sample, bool) or not isinstance(sample, int)):
        raise InvalidRequestError(f"sample: expected an integer, got {sample!r}")
    return ToScore(
        line=number,
        id=name,
        sample=sample,
        text=lines.text(row, "text") if "text" in row else None,
        prompt=lines.text(row, "prompt") if "prompt" in row else None,
        chat=lines.chat(row),
        tools=lines.tools(row),
        completions=_completions(row, found[0]) if found else (),
        single=found != ["completions"],
        metadata=row.get("metadata"),
        **lines.asked(row, ASKED),
    )


def _completions(row: dict[str, Any], key: str) -> tuple[str, ...]:
    if key in ONE:
        return (lines.text(row, key),)
    texts = row[key]
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError("completions: expected a list of at least one string")
    return tuple(texts)

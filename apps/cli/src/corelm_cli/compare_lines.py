"""What a line of ``corelm compare`` holds: a prompt, and perhaps the completion that all sides score."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from corelm.errors import InvalidRequestError
from corelm.validate import invalid, token_ids
from corelm_cli import lines
from corelm_cli.completions import FROM_ANSWERS, ONE
from corelm_cli.lines import Id, Line, LineError
from corelm_cli.streams import opened_input

ASKED = ("prompt", "messages", "ids", *ONE)
KEYS = ("id", *ASKED, "metadata")
#: How many lines that are wrong a message names.
_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared(Line):
    """A line to compare.

    Attributes:
        prompt: a text, a list of messages, or ids.
        completion: a text or ids; None if the line has none.
    """

    prompt: Any
    completion: str | tuple[int, ...] | None


def read_compared(number: int, name: Id, row: dict[str, Any]) -> Compared:
    """Read a line with one of `prompt`, `messages` and `ids`, and perhaps `completion` or `response`.

    The `token_ids` that ``corelm generate --return-tokens`` writes come before the text of a response: the text may
    have other ids.
    """
    lines.check_keys(row, KEYS, FROM_ANSWERS)
    given = [key for key in ("prompt", "messages", "ids") if key in row]
    if len(given) != 1:
        raise InvalidRequestError(
            f"expected one of `prompt`, `messages` and `ids`, got {' and '.join(given) or 'none of them'}"
        )
    found = [key for key in ONE if key in row]
    if len(found) > 1:
        raise InvalidRequestError("expected `completion` or `response`, got both")
    completion: Any = lines.text(row, found[0]) if found else None
    if "token_ids" in row:
        completion = _ids(row, "token_ids")
    prompt: Any = _ids(row, "ids") if "ids" in row else lines.text(row, "prompt") if "prompt" in row else None
    if prompt is None:
        lines.chat(row)  # refuses what is no conversation
        prompt = row["messages"]
    # What several answers of one prompt have in common is the id; nothing is resumed here that it would have to name.
    return Compared(
        line=number,
        id=name,
        sample=row["sample"] if isinstance(row.get("sample"), int) else None,
        prompt=prompt,
        completion=completion,
        metadata=row.get("metadata"),
        **lines.asked(row, ASKED),
    )


def read_all(path: Path | None, most: int | None) -> tuple[list[Any], list[Any] | None]:
    """Return the prompts of a file, or of the standard input for None, and their completions; None if it has none.

    Args:
        most: how many lines to read; None for all.

    Raises:
        InvalidRequestError: a line is wrong, some lines have completions and others have not, or there are none.
        OSError: the file cannot be read.
    """
    with opened_input(path) as (file, _):
        found = list(islice(lines.read_lines(file, read_compared), most))
    wrong = [each for each in found if isinstance(each, LineError)]
    if wrong:
        named = "; ".join(f"line {each.line}: {each.error}" for each in wrong[:_NAMED])
        more = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise invalid("--input", f"{named}{more}")
    read = [each for each in found if isinstance(each, Compared)]
    if not read:
        raise invalid("--input", "there is no line; leave the flag out to compare with the built-in prompts")
    without = [each for each in read if each.completion is None]
    if without and len(without) < len(read):
        raise invalid(
            "--input", f"line {without[0].line} has no completion, and others have one; give all lines one, or none"
        )
    return [each.prompt for each in read], None if without else [each.completion for each in read]


def _ids(row: dict[str, Any], key: str) -> tuple[int, ...]:
    if not isinstance(row[key], list):
        raise InvalidRequestError(f"{key}: expected a list of token ids, got {type(row[key]).__name__}")
    return token_ids(key, row[key])

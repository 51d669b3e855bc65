"""Messages of core and of the system, as a user of the command reads and types them."""

from __future__ import annotations

import re

_PHRASES = (
    (re.compile(r"\bgive max_new_tokens=(\d+)"), r"give --max-new-tokens \1"),
    (re.compile(r"\bgive the policy truncation='left'"), "give --truncation left"),
    (
        re.compile(r"\bpass chat_template= .*?, or use input_mode='text' or 'tokens'"),
        "give --chat-template, a jinja file or chatml",
    ),
    (re.compile(r"^\[Errno \d+\] "), ""),
    (re.compile(r"\bpass jinja text \(not the path of a file\), or"), "give jinja text, a file such as ./NAME, or"),
)


def as_flags(message: str) -> str:
    """Return a message that names flags instead of Python's arguments, and no number of a system error."""
    for phrase, flag in _PHRASES:
        message = phrase.sub(flag, message)
    return message

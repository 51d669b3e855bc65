"""Messages of core and of the system, as a user of the command reads and types them."""

from __future__ import annotations

import re
from collections.abc import Callable


def as_flag(name: str) -> str:
    """Return the flag of a parameter."""
    return f"--{name.replace('_', '-')}"


_PHRASES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"\bgive max_new_tokens=(\d+)"), r"give --max-new-tokens \1"),
    (re.compile(r"\bgive the policy truncation='left'"), "give --truncation left"),
    (
        re.compile(r"\bpass chat_template= .*?, or use input_mode='text' or 'tokens'"),
        "give --chat-template, a jinja file or chatml",
    ),
    (re.compile(r"\bgive top_k, top_p or min_p as well"), "give --top-k, --top-p or --min-p as well"),
    (re.compile(r"\bleave out return_support=True"), "leave out --return-support"),
    (re.compile(r"\bleave out (top_logprobs|top_k)=(\d+)"), lambda at: f"leave out {as_flag(at[1])} {at[2]}"),
    (re.compile(r"^(return_support|top_logprobs|top_k): "), lambda at: f"{as_flag(at[1])}: "),
    (re.compile(r"\bleave out adapter='(.*?)'"), r"leave out --adapter \1"),
    (re.compile(r"\bCall load_adapter\('(.*?)', …\) first"), r"Give --adapter \1=FOLDER"),
    (re.compile(r"^(adapter: |path: (?=there is no readable adapter))"), "--adapter: "),
    (re.compile(r"\bcall get_backend\('.*?', 'PATH'\)"), "give --model PATH"),
    (re.compile(r"\bname the backend first: get_backend\('(.*?)', (.*?)\)"), r"give --backend \1 --model \2"),
    (re.compile(r"\bcall, for example, get_backend\('(.*?)', base_url=(.*?)\)"), r"give --backend \1 --base-url \2"),
    (re.compile(r"\bgive another host or port; port 0 takes"), "give another --host or --port; --port 0 takes"),
    (re.compile(r"\bpass checkpoints=(\[PATH, …\])?"), "give --checkpoint FOLDER"),
    (re.compile(r"\bpass oracle=( a folder| the model's folder)?"), "give --oracle FOLDER"),
    (re.compile(r"^(tolerance|oracle|budget): "), lambda at: f"{as_flag(at[1])}: "),
    (re.compile(r"^checkpoints: "), "--checkpoint: "),
    (re.compile(r"^\[Errno \d+\] "), ""),
    (re.compile(r"\bpass jinja text \(not the path of a file\), or"), "give jinja text, a file such as ./NAME, or"),
)


def as_flags(message: str) -> str:
    """Return a message that names flags instead of Python's arguments, and no number of a system error."""
    for phrase, flag in _PHRASES:
        message = phrase.sub(flag, message)
    return message

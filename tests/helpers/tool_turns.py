"""Assistants' turns with reasoning and tool calls, for property tests of chat templates and the parsers of answers."""

import re
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from corelm import Message
from helpers.tool_templates import Family

#: Everything that begins or ends a part in some family.
MARKS = re.compile(
    r"</?think>|</?tool_call>|</?function|</?parameter|</?arg_|<｜|\[/?[A-Z_]+\]|<\|[a-z_]*\|>|\"name\"", re.DOTALL
)
#: Pieces of what surrounds texts in JSON and in tags, and other pieces of text.
PIECES = ['"', "'", *"{}[\\\n <>x1", "}}", "; ", "```", "</a>", "é漢🙂", "\u2028", "null"]

names = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
pieces = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
texts = st.one_of(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), pieces)
numbers = st.one_of(st.integers(-(10**9), 10**9), st.floats(allow_nan=False, allow_infinity=False))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)
#: What is said outside of calls. Templates strip it.
speech = texts.map(str.strip).filter(lambda text: not MARKS.search(text))


@st.composite
def turns(draw: st.DrawFn, family: Family) -> dict[str, Any]:
    """Return an assistant's turn that the family's template can write."""
    calls = []
    for number in range(draw(st.integers(0, family.calls))):
        name = draw(names)
        arguments = draw(st.dictionaries(names, values, max_size=3))
        call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
        if family.ids:
            call["id"] = family.ids.format(name=name, number=number)
        calls.append(call)
    content = draw(speech) if family.text_with_calls or not calls else ""
    # An answer that is nothing but such an object is a call.
    assume(family.parser != "llama3_json" or "{" not in content)
    turn: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        turn["tool_calls"] = calls
    if family.thinking and (thought := draw(speech)):
        turn[family.thinking] = thought
    return turn


def expected(turn: dict[str, Any]) -> Message:
    """Return the message of a turn. One that only calls tools has no content."""
    if turn.get("tool_calls") and not turn["content"]:
        turn = {**turn, "content": None}
    return Message.from_dict(turn)


def declared(turn: dict[str, Any]) -> list[dict[str, Any]]:
    """Return tools whose parameters have the types of the arguments in the turn."""
    kinds = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string"}
    tools: dict[str, dict[str, Any]] = {}
    for call in turn.get("tool_calls", ()):
        properties = tools.setdefault(call["function"]["name"], {})
        for key, value in call["function"]["arguments"].items():
            kind = kinds.get(type(value)) or ("object" if isinstance(value, dict) else "array")
            # The same parameter in two calls must have one type.
            assume(properties.setdefault(key, {"type": kind}) == {"type": kind})
    return [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
        for name, properties in tools.items()
    ]

"""Nulls that come from a column of a data set: Arrow gives every object in it the keys of all the others.

Only a null that cannot be meant is left out: one that JSON Schema does not allow in a tool, and an argument that is not
among the parameters of the tool that is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def without_nulls(schema: Any) -> Any:
    """Drop the keys of a tool, or of a part of it, that are null where JSON Schema allows no null."""
    if isinstance(schema, Mapping):
        return {key: without_nulls(value) for key, value in schema.items() if value is not None or _may_be(key, schema)}
    return [each if each is None else without_nulls(each) for each in schema] if isinstance(schema, list) else schema


def _may_be(key: str, schema: Mapping[str, Any]) -> bool:
    """Return whether null is a value of `key`: a default or a constant of a type that includes null."""
    kind = schema.get("type")
    return key in ("default", "const") and (not isinstance(kind, str) or kind == "null")


def without_foreign_arguments(messages: list[dict[str, Any]], tools: Any) -> list[dict[str, Any]]:
    """Drop null arguments of calls that the called tool does not declare.

    Args:
        messages: for the template.
        tools: those that it is given; None, or functions, if they do not say what parameters there are.
    """
    known = dict(filter(None, map(_parameters, tools))) if isinstance(tools, Sequence) else {}
    if not known or not any(message.get("tool_calls") for message in messages):
        return messages
    return [
        {**message, "tool_calls": [_own_arguments(call, known) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _parameters(tool: Any) -> tuple[str, frozenset[str]] | None:
    """Return the name of a tool and of its parameters; None if it does not say them."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    properties = (function.get("parameters") or {}).get("properties") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(properties, Mapping):
        return None
    return str(function.get("name")), frozenset(properties)


def _own_arguments(call: Any, known: Mapping[str, frozenset[str]]) -> Any:
    holder = call.get("function", call)
    if not isinstance(holder, Mapping):
        return call
    given, own = holder.get("arguments"), known.get(str(holder.get("name")))
    if own is None or not isinstance(given, Mapping) or None not in given.values():
        return call
    holder = {**holder, "arguments": {key: value for key, value in given.items() if value is not None or key in own}}
    return {**call, "function": holder} if "function" in call else holder

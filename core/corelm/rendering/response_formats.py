r"""How families of models write reasoning and tool calls, as response templates of transformers.

A response template is data: for each key of a message, the patterns that begin and end its text, and how that text is
read (`transformers.utils.chat_parsing`). `corelm.rendering.response_parsers` applies these. The rules here:

- Patterns take the newlines that the family's chat template writes around a part, and no others. Parsing what the
  template has rendered then gives the same message.
- A call ends at its closing mark after the brace that closes its JSON, so arguments may hold that mark in a text.
- A search tries a pattern at every character, and a model may write newlines without end. So a pattern begins with a
  mark, or with all whitespace before it (`_before`), and looks behind only from a mark.
- Where a call is written as XML, its beginning only matches if the whole call is well formed. The parser reports a
  beginning that is left in the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: The key of text that belongs to no part, in formats in which all text does.
STRAY = "stray"

_AS_IT_IS: Mapping[str, Any] = {"content": "text", "content_args": {"strip": False}}
#: All text that is in no other part. What follows a call begins a new line.
_TEXT: Mapping[str, Any] = {**_AS_IT_IS, "repeats": True, "join": "\n"}
_FUNCTION: Mapping[str, Any] = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One way in which a family writes an answer.

    Attributes:
        fields: those of the response template, by the key of the message.
        where: a pattern that only answers in this dialect contain; None for the dialect of all others.
    """

    fields: Mapping[str, Mapping[str, Any]]
    where: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormat:
    """How a family of models writes its answers.

    Attributes:
        dialects: the first whose `where` is found in an answer is used.
        marks: an answer that contains none of these texts is plain text.
        call: the text that begins a call; an answer in which it stays as plain text is malformed. "" if there is none.
        think: what begins and ends the reasoning, where a generation prompt may write the beginning; None if no
            generation prompt does.
        reasoning: what begins and ends the reasoning; None for `think`.
    """

    dialects: tuple[Dialect, ...]
    marks: tuple[str, ...]
    call: str = ""
    think: tuple[str, str] | None = None
    reasoning: tuple[str, str] | None = None


def _before(space: str) -> str:
    """Return a pattern for all characters of a kind that precede a mark, if there are any."""
    return rf"(?:(?<!{space}){space}++)?" if space else ""


def _thinking(begin: str = "<think>", end: str = "</think>", space: str = r"\n") -> Mapping[str, Any]:
    """Return the field of reasoning, which begins an answer, with `space` characters between the marks and the text."""
    spaces = f"{space}*+" if space else ""
    return {
        **_AS_IT_IS,
        "open_pattern": rf"\A\s*+{begin}{spaces}",
        "close_pattern": f"{_before(space)}{end}{spaces}",
    }


def _after_brace(mark: str, between: str = "") -> str:
    """Return a pattern for the mark that ends a call, after the brace that ends its JSON and `between`."""
    whole = f"{between}{mark}"
    return rf"{whole}(?<=\}}\s*{whole})\s*+"


# Hermes 2 and 3, Qwen2.5, Qwen3 ---------------------------------------------------------------------------------------

_HERMES = Dialect(
    fields={
        "reasoning_content": _thinking(),
        "tool_calls": {
            "open_pattern": r"\n?<tool_call>",
            "close_pattern": _after_brace("</tool_call>"),
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": _TEXT,
    }
)


# Qwen3-Coder, Qwen3.5: the same tags around XML -----------------------------------------------------------------------

#: Text up to the end of a parameter. An end counts where another parameter begins, or the call ends. A line in it that
#: begins another parameter says that the end is missing.
_PARAMETER = (
    r"<parameter=[^>\n]+>(?:(?!</parameter>\s*+(?:<parameter=|</function>)|\n<parameter=[^>\n]+>\n).)*+"
    r"</parameter>\s*+"
)
_QWEN_XML = Dialect(
    where=r"<tool_call>\s*<function=",
    fields={
        "reasoning_content": _thinking(),
        "tool_calls": {
            # Their templates strip the content, and disagree about the number of newlines after it.
            "open_pattern": _before(r"\s") + r"<tool_call>\s*+<function=(?P<name>[^>\n]+)>\s*+"
            rf"(?=(?:{_PARAMETER})*+</function>\s*+</tool_call>)",
            "close_pattern": r"</function>(?<=(?:</parameter>|<function=[^>\n]+>)\s*</function>)\s*+</tool_call>\s*+",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))"
            },
            "transform": _FUNCTION,
        },
        "content": _TEXT,
    },
)


# GLM-4.5 and newer ----------------------------------------------------------------------------------------------------

_ARGUMENT = (
    r"<arg_key>[^<]*</arg_key>\s*+<arg_value>"
    r"(?:(?!</arg_value>\s*+(?:<arg_key>|</tool_call>)|<arg_key>[^<]*</arg_key>\s*<arg_value>).)*+</arg_value>\s*+"
)
_GLM = Dialect(
    fields={
        "reasoning_content": _thinking(space=r"\s"),
        "tool_calls": {
            "open_pattern": _before(r"\s") + rf"<tool_call>\s*+(?P<name>[^\s<]++)\s*+(?=(?:{_ARGUMENT})*+</tool_call>)",
            "close_pattern": r"</tool_call>(?<=(?:</arg_value>|<tool_call>\s*[^\s<]+)\s*</tool_call>)\s*+",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
                r"(?=\s*(?:<arg_key>|\Z))"
            },
            "transform": _FUNCTION,
        },
        "content": _TEXT,
    }
)


# Llama 3.1 to 3.3: the whole answer is a call -------------------------------------------------------------------------

#: An object with a name and parameters, and no other one that a user may have asked for.
_LLAMA_CALL = (
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?:[^"\\]|\\.)*"\s*,\s*"(?:parameters|arguments)"\s*:\s*\{'
)
_LLAMA = Dialect(
    fields={
        "tool_calls": {
            "open_pattern": r"(?:\A\s*+(?:<\|python_tag\|>\s*+)?|<\|python_tag\|>\s*+)"
            rf"(?={_LLAMA_CALL})|(?={_LLAMA_CALL})(?<=\}}\s*;\s*)",
            "close_pattern": rf";(?<=\}}\s*;)\s*+(?={_LLAMA_CALL})",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": _TEXT,
    }
)


# DeepSeek R1, V3, V3.1 ------------------------------------------------------------------------------------------------

_DEEPSEEK = Dialect(
    fields={
        "reasoning_content": _thinking(),
        "tool_calls": {
            # R1 and V3 write the type first and fence the JSON, V3.1 does neither.
            "open_pattern": r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?"
            r"(?P<name>[^\n<]+)(?:<｜tool▁sep｜>|\n```json\n)",
            "close_pattern": _after_brace("<｜tool▁call▁end｜>", r"(?:```\s*)?") + r"(?:<｜tool▁calls▁end｜>\s*+)?",
            "repeats": True,
            "content": "json",
            "transform": _FUNCTION,
        },
        "content": _TEXT,
    }
)


# Mistral --------------------------------------------------------------------------------------------------------------

_MISTRAL_THINKING = _thinking(r"\[THINK\]", r"\[/THINK\]", "")


def _mistral(call_id: str, transform: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    return {
        "reasoning_content": _MISTRAL_THINKING,
        "tool_calls": {
            "open_pattern": rf"\[TOOL_CALLS\]\s*(?P<name>[^\[\s]+){call_id}\[ARGS\]",
            "close_pattern": r"(?=\[TOOL_CALLS\])(?<=\}\s*)",
            "repeats": True,
            "content": "json",
            "transform": transform,
        },
        "content": _TEXT,
    }


_MISTRAL = (
    Dialect(where=r"\[CALL_ID\]", fields=_mistral(r"\[CALL_ID\](?P<id>[^\[\s]+)", {**_FUNCTION, "id": "{id}"})),
    Dialect(where=r"\[ARGS\]", fields=_mistral("", _FUNCTION)),
    # Older ones write one list of calls.
    Dialect(
        fields={
            "reasoning_content": _MISTRAL_THINKING,
            "tool_calls": {"open_pattern": r"\[TOOL_CALLS\]\s*", "content": "json"},
            "content": _TEXT,
        }
    ),
)


# Kimi K2 --------------------------------------------------------------------------------------------------------------

_KIMI = Dialect(
    fields={
        "reasoning_content": _thinking(space=""),
        "tool_calls": {
            "open_pattern": r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*"
            r"(?P<id>(?:functions\.)?(?P<name>[^:\s<]+):\d+)\s*<\|tool_call_argument_begin\|>",
            "close_pattern": _after_brace(r"<\|tool_call_end\|>") + r"(?:<\|tool_calls_section_end\|>\s*+)?",
            "repeats": True,
            "content": "json",
            "transform": {**_FUNCTION, "id": "{id}"},
        },
        "content": _TEXT,
    }
)


# gpt-oss: every part names its channel --------------------------------------------------------------------------------

_START = r"(?:<\|start\|>assistant)?"
_HARMONY = Dialect(
    fields={
        "thinking": {
            **_TEXT,
            "open_pattern": _START + r"<\|channel\|>analysis<\|message\|>",
            "close_pattern": r"<\|end\|>",
        },
        "tool_calls": {
            # The recipient is before the channel in the family's chat template, and after it in answers.
            "open_pattern": _START
            + r"(?:<\|channel\|>(?:commentary|analysis))?"
            + _before(r"\s")
            + r"to=functions\.(?P<name>[^\s<]++)[^<]*"
            r"(?:<\|channel\|>(?:commentary|analysis)[^<]*)?(?:<\|constrain\|>[^<]*)?<\|message\|>",
            "close_pattern": _after_brace(r"<\|(?:call|end)\|>"),
            "repeats": True,
            "content": "json",
            "transform": _FUNCTION,
        },
        "content": {
            **_TEXT,
            "open_pattern": _START
            + r"<\|channel\|>(?:final|commentary)(?![^<]*\bto=)[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>",
            "close_pattern": r"<\|(?:return|end)\|>",
        },
        STRAY: _TEXT,
    }
)


_THINK = ("<think>", "</think>")


def _tagged(call: str, *dialects: Dialect) -> ResponseFormat:
    """Return the format of a family that thinks between ``<think>`` tags."""
    return ResponseFormat(dialects=dialects, marks=(*_THINK, call), call=call, think=_THINK)


#: By the name that `response_parser` takes.
FORMATS: Mapping[str, ResponseFormat] = {
    "deepseek_r1": _tagged("<｜tool▁call▁begin｜>", _DEEPSEEK),
    "glm": _tagged("<tool_call>", _GLM),
    "gpt_oss": ResponseFormat(
        dialects=(_HARMONY,),
        marks=("<|channel|>", "<|message|>"),
        reasoning=("<|channel|>analysis<|message|>", "<|end|>"),
    ),
    "hermes": _tagged("<tool_call>", _HERMES),
    "kimi_k2": _tagged("<|tool_call_begin|>", _KIMI),
    "llama3_json": ResponseFormat(dialects=(_LLAMA,), marks=('"name"',)),
    "mistral": ResponseFormat(
        dialects=_MISTRAL,
        marks=("[TOOL_CALLS]", "[THINK]", "[/THINK]"),
        call="[TOOL_CALLS]",
        think=("[THINK]", "[/THINK]"),
    ),
    "qwen": _tagged("<tool_call>", _QWEN_XML, _HERMES),
}

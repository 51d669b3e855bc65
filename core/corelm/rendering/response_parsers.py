r"""`parser_named`: from the text of an answer to a message with its reasoning and its tool calls.

The parsing itself is transformers' (`transformers.utils.chat_parsing`, from transformers 5.19): it needs a tokenizer
library but no engine. It reads response templates. These are data: for each key of a message, the patterns that begin
and end its text, and how that text is read. Those of core are at the end of this file. The rules there:

- Patterns take the newlines that the family's chat template writes around a part, and no others. Parsing what the
  template has rendered then gives the same message.
- A call ends at its closing mark after the brace that closes its JSON, so arguments may hold that mark in a text.
- A search tries a pattern at every character, and a model may write newlines without end. So a pattern begins with a
  mark, or with all whitespace before it (`_before`), and looks behind only from a mark.
- Where a call is written as XML, its beginning only matches if the whole call is well formed. The parser reports a
  beginning that is left in the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from corelm.errors import BackendNotInstalledError, ResponseFormatError, described, how_to_install
from corelm.rendering.render import special_tokens
from corelm.rendering.template import map_strings
from corelm.spec.message import FIELDS, Message
from corelm.spec.sampling import SamplingParams
from corelm.validate import did_you_mean, invalid

#: The format that a tokenizer brings itself.
AUTO = "auto"
#: A generation prompt ends before the answer begins. The parser needs no anchor to find where that is.
_NO_ANCHOR = {"start_anchor_pattern": r"(?!)"}
#: What a call may say. Llama's calls have `parameters`.
_CALL_KEYS = {"type", "id", "name", "arguments", "parameters"}

Tools = Sequence[Mapping[str, Any] | Callable[..., Any]]


@dataclass(frozen=True)
class NamedParser:
    """Reads answers in one format. It can be pickled, and called with the text alone.

    Attributes:
        name: one of `PARSERS`.
        template: the tokenizer's own response template; None for the format of that name.
        specials: the texts of special tokens, which are removed from content and reasoning.
        eos: the text of the EOS, which is removed from the end of an answer.
    """

    name: str
    template: Mapping[str, Any] | None = None
    specials: frozenset[str] = frozenset()
    eos: str | None = None

    @property
    def keys(self) -> frozenset[str]:
        """The keys of the messages that may be found, such as `content`, `tool_calls` and `reasoning_content`."""
        if self.template is not None:
            return frozenset(self.template["fields"])
        return frozenset().union(*FORMATS[self.name].dialects.values()) - {STRAY}

    @property
    def reasoning_marks(self) -> tuple[str, ...]:
        """The texts that begin and end the reasoning; none if the format has none, or is the tokenizer's own."""
        form = None if self.template is not None else FORMATS[self.name]
        return () if form is None else form.reasoning or form.think or ()

    def sampling(self, sampling: SamplingParams) -> SamplingParams:
        """Return how to sample answers in this format: no stop string ends them in their reasoning."""
        if not sampling.stop or sampling.reasoning_marks:
            return sampling
        return SamplingParams.make(sampling, reasoning_marks=self.reasoning_marks)

    def __call__(self, text: str) -> Message:
        """Return the message of an answer, if only its text is known. See `parse`."""
        return self.parse(text)

    def parse(self, text: str, *, prefix: str = "", tools: Tools | None = None, typed: str = "") -> Message:
        """Return the message that an answer stands for.

        Its `tool_calls` have OpenAI's form, with the arguments as an object; its reasoning is in `extra`, under the key
        that the family's chat templates read. Text that is neither is the content, as it was written.

        Args:
            text: the answer, with its special tokens: some formats use them as marks.
            prefix: the prompt. If it ends with the beginning of the answer, such as ``<think>``, that is parsed too.
            tools: those of the prompt, as its chat template got them. Arguments that a format writes without quotes
                get the types that the tools declare. If there are none, what looks like a call is text. None if the
                tools are not known: any call is one then, and its arguments are texts.
            typed: a character that was put into each text that looks like a special token and is none. It is removed
                from what is found.

        Raises:
            ResponseFormatError: the text does not follow the format. Nothing of it was dropped: use it as it is.
        """
        if not typed:
            return self._parsed(text, prefix, tools)
        try:
            message = self._parsed(text, prefix, tools)
        except ResponseFormatError as error:
            raise ResponseFormatError(str(error).replace(typed, "").replace(ascii(typed)[1:-1], "")) from error
        return Message.from_dict(map_strings(message.to_dict(), lambda said: said.replace(typed, "")))

    def _parsed(self, text: str, prefix: str, tools: Tools | None) -> Message:
        offered = tools is None or bool(tools)
        if self.eos:
            text = text.removesuffix(self.eos)
        if self.template is not None:
            return _message(_parsed(self.template, offered, text, prefix, tools), self.specials)
        form = FORMATS[self.name]
        text = _prewritten(form, text, prefix) + text
        if not any(mark in text for mark in form.marks):
            return Message("assistant", _without(text, self.specials))
        dialect = next(fields for where, fields in form.dialects.items() if re.search(where, text))
        parsed = _parsed({"fields": dialect, **_NO_ANCHOR}, offered, text, "", tools)
        if stray := parsed.pop(STRAY, "").strip():
            if offered:
                raise ResponseFormatError(f"text outside of every channel: {_excerpt(stray)}")
            parsed["content"] = "\n".join(filter(None, (parsed.get("content"), stray)))
        if offered and form.call and form.call in (parsed.get("content") or ""):
            raise ResponseFormatError(f"a tool call is not well formed: {_excerpt(text[text.index(form.call) :])}")
        return _message(parsed, self.specials)


def parser_named(name: str, tokenizer: Any = None) -> NamedParser:
    """Return the parser of a format.

    >>> call = parser_named("hermes")('On it.\\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    >>> call.content, call.tool_calls[0]["function"]
    ('On it.', {'name': 'add', 'arguments': {'a': 1}})

    Args:
        name: `hermes` (also Qwen2.5 and Qwen3), `qwen` (the same, and the XML of Qwen3-Coder), `llama3_json`,
            `deepseek_r1` (also V3 and V3.1), `mistral`, `glm`, `kimi_k2`, `gpt_oss`, or `auto`: the tokenizer's own
            `response_template`.
        tokenizer: knows its special tokens, and has the template of `auto`.

    Raises:
        InvalidRequestError: there is no such parser, or `auto` was asked for and the tokenizer has no template.
        BackendNotInstalledError: transformers is not installed, or is too old.
    """
    check_name(name)
    _engine()
    eos = getattr(tokenizer, "eos_token", None)
    if name != AUTO:
        return NamedParser(name, None, _foreign(tokenizer, [*FORMATS[name].dialects.values()]), eos)
    if tokenizer is None:
        raise invalid("tokenizer", "'auto' reads the response_template of a tokenizer; give it as the second argument")
    template = getattr(tokenizer, "response_template", None)
    if template is None:
        names = ", ".join(map(repr, FORMATS))
        lacks = "'auto' reads the response_template of the tokenizer, and it has none"
        raise invalid("response_parser", f"{lacks}; give one of {names}")
    try:
        _loaded(json.dumps(template))
        return NamedParser(name, template, _foreign(tokenizer, template), eos)
    except (TypeError, ValueError) as error:
        raise invalid("response_parser", f"the tokenizer's response_template is not usable: {error}") from error


def _foreign(tokenizer: Any, patterns: Any) -> frozenset[str]:
    """Return the texts of special tokens that are no marks of a format."""
    own = json.dumps(patterns, ensure_ascii=False).replace("\\", "")
    return frozenset(text for text in special_tokens(tokenizer).values() if text and text not in own)


def check_name(name: Any) -> None:
    """Refuse a name that no parser has."""
    if not isinstance(name, str) or name not in PARSERS:
        raise invalid(
            "response_parser",
            f"no parser is named {name!r}; give one of {', '.join(map(repr, PARSERS))}, or a function that turns the "
            f"text of an answer into a message{did_you_mean(name, PARSERS)}",
        )


# transformers ---------------------------------------------------------------------------------------------------------


def _engine() -> Any:
    try:
        from transformers.utils import chat_parsing
    except ImportError as error:
        needed = how_to_install("transformers>=5.19")
        raise BackendNotInstalledError(f"the parsers of answers are those of transformers: {needed}") from error
    return chat_parsing


@lru_cache(maxsize=32)
def _loaded(template: str) -> Any:
    """Return a response template, compiled; its JSON is given."""
    from transformers.utils.chat_parsing.response_templates import load_response_template

    return load_response_template(json.loads(template))


def _parsed(template: Mapping[str, Any], calls: bool, text: str, prefix: str, tools: Tools | None) -> dict[str, Any]:
    """Return the keys of the message that transformers finds. Without `calls`, what looks like one is text."""
    fields = {key: field for key, field in template["fields"].items() if calls or key != "tool_calls"}
    loaded = _loaded(json.dumps({**template, "fields": fields}))
    # Without its anchor, transformers would take the whole prompt for the beginning of the answer.
    if prefix and not loaded.start_anchor_re.search(prefix):
        prefix = ""
    listed = [dict(tool) if isinstance(tool, Mapping) else tool for tool in tools or ()]
    try:
        return _engine().parse_response(text, loaded, prefix=prefix, tools=listed)
    except (ValueError, KeyError, RecursionError) as error:
        # The message of transformers repeats the whole text; its cause says what is wrong with it.
        raise ResponseFormatError(f"the answer is malformed: {described(error.__cause__ or error)}") from error


# Before and after it --------------------------------------------------------------------------------------------------


def _prewritten(form: ResponseFormat, text: str, prefix: str) -> str:
    """Return the reasoning at the end of a prompt, with which the answer begins."""
    if form.think is None:
        return ""
    begin, end = form.think
    if prefix:
        found = re.search(rf"{re.escape(begin)}\s*(?:{re.escape(end)}\s*)?\Z", prefix)
        return "" if found is None else found[0]
    # The prompt is not known. It began the reasoning that the answer ends.
    ends = text.find(end)
    return begin if ends >= 0 and begin not in text[:ends] else ""


def _message(parsed: Mapping[str, Any], specials: Iterable[str]) -> Message:
    if not parsed.keys() - {"role"}:
        # For example, nothing but an empty block of reasoning.
        parsed = {"content": ""}
    extra = {key: _without(value, specials) for key, value in parsed.items() if key not in (*FIELDS, "role")}
    content = _without(parsed.get("content"), specials)
    found = parsed.get("tool_calls")
    calls = tuple(_call(one) for one in _flat(found)) if found else None
    if calls and not (content or "").strip():
        content = None
    elif not calls and content is None:
        content = ""
    return Message("assistant", content, tool_calls=calls or None, extra=extra)


def _flat(found: Any) -> Iterator[Any]:
    for one in found if isinstance(found, list) else [found]:
        yield from _flat(one) if isinstance(one, list) else (one,)


def _call(found: Any) -> dict[str, Any]:
    said = found.get("function", found) if isinstance(found, Mapping) else found
    if not isinstance(said, Mapping) or not isinstance(said.get("name"), str):
        raise ResponseFormatError(f"a tool call has no name: {_excerpt(json.dumps(said, ensure_ascii=False))}")
    if odd := said.keys() - _CALL_KEYS:
        raise ResponseFormatError(f"a tool call has the unknown key {min(odd)!r}: {_excerpt(str(dict(said)))}")
    arguments = said.get("arguments", said.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise ResponseFormatError(f"arguments of {said['name']!r}: {described(error)}") from error
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise ResponseFormatError(f"arguments of {said['name']!r} are not an object: {_excerpt(str(arguments))}")
    try:
        json.dumps(arguments, allow_nan=False)
    except ValueError as error:
        raise ResponseFormatError(f"arguments of {said['name']!r} are not JSON: {described(error)}") from error
    call: dict[str, Any] = {"type": "function", "function": {"name": said["name"], "arguments": dict(arguments)}}
    call_id = said.get("id") or found.get("id")
    return {"id": str(call_id), **call} if call_id else call


def _without(value: Any, specials: Iterable[str]) -> Any:
    if isinstance(value, str):
        for text in specials:
            value = value.replace(text, "")
    return value


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}…")


# Formats --------------------------------------------------------------------------------------------------------------

#: The key of text that belongs to no part, in formats in which all text does.
STRAY = "stray"

#: Those of a response template, by the key of the message.
Fields = Mapping[str, Mapping[str, Any]]

_AS_IT_IS: Mapping[str, Any] = {"content": "text", "content_args": {"strip": False}}
#: All text that is in no other part. What follows a call begins a new line.
_TEXT: Mapping[str, Any] = {**_AS_IT_IS, "repeats": True, "join": "\n"}
#: A call whose name is in the opening pattern, such a call with an id, and one whose JSON says its name.
_FUNCTION: Mapping[str, Any] = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_WITH_ID: Mapping[str, Any] = {**_FUNCTION, "id": "{id}"}
_NAMED_INSIDE: Mapping[str, Any] = {"type": "function", "function": "{content}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormat:
    """How a family of models writes its answers.

    Attributes:
        dialects: the ways in which it writes them, by a pattern that only such answers contain; the first one that is
            found is used, and "" is found in all.
        marks: an answer that contains none of these texts is plain text.
        call: the text that begins a call; an answer in which it stays as plain text is malformed. "" if there is none.
        think: what begins and ends the reasoning, where a generation prompt may write the beginning; None if no
            generation prompt does.
        reasoning: what begins and ends the reasoning; None for `think`.
    """

    dialects: Mapping[str, Fields]
    marks: tuple[str, ...]
    call: str = ""
    think: tuple[str, str] | None = None
    reasoning: tuple[str, str] | None = None


def _before(space: str) -> str:
    """Return a pattern for all characters of a kind that precede a mark, if there are any."""
    return rf"(?:(?<!{space}){space}++)?" if space else ""


def _thinking(space: str = r"\n", begin: str = "<think>", end: str = "</think>") -> Mapping[str, Any]:
    """Return the field of reasoning, which begins an answer, with `space` characters between the marks and the text."""
    spaces = f"{space}*+" if space else ""
    patterns = {"open_pattern": rf"\A\s*+{begin}{spaces}", "close_pattern": f"{_before(space)}{end}{spaces}"}
    return {**_AS_IT_IS, **patterns}


def _after_brace(mark: str, between: str = "") -> str:
    """Return a pattern for the mark that ends a call, after the brace that ends its JSON and `between`."""
    whole = f"{between}{mark}"
    return rf"{whole}(?<=\}}\s*{whole})\s*+"


def _calling(
    begin: str,
    end: str,
    transform: Mapping[str, Any] = _FUNCTION,
    thinking: Mapping[str, Any] | None = None,
    xml: str | None = None,
) -> Fields:
    """Return the fields of answers that may think first, with calls between two patterns, and other text around them.

    Arguments are JSON, or, with `xml`, what this pattern finds: a `key` and a `value` each time.
    """
    content = {"content": "json"} if xml is None else {"content": "xml-inline", "content_args": {"tag_pattern": xml}}
    calls = {"open_pattern": begin, "close_pattern": end, "repeats": True, **content, "transform": transform}
    return {**({"reasoning_content": thinking} if thinking else {}), "tool_calls": calls, "content": _TEXT}


#: Hermes 2 and 3, Qwen2.5, Qwen3.
_HERMES = _calling(r"\n?<tool_call>", _after_brace("</tool_call>"), _NAMED_INSIDE, _thinking())

#: Text up to the end of a parameter. An end counts where another parameter begins, or the call ends. A line in it that
#: begins another parameter says that the end is missing.
_PARAMETER = (
    r"<parameter=[^>\n]+>(?:(?!</parameter>\s*+(?:<parameter=|</function>)|\n<parameter=[^>\n]+>\n).)*+"
    r"</parameter>\s*+"
)
#: Qwen3-Coder, Qwen3.5: the same tags around XML. Their templates strip the content, and disagree about the number of
#: newlines after it.
_QWEN_XML = _calling(
    _before(r"\s") + r"<tool_call>\s*+<function=(?P<name>[^>\n]+)>\s*+"
    rf"(?=(?:{_PARAMETER})*+</function>\s*+</tool_call>)",
    r"</function>(?<=(?:</parameter>|<function=[^>\n]+>)\s*</function>)\s*+</tool_call>\s*+",
    thinking=_thinking(),
    xml=r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))",
)

#: GLM-4.5 and newer.
_ARGUMENT = (
    r"<arg_key>[^<]*</arg_key>\s*+<arg_value>"
    r"(?:(?!</arg_value>\s*+(?:<arg_key>|</tool_call>)|<arg_key>[^<]*</arg_key>\s*<arg_value>).)*+</arg_value>\s*+"
)
_GLM = _calling(
    _before(r"\s") + rf"<tool_call>\s*+(?P<name>[^\s<]++)\s*+(?=(?:{_ARGUMENT})*+</tool_call>)",
    r"</tool_call>(?<=(?:</arg_value>|<tool_call>\s*[^\s<]+)\s*</tool_call>)\s*+",
    thinking=_thinking(r"\s"),
    xml=r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>(?=\s*(?:<arg_key>|\Z))",
)

#: Llama 3.1 to 3.3: the whole answer is a call, an object with a name and parameters, and no other one that a user may
#: have asked for.
_LLAMA_CALL = (
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?:[^"\\]|\\.)*"\s*,\s*"(?:parameters|arguments)"\s*:\s*\{'
)
_LLAMA = _calling(
    r"(?:\A\s*+(?:<\|python_tag\|>\s*+)?|<\|python_tag\|>\s*+)"
    rf"(?={_LLAMA_CALL})|(?={_LLAMA_CALL})(?<=\}}\s*;\s*)",
    rf";(?<=\}}\s*;)\s*+(?={_LLAMA_CALL})",
    _NAMED_INSIDE,
)

#: DeepSeek R1, V3, V3.1. R1 and V3 write the type first and fence the JSON, V3.1 does neither.
_DEEPSEEK = _calling(
    r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?"
    r"(?P<name>[^\n<]+)(?:<｜tool▁sep｜>|\n```json\n)",
    _after_brace("<｜tool▁call▁end｜>", r"(?:```\s*)?") + r"(?:<｜tool▁calls▁end｜>\s*+)?",
    thinking=_thinking(),
)

_KIMI = _calling(
    r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*"
    r"(?P<id>(?:functions\.)?(?P<name>[^:\s<]+):\d+)\s*<\|tool_call_argument_begin\|>",
    _after_brace(r"<\|tool_call_end\|>") + r"(?:<\|tool_calls_section_end\|>\s*+)?",
    _WITH_ID,
    _thinking(""),
)


def _mistral(call_id: str, transform: Mapping[str, Any]) -> Fields:
    begin = rf"\[TOOL_CALLS\]\s*(?P<name>[^\[\s]+){call_id}\[ARGS\]"
    return _calling(begin, r"(?=\[TOOL_CALLS\])(?<=\}\s*)", transform, _MISTRAL_THINKING)


_MISTRAL_THINKING = _thinking("", r"\[THINK\]", r"\[/THINK\]")
_MISTRAL: Mapping[str, Fields] = {
    r"\[CALL_ID\]": _mistral(r"\[CALL_ID\](?P<id>[^\[\s]+)", _WITH_ID),
    r"\[ARGS\]": _mistral("", _FUNCTION),
    # Older ones write one list of calls.
    "": {
        "reasoning_content": _MISTRAL_THINKING,
        "tool_calls": {"open_pattern": r"\[TOOL_CALLS\]\s*", "content": "json"},
        "content": _TEXT,
    },
}

#: gpt-oss: every part names its channel. The recipient of a call is before the channel in the family's chat template,
#: and after it in answers.
_START, _SPACES = r"(?:<\|start\|>assistant)?", _before(r"\s")
_CALLED = (
    rf"{_START}(?:<\|channel\|>(?:commentary|analysis))?{_SPACES}to=functions\.(?P<name>[^\s<]++)[^<]*"
    r"(?:<\|channel\|>(?:commentary|analysis)[^<]*)?(?:<\|constrain\|>[^<]*)?<\|message\|>"
)
_FINAL = rf"{_START}<\|channel\|>(?:final|commentary)(?![^<]*\bto=)[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
_ANALYSIS = rf"{_START}<\|channel\|>analysis<\|message\|>"
_HARMONY: Fields = {
    "thinking": {**_TEXT, "open_pattern": _ANALYSIS, "close_pattern": r"<\|end\|>"},
    **_calling(_CALLED, _after_brace(r"<\|(?:call|end)\|>")),
    "content": {**_TEXT, "open_pattern": _FINAL, "close_pattern": r"<\|(?:return|end)\|>"},
    STRAY: _TEXT,
}


def _tagged(call: str, dialects: Mapping[str, Fields], *think: str) -> ResponseFormat:
    begin, end = think or ("<think>", "</think>")
    return ResponseFormat(dialects=dialects, marks=(begin, end, call), call=call, think=(begin, end))


#: By the name that `response_parser` takes.
FORMATS: Mapping[str, ResponseFormat] = {
    "deepseek_r1": _tagged("<｜tool▁call▁begin｜>", {"": _DEEPSEEK}),
    "glm": _tagged("<tool_call>", {"": _GLM}),
    "gpt_oss": ResponseFormat(
        dialects={"": _HARMONY},
        marks=("<|channel|>", "<|message|>"),
        reasoning=("<|channel|>analysis<|message|>", "<|end|>"),
    ),
    "hermes": _tagged("<tool_call>", {"": _HERMES}),
    "kimi_k2": _tagged("<|tool_call_begin|>", {"": _KIMI}),
    "llama3_json": ResponseFormat(dialects={"": _LLAMA}, marks=('"name"',)),
    "mistral": _tagged("[TOOL_CALLS]", _MISTRAL, "[THINK]", "[/THINK]"),
    "qwen": _tagged("<tool_call>", {r"<tool_call>\s*<function=": _QWEN_XML, "": _HERMES}),
}
#: Every name that `parser_named` takes.
PARSERS = (AUTO, *sorted(FORMATS))

"""What a family's chat template writes for an assistant's turn, its parser reads as the same turn."""

import contextlib
import pickle
import time
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corelm import Message, parser_named
from corelm.errors import InvalidRequestError, ResponseFormatError
from corelm.rendering.response_parsers import FORMATS
from helpers import chat_templates as ct
from helpers.each import each, examples
from helpers.tool_templates import FAMILIES, cut_out
from helpers.tool_turns import declared, expected, texts, turns

marked = st.lists(
    st.one_of(texts, st.sampled_from(sorted({mark for form in FORMATS.values() for mark in form.marks}))), max_size=8
).map("".join)


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
@settings(max_examples=examples(15), deadline=None)
def test_what_a_template_wrote_is_read_as_the_same_turn(name: str, data: st.DataObject) -> None:
    family = FAMILIES[name]
    turn = data.draw(turns(family))
    tools = declared(turn)
    end = family.end if turn.get("tool_calls") or name != "gpt_oss" else "<|return|>"
    prompt, answer = cut_out(family.template, turn, end)
    found = parser_named(family.parser).parse(answer, prefix=prompt, tools=tools if not family.typed else None)
    assert found == expected(turn)


@each("name", [name for name in FAMILIES if name != "gpt_oss"])
@each("mark", ["</tool_call>", "<tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "<|im_end|>"])
def test_a_mark_inside_an_argument_is_text(name: str, mark: str) -> None:
    family = FAMILIES[name]
    call: dict[str, Any] = {"type": "function", "function": {"name": "say", "arguments": {"it": f"a {mark} b"}}}
    if family.ids:
        call["id"] = family.ids.format(name="say", number=0)
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    prompt, answer = cut_out(family.template, turn, family.end)
    assert parser_named(family.parser).parse(answer, prefix=prompt) == expected(turn)


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
@settings(max_examples=examples(15), deadline=None)
def test_no_text_is_dropped_from_an_answer_that_was_cut_off(name: str, data: st.DataObject) -> None:
    """Every prefix of an answer is either refused or read as what it holds up to there."""
    family = FAMILIES[name]
    turn = data.draw(turns(family).filter(lambda turn: "tool_calls" in turn))
    prompt, answer = cut_out(family.template, turn, family.end)
    answer = answer[: data.draw(st.integers(0, len(answer)))]
    tools = declared(turn) if not family.typed else None
    try:
        found = parser_named(family.parser).parse(answer, prefix=prompt, tools=tools)
    except ResponseFormatError:
        return
    calls = list(found.tool_calls or ())
    assert calls == turn["tool_calls"][: len(calls)]
    whole = expected(turn)
    for said, part in (
        (whole.content or "", found.content or ""),
        *((whole.extra.get(key, ""), value) for key, value in found.extra.items()),
    ):
        # The end may be the beginning of a mark.
        assert not calls or part.startswith(said)
        assert part.startswith(said) or said.startswith(part.rstrip()) or part.startswith(said[: len(part) - 30])


@pytest.mark.parametrize("name", FORMATS)
@given(text=st.one_of(texts, marked))
@settings(max_examples=examples(15), deadline=None)
def test_any_text_is_read_or_refused(name: str, text: str) -> None:
    form = FORMATS[name]
    try:
        found = parser_named(name).parse(text)
    except ResponseFormatError as error:
        assert any(mark in text for mark in form.marks) and str(error)
    else:
        assert found.role == "assistant"
        if not any(mark in text for mark in form.marks):
            assert found == Message("assistant", text)


def slow_texts(length: int, units: list[str]) -> list[tuple[str, str]]:
    """Return formats and beginnings of texts that take a parser much more time than a text of their length should."""
    return [
        (name, text[:40])
        for name, form in FORMATS.items()
        for mark in sorted({*form.marks, form.call})
        for unit in units
        for text in (mark + unit * length, unit * length + mark)
        # In a parser that looks at all that is left for each unit, 50,000 units take a thousand times as long as a loop
        # of a million steps.
        if all(seconds_for(name, text) > 600 * (length / 50_000) ** 2 * seconds_of_a_loop() for _ in range(3))
    ]


@cache
def seconds_of_a_loop() -> float:
    """Return how long a million steps take here."""
    started = time.process_time()
    for _ in range(1_000_000):
        pass
    return time.process_time() - started


def seconds_for(name: str, text: str) -> float:
    started = time.process_time()
    with contextlib.suppress(ResponseFormatError):
        parser_named(name).parse(text, prefix="a prompt")
    return time.process_time() - started


def test_a_model_that_writes_one_thing_without_end_costs_no_more_than_its_length() -> None:
    assert not slow_texts(8_000, ["\n", "}\n"])


MALFORMED = {
    "hermes": [
        '<tool_call>{"name": "f", "argu',
        "<tool_call>f(1)</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{"}</tool_call>',
        '<tool_call>{"name": "f", "args": {}}</tool_call>',
        "<tool_call>" + "[" * 5000 + "</tool_call>",
    ],
    "qwen": [
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>",
        "<tool_call><function=f>",
    ],
    "glm": [
        "<tool_call>f\n<arg_key>a</arg_key>\n</tool_call>",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    ],
    "llama3_json": ['{"name": "f", "parameters": {"a": 1', '{"name": "f", "parameters": {}} Done.'],
    "deepseek_r1": ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"],
    "mistral": ["[TOOL_CALLS] f(1)", '[TOOL_CALLS][{"name": "f"', "[TOOL_CALLS]f[ARGS]{"],
    "kimi_k2": ["<|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>"],
    "gpt_oss": ["said <|channel|>final<|message|>Hi", "<|channel|>commentary to=functions.f<|message|>{"],
}


@each("name, text", [(name, text) for name, each in MALFORMED.items() for text in each])
def test_what_does_not_follow_the_format_is_refused(name: str, text: str) -> None:
    with pytest.raises(ResponseFormatError):
        parser_named(name)(text)


@each("text", ['{"name": "Bob", "age": 3}', '{"answer": {"name": "f"}}', "<|python_tag|>print(1)"])
def test_json_that_is_not_a_call_is_the_answer(text: str) -> None:
    assert parser_named("llama3_json")(text) == Message("assistant", text)


def test_llama_may_call_several_functions() -> None:
    text = '<|python_tag|>{"name": "f", "parameters": {"a": "; {"}}; {"name": "g", "parameters": {}}'
    calls = parser_named("llama3_json")(text).tool_calls
    assert [call["function"] for call in calls] == [
        {"name": "f", "arguments": {"a": "; {"}},
        {"name": "g", "arguments": {}},
    ]


# What the prompt says -------------------------------------------------------------------------------------------------


@each(
    "prefix, text, thought, content",
    [
        ("<|im_start|>assistant\n<think>\n", "hm\n</think>\n\nHi", "hm", "Hi"),
        ("<|im_start|>assistant\n<think>\n", "hm, and cut", "hm, and cut", ""),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "Hi", None, "Hi"),
        ("<|im_start|>user\n<think>\n<|im_end|>\n<|im_start|>assistant\n", "Hi", None, "Hi"),
        ("any other header", "<think>\nhm\n</think>\n\nHi", "hm", "Hi"),
        # The prompt is not known, but it must have begun what the answer ends.
        ("", "hm\n</think>\n\nHi", "hm", "Hi"),
        ("<|im_start|>assistant\n", "It ends with </think>.", None, "It ends with </think>."),
    ],
)
@each("name", ["hermes", "qwen", "deepseek_r1"])
def test_reasoning_may_begin_in_the_prompt(name, prefix, text, thought, content) -> None:
    found = parser_named(name).parse(text, prefix=prefix)
    assert (found.extra.get("reasoning_content"), found.content) == (thought, content)


def test_without_tools_untyped_arguments_are_texts() -> None:
    text = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    assert parser_named("qwen")(text).tool_calls[0]["function"]["arguments"] == {"a": "1"}
    tools = [{"name": "f", "parameters": {"properties": {"a": {"type": "number"}}}}]
    assert parser_named("qwen").parse(text, tools=tools).tool_calls[0]["function"]["arguments"] == {"a": 1}


# Names, special tokens, the tokenizer's own ---------------------------------------------------------------------------


@each("name", ["hermse", "", None, 3])
def test_an_unknown_name_is_refused(name) -> None:
    with pytest.raises(InvalidRequestError, match=r"no parser is named .*'deepseek_r1', .*'qwen'") as caught:
        parser_named(name)
    assert caught.value.field == "response_parser" and ("mean 'hermes'" in str(caught.value)) == (name == "hermse")


def test_special_tokens_are_removed_from_what_was_said_but_marks_are_read() -> None:
    parser = parser_named("hermes", ct.tokenizer())
    assert parser("<think>\nhm<|eot|>\n</think>\n\nHi<|start|><|im_end|>") == Message(
        "assistant", "Hi", extra={"reasoning_content": "hm"}
    )
    assert parser("Hi<|eot|><|im_end|>").content == "Hi"
    channels = parser_named("gpt_oss", ct.tokenizer())
    assert channels(
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi"
    ) == Message("assistant", "Hi", extra={"thinking": "hm"})


OWN = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}


class WithTemplate:
    """A tokenizer with its own response template."""

    eos_token = "<|im_end|>"

    def __init__(self, template: Any) -> None:
        self.response_template = template


def test_auto_reads_the_tokenizers_own_template() -> None:
    parser = pickle.loads(pickle.dumps(parser_named("auto", WithTemplate(OWN))))
    prefix = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    found = parser.parse('hm</think>ok <call>{"name": "f", "arguments": {}}</call><|im_end|>', prefix=prefix)
    calls = ({"type": "function", "function": {"name": "f", "arguments": {}}},)
    assert found == Message("assistant", "ok", tool_calls=calls, extra={"thinking": "hm"})
    # A prompt without the anchor is not taken for the beginning of the answer.
    assert parser.parse("Hi", prefix="[INST] Hello [/INST]") == Message("assistant", "Hi")


@each("template", [None, {}, {"fields": {"x": {"open": 3}}}, {"fields": object()}, "text"])
def test_auto_is_refused_where_the_tokenizer_has_no_usable_template(template) -> None:
    with pytest.raises(InvalidRequestError, match="response_template"):
        parser_named("auto", WithTemplate(template))

"""A policy with the parser of a format: what it passes to the parser, and that sampled ids survive."""

import json

import pytest
from tensordict import TensorDict

from corelm import History, LLMPolicy, Message
from corelm.errors import InvalidRequestError, ResponseParserWarning
from helpers import chat_templates as ct
from helpers.each import each
from helpers.refusals import refused
from helpers.scripted import scripted
from helpers.tool_templates import HARMONY, HERMES, QWEN_XML

ASKED = {"role": "user", "content": "What is 1 + 2?"}
ADD = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
JSON_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n"
    "</tool_call>"
)
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": NUMBERS}}]
READS_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"


def said(answer, *, chat=(ASKED,), engine=None, tools=None, **options):
    """Return the result of one conversation whose answer is given."""
    backend, _ = scripted((lambda prompt: answer) if isinstance(answer, str) else answer, **(engine or {}))
    options = {"chat_template": HERMES, "response_parser": "hermes", "inplace": False, **options}
    options["chat_template"] = READS_TOOLS + options["chat_template"]
    with LLMPolicy(backend, **{"template_kwargs": {"tools": TOOLS}, **options}) as policy:
        entries = {"history": History.from_chats([list(chat)])}
        return policy(TensorDict(entries | ({} if tools is None else {"tools": tools}), batch_size=()))


def message(result):
    return result["history"].response.chats[0][0]


@each("singly", [False, True])
def test_the_message_has_the_calls_and_the_ids_that_were_sampled(singly):
    result = said(f"<think>\nEasy.\n</think>\n\nI add.\n{JSON_CALL}", engine={"singly": singly})
    found = message(result)
    assert found.content == "I add." and found.tool_calls == (ADD,) and found.extra == {"reasoning_content": "Easy."}
    assert list(found.token_ids) == result["tokens"].response[0].tolist()
    assert result["text"].response[0].endswith("</tool_call>") and result["errors"][0] == ""


def test_a_tool_loop_goes_on_from_the_sampled_ids():
    backend, engine = scripted(lambda prompt: "It is 3." if "<|im_start|>tool" in prompt else JSON_CALL, singly=True)
    options = {"chat_template": READS_TOOLS + HERMES, "template_kwargs": {"tools": TOOLS}, "inplace": False}
    with LLMPolicy(backend, response_parser="hermes", **options) as policy:
        first = policy(TensorDict(history=History.from_chats([[ASKED]])))
        (call,) = message(first).tool_calls
        result = json.dumps(sum(call["function"]["arguments"].values()))
        answered = first["history"].full.append([{"role": "tool", "content": result}])
        second = policy(TensorDict(history=answered))
    ids = first["tokens"].full[0].tolist()
    assert engine.requests[1].prompts.tolist()[0][: len(ids)] == ids
    assert message(second) == Message("assistant", "It is 3.", token_ids=message(second).token_ids)
    assert [turn.role for turn in second["history"].full.chats[0]] == ["user", "assistant", "tool", "assistant"]


def test_the_parser_sees_reasoning_that_the_prompt_began():
    found = message(said("Hm.\n</think>\n\nThree.", chat_template=QWEN_XML, response_parser="qwen"))
    assert (found.content, found.extra) == ("Three.", {"reasoning_content": "Hm."})
    cut = message(said("Hm.", chat_template=QWEN_XML, response_parser="qwen"))
    assert (cut.content, cut.extra) == ("", {"reasoning_content": "Hm."})


@each("where", ["template_kwargs", "tools_key"])
def test_the_types_of_arguments_are_those_of_the_tools(where):
    given = {} if where == "template_kwargs" else {"tools": [TOOLS], "template_kwargs": {}}
    options = {"chat_template": QWEN_XML, "response_parser": "qwen"}
    assert message(said(f"</think>{XML_CALL}", **options, **given)).tool_calls == (ADD,)


def test_what_was_not_offered_is_not_called():
    result = said(f"<think>\nEasy.\n</think>\n\nI add.\n{JSON_CALL}", template_kwargs={})
    found = message(result)
    assert found.content == f"I add.\n{JSON_CALL}" and found.tool_calls is None and result["errors"][0] == ""
    assert found.extra == {"reasoning_content": "Easy."}


def test_special_tokens_that_the_model_typed_are_text():
    # <|start|>, <|end|> and the EOS <|im_end|> are special tokens of this tokenizer. Their letters are none.
    text = "The marks are <|start|> and <|end|>, and a turn ends with <|im_end|>"
    typed = said(text, engine={"singly": True})
    assert message(typed).content == text
    harmony = {"chat_template": HARMONY, "response_parser": "gpt_oss"}
    begin = "<|channel|>final<|message|>"
    assert message(said(f"{begin}Use <|end|>, then stop.", engine={"singly": True}, **harmony)).content == (
        "Use <|end|>, then stop."
    )
    with pytest.warns(ResponseParserWarning, match="outside"):
        said(f"{begin}Use <|end|>, then stop.", **harmony)


def test_a_special_token_that_ends_an_answer_does_not_end_its_call():
    stop = ct.tokenizer().convert_tokens_to_ids("<|end|>")
    call = '{"name": "add", "parameters": {"a": 1, "b": 2}}<|end|>'
    result = said(
        call, response_parser="llama3_json", engine={"eos": False}, sampling_params={"stop_token_ids": [stop]}
    )
    assert message(result).tool_calls == (ADD,) and message(result).token_ids[-1] == stop


@each("parameter", ["NaN", "1e999", "-Infinity"])
def test_arguments_that_json_does_not_have_are_no_call(parameter):
    text = f'<tool_call>\n{{"name": "add", "arguments": {{"a": {parameter}}}}}\n</tool_call>'
    with pytest.warns(ResponseParserWarning, match="row 0: ResponseFormatError"):
        result = said(text)
    assert message(result).content == text and not message(result).tool_calls
    assert "not JSON" in result["errors"][0]


def test_marks_that_are_special_tokens_are_seen_although_texts_leave_them_out():
    # <|start|> and <|end|> are special tokens of this tokenizer.
    text = "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>Three."
    result = said(text, chat_template=HARMONY, response_parser="gpt_oss")
    assert message(result).extra == {"thinking": "Easy."} and message(result).content == "Three."
    assert "<|end|>" not in result["text"].response[0]


@each("text", ['<tool_call>\n{"name": "add", "argu', "<tool_call>add(1, 2)</tool_call>"])
def test_an_answer_that_does_not_parse_keeps_its_text(text):
    with pytest.warns(ResponseParserWarning, match="row 0: ResponseFormatError"):
        result = said(text)
    found = message(result)
    assert found.content == text and not found.tool_calls and "malformed" in result["errors"][0]
    assert list(found.token_ids) == result["tokens"].response[0].tolist()


def test_an_answer_that_continues_a_turn_is_read_with_it():
    chat = (ASKED, {"role": "assistant", "content": "I add.\n<tool_call>\n"})
    rest = JSON_CALL.removeprefix("<tool_call>\n")
    found = message(said(rest, chat=chat, continue_final_message=True))
    assert found.content == "I add." and found.tool_calls == (ADD,)
    chat = (ASKED, {"role": "assistant", "content": "I", "reasoning_content": "Hmm."})
    continued = {"continue_final_message": True, "chat_template": QWEN_XML, "response_parser": "qwen"}
    found = message(said(f" add.\n{XML_CALL}", chat=chat, **continued))
    assert (found.content, found.extra) == ("I add.", {"reasoning_content": "Hmm."}) and found.tool_calls


def test_a_call_may_end_with_a_stop_string_that_is_its_mark():
    result = said(JSON_CALL, engine={"singly": True, "eos": False}, sampling_params={"stop": ["</tool_call>"]})
    assert not result["text"].response[0].endswith(">") and message(result).tool_calls == (ADD,)


def test_an_engine_that_was_opened_for_nothing_is_closed(caplog):
    with caplog.at_level("INFO", "corelm"), refused(InvalidRequestError, field="response_parser"):
        LLMPolicy("toy", response_parser="auto")
    assert "toy: opened" in caplog.text and "toy: closed" in caplog.text

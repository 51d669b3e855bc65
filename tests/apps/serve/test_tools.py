"""The official client calls a tool and sends its result back; what the engine reads is what it sampled."""

from __future__ import annotations

import json
from typing import Any

import pytest

import corelm
from corelm import Backend
from helpers.scripted_bytes import scripted_bytes
from helpers.serving import Seen, chat_ids, client_of, memorized, serving
from helpers.tiny_models import tiny_model, tiny_tokenizer

ASKED = [{"role": "user", "content": "What is 2 and 3?"}]
CALL = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"b": 3, "a": 2}}\n</tool_call>'
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]


def of_transformers(seen: Seen) -> Backend:
    tokenizer = tiny_tokenizer()
    answer = [*tokenizer(CALL, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    model = memorized(chat_ids(ASKED, TOOLS), answer)
    return corelm.get_backend("transformers", model, tokenizer=tokenizer, wrappers=[seen])


def of_script(seen: Seen) -> Backend:
    engine = scripted_bytes(CALL, "It is 5.").engine.plugin
    return Backend.from_plugin(engine, "scripted", wrappers=[seen])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("made", [of_transformers, of_script])
def test_a_tool_is_called_and_answered(made: Any, stream: bool, seen: Seen) -> None:
    with (
        made(seen) as backend,
        serving(backend, model_name="m", response_parser="hermes") as server,
        client_of(server) as client,
    ):
        asked = {"model": "m", "messages": ASKED, "tools": TOOLS, "temperature": 0.0, "max_tokens": 200}
        if stream:
            message = joined(client, asked)
        else:
            choice = client.chat.completions.create(**asked).choices[0]
            assert choice.finish_reason == "tool_calls"
            message = choice.message.model_dump()
        assert message["content"].strip() == "Let me see."
        (call,) = message["tool_calls"]
        assert call["function"]["name"] == "add" and json.loads(call["function"]["arguments"]) == {"a": 2, "b": 3}
        assert len(call["id"]) == 9 and call["id"].isalnum()
        result = {"role": "tool", "tool_call_id": call["id"], "content": "5"}
        client.chat.completions.create(model="m", messages=[*ASKED, message, result], tools=TOOLS, max_tokens=10)
        first, second = seen.answers
        # The template would have written the call in another way: the engine is told what it sampled.
        assert bytes_of(backend, first[1]).startswith(CALL)
        assert (*first[0], *first[1]) == second[0][: len(first[0]) + len(first[1])]


@pytest.mark.parametrize("given", ["", " ", "null", "{}", None])
def test_an_earlier_call_may_have_no_arguments(given: str | None) -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.arguments | items | list }}{% endfor %}"
    template = f"{{% for m in messages %}}{{{{ m.content }}}}{calls}{{% endfor %}}"
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "now", "arguments": given}}
    chat = [
        *ASKED,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "5"},
    ]
    seen = Seen()
    with (
        corelm.get_backend("transformers", tiny_model(), tokenizer=tiny_tokenizer(), wrappers=[seen]) as backend,
        serving(backend, model_name="m", chat_template=template) as server,
        client_of(server) as client,
    ):
        client.chat.completions.create(model="m", messages=chat, max_tokens=1)
    assert tiny_tokenizer().decode(seen.answers[0][0]) == f"{ASKED[0]['content']}[]5"


def test_calls_are_shown_as_text_without_a_parser(seen: Seen) -> None:
    with scripted_bytes(CALL) as backend, serving(backend, model_name="m") as server, client_of(server) as client:
        message = client.chat.completions.create(model="m", messages=ASKED, tools=TOOLS).choices[0].message
    assert message.content == CALL and message.tool_calls is None


@pytest.mark.parametrize("asked", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_what_was_not_offered_is_not_called(asked: dict[str, Any]) -> None:
    with (
        scripted_bytes(CALL) as backend,
        serving(backend, model_name="m", response_parser="hermes") as server,
        client_of(server) as client,
    ):
        choice = client.chat.completions.create(model="m", messages=ASKED, **asked).choices[0]
    assert choice.message.content == CALL and choice.message.tool_calls is None and choice.finish_reason == "stop"


def test_without_a_choice_the_template_is_given_no_tools() -> None:
    with scripted_bytes("ok") as backend, serving(backend, model_name="m") as server, client_of(server) as client:
        for choice in ("auto", "none"):
            client.chat.completions.create(model="m", messages=ASKED, tools=TOOLS, tool_choice=choice)
        given = backend.tokenizer.tools
    assert given[0] == TOOLS and given[-1] is None


def test_an_answer_that_is_no_call_is_text() -> None:
    broken = '<tool_call>{"name": </tool_call>'
    with (
        scripted_bytes(broken) as backend,
        serving(backend, model_name="m", response_parser="hermes") as server,
        client_of(server) as client,
    ):
        choice = client.chat.completions.create(model="m", messages=ASKED, tools=TOOLS).choices[0]
    assert choice.message.content == broken and choice.finish_reason == "stop"


def test_reasoning_is_a_field_of_its_message() -> None:
    with (
        scripted_bytes("<think>\nA riddle.\n</think>\n\nFive.") as backend,
        serving(backend, model_name="m", response_parser="deepseek_r1") as server,
        client_of(server) as client,
    ):
        message = client.chat.completions.create(model="m", messages=ASKED).choices[0].message
    assert message.content == "Five." and message.reasoning_content.strip() == "A riddle."


def test_a_stop_string_in_the_reasoning_does_not_end_the_answer(seen: Seen) -> None:
    tokenizer = tiny_tokenizer()
    said = "<think>\nObs: none.\n</think>\n\nIt is 4. Obs: more"
    model = memorized(chat_ids(ASKED), tokenizer(said, add_special_tokens=False)["input_ids"])
    with (
        corelm.get_backend("transformers", model, tokenizer=tokenizer, wrappers=[seen]) as backend,
        serving(backend, model_name="m", response_parser="hermes") as server,
        client_of(server) as client,
    ):
        asked = {"model": "m", "messages": ASKED, "temperature": 0.0, "max_tokens": 100, "stop": ["Obs:"]}
        choice = client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content == "It is 4. " and choice.message.reasoning_content == "Obs: none."
    # The engine itself has stopped there.
    assert tokenizer.decode(seen.answers[0][1]).endswith("It is 4. Obs:")


def test_a_character_of_several_tokens_is_streamed_whole() -> None:
    text = "naïve — ✓ 日本 🙂"
    with scripted_bytes(text) as backend, serving(backend, model_name="m") as server, client_of(server) as client:
        asked = {"model": "m", "messages": ASKED, "max_tokens": 100}
        parts = [each.choices[0].delta.content or "" for each in client.chat.completions.create(**asked, stream=True)]
    assert "".join(parts) == text and not any("\ufffd" in part for part in parts)


def bytes_of(backend: Backend, ids: tuple[int, ...]) -> str:
    (text,) = backend.detokenize([list(ids)])
    return text


def joined(client: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the message of a stream, as a client joins it."""
    message: dict[str, Any] = {"role": "", "content": "", "tool_calls": []}
    reasons = []
    for part in client.chat.completions.create(**asked, stream=True):
        (choice,) = part.choices
        message["role"] += choice.delta.role or ""
        message["content"] += choice.delta.content or ""
        message["tool_calls"] += [each.model_dump(exclude={"index"}) for each in choice.delta.tool_calls or ()]
        reasons.append(choice.finish_reason)
    assert reasons[-1] == "tool_calls" and set(reasons[:-1]) == {None}
    return message

"""Texts that cannot be encoded, and chat templates that never end: refused by row, and the other rows are rendered."""

from typing import Any

import pytest
from tensordict import TensorDict

import corelm
from corelm import History, LLMPolicy
from corelm.errors import InvalidRequestError, TemplateError
from corelm.rendering import template as module
from helpers import chat_templates as ct
from helpers.each import each
from helpers.refusals import refused
from helpers.rendering import MORE, QUESTION, TOKENIZER, own, rendered

#: Half of an emoji, as a cut text ends.
CUT = "How nice \ud83d"
#: All of Unicode's private use area, from which rendering chooses its marks.
PRIVATE = "".join(map(chr, range(0xE000, 0xF900)))

CUT_CHATS = {
    "content": {"role": "user", "content": CUT},
    "name": {"role": "user", "content": "Hello", "name": CUT},
    "role": {"role": CUT, "content": "Hello"},
    "tool_calls": {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"of": [CUT]}}}]},
    "reasoning_content": {"role": "assistant", "content": "Hi", "reasoning_content": CUT},
    "a key": {"role": "user", "content": "Hi", "meta": {CUT: 1}},
}


@each("field", CUT_CHATS)
@each("prompt", [True, False])
def test_a_text_that_cannot_be_encoded_is_refused_by_row_and_field(field: str, prompt: bool) -> None:
    with refused(InvalidRequestError, field="history", rows=(1,)) as caught:
        rendered([[QUESTION], [QUESTION, CUT_CHATS[field]], [MORE]], ct.THINKING, prompt)
    assert (field if field != "a key" else "meta") in str(caught.value)


@each("tools", [[{"name": CUT}], [{"parameters": {CUT: {}}}]])
def test_tools_that_cannot_be_encoded_are_refused(tools: list[Any]) -> None:
    with refused(InvalidRequestError, field="template_kwargs"):
        rendered([[QUESTION]], ct.CHATML, template_kwargs={"tools": tools})


def test_a_template_that_holds_or_writes_a_lone_surrogate_is_refused() -> None:
    with refused(InvalidRequestError, field="chat_template"):
        rendered([[QUESTION]], ct.CHATML + CUT)
    writes = ct.CHATML + r"{{ '\ud83d' if 'Italy' in messages[-1].content }}"
    with refused(TemplateError, rows=(1,)):
        rendered([[QUESTION], [MORE]], writes)
    with refused(InvalidRequestError, field="chat_template"):
        rendered([[QUESTION]], 5)


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from corelm_testing.tiny import build_tiny

    folder = build_tiny(tmp_path_factory.mktemp("models") / "tiny", steps=2, progress=False)
    with corelm.get_backend("transformers", str(folder), dtype="float32") as opened:
        yield opened


TEXTS = ["Who are", CUT, "What is", 7]
CHATS = [[QUESTION], [{"role": "user", "content": CUT}], [MORE], [{"role": "user", "content": "Stop"}]]
FAILS_AT_STOP = ct.CHATML + "{% if messages[0].content == 'Stop' %}{{ raise_exception('stopped') }}{% endif %}"


@each("generate", [True, False])
def test_a_policy_answers_the_rows_next_to_a_bad_one(backend: Any, generate: bool) -> None:
    policy = LLMPolicy(backend, generate=generate, sampling_params={"max_new_tokens": 3}, inplace=False)
    part = "prompt" if generate else "full"
    texts = policy.replace(input_mode="text")
    with refused(InvalidRequestError, field=f"text.{part}", rows=(1, 3)):
        texts(TensorDict(text=TEXTS))
    td = texts.replace(on_error="skip")(TensorDict(text=TEXTS))
    assert [bool(error) for error in td["errors"]] == [False, True, False, True]
    alone = texts(TensorDict(text=["Who are", "What is"]), **({"seed": 3} if generate else {}))
    both = texts.replace(on_error="skip")(TensorDict(text=TEXTS), **({"seed": 3} if generate else {}))
    assert both["tokens"].full[0].tolist() == alone["tokens"].full[0].tolist()

    history = policy.replace(input_mode="history", chat_template=FAILS_AT_STOP)
    chats = TensorDict(history=History.from_chats(CHATS))
    with refused(InvalidRequestError, rows=(1,)):
        history(chats)
    td = history.replace(on_error="skip")(chats)
    errors = list(td["errors"])
    assert [bool(error) for error in errors] == [False, True, False, True]
    assert "lone surrogate" in errors[1] and "stopped" in errors[3]
    assert all(len(row) for row in (td["tokens"].full[0], td["tokens"].full[2]))


def test_a_conversation_may_use_up_the_private_characters() -> None:
    chat = [
        {"role": "user", "content": PRIVATE + "\ue0000\ue001 \\ue000<|im_end|>"},
        {"role": "assistant", "content": PRIVATE},
    ]
    ours = rendered([[QUESTION], chat], ct.CHATML)
    assert ours.texts[1] == own(chat, ct.CHATML, tokenize=False)
    assert TOKENIZER.decode(ours.ids.split()[1][ours.assistant.split()[1]]) == PRIVATE + "<|im_end|>"
    writes_tools = "{{ tools | tojson }}" + ct.CHATML
    tools = [{"name": PRIVATE}]
    assert PRIVATE in rendered([[QUESTION]], writes_tools, template_kwargs={"tools": tools}).texts[0]


def test_a_template_that_writes_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CHARACTERS", 1000)
    for source in (
        "{{ 'ab' * 5000 }}",
        "{{ 'a' * 10 ** 15 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ range(10 ** 9) | list }}",
        "{% for a in messages %}",
    ):
        with refused(TemplateError, rows=(0, 1)):
            rendered([[QUESTION], [MORE]], source)

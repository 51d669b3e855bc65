"""Rendered conversations, compared with the tokenizer's own rendering, ids and assistant mask."""

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corelm.containers import History
from corelm.rendering.render import Segment, render, segments_of
from corelm.spec.records import TokenizeResult
from helpers import chat_templates as ct
from helpers.each import each, examples
from helpers.rendering import (
    ANSWER,
    EOS_IDS,
    MORE,
    QUESTION,
    TOKENIZER,
    ids_of,
    own,
    rendered,
    sampled,
    tokenize,
)

contents = st.text(alphabet=st.sampled_from("ab 1?.\n\té🙂the"), max_size=12)


@st.composite
def plain_chats(draw: st.DrawFn) -> list[dict[str, str]]:
    """Chats without sampled turns and special tokens: an optional system turn, then user and assistant alternate."""
    chat = [{"role": "system", "content": draw(contents)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        chat += [{"role": "user", "content": draw(contents)}, {"role": "assistant", "content": draw(contents)}]
    return chat[:-1] if draw(st.booleans()) else chat


@pytest.mark.parametrize("name", [*ct.UNMARKED])
@given(chat=plain_chats(), prompt=st.booleans())
@settings(max_examples=examples(12), deadline=None)
def test_a_template_without_markers_gives_the_mask_of_the_one_with_markers(
    name: str, chat: list[dict[str, str]], prompt: bool
) -> None:
    oracle = own(chat, ct.MARKED[name], prompt, return_assistant_tokens_mask=True)
    ours = rendered([chat], ct.UNMARKED[name], prompt)
    assert ours.ids.tolist() == [oracle["input_ids"]]
    assert ours.assistant.tolist() == [[bool(m) for m in oracle["assistant_masks"]]]


def test_thinking_that_the_template_drops_from_a_past_turn_is_not_in_the_mask() -> None:
    chat = [QUESTION, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nParis."}, MORE]
    oracle = own(chat, ct.THINKING_MARKED, True, return_assistant_tokens_mask=True)
    ours = rendered([chat], ct.THINKING, True)
    assert ours.assistant.tolist() == [[bool(m) for m in oracle["assistant_masks"]]]
    assert TOKENIZER.decode(ours.ids.values[ours.assistant.values]) == "Paris.<|im_end|>"


def test_a_tokenizer_elsewhere_gets_every_setting_of_the_rendering() -> None:
    given: dict[str, Any] = {}

    class Elsewhere:
        def render_segments(self, chats: Any, **settings: Any) -> list[list[Segment]]:
            given.update(settings)
            return segments_of(chats, TOKENIZER, **settings)

    template = next(iter(ct.UNMARKED.values()))
    chats, asked = History.from_chats([[QUESTION]]).chats, {"add_generation_prompt": True, "chat_template": template}
    found = render(chats, Elsewhere(), tokenize, eos_ids=EOS_IDS, **asked)
    assert found.texts == rendered([[QUESTION]], template, True).texts
    assert given.keys() == inspect.signature(render).parameters.keys() - {"chats", "tokenizer", "tokenize"}


def test_an_empty_turn_is_not_in_the_mask() -> None:
    template = "{% for m in messages %}t{% generation %}{{ m.content }}{% endgeneration %}h{% endfor %}"
    ours = rendered([[{"role": "assistant", "content": ""}], [{"role": "assistant", "content": " and "}]], template)
    # The empty turn lies in the middle of one token.
    assert TOKENIZER.tokenize("th") == ["th"] and ours.ids.tolist()[0] == TOKENIZER("th")["input_ids"]
    empty, spoken = ours.assistant.tolist()
    assert empty == [False] and any(spoken)


def test_a_conversation_may_start_with_the_assistant() -> None:
    chat = [{"role": "assistant", "name": "ann", "content": "Hello."}, MORE]
    named = ct.CHATML_MARKED.replace("{{ m.role }}", "{{ m.role }} {{ m.name }}")
    oracle = own(chat, named, return_assistant_tokens_mask=True)
    assert rendered([chat], ct.unmarked(named)).assistant.tolist() == [[bool(m) for m in oracle["assistant_masks"]]]


def test_tool_calls_and_results_reach_the_template() -> None:
    call = {"type": "function", "function": {"name": "capital", "arguments": {"of": "Italy"}}}
    result = {"role": "tool", "content": "Rome", "tool_call_id": "7", "name": "capital"}
    chat = [MORE, {"role": "assistant", "tool_calls": [call]}, result]
    oracle = own(chat, ct.THINKING_MARKED, True, return_assistant_tokens_mask=True)
    for template in (ct.THINKING_MARKED, ct.THINKING):
        ours = rendered([chat], template, True)
        assert ours.ids.tolist() == [oracle["input_ids"]]
        assert ours.assistant.tolist() == [[bool(m) for m in oracle["assistant_masks"]]]
    assert '{"name": "capital", "arguments": {"of": "Italy"}}' in ours.texts[0]


def test_template_arguments_and_the_default_template_are_used() -> None:
    quiet = {"enable_thinking": False}
    expected = own([QUESTION], ct.THINKING, True, **quiet)["input_ids"]
    assert ids_of([QUESTION], ct.THINKING, True, template_kwargs=quiet) == expected
    assert rendered([[QUESTION]]).ids.tolist() == [own([QUESTION], TOKENIZER.chat_template)["input_ids"]]


def test_rows_are_independent_and_texts_are_tokenized_in_one_call() -> None:
    calls: list[int] = []

    def counted(texts: Sequence[str], **options: Any) -> TokenizeResult:
        calls.append(len(texts))
        return tokenize(texts, **options)

    chats = [
        [QUESTION],
        [QUESTION, sampled("Paris.<|im_end|>"), MORE, ANSWER],
        [MORE, ANSWER],
        [QUESTION, ANSWER, MORE],
    ]
    together = rendered(chats, ct.CHATML_MARKED, True, tokenize=counted)
    assert len(calls) == 1
    alone = [rendered([chat], ct.CHATML_MARKED, True) for chat in chats]
    assert together.ids.tolist() == [one.ids.tolist()[0] for one in alone]
    assert together.assistant.tolist() == [one.assistant.tolist()[0] for one in alone]
    assert together.texts == tuple(one.texts[0] for one in alone)


@each(
    "template, answer, between",
    [
        # The turn ends with an EOS: the template's is left out, with the space that one template writes before it.
        (ct.CHATML, "Paris.<|im_end|>", "\n<|im_start|>user\nAnd of Italy?<|im_end|>\n<|im_start|>assistant\n"),
        (ct.INSTRUCT, "Paris.<|im_end|>", "[INST] And of Italy? [/INST]"),
        # Cut off: the template closes the turn.
        (ct.CHATML, "Par", "<|im_end|>\n<|im_start|>user\nAnd of Italy?<|im_end|>\n<|im_start|>assistant\n"),
        (ct.INSTRUCT, "Par", " <|im_end|>[INST] And of Italy? [/INST]"),
        # The turn ends with another EOS than the template's: it stands for that.
        (ct.CHATML, "Par<|eot|>", "\n<|im_start|>user\nAnd of Italy?<|im_end|>\n<|im_start|>assistant\n"),
        # The template next writes the turn's last id, which is not an EOS.
        (ct.BARE, "Par\n", "\nuser: And of Italy?\nassistant: "),
    ],
)
def test_the_text_between_a_sampled_turn_and_the_next(template: str, answer: str, between: str) -> None:
    turn = sampled(answer)
    before = own([QUESTION], template, True)["input_ids"]
    after = ids_of([QUESTION, turn, MORE], template, True)
    assert after[: len(before) + len(turn["token_ids"])] == before + turn["token_ids"]
    assert TOKENIZER.decode(after[len(before) + len(turn["token_ids"]) :]) == between


def test_an_eos_may_be_an_ordinary_token() -> None:
    newline = TOKENIZER("\n")["input_ids"]
    after = ids_of([QUESTION, sampled("Par\n"), MORE], ct.BARE, True, eos_ids=frozenset(newline))
    assert TOKENIZER.decode(after).endswith("assistant: Par\nuser: And of Italy?\nassistant: ")


@each("content", [None, "", "hm"])
def test_the_ids_of_a_parsed_turn_include_its_calls_and_thinking(content: str | None) -> None:
    call = {"type": "function", "function": {"name": "capital", "arguments": {}}}
    words = '<think>hm</think>\n<tool_call>{"name": "capital"}</tool_call><|im_end|>'
    turn = {**sampled(words), "content": content, "tool_calls": [call], "reasoning_content": "hm"}
    chat = [MORE, turn, {"role": "tool", "content": "Rome"}]
    ours = rendered([chat], ct.THINKING, True)
    text = TOKENIZER.decode(ours.ids.values)
    assert text == (
        f"<|im_start|>user\nAnd of Italy?<|im_end|>\n<|im_start|>assistant\n{words}\n"
        "<|im_start|>tool\nRome<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ours.texts == (text,)


def test_prefer_tokens_false_renders_the_text() -> None:
    chat = [QUESTION, sampled("Paris.<|im_end|>"), MORE]
    # What was remembered for the same conversation with its ids is not used.
    rendered([chat], ct.CHATML_MARKED, True)
    plain = [{key: m[key] for key in ("role", "content")} for m in chat]
    oracle = own(plain, ct.CHATML_MARKED, True, return_assistant_tokens_mask=True)
    ours = rendered([chat, plain], ct.CHATML_MARKED, True, prefer_tokens=False)
    assert ours.ids.tolist() == [oracle["input_ids"]] * 2
    assert ours.assistant.tolist() == [[bool(m) for m in oracle["assistant_masks"]]] * 2

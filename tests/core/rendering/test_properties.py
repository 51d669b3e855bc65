"""Generated chat templates, and conversations of any text: sampled ids survive, and masks cover what they should."""

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from corelm.errors import InvalidRequestError, TemplateError
from helpers import chat_templates as ct
from helpers.each import examples
from helpers.rendering import ANSWER, EOS_IDS, QUESTION, TOKENIZER, VOCABULARY, own, rendered

dashes = st.sampled_from(["", "-"])
literals = st.sampled_from(["", " ", "\n", "\n\n", "  \n", ": ", "###", "[/INST]", "<|end|>", "é"])


def quoted(text: str) -> str:
    return "{{ '" + text.replace("\n", "\\n") + "' }}"


@st.composite
def templates(draw: st.DrawFn) -> str:
    """A loop over the messages, with or without markers, and text, filters and whitespace control around everything."""
    raw = draw(st.booleans())
    text = [draw(literals) if raw else quoted(draw(literals)) for _ in range(5)]
    content = draw(st.sampled_from(["m.content", "m['content']", "m.content | trim", "(m.content or '')"]))
    end = quoted(draw(st.sampled_from(["<|im_end|>", "<|eot|>", "\n", ""])))
    left, right, begin, stop = (draw(dashes) for _ in range(4))
    said = f"{text[0]}{{{{ {content} }}}}{end}"
    if draw(st.booleans()):
        said = f"{{%{left} generation {right}%}}{said}{{%{begin} endgeneration {stop}%}}"
    turn = (
        f"{{% if m.role == 'assistant' %}}{said}{text[1]}"
        f"{{% else %}}{text[2]}{{{{ {content} }}}}{quoted('<|im_end|>')}{text[3]}{{% endif %}}"
    )
    header = draw(
        st.sampled_from(["<|im_start|>{{ m.role }}\n", "{{ m.role }}: ", "<|start|>{{ m.role | upper }}<|end|>"])
    )
    opening = draw(st.sampled_from(["", "<|endoftext|>", "{{ '<|endoftext|>' }}\n"]))
    prompt = header.replace("{{ m.role }}", "assistant").replace("{{ m.role | upper }}", "ASSISTANT")
    return (
        f"{opening}{{%{draw(dashes)} for m in messages {draw(dashes)}%}}{header}{turn}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{quoted(prompt)}{{% endif %}}"
    )


plain = st.text(max_size=12).filter(lambda text: not any(special in text for special in ct.SPECIAL))
anything = st.one_of(
    plain,
    st.lists(st.sampled_from([*ct.SPECIAL, "<|im_", "\ue000Turn1\ue000", "\ue001", "\\ue000", "user"]), max_size=4).map(
        "".join
    ),
)
ids = st.lists(st.integers(0, VOCABULARY - 1), max_size=5)
ends = st.sampled_from([[], *([eos] for eos in sorted(EOS_IDS))])
answers = st.builds(lambda body, end: body + end, ids, ends)


def said(answer: Sequence[int]) -> dict[str, Any]:
    return {"role": "assistant", "content": TOKENIZER.decode(answer), "token_ids": list(answer)}


named = st.sampled_from([*ct.MARKED.values(), *ct.UNMARKED.values()])


@given(named | templates(), st.lists(plain, min_size=1, max_size=4), st.booleans())
@settings(max_examples=examples(60), deadline=None)
def test_a_conversation_without_sampled_turns_is_rendered_as_the_tokenizer_does(
    template: str, contents: list[str], prompt: bool
) -> None:
    chat = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(contents)]
    marked = "generation %}" in template or "generation -%}" in template
    oracle = own(chat, template, prompt, return_assistant_tokens_mask=marked)
    ours = rendered([chat], template, prompt, want_assistant=marked)
    assert ours.ids.tolist() == [oracle["input_ids"]] and ours.texts == (TOKENIZER.decode(oracle["input_ids"]),)
    # transformers leaves out all but the first token of a block's last character, so compare where each is one byte.
    if marked and (template in ct.MARKED.values() or all(map(str.isascii, [template, *contents]))):
        assert ours.assistant.tolist() == [list(map(bool, oracle["assistant_masks"]))]


exchanges = st.lists(st.tuples(st.sampled_from(["user", "tool"]), anything, answers), min_size=1, max_size=3)


@given(named | templates(), st.booleans(), exchanges, anything)
@settings(max_examples=examples(60), deadline=None)
def test_sampled_ids_survive_every_turn_and_the_mask_covers_them(
    template: str, with_history: bool, exchanges: list[tuple[str, str, list[int]]], last: str
) -> None:
    with_history &= template in (*ct.MARKED.values(), *ct.UNMARKED.values())
    chat: list[dict[str, Any]] = [QUESTION, ANSWER] if with_history else []
    known: list[int] = []
    mask: list[bool] = []
    for role, question, answer in [*exchanges, ("user", last, [])]:
        chat.append({"role": role, "content": question})
        prompt = rendered([chat], template, True)
        found, covered = prompt.ids.tolist()[0], prompt.assistant.tolist()[0]
        assert found[: len(known)] == known
        assert (with_history and not known) or covered == mask + [False] * (len(found) - len(known))
        chat.append(said(answer))
        whole = rendered([chat], template)
        known, mask = found + answer, covered + [True] * len(answer)
        assert whole.ids.tolist() == [known] and whole.assistant.tolist() == [mask]
        # Rows do not change one another, and masks change no ids.
        again = rendered([[{"role": "user", "content": last}], chat], template, want_assistant=False)
        assert again.ids.tolist()[1] == known and again.assistant is None


#: Surrogates, private characters and control characters included.
wild = st.text(st.characters(), max_size=8) | st.text(st.characters(categories=["Cs", "Co", "Cc"]), max_size=8)
nested = st.recursive(
    wild | st.none() | st.integers() | st.floats(),
    lambda one: st.lists(one, max_size=3) | st.dictionaries(wild, one, max_size=3),
    max_leaves=6,
)
wild_messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": wild},
    optional={
        "name": wild,
        "tool_calls": st.lists(st.dictionaries(wild, nested, max_size=2), max_size=2),
        "reasoning_content": wild,
        "more": nested,
        "token_ids": answers,
    },
)


@given(
    named,
    st.lists(st.lists(wild_messages, max_size=3), min_size=1, max_size=3),
    st.booleans(),
)
@settings(max_examples=examples(30), deadline=None)
def test_any_conversation_is_rendered_or_refused_by_row(template: str, chats: list[Any], prompt: bool) -> None:
    good = chats
    while good:
        try:
            ours = rendered(good, template, prompt)
        except (InvalidRequestError, TemplateError) as error:
            assert error.rows and max(error.rows) < len(good)
            good = [chat for row, chat in enumerate(good) if row not in error.rows]
        else:
            assert ours.assistant.lengths.tolist() == ours.ids.lengths.tolist() and len(ours.texts) == len(good)
            return

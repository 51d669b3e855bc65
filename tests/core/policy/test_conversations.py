"""Conversations that end with an assistant turn, and conversations with tools of their own."""

import json

import pytest
import tokenizers
import torch
from tensordict import TensorDict
from tokenizers import decoders, models, pre_tokenizers

import corelm
from corelm import History, LLMPolicy
from corelm.errors import InvalidRequestError, TemplateError
from corelm_testing.toy import Bigram, ByteTokenizer
from helpers.each import each
from helpers.refusals import refused
from helpers.rendering import TOKENIZER
from helpers.toy_prompts import SAMPLING, chat

BEGUN = [*chat("Who?"), {"role": "assistant", "content": "I am"}]
START = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
TOOLS = [{"type": "function", "function": {"name": "weather"}}]


class ToolTokenizer(ByteTokenizer):
    """Writes the names of the tools before the turns."""

    def apply_chat_template(self, conversation, tools=None, **options):
        text = super().apply_chat_template(conversation, **options)
        return "".join(f"[{tool['function']['name']}]" for tool in tools or []) + text


@pytest.fixture(scope="module")
def backend():
    """Yield a toy backend whose tokenizer writes tools."""
    with corelm.get_backend("toy", tokenizer=ToolTokenizer()) as opened:
        yield opened


def policy_of(backend, **options):
    return LLMPolicy(backend, sampling_params=SAMPLING, inplace=False, **options)


@each("batching", [False, True])
def test_a_conversation_that_ends_with_the_assistant_is_refused_by_default(backend, batching):
    policy = policy_of(backend, batching=batching)
    td = TensorDict(history=History.from_chats([chat("Hi"), BEGUN]))
    with pytest.raises(InvalidRequestError, match=r"row 1: .*ends with an assistant turn.*continue_final_message=True"):
        policy(td)
    out = policy.replace(on_error="skip")(td)
    assert out["errors"][0] == "" and "assistant turn" in out["errors"][1]
    again = policy.replace(continue_final_message=None)(td)
    policy.cleanup_batching()
    prompt = backend.tokenizer.apply_chat_template(BEGUN, add_generation_prompt=True)
    assert again["text"].prompt[1] == prompt
    assert [len(each) for each in again["history"].full.chats] == [len(chat("Hi")) + 1, len(BEGUN) + 1]
    assert policy.replace(generate=False)(td)["log_probs"].full  # scoring reads whole conversations


@each("prefer_tokens", [True, False])
def test_the_answer_continues_the_assistants_turn(backend, prefer_tokens):
    policy = policy_of(backend, continue_final_message=True, prefer_tokens=prefer_tokens)
    td = TensorDict(history=History.from_chats([chat("Hi"), BEGUN]))
    out = policy(td, seed=1)
    assert out["text"].prompt == [START.format("Hi"), START.format("Who?") + "I am"]
    full = out["history"].full.chats
    assert [[turn.role for turn in each] for each in full] == [["user", "assistant"]] * 2
    assert full[1][-1].content == "I am" + out["text"].response[1] == out["history"].response.chats[1][0].content
    ids = out["tokens"]
    assert list(full[1][-1].token_ids) == ids.response[1].tolist()
    assert full[1][-1].begun == BEGUN[-1]
    assert out["history"].prompt.to_chats()[1] == BEGUN
    alone = policy(TensorDict(history=History.from_chats([chat("Hi")])), seed=1)
    assert alone["tokens"].response[0].tolist() == ids.response[0].tolist()
    scored = policy.replace(generate=False)(TensorDict(history=out["history"].full))
    if prefer_tokens:
        assert scored["tokens"].full[1].tolist() == ids.full[1].tolist()


def test_tools_that_the_template_does_not_read_are_refused():
    chats = TensorDict(history=History.from_chats([chat("2 + 3?")]))
    table = torch.zeros(len(TOKENIZER), len(TOKENIZER))
    with corelm.get_backend("toy", Bigram(table), tokenizer=TOKENIZER) as opened:
        policy = policy_of(
            opened, template_kwargs={"tools": TOOLS}, chat_template="{{ tools }}{{ messages[0].content }}"
        )
        assert "weather" in policy(chats)["text"].prompt[0]
        with pytest.raises(TemplateError, match="does not read tools"):
            policy.replace(chat_template="{{ messages[0].content }}")(chats)


def test_calls_that_the_template_does_not_write_are_refused():
    calls = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}]
    called = corelm.Message("assistant", "", tool_calls=calls)
    answers = "{% for turn in messages %}{{ turn.content }};{% endfor %}"
    table = torch.zeros(len(TOKENIZER), len(TOKENIZER))
    with corelm.get_backend("toy", Bigram(table), tokenizer=TOKENIZER) as opened:

        def prompts(template, turn, **options):
            asked, result = corelm.Message("user", "Hi"), corelm.Message("tool", "rain")
            chats = History.of([[asked], [asked, turn, result]], (2,))
            policy = policy_of(opened, chat_template=template, **options)
            return policy(TensorDict(history=chats))["text"].prompt

        with pytest.raises(TemplateError, match="does not read tool_calls") as refusal:
            prompts(answers, called)
        assert refusal.value.rows == (1,)
        for template in (
            "{% for turn in messages %}{{ turn.content }}{{ turn.tool_calls }}{% endfor %}",
            "{{ messages | tojson }}",
        ):
            assert "Oslo" in prompts(template, called)[1]
        # Sampled ids hold the calls, until the turn is rendered from its text.
        (ids,) = opened.tokenize(["Oslo"]).ids.tolist()
        sampled = corelm.Message("assistant", "Oslo", tool_calls=calls, token_ids=tuple(ids))
        assert "Oslo" in prompts(answers, sampled)[1]
        with pytest.raises(TemplateError, match="does not read tool_calls"):
            prompts(answers, sampled, prefer_tokens=False)


def test_a_turn_that_was_cut_off_is_continued_from_its_own_ids(backend):
    sampling = {"max_new_tokens": 3, "seed": 5, "ignore_eos": True}
    short = policy_of(backend, continue_final_message=True).replace(sampling_params=sampling)
    first = short(TensorDict(history=History.from_chats([chat("Where?")])))
    again = short(TensorDict(history=first["history"].full))
    assert first["finish_reason"][0] == "length"
    assert again["tokens"].prompt[0].tolist() == first["tokens"].full[0].tolist()
    assert len(again["history"].full.chats[0]) == 2
    samples = short.replace(num_samples=2)(TensorDict(history=first["history"].full))
    assert [len(each) for each in samples["history"].full.chats] == [2, 2]


def test_a_turn_that_has_ended_is_continued_without_its_eos(backend):
    (eos,) = backend.eos_token_ids
    turn, *_ = backend.tokenize(["I am"], add_special_tokens=False).ids.tolist()
    prompts = [
        policy_of(backend, continue_final_message=True)(
            TensorDict(history=History.of([[corelm.Message("user", "Who?"), said]], (1,)))
        )["tokens"].prompt[0]
        for said in (
            corelm.Message("assistant", "I am", token_ids=(*turn, eos)),
            corelm.Message("assistant", "I am", token_ids=tuple(turn)),
        )
    ]
    assert prompts[0].tolist() == prompts[1].tolist() and prompts[0].tolist()[-len(turn) :] == turn


def test_of_a_prompt_that_is_cut_on_the_left_the_same_tokens_are_the_assistants(backend):
    said = [*chat("x" * 600), {"role": "assistant", "content": "hello"}, *chat("Hi")]
    out = policy_of(backend, truncation="left")(TensorDict(history=History.from_chats([said])))
    prompt = out["tokens"].prompt[0]
    assert len(prompt) == backend.capabilities.max_context - SAMPLING["max_new_tokens"]
    marked = prompt[out["masks"].all_assistant_mask[0][: len(prompt)]].tolist()
    assert marked == [*b"hello", *backend.eos_token_ids]


def test_of_a_prompt_only_earlier_answers_are_the_assistants_and_not_what_a_tool_said(backend):
    policy = policy_of(backend)
    first = policy(TensorDict(history=History.from_chats([chat("Hi"), chat("What is 2 + 3?")])), seed=1)
    asked = first["history"].full.append({"role": "tool", "content": "five"})
    second = policy(TensorDict(history=asked), seed=2)
    masks = corelm.ragged(second, ("masks", "all_assistant_mask")).tolist()
    for row, mask in enumerate(masks):
        prompt, answer = len(first["tokens"].prompt[row]), len(first["tokens"].response[row])
        last = len(second["tokens"].response[row])
        between = len(mask) - prompt - answer - last
        assert between > len("five")
        assert mask == [False] * prompt + [True] * answer + [False] * between + [True] * last


def test_an_empty_turn_is_begun_and_a_turn_that_calls_tools_is_refused(backend):
    policy = policy_of(backend, continue_final_message=True)
    empty = [*chat("Hi"), {"role": "assistant", "content": ""}]
    out = policy(TensorDict(history=History.from_chats([empty])))
    assert out["text"].prompt == [START.format("Hi")] and len(out["history"].full.chats[0]) == 2
    calls = [*chat("Hi"), {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]
    with refused(InvalidRequestError, field="history.prompt", rows=(0,)):
        policy(TensorDict(history=History.from_chats([calls])))


def metaspace_tokenizer():
    """Return a tokenizer of transformers that drops the first space of a text, as those of SentencePiece do."""
    transformers = pytest.importorskip("transformers")
    words = ["<unk>", "</s>", "▁I", "▁am", "▁Pip", "▁not", "▁Who?"]
    rust = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    rust.pre_tokenizer, rust.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=rust,
        eos_token="</s>",
        unk_token="<unk>",
        chat_template="{{ messages | map(attribute='content') | join(' ') }}",
    )


def follows(size, pairs):
    """Return a model in which each id is almost always followed by the one given with it."""
    table = torch.zeros(size, size)
    table[tuple(zip(*pairs, strict=True))] = 50.0
    return Bigram(table)


@each("prefer_tokens", [True, False])
def test_a_continued_turn_reads_as_its_ids_decode(prefer_tokens):
    tokenizer, parsed = metaspace_tokenizer(), []
    model = follows(7, [(3, 4), (4, 1), (6, 2), (2, 3)])

    def parser(text):
        parsed.append(text)
        return {"role": "assistant", "content": text}

    with corelm.get_backend("toy", model, tokenizer=tokenizer) as backend:
        policy = policy_of(backend, continue_final_message=True, prefer_tokens=prefer_tokens, response_parser=parser)
        typed = policy(TensorDict(history=History.from_chats([BEGUN, chat("Who?")])))["history"].full.chats
        assert [turns[-1].content for turns in typed] == parsed == ["I am Pip"] * 2
        assert typed[0][-1].token_ids == (4, 1)
        cut = policy.replace(sampling_params={"max_new_tokens": 2})(
            TensorDict(history=History.from_chats([chat("Who?")]))
        )
        assert cut["history"].full.chats[0][-1].content == "I am"
        whole = policy(TensorDict(history=cut["history"].full))["history"].full.chats[0][-1]
        assert whole.content == "I am Pip"
        if prefer_tokens:
            assert tokenizer.decode(whole.token_ids, skip_special_tokens=True) == "I am Pip"
        stopped = policy.replace(sampling_params={"stop": ["Pip"]})(TensorDict(history=History.from_chats([BEGUN])))
        assert stopped["history"].full.chats[0][-1].content == "I am "
        # What the user typed is kept, although these ids decode to something else.
        odd = [*chat("Who?"), {"role": "assistant", "content": " I am"}]
        kept = policy(TensorDict(history=History.from_chats([odd])))["history"].full.chats[0][-1]
        assert kept.content.startswith(" I am") and kept.content.endswith(" Pip")


def test_a_character_that_was_cut_in_two_is_whole_in_the_continued_turn(backend):
    with corelm.get_backend("toy", follows(260, [(10, 0xC3), (0xC3, 0xA9), (0xA9, 259)])) as accents:
        short = policy_of(accents, continue_final_message=True).replace(sampling_params={"max_new_tokens": 1})
        first = short(TensorDict(history=History.from_chats([chat("Which?")])))
        assert first["history"].full.chats[0][-1].content == "\ufffd"
        assert short(TensorDict(history=first["history"].full))["history"].full.chats[0][-1].content == "é"


@each("name", ["continue_final_message", "add_generation_prompt", "chat_template"])
def test_what_the_policy_tells_the_template_itself_is_refused_in_template_kwargs(backend, name):
    with refused(InvalidRequestError, field="template_kwargs"):
        LLMPolicy(backend, template_kwargs={name: True})


@each("tools", [[TOOLS, None], [None, TOOLS], [TOOLS, TOOLS]])
def test_each_conversation_has_its_own_tools(backend, tools):
    td = TensorDict(history=History.from_chats([chat("Hi"), chat("Ho")]), tools=tools)
    for generate in (True, False):
        out = policy_of(backend, generate=generate)(td, **({"seed": 1} if generate else {}))
        texts = out["text"].prompt if generate else out["text"].full
        assert [text.startswith("[weather]") for text in texts] == [each is not None for each in tools]
        assert "Hi" in texts[0] and "Ho" in texts[1]
    off = policy_of(backend, tools_key=None)(td)
    assert not any(text.startswith("[") for text in off["text"].prompt)


def test_conversations_that_are_grouped_by_their_tools_come_back_in_order(backend):
    """Groups of rows 0 and 3, and of 1 and 2: an order that is not its own inverse."""
    said, tools = ["a", "b", "c", "d"], [TOOLS, None, None, TOOLS]
    out = policy_of(backend)(TensorDict(history=History.from_chats([chat(each) for each in said]), tools=tools))
    texts = [
        START.format(each) if own is None else "[weather]" + START.format(each)
        for each, own in zip(said, tools, strict=True)
    ]
    assert out["text"].prompt == texts
    ids = backend.tokenize(texts, add_special_tokens=False).ids
    assert corelm.ragged(out, ("tokens", "prompt")).tolist() == ids.tolist()


def test_a_batch_of_which_every_conversation_is_skipped_may_have_tools(backend):
    td = TensorDict(history=History.from_chats([BEGUN, BEGUN]), tools=[TOOLS, TOOLS])
    out = policy_of(backend, on_error="skip")(td)
    assert out["text"].full == ["", ""] and all("ends with an assistant turn" in why for why in out["errors"])


def test_tools_of_one_conversation_replace_those_of_all(backend):
    policy = policy_of(backend, template_kwargs={"tools": [{"function": {"name": "shared"}}]})
    td = TensorDict(history=History.from_chats([chat("Hi"), chat("Ho")]), tools=[TOOLS, None])
    assert [text[:6] for text in policy(td)["text"].prompt] == ["[weath", "[share"]


@each("tools", [[TOOLS], ["f", "g"]])
def test_tools_that_do_not_fit_the_conversations_are_refused(backend, tools):
    td = TensorDict(history=History.from_chats([chat("Hi"), chat("Ho")]), tools=tools)
    with refused(InvalidRequestError, field="tools"):
        policy_of(backend)(td)


def weather(city: str) -> str:
    """Return the weather."""
    return city


@each(
    "tools",
    [
        [[weather], TOOLS],
        [[json.dumps(TOOLS[0])], TOOLS],
        [json.dumps(TOOLS), TOOLS],
        [TOOLS[0], TOOLS[0]],
        TOOLS,
        [weather],
    ],
)
def test_tools_of_other_kinds_are_refused_with_what_to_type(backend, tools):
    policy = policy_of(backend)
    td = TensorDict(history=History.from_chats([chat("Hi"), chat("Ho")]), tools=tools)
    with refused(InvalidRequestError, field="tools") as error:
        policy(td)
    if error.value.rows:
        out = policy.replace(on_error="skip")(td)
        assert "expected a list of dicts" in out["errors"][0] and out["errors"][1] == ""
        assert out["text"].prompt[1].startswith("[weather]")

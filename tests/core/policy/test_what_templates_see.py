"""What happens between two turns: the template sees calls and reasoning, a turn ends once, and masks end with it."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import corelm
from corelm import History, LLMPolicy
from corelm.errors import TemplateError
from corelm_testing.toy import Bigram
from helpers.each import each
from helpers.refusals import refused

SPECIAL = ["<|start|>", "<|msg|>", "<|end_msg|>", "<|end|>", "<|stop|>", "<|pad|>"]
TURNS = (
    "{% for m in messages %}<|start|>{{ m.role }}<|msg|>{{ m.content or '' }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}END\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|msg|>{% endif %}"
)
#: Writes results inside the turn that asked for them, as templates of Gemma 4 do.
NESTED = (
    "{% for m in messages %}{% if m.role == 'user' %}<|start|>user<|msg|>{{ m.content }}<|end|>\n"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|msg|>"
    "{% if m.tool_calls %}<call>{{ m.tool_calls[0].function.name }}</call>"
    "{% for r in messages[loop.index:loop.index + 1] if r.role == 'tool' %}<result>{{ r.content }}</result>"
    "{% endfor %}{% endif %}{{ m.content or '' }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|msg|>{% endif %}"
)
#: Closes thinking in every turn, and drops it from those before the last question.
THINKING = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }}<|msg|>{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "<think>{{ m.reasoning_content or '' }}</think>{% endif %}{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|msg|><think>{% endif %}"
)
QUESTION, MORE = {"role": "user", "content": "Hi?"}, {"role": "user", "content": "And?"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
RESULT = {"role": "tool", "content": "sunny"}


class Counting(PreTrainedTokenizerFast):
    """Counts how many messages were rendered."""

    rendered = 0

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        several = bool(conversation) and isinstance(conversation[0], list)
        Counting.rendered += sum(map(len, conversation)) if several else len(conversation)
        return super().apply_chat_template(conversation, **options)


def tokenizer_of(template: str, eos: str) -> Any:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(["Hi"], trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    found = Counting(tokenizer_object=core, clean_up_tokenization_spaces=False)
    found.add_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL], special_tokens=True)
    found.pad_token, found.eos_token, found.chat_template = "<|pad|>", eos, template
    return found


@contextmanager
def opened(template: str, eos: str = "<|end|>") -> Iterator[tuple[Any, Any]]:
    """Yield a backend and its tokenizer."""
    tokenizer = tokenizer_of(template, eos)
    model = Bigram(torch.zeros(len(tokenizer), len(tokenizer)))
    with corelm.get_backend("toy", model, tokenizer=tokenizer, max_context=100_000) as backend:
        yield backend, tokenizer


def read(backend: Any, chat: list[dict[str, Any]], **options: Any) -> tuple[str, str]:
    """Return the text that a policy reads, and what of it is the assistant's."""
    policy = LLMPolicy(backend, sampling_params={"max_new_tokens": 1}, inplace=False, **options)
    out = policy(TensorDict(history=History.from_chats([chat])))
    ids = out["tokens"].prompt[0] if options.get("generate", True) else out["tokens"].full[0]
    mask = out["masks"].all_assistant_mask[0][: len(ids)]
    return backend.tokenizer.decode(ids.tolist()), backend.tokenizer.decode(ids[mask].tolist())


def said(tokenizer: Any, text: str, **fields: Any) -> dict[str, Any]:
    """Return a turn that was sampled as this text."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    content = tokenizer.decode(ids, skip_special_tokens=True)
    return {"role": "assistant", "content": content, "token_ids": ids, **fields}


@each(
    "end, sampled",
    [
        # As the template writes it; with two tokens; a stop token that the template does not write; cut off.
        ("<|end|>", "Yes.<|end|>"),
        ("<|end_msg|><|end|>", "Yes.<|end_msg|><|end|>"),
        ("<|end|>", "Yes.<|stop|>"),
        ("<|end|>", "Yes."),
    ],
)
def test_a_turn_ends_once(end: str, sampled: str) -> None:
    with opened(TURNS.replace("END", end)) as (backend, tokenizer):
        prompt, _ = read(backend, [QUESTION, said(tokenizer, sampled), MORE])
        ended = sampled if "<" in sampled else sampled + end
        assert prompt == (
            f"<|start|>user<|msg|>Hi?{end}\n<|start|>assistant<|msg|>{ended}\n<|start|>user<|msg|>And?{end}\n"
            "<|start|>assistant<|msg|>"
        )


@each("eos", ["<|end|>", "<|pad|>"])
def test_a_mask_ends_with_the_turn_whatever_the_eos(eos: str) -> None:
    chat = [QUESTION, {"role": "assistant", "content": "Yes."}, MORE, {"role": "assistant", "content": "No."}]
    with opened(TURNS.replace("END", "<|end|>"), eos) as (backend, _):
        assert read(backend, chat, generate=False)[1] == "Yes.<|end|>No.<|end|>"


def test_the_template_sees_the_calls_of_a_sampled_turn() -> None:
    with opened(NESTED) as (backend, tokenizer):
        turn = said(tokenizer, "<call>weather</call>", content=None, tool_calls=[CALL])
        prompt, trained = read(backend, [QUESTION, turn, RESULT])
        own = [QUESTION, {"role": "assistant", "tool_calls": [CALL]}, RESULT]
        assert prompt == tokenizer.apply_chat_template(own, tokenize=False, add_generation_prompt=True)
        assert "<result>sunny" in prompt and trained == "<call>weather</call>"
        given = [*own, {"role": "assistant", "content": "It is."}]
        assert read(backend, given, generate=False)[1] == "<call>weather</call>It is.<|end|>"


@each("more", [{}, {"prefer_tokens": False}])
def test_calls_are_in_the_mask_where_the_prompt_is_written_unasked(more: dict[str, Any]) -> None:
    asks = (
        "{% for m in messages %}{% if m.role == 'user' %}[Q]{{ m.content }}[/Q]{% elif m.role == 'tool' %}"
        "[R]{{ m.content }}[/R]{% elif m.tool_calls %}<|msg|>{{ m.tool_calls[0].function | tojson }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}<|start|>"
    )
    with opened(asks) as (backend, tokenizer):
        call = said(tokenizer, "<|msg|>{}", content=None, tool_calls=[CALL])
        chat = [QUESTION, call, RESULT, {"role": "assistant", "content": "It is."}, MORE]
        written = "<|msg|>{}" if not more else '<|msg|>{"name": "weather", "arguments": {"city": "Rome"}}'
        assert read(backend, chat, generate=False, **more)[1] == f"{written}It is."


def test_thinking_that_was_cut_off_is_closed_and_past_thinking_is_kept() -> None:
    with opened(THINKING) as (backend, tokenizer):
        cut = said(tokenizer, "Let me", content="", reasoning_content="Let me")
        for after in (RESULT, MORE):
            assert "<think>Let me</think><|end|>" in read(backend, [QUESTION, cut, after])[0]
        whole = said(tokenizer, "I see.</think>Yes.<|end|>", content="Yes.", reasoning_content="I see.")
        assert "<think>I see.</think>Yes.<|end|>\n<|start|>user<|msg|>And?" in read(backend, [QUESTION, whole, MORE])[0]
        anew = read(backend, [QUESTION, whole, MORE], prefer_tokens=False)[0]
        assert "I see." not in anew


#: Writes thinking only into the prompt, as templates of DeepSeek R1 do.
PROMPTED = TURNS.replace("END", "<|end|>").replace("<|msg|>{% endif %}", "<|msg|><think>\n{% endif %}")


@each(
    "template, sampled, closed",
    [
        (THINKING, "Let me", "<think>Let me</think><|end|>"),
        (PROMPTED, "Let me", "<think>\nLet me\n</think>\n\n<|end|>"),
        (THINKING.replace("<think>{% endif %}", "{% endif %}"), "<think>Let me", "<think>Let me</think><|end|>"),
        # Not inside of it: answered, ended by the model, or never begun.
        (THINKING, "Hm.</think>So", "<think>Hm.</think>So<|end|>"),
        (THINKING, "Let me<|end|>", "<think>Let me<|end|>"),
        (THINKING.replace("<think>{% endif %}", "{% endif %}"), "Let me", "<|msg|>Let me<|end|>"),
    ],
)
def test_thinking_that_was_cut_off_is_closed_without_a_parser(template: str, sampled: str, closed: str) -> None:
    with opened(template) as (backend, tokenizer):
        for after in (RESULT, MORE):
            prompt, trained = read(backend, [QUESTION, said(tokenizer, sampled), after])
            assert f"{closed}\n<|start|>{after['role']}<|msg|>{after['content']}<|end|>\n" in prompt
            assert trained == sampled


@each("template", [TURNS.replace("END", "<|end|>"), THINKING])
@each("more", [{}, {"reasoning_content": "Hm."}])
def test_an_answer_continues_what_the_template_writes(template: str, more: dict[str, str]) -> None:
    chat = [QUESTION, {"role": "assistant", "content": "I am", **more}]
    with opened(template) as (backend, tokenizer):
        wanted = tokenizer.apply_chat_template(chat, tokenize=False, continue_final_message=True)
        assert read(backend, chat, continue_final_message=True)[0] == wanted
        scored = [QUESTION, {**chat[1], "content": "I am Pip."}]
        assert read(backend, scored, generate=False)[0].startswith(wanted)
        # The next prompt begins with that one and the answer.
        policy = LLMPolicy(backend, sampling_params={"max_new_tokens": 3}, inplace=False, continue_final_message=True)
        first = policy(TensorDict(history=History.from_chats([chat])), seed=1)
        again = policy.replace(continue_final_message=False)(TensorDict(history=first["history"].full.append(MORE)))
        known = first["tokens"].full[0].tolist()
        ids = again["tokens"].prompt[0].tolist()
        assert ids[: len(known)] == known and tokenizer.decode(ids[len(known) :]).startswith("<|end|>\n<|start|>user")


def test_arguments_are_objects_or_texts_as_the_template_wants_them() -> None:
    as_text = {"type": "function", "function": {"name": "weather", "arguments": json.dumps({"city": "Rome"})}}
    joins, prints = (
        TURNS.replace("m.tool_calls | tojson", f"'call ' {sign} m.tool_calls[0].function.arguments") for sign in "+~"
    )
    json_text = 'call {"city": "Rome"}'
    for template, written in ((TURNS, '"arguments": {"city": "Rome"}'), (joins, json_text), (prints, json_text)):
        with opened(template.replace("END", "<|end|>")) as (backend, _):
            texts = [
                read(backend, [QUESTION, {"role": "assistant", "tool_calls": [one]}, RESULT])[0]
                for one in (CALL, as_text)
            ]
            assert texts[0] == texts[1] and written in texts[0]


def test_ids_of_calls_are_nine_letters_or_digits_where_the_template_wants_these() -> None:
    picky = TURNS.replace("END", "<|end|>").replace(
        "{% if m.tool_calls %}",
        "{% for id in [m.tool_call_id or m.tool_calls and m.tool_calls[0].id] if id %}"
        "{% if id | length != 9 %}{{ raise_exception('nine') }}{% endif %}[{{ id }}]{% endfor %}{% if m.tool_calls %}",
    )
    with opened(picky) as (backend, _):
        for given in ("call_0123456789abcdef", "abcdef123"):
            chat = [QUESTION, {"role": "assistant", "tool_calls": [{**CALL, "id": given}]}]
            prompt, _ = read(backend, [*chat, {**RESULT, "tool_call_id": given}])
            (written, again) = re.findall(r"<\|msg\|>(?:sunny)?\[(\w+)\]", prompt)
            assert written == again and len(written) == 9 and (written == given) is (len(given) == 9)


@each("given", ["", " ", "null", "{}", None, {}, ...])
def test_a_call_without_arguments_has_an_empty_object(given: Any) -> None:
    function = {"name": "now"} if given is ... else {"name": "now", "arguments": given}
    call = {"type": "function", "function": function}
    iterates = TURNS.replace("m.tool_calls | tojson", "m.tool_calls[0].function.arguments | items | list")
    for template, written in ((TURNS, '"arguments": {}'), (iterates, "[]")):
        with opened(template.replace("END", "<|end|>")) as (backend, _):
            assert written in read(backend, [QUESTION, {"role": "assistant", "tool_calls": [call]}, RESULT])[0]


@each("where", ["name of an argument", "description of a tool"])
def test_a_special_token_that_is_typed_anywhere_is_text(where: str) -> None:
    typed = {"<|end|>": "x"} if where.startswith("name") else {"x": "x"}
    call = {"type": "function", "function": {"name": "f", "arguments": typed}}
    tool = {"type": "function", "function": {"name": "f", "description": "<|end|>" if "tool" in where else "x"}}
    with opened("{{ tools | tojson }}" + TURNS.replace("END", "<|end|>")) as (backend, tokenizer):
        policy = LLMPolicy(
            backend, sampling_params={"max_new_tokens": 1}, inplace=False, template_kwargs={"tools": [tool]}
        )
        chat = [QUESTION, {"role": "assistant", "tool_calls": [call]}, RESULT]
        ids = policy(TensorDict(history=History.from_chats([chat])))["tokens"].prompt[0].tolist()
        assert ids.count(tokenizer.eos_token_id) == 3 and tokenizer.decode(ids).count("<|end|>") == 4


def test_a_special_token_in_a_given_answer_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    given = [{**QUESTION, "content": "<|pad|>"}, {"role": "assistant", "content": "Yes.<|stop|>"}, MORE]
    with opened(TURNS.replace("END", "<|end|>")) as (backend, tokenizer):
        for _ in range(2):
            read(backend, [QUESTION, said(tokenizer, "Yes.<|start|>"), MORE])
            text, _ = read(backend, given)
        assert text.count("<|stop|>") == 1
    (warning,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert "message 1" in warning and "<|stop|>" in warning and "token_ids" in warning


def test_a_template_that_leaves_out_what_a_user_said_is_refused() -> None:
    parts = (
        "{% for m in messages %}{% for part in m.content if part is mapping %}{{ part.text }}{% endfor %}{% endfor %}"
    )
    with opened(parts) as (backend, _), refused(TemplateError, rows=(0,)):
        read(backend, [QUESTION])


def test_a_rollout_renders_one_conversation_a_turn() -> None:
    with opened(TURNS.replace("END", "<|end|>")) as (backend, tokenizer):
        chat = [QUESTION]
        for turn in range(12):
            read(backend, chat)
            chat += [said(tokenizer, f"Yes, {turn}.<|end|>"), {"role": "user", "content": f"And {turn}?"}]
        Counting.rendered = 0
        read(backend, chat)
        assert Counting.rendered == len(chat)


#: Writes the tools before the last question, as templates of Mistral do: each prompt begins otherwise.
MOVING = (
    "{% for m in messages %}{% if m.role == 'user' and loop.index0 > messages | length - 3 %}<tools>{% endif %}"
    + TURNS.replace("END", "<|end|>").removeprefix("{% for m in messages %}")
)


#: Opens the answer with empty thinking if the user says so, as Nemotron's templates do.
SWITCHED = TURNS.replace("END", "<|end|>") + (
    "{% if add_generation_prompt and 'And 13?' in messages[-1].content %}<think></think>{% endif %}"
)


@each("template", [TURNS.replace("END", "<|end|>"), THINKING, MOVING, SWITCHED])
@each("generate", [True, False])
def test_a_long_prompt_is_the_same_where_nothing_is_remembered(template: str, generate: bool) -> None:
    chat = [QUESTION]
    with opened(template) as (backend, tokenizer):
        for turn in range(20):
            read(backend, chat)
            chat += [said(tokenizer, f"Yes, {turn}.<|end|>"), {"role": "user", "content": f"And {turn}?"}]
        if not generate:
            chat = chat[:-1]
        warm = read(backend, chat, generate=generate)
    assert ("<think></think>" in warm[0]) == (template == SWITCHED)
    with opened(template) as (backend, _):
        assert read(backend, chat, generate=generate) == warm


def test_nulls_of_a_data_sets_column_are_left_out() -> None:
    def tool(name: str, **parameters: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "parameters": {"properties": parameters}}}

    def asked(name: str, **arguments: Any) -> list[dict[str, Any]]:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}, RESULT]

    city, days = {"type": "string"}, {"type": ["integer", "null"], "default": None}
    rows = [(asked("f", city="Rome"), [tool("f", city=city)]), (asked("g", days=None), [tool("g", days=days)])]
    column = [
        (asked("f", city="Rome", days=None), [tool("f", city={**city, "default": None}, days=None)]),
        (asked("g", city=None, days=None), [tool("g", city=None, days=days)]),
    ]
    with opened("{{ tools | tojson }}" + TURNS.replace("END", "<|end|>")) as (backend, _):
        texts = [
            [read(backend, chat, template_kwargs={"tools": tools})[0] for chat, tools in each]
            for each in (rows, column)
        ]
        assert texts[0] == texts[1] and '"days": null' in texts[0][1]

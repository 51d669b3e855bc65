"""The cost of turning conversations into tokens, with the assistant mask.

    core                     the steps of a policy that scores a history: ids, mask and text, as tensors
    core, without the mask   the same without the mask
    core, sampled turns      the same for sampled assistant turns, which keep their ids
    tokenizer                `apply_chat_template` of all conversations at once, with the assistant's mask
    tokenizer, no mask       the same without it
    render, encode           every conversation rendered, then one `encode_batch_fast`: no mask
    torchrl                  TorchRL's History.apply_chat_template, with the mask, if torchrl is installed

The tokenizer is a small byte-level BPE trained on the dialogues of the examples; the conversations use the same text.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from tensordict import TensorDict

from benchmarks.measure import Figure, Way, compare
from benchmarks.models import dialogues, tokenizer
from corelm import Backend, Capabilities, History, PolicyOptions, hookimpl
from corelm.policy.inputs import InputReader

COUNT = 256
GOAL = 0.85
Chats = list[list[dict[str, Any]]]


class Engine:
    """A plugin of which only the tokenizer is used."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.capabilities = Capabilities(vocab_size=len(tokenizer), max_context=1 << 20)

    @hookimpl
    def generate(self, request: Any) -> None: ...

    @hookimpl
    def score_logprobs(self, request: Any) -> None: ...


def figures(quick: bool) -> Iterator[list[Figure]]:
    lines = itertools.cycle([turn["content"] for chat in dialogues() for turn in chat])
    # (turns, sentences per turn)
    for turns, sentences in ((4, 4),) if quick else ((4, 1), (4, 4), (8, 2), (8, 4)):
        chats = [[_turn(turn, lines, sentences) for turn in range(turns)] for _ in range(COUNT)]
        length = sum(len(tokenizer().apply_chat_template(chat, return_dict=False)) for chat in chats) // COUNT
        yield compare(
            f"{COUNT} chats of {turns} turns, {length} tokens each",
            ways(tokenizer(), chats),
            baseline="tokenizer",
            repeats=5 if quick else 41,
            rows=COUNT,
            goals={"core": GOAL, "core, sampled turns": GOAL},
        )


def _turn(turn: int, lines: Iterator[str], sentences: int) -> dict[str, Any]:
    content = " ".join(itertools.islice(lines, sentences))
    return {"role": "assistant" if turn % 2 else "user", "content": content}


def ways(tokenizer: Any, chats: Chats) -> dict[str, Way]:
    reader = InputReader(PolicyOptions(input_mode="history"))
    backend = Backend.from_plugin(Engine(tokenizer), "none")
    plain, sampled = (
        TensorDict({"history": History.from_chats(c)}, [COUNT]) for c in (chats, _sampled(tokenizer, chats))
    )

    def with_mask() -> Any:
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        return tokenizer.apply_chat_template(chats, tokenize=True, **options)

    def render_then_encode() -> Any:
        texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
        return tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)

    found = reader.sequences(plain, backend, True)
    wanted = with_mask()
    assert found.ids.tolist() == wanted["input_ids"] and found.assistant is not None
    assert [list(map(int, row)) for row in found.assistant.tolist()] == wanted["assistant_masks"]
    named: dict[str, Way] = {
        "core": lambda: reader.sequences(plain, backend, True),
        "core, without the mask": lambda: reader.sequences(plain, backend, False),
        "core, sampled turns": lambda: reader.sequences(sampled, backend, True),
        "tokenizer": with_mask,
        "tokenizer, no mask": lambda: tokenizer.apply_chat_template(chats, tokenize=True, return_dict=True),
        "render, encode": render_then_encode,
    }
    if find_spec("torchrl") is not None:
        named["torchrl"] = _torchrl(tokenizer, chats)
    return named


def _sampled(tokenizer: Any, chats: Chats) -> Chats:
    """Return the same conversations, with ids in the assistant turns as if an engine had sampled them."""
    end = tokenizer.eos_token_id

    def as_sampled(turn: dict[str, Any]) -> dict[str, Any]:
        if turn["role"] != "assistant":
            return turn
        return {**turn, "token_ids": [*tokenizer(turn["content"], add_special_tokens=False)["input_ids"], end]}

    return [[as_sampled(turn) for turn in chat] for chat in chats]


def _torchrl(tokenizer: Any, chats: Chats) -> Way:
    from torchrl.data.llm import History as RLHistory

    history = RLHistory.from_chats(chats)
    return lambda: history.apply_chat_template(
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
        add_generation_prompt=False,
        tokenize=True,
        return_dict=True,
        return_tensors=None,
        return_assistant_tokens_mask=True,
    )

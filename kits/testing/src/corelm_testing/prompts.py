"""The prompts of the tests: a few questions as conversations, texts or tokens, in a batch of any shape."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict

from corelm import History
from corelm.errors import TemplateError
from corelm.tensors.lazy_rows import nested
from corelm_testing.base import not_applicable

if TYPE_CHECKING:
    from corelm import Backend

QUESTIONS = ("Where is the cat?", "Is the tea hot?", "Who?", "When is it dark?")


def questions(shape: tuple[int, ...]) -> list[str]:
    count = math.prod(shape)
    return [QUESTIONS[row % len(QUESTIONS)] for row in range(count)]


def conversations(backend: Backend, shape: tuple[int, ...]) -> History:
    """Return a history with one user question per conversation; not applicable without a chat template.

    Raises:
        TemplateError: there is a template, and it fails.
    """
    chats = [[{"role": "user", "content": question}] for question in questions(shape)]
    history = History.of(chats, shape)
    try:
        History.from_chats([{"role": "user", "content": "Who?"}]).apply_chat_template(backend.tokenizer)
    except TemplateError:
        # A tokenizer without `chat_template` renders in a way of its own.
        if getattr(backend.tokenizer, "chat_template", "its own") and hasattr(backend.tokenizer, "apply_chat_template"):
            raise
        not_applicable("the tokenizer has no chat template")
    return history


def as_input(backend: Backend, mode: str, shape: tuple[int, ...], rows: list[list[int]]) -> TensorDict:
    """Return the questions under the key that this input mode reads; in tokens mode, `rows` of 5 ids each."""
    if mode == "history":
        return TensorDict(history=conversations(backend, shape), batch_size=shape)
    td = TensorDict({}, batch_size=shape)
    if mode == "text":
        td["text"] = nested(iter(questions(shape)), shape)
    else:
        td["tokens"] = torch.tensor(rows, dtype=torch.int64).reshape(*shape, 5)
    return td

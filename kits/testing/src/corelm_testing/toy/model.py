"""A bigram model: the next token depends only on the last one, so one table holds every log-probability."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from corelm_testing.toy.tokenizer import ByteTokenizer

TALK = (
    ("Where is the cat?", "The cat is on the mat."),
    ("What does the sea do?", "The sea comes and goes."),
    ("Is the tea hot?", "The tea is hot, so wait a little."),
    ("Who sings in the tree?", "A small bird sings there."),
    ("When is it dark?", "It is dark at ten."),
)


class Bigram(nn.Module):
    """`table`: float32[V, V], the logits of the next token given the last one."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)

    @classmethod
    def of_talk(cls) -> Bigram:
        """Return a model counted on `TALK`. Its log-probabilities are ``log((count + 0.0001) / (total + 0.026))``."""
        tokenizer = ByteTokenizer()
        chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in TALK]
        texts = [tokenizer.apply_chat_template(chat) for chat in chats]
        size = len(tokenizer)
        counts = torch.zeros(size, size)
        for row in tokenizer(texts)["input_ids"]:
            ids = torch.tensor(row)
            counts.index_put_((ids[:-1], ids[1:]), torch.ones(len(ids) - 1), accumulate=True)
        return cls((counts + 0.0001).log())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Bigram:
        """Load a file that ``torch.save(model.state_dict(), path)`` wrote."""
        return cls(torch.load(path, weights_only=True)["table"])

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits ``[..., V]`` of the token that follows each of the ids ``[...]``."""
        return self.table[ids]

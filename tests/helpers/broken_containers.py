"""Containers whose contents are not what they should be. What is printed of them must not fail."""

from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, lazy_stack

import corelm
from corelm.containers import ChatHistory, History, LogProbs, Masks, Text, Tokens
from helpers.four_rows import batch

BROKEN: dict[str, Any] = {
    "meta": lambda: batch((4,), True).to("meta"),
    "meta rows": lambda: batch().to("meta"),
    "a stack of both layouts": lambda: lazy_stack([batch()[0], batch((4,), True)[1]]),
    "dense rows of different widths": lambda: lazy_stack([batch((4,), True)[0], corelm.repad(batch()[2:])[0]]),
    "dense without masks": lambda: batch((4,), True).exclude("masks"),
    "fields left out": lambda: batch().exclude(("tokens", "full"), ("log_probs", "full"), ("text", "response")),
    "no fields": lambda: TensorDict(tokens=Tokens(batch_size=[2]), text=Text(batch_size=[2]), batch_size=[2]),
    "no rows": lambda: batch().exclude("finish_reason")[:0],
    "NaN and infinity": lambda: TensorDict(
        log_probs=LogProbs(full=torch.tensor([[float("nan"), float("-inf")]]), batch_size=[1]), batch_size=[1]
    ),
    "floats where ids are meant": lambda: TensorDict(
        tokens=Tokens(full=torch.rand(2, 3), batch_size=[2]), batch_size=[2]
    ),
    "strings where tensors are meant": lambda: TensorDict(tokens=Tokens(full="x", batch_size=[2]), batch_size=[2]),
    "a number where a text is meant": lambda: TensorDict(
        text=Text(prompt=3, response=None, batch_size=[]), batch_size=[]
    ),
    "a nested tensor": lambda: TensorDict(
        tokens=Tokens(
            full=torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), batch_size=[2]
        ),
        batch_size=[2],
    ),
    "a conversation that is not one": lambda: TensorDict(
        history=History(conversation=NonTensorData("x", batch_size=[2]), batch_size=[2]), batch_size=[2]
    ),
    "masks of another width": lambda: TensorDict(
        tokens=Tokens(full=torch.zeros(2, 3, dtype=torch.int64), batch_size=[2]),
        masks=Masks(all_attention_mask=torch.ones(2, 5, dtype=torch.bool), batch_size=[2]),
        batch_size=[2],
    ),
    "a chat history of texts": lambda: TensorDict(history=ChatHistory(full="x", batch_size=[]), batch_size=[]),
    "containers under next": lambda: TensorDict({"next": batch()}, batch_size=[4]),
}

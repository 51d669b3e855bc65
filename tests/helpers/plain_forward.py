"""Checks of a backend against the plain forward of its model, and models that make a mistake visible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from corelm import Backend
from helpers import oracle
from helpers.tiny_models import random_rows
from transformers_backend.decoding import Decoder

Open = Callable[..., Backend]
ROWS = random_rows(30, 7, 19, 2, 30)
PROMPTS = random_rows(20, 3, 9, 20)
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def wide(model: PreTrainedModel) -> Any:
    """Give the model weights that make a mistake visible."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and "norm" not in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    return model.eval()


def check(backend: Backend, model: nn.Module) -> None:
    """Compare scores and generated log-probs with the oracle."""
    for row, found in zip(ROWS, backend.score_logprobs(ROWS).logprobs.split(), strict=True):
        torch.testing.assert_close(found, oracle.logprobs(model, row), rtol=0, atol=2e-5)
    made = backend.generate(PROMPTS, {"max_new_tokens": 12}, seeds=list(range(len(PROMPTS))))
    assert made.logprobs is not None
    for prompt, answer, found in zip(PROMPTS, made.ids.tolist(), made.logprobs.split(), strict=True):
        expected = oracle.logprobs(model, [*prompt, *answer])[len(prompt) :]
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def decoder(backend: Backend) -> Decoder:
    found: Decoder = backend.engine.plugin.decoder
    return found


def spoil_cache_after(model: Any, length: int) -> None:
    """Change what the model's body returns if its cache already holds more than `length` tokens."""
    plain = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        past = kwargs.get("past_key_values")
        if past is not None and past.get_seq_length() > length:
            out.last_hidden_state = -out.last_hidden_state
        return out

    model.model.forward = forward

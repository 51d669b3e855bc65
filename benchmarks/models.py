"""Random models of a given shape, and a small tokenizer trained on the dialogues of the examples."""

from __future__ import annotations

import functools
from typing import Any

import torch

from corelm_testing.tiny import Chat, build_tokenizer, read_chats

#: Vocabulary size, width and number of layers.
Shape = tuple[int, int, int]

#: Most of the time is spent in the head, or in the body.
HEAD_HEAVY: Shape = (151_936, 256, 2)
BODY_HEAVY: Shape = (32_000, 512, 6)


def random_model(shape: Shape, **config: Any) -> Any:
    """Return a random Qwen2 with heads of 64; `config` holds further fields of its configuration."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    vocab, hidden, layers = shape
    torch.manual_seed(0)
    given = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    return Qwen2ForCausalLM(Qwen2Config(**{**given, **config})).eval()


def named(shape: Shape) -> str:
    vocab, hidden, layers = shape
    return f"V={vocab:,}, {layers} layers of {hidden}"


@functools.cache
def tokenizer() -> Any:
    """Return a byte-level BPE of at most 1,024 entries."""
    return build_tokenizer("\n".join(turn["content"] for chat in dialogues() for turn in chat))


def dialogues() -> list[Chat]:
    """Return short conversations, as messages with role and content."""
    return read_chats()

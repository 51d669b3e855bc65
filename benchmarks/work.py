"""The operations and bytes that scoring and decoding cannot do without, counted from the modules of a model.

Only matrix products count as operations: those of linear layers, and those of attention over the pairs of a token and
a token that it sees. A way that does more, such as reading the padding of rows, does not get more work counted.

Bytes are those of the weights and of the cache of keys and values. States and logits can stay in the caches of the
processor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Work:
    """What has to be done.

    Attributes:
        flops: floating-point operations: two for each multiplication and addition.
        bytes: bytes to read from memory.
        dtype: the dtype of the weights, such as ``float32``.
    """

    flops: int
    bytes: int
    dtype: str


def scoring_work(model: Any, lengths: Iterable[int], scored: int) -> Work:
    """Count the work of log-probs of `scored` tokens in rows of `lengths` tokens that share no start.

    `model` is a dense decoder of transformers. The last token of a row is only a target: no layer has to read it.
    """
    read = [length - 1 for length in lengths]
    return Work(_body_flops(model, read) + 2 * _head_weights(model) * scored, _weight_bytes(model), _dtype(model))


def decoding_work(model: Any, rows: int, prompt: int, new: int) -> Work:
    """Count the work of `new` tokens for each of `rows` prompts of `prompt` tokens, each token in a step of its own.

    The step of the first new token reads the prompts, and each later step reads the token before. Every step reads all
    weights, and what the cache holds of the earlier tokens. The last token is not read.
    """
    flops = _body_flops(model, [prompt + new - 1] * rows) + 2 * _head_weights(model) * rows * new
    cached = rows * sum(range(prompt, prompt + new - 1))
    return Work(flops, new * _weight_bytes(model) + cached * _cache_bytes(model), _dtype(model))


def _body_flops(model: Any, lengths: Iterable[int]) -> int:
    """Return the operations of all layers but the head for rows of `lengths` tokens."""
    lengths, config = list(lengths), model.config
    head = model.get_output_embeddings()
    weights = sum(
        module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear) and module is not head
    )
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    width = config.num_attention_heads * _head_width(config)
    # Queries times keys, and weights of attention times values.
    return 2 * weights * sum(lengths) + config.num_hidden_layers * 4 * width * pairs


def _head_weights(model: Any) -> int:
    return model.get_output_embeddings().weight.numel()


def _weight_bytes(model: Any) -> int:
    """Return the bytes of the weights that each step reads.

    The embedding table is among them only if the head is tied to it: a step looks up a few of its rows.
    """
    table = model.get_input_embeddings().weight
    tied = table is model.get_output_embeddings().weight
    return sum(each.nbytes for each in model.parameters() if tied or each is not table)


def _cache_bytes(model: Any) -> int:
    """Return the bytes of the keys and values of a token, in all layers."""
    config = model.config
    width = config.num_key_value_heads * _head_width(config)
    return 2 * config.num_hidden_layers * width * model.dtype.itemsize


def _head_width(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _dtype(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")

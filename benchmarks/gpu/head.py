"""The head of the transformers plugin alone: hidden states in, log-probs of given tokens out.

products     the matrix products of the head, and nothing else: the baseline
tiled        `TiledHead`, which never holds all logits
plain        logits, float32, `log_softmax`, `gather`, in slices of 512 states
CCE, Liger   cut_cross_entropy and liger_kernel, where they are installed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.device import Size, clock, device, memory, value
from benchmarks.measure import Figure, Way, compare
from transformers_backend.fast.tiles import TiledHead

#: Takes hidden states, weight and tokens, and returns log-probs.
Head = Callable[[Tensor, Tensor, Tensor], Tensor]

_SLICE = 512


def figures(size: Size) -> Iterator[list[Figure]]:
    generator = torch.Generator(device()).manual_seed(0)
    options: dict[str, Any] = {"device": device(), "generator": generator}
    vocab, width = size.config["vocab_size"], size.config["hidden_size"]
    hidden = torch.randn(size.head_rows, width, **options).to(size.dtype)
    weight = (0.08 * torch.randn(vocab, width, **options)).to(size.dtype)
    tokens = torch.randint(vocab, (size.head_rows,), **options)
    heads: dict[str, Head] = {"tiled": tiled, "plain": plain, **others()}
    named = f"head, {size.head_rows:,} states of {width}, V={vocab:,}"

    products = {"products": lambda: [functional.linear(part, weight) for part in hidden.split(2048)]}
    forward = products | {name: _without_gradients(head, hidden, weight, tokens) for name, head in heads.items()}
    yield compare(
        f"{named}, forward", forward, baseline="products", repeats=size.repeats, clock=clock, goals={"tiled": 1.6}
    )
    both = {name: _with_gradients(head, hidden, weight, tokens) for name, head in heads.items()}
    yield compare(
        f"{named}, forward and backward",
        both,
        baseline="plain",
        repeats=size.repeats,
        clock=clock,
        goals={"tiled": 0.7},
    )
    yield memory(f"{named}, memory forward", forward, {"tiled": 360})
    # The gradients of weight and states are 0.5 GiB of it.
    yield memory(f"{named}, memory forward and backward", both, {"tiled": 2560})
    yield precision(f"{named}, largest error to float64", hidden[:_SLICE], weight, tokens[:_SLICE])


def tiled(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    return TiledHead(weight, None).logprobs(hidden, tokens)


def plain(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    parts = zip(hidden.split(_SLICE), tokens.split(_SLICE), strict=True)
    return torch.cat([_chosen(functional.linear(states, weight).float(), ids) for states, ids in parts])


def others() -> dict[str, Head]:
    """Return the heads of other libraries that are installed."""
    found: dict[str, Head] = {}
    if not torch.cuda.is_available():
        # Their kernels need one.
        return found
    try:
        from cut_cross_entropy import linear_cross_entropy
    except ImportError:
        pass
    else:
        found["CCE"] = lambda hidden, weight, tokens: -linear_cross_entropy(hidden, weight, tokens, reduction="none")
    try:
        from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        pass
    else:
        loss = LigerFusedLinearCrossEntropyLoss(reduction="none")
        found["Liger"] = lambda hidden, weight, tokens: -loss(weight, hidden, tokens)
    return found


def precision(work: str, hidden: Tensor, weight: Tensor, tokens: Tensor) -> list[Figure]:
    """Compare with logits in float64. The tiled head may be a tenth less exact than the plain one."""
    with torch.no_grad():
        exact = torch.cat(
            [
                _chosen(functional.linear(states.double(), weight.double()), ids)
                for states, ids in zip(hidden.split(64), tokens.split(64), strict=True)
            ]
        )
        errors = {
            name: float((head(hidden, weight, tokens) - exact).abs().max())
            for name, head in (("plain", plain), ("tiled", tiled))
        }
    return [
        value(work, "plain", errors["plain"]),
        value(work, "tiled", errors["tiled"], 1.1 * errors["plain"]),
    ]


def _chosen(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


def _without_gradients(head: Head, hidden: Tensor, weight: Tensor, tokens: Tensor) -> Way:
    def run() -> Any:
        with torch.no_grad():
            return head(hidden, weight, tokens)

    return run


def _with_gradients(head: Head, hidden: Tensor, weight: Tensor, tokens: Tensor) -> Way:
    states, matrix = (each.clone().requires_grad_() for each in (hidden, weight))

    def run() -> None:
        states.grad = matrix.grad = None
        head(states, matrix, tokens).sum().backward()

    return run

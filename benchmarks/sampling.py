"""The cost of one step of sampling: from the body's last hidden states to a token and its raw log-prob.

    head product     the matrix product of the head alone, as the decoder computes it
    PyTorch product  the same product as PyTorch computes it by default
    greedy           the product, the most probable token and its log-prob
    temperature 1    the product, a token drawn from the model's own distribution and its log-prob
    temperature 0.7  the product, a token drawn from a sharper distribution and the model's own log-prob of it

The head has V=151,936. Each row has a random state of its own. The decoder works on a few rows at a time, and their
logits are made once, by the product.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from benchmarks.measure import Figure, Way, compare
from corelm.backend.arguments import answer_seeds
from corelm.spec import Ragged, SamplingParams
from corelm_engine_kit.sampling import Sampler
from transformers_backend.fast.onednn import quick_products

VOCAB = 151_936
WIDTHS = (256, 1024)
COUNTS = (1, 8, 32)
#: The goal holds up to so many rows. With more, the product costs less per row.
MOST_WITH_GOAL = 8
GOAL = 1.1
TEMPERATURES = {"greedy": 0.0, "temperature 1": 1.0, "temperature 0.7": 0.7}


def figures(quick: bool) -> Iterator[list[Figure]]:
    for hidden in WIDTHS[:1] if quick else WIDTHS:
        for rows in COUNTS[:1] if quick else COUNTS:
            with torch.no_grad():
                yield step(hidden, rows, 3 if quick else 25, None if quick or rows > MOST_WITH_GOAL else GOAL)


def step(hidden: int, rows: int, repeats: int, goal: float | None) -> list[Figure]:
    torch.manual_seed(0)
    head = nn.Linear(hidden, VOCAB, bias=False)
    states = torch.randn(rows, 1, hidden)

    def product() -> Tensor:
        with quick_products(head):
            logits: Tensor = head(states)
        return logits

    def drawing(temperature: float) -> Way:
        sampler = Sampler(
            SamplingParams(temperature=temperature),
            Ragged.from_list([[0]] * rows),
            answer_seeds(0, range(rows)),
            frozenset(),
            VOCAB,
            states.device,
            raw=True,
        )
        return lambda: sampler(product()[:, -1])

    ways: dict[str, Way] = {"head product": product, "PyTorch product": lambda: head(states)}
    ways |= {name: drawing(temperature) for name, temperature in TEMPERATURES.items()}
    work = f"a token for {'one row' if rows == 1 else f'{rows} rows'}, V={VOCAB:,}, states of {hidden}"
    goals = {} if goal is None else dict.fromkeys(TEMPERATURES, goal)
    return compare(work, ways, baseline="head product", repeats=repeats, goals=goals)

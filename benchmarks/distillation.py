"""The cost of the exact divergence of two models in this process, with its gradients to the student.

    two tables      two heads' logits, two `log_softmax` over the vocabulary, and the definition of the divergence
    tile by tile    ``corelm.kl.exact_divergence``

Hidden states and heads are random: a teacher of 512 and a student of 256, V=151,936. Bodies are left out, since both
ways run the same ones. Time is compared at 256 positions. Memory is measured at 8 rows of 512; there two tables would
take over 10 GB. The gradient of a trained head is as large as the head. It is no extra memory, and is subtracted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.measure import Figure, Way, compare, peaks
from corelm.kl import DIVERGENCES, Divergence, OutputHead, exact_divergence

VOCAB = 151_936
#: The widths of the hidden states.
TEACHER, STUDENT = 512, 256
ROWS, LENGTH = 8, 512
#: MiB above the gradients themselves.
MOST = 100.0


def figures(quick: bool) -> Iterator[list[Figure]]:
    positions = 128 if quick else 256
    for kind in DIVERGENCES[:1] if quick else DIVERGENCES:
        for train in (False, True):
            ways = {way: prepare(way, kind, positions, train, True) for way in ("two tables", "tile by tile")}
            what = "and its gradients" if train else "alone"
            work = f"exact {kind} {what}, {positions} positions, V={VOCAB:,}, widths {TEACHER} and {STUDENT}"
            yield compare(work, ways, baseline="two tables", repeats=2 if quick else 5)
    for kind in DIVERGENCES[:1] if quick else DIVERGENCES:
        # One takes a minute, and the two were at most 21 MiB apart for each kind.
        for head in (True,) if kind != DIVERGENCES[0] else (False, True):
            yield [memory(kind, head)]


def memory(kind: Divergence, head: bool) -> Figure:
    """Measure the peak above the gradients, at 8 rows of 512."""
    gradients = 4 * (ROWS * LENGTH * STUDENT + (VOCAB * STUDENT if head else 0)) / 2**20
    work = f"memory of exact {kind} and gradients, {ROWS} rows of {LENGTH}, V={VOCAB:,}"
    (found,) = peaks(work, prepare, ["tile by tile"], (kind, ROWS * LENGTH, True, head), {})
    assert found.mib is not None
    way = "tile by tile, head trained" if head else "tile by tile, head frozen"
    return replace(found, way=way, mib=found.mib - gradients, goal=MOST)


def prepare(way: str, kind: Divergence, positions: int, train: bool, head: bool) -> Way:
    """Return a function that makes the divergence, and with `train` its gradients: with `head`, also those of the
    student's head.
    """
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(positions, width, generator=generator) for width in (TEACHER, STUDENT)]
    weights = [torch.randn(VOCAB, width, generator=generator).mul_(2 / width**0.5) for width in (TEACHER, STUDENT)]
    states[1].requires_grad_(train)
    weights[1].requires_grad_(train and head)

    def run() -> None:
        states[1].grad = weights[1].grad = None
        if way == "two tables":
            found = from_tables(states, weights, kind)
        else:
            heads = [OutputHead(weight) for weight in weights]
            found = exact_divergence(states[0], heads[0], states[1], heads[1], kind)
        if train:
            found.sum().backward()

    return run


def from_tables(states: list[Tensor], weights: list[Tensor], kind: Divergence) -> Tensor:
    with torch.no_grad():
        log_p = (states[0] @ weights[0].T).log_softmax(-1)
    log_q = (states[1] @ weights[1].T).log_softmax(-1)
    if kind == "forward_kl":
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    if kind == "reverse_kl":
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    log_m = torch.logaddexp(log_p, log_q) - math.log(2.0)
    return 0.5 * ((log_p.exp() * (log_p - log_m)).sum(-1) + (log_q.exp() * (log_q - log_m)).sum(-1))

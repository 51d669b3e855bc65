"""Scoring one row: a short one, the commonest call of an evaluation, and a long one with gradients.

log_softmax   the model's plain forward of the row, `log_softmax` over the vocabulary, `gather`
backend       ``backend.score_logprobs`` of the transformers backend
body          forward and backward of the model's body alone on the tokens that it has to read (all but the last), and a
              gradient as large as the head's weights
head          log-probs from hidden states by the tiled head, and their gradients
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from benchmarks.measure import LONGER, Figure, Way, compare, peaks
from benchmarks.models import BODY_HEAVY, HEAD_HEAVY, Shape, named, random_model
from benchmarks.scoring import log_softmax, opened
from corelm import Ragged
from transformers_backend.fast.tiles import TiledHead

SHORT = (16, 32, 64)
#: The model of the long row, which has room for it.
LONG_SHAPE: Shape = (32_000, 256, 2)
#: Vocabulary and width of the head that reads more and more tokens.
GROWING = (8_192, 256)


def figures(quick: bool) -> Iterator[list[Figure]]:
    for shape in (HEAD_HEAVY, BODY_HEAVY):
        for length in SHORT[:1] if quick else SHORT:
            yield of_short_row(shape, length, 3 if quick else 21)
    yield from memory_of_long_row(4_096 if quick else 32_768)
    if not quick:
        yield growth_of_head(*GROWING, repeats=3)


def of_short_row(shape: Shape, length: int, repeats: int) -> list[Figure]:
    model = random_model(shape)
    backend, rows = opened(model), row(shape, length)
    ways: dict[str, Way] = {
        "log_softmax": lambda: log_softmax(model, rows),
        "backend": lambda: backend.score_logprobs(rows),
    }
    # The first call of this length compares it with the model's own forward.
    ways["backend"]()
    work = f"scoring one row of {length} tokens, {named(shape)}"
    return compare(work, ways, baseline="log_softmax", repeats=repeats, goals={"backend": 1.0}, longest=LONGER)


def memory_of_long_row(length: int) -> Iterator[list[Figure]]:
    """Measure what the head takes beyond the body's activations and the gradients of all weights."""
    work = f"memory of log-probs and their gradients, one row of {length:,} tokens, {named(LONG_SHAPE)}"
    plain = peaks(work, prepare_long_row, ["body"], (length,), {})
    yield plain + peaks(work, prepare_long_row, ["backend"], (length,), {"backend": 100 + (plain[0].mib or 0)})


def prepare_long_row(way: str, length: int) -> Way:
    model = random_model(LONG_SHAPE, max_position_embeddings=65_536)
    backend, rows = opened(model), row(LONG_SHAPE, length)

    def body() -> None:
        # The last token is only a target.
        states = model.get_decoder()(input_ids=rows.values[None, :-1], use_cache=False).last_hidden_state
        (states.sum() + model.get_output_embeddings().weight.sum()).backward()

    def ours() -> None:
        backend.score_logprobs(rows, grad=True).logprobs.values.sum().backward()

    # The first call of this length compares it with the model's own forward.
    backend.score_logprobs(rows)
    return body if way == "body" else ours


def growth_of_head(vocab: int, width: int, repeats: int) -> list[Figure]:
    """Double the number of tokens that the head reads, three times."""
    generator = torch.Generator().manual_seed(0)
    head = TiledHead(torch.randn(vocab, width, generator=generator).requires_grad_(), None)

    def run(tokens: int) -> None:
        states = torch.randn(tokens, width, generator=generator).requires_grad_()
        ids = torch.randint(vocab, (tokens,), generator=generator)
        head.logprobs(states, ids).sum().backward()
        head.weight.grad = None

    counts = {f"{count:,} tokens": count for count in (4_096, 8_192, 16_384, 32_768)}
    ways: dict[str, Way] = {name: functools.partial(run, count) for name, count in counts.items()}
    first = next(iter(counts))
    goals = {name: 1.05 * count / counts[first] for name, count in counts.items() if name != first}
    work = f"growth of the head with gradients, V={vocab:,}, width {width}"
    return compare(work, ways, baseline=first, repeats=repeats, goals=goals)


def row(shape: Shape, length: int) -> Ragged:
    """Return one row of random ids."""
    ids = torch.randint(shape[0], (length,), generator=torch.Generator().manual_seed(0))
    return Ragged(ids, torch.tensor([length]))

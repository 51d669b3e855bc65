"""The sampler's distribution, tested by chi-square against softmax and number by number against float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from corelm.backend.arguments import answer_seeds
from corelm.spec.sampling import SamplingParams
from corelm.tensors.ragged import Ragged
from corelm_engine_kit import columns
from corelm_engine_kit.columns import argmax, numbers_for
from corelm_engine_kit.masses import log_softmax_at
from corelm_engine_kit.sampling import _GOLDEN, ExponentialStreams, Sampler, _exponentials, truncated

CPU = torch.device("cpu")
V = 700
LOGITS = torch.randn(V, generator=torch.Generator().manual_seed(0)) * 2


def expected(
    logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Return float64[V]: the probabilities, one token at a time, directly from the definitions."""
    mass = (logits.double() / temperature).softmax(-1)
    order = sorted(range(len(mass)), key=lambda token: -float(mass[token]))
    kept = order[:top_k] if top_k else order
    if top_p < 1:
        total, running, nucleus = sum(float(mass[t]) for t in kept), 0.0, []
        for token in kept:
            nucleus.append(token)
            running += float(mass[token]) / total
            if running >= top_p:
                break
        kept = nucleus
    kept = [token for token in kept if mass[token] >= min_p * mass[kept[0]]]
    out = torch.zeros_like(mass)
    out[kept] = mass[kept]
    return out / out.sum()


def draw(
    logits: Tensor, rows: int, seed: int = 0, raw: bool = False, steps: int = 1, **sampling: object
) -> tuple[Tensor, Tensor]:
    sampler = Sampler(
        SamplingParams(**sampling),
        Ragged.from_list([[0]] * rows),
        answer_seeds(seed, range(rows)),
        frozenset(),
        len(logits),
        CPU,
        raw,
    )
    drawn = [sampler(logits.expand(rows, -1)) for _ in range(steps)]
    return torch.cat([each.ids for each in drawn]), torch.cat([each.logprobs for each in drawn])


def p_value(observed: Tensor, wanted: Tensor) -> float:
    """Return the p-value of a chi-square test of counts against expected counts. Small cells are pooled."""
    big = wanted >= 8
    cells = [*observed[big].tolist(), int(observed[~big].sum())], [*wanted[big].tolist(), float(wanted[~big].sum())]
    if cells[1][-1] < 8:
        # The pool itself is too small, so it joins the last other cell.
        cells = tuple([*cell[:-2], cell[-2] + cell[-1]] for cell in cells)
    observed, wanted = (torch.tensor(each, dtype=torch.float64) for each in cells)
    statistic = ((observed - wanted).square() / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor((len(wanted) - 1) / 2).double(), statistic / 2))


def test_the_p_value_tells_a_wrong_distribution() -> None:
    wanted = torch.full((10,), 100.0)
    # 19 is about what chi-square with 9 degrees of freedom exceeds with 2.5 %.
    observed = wanted + torch.tensor([19.023 / 2 * 100]).sqrt() * torch.tensor([1.0, -1.0] + [0.0] * 8)
    assert p_value(observed, wanted) == pytest.approx(0.025, abs=1e-4)


def test_samples_follow_the_distribution() -> None:
    truncations = [{}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.9, "min_p": 0.02}]
    for temperature, truncation in itertools.product([0.7, 1.5], truncations):
        probabilities = expected(LOGITS, temperature, **truncation)
        ids, logprobs = draw(LOGITS, 500, steps=16, temperature=temperature, **truncation)
        counts = torch.bincount(ids, minlength=V)
        assert not counts[probabilities == 0].any(), (temperature, truncation)
        assert p_value(counts, probabilities * 8000) > 1e-4, (temperature, truncation)
        torch.testing.assert_close(logprobs, probabilities[ids].log().float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.7, pytest.param(1.5, marks=pytest.mark.nightly)])
def test_samples_reach_the_tail_of_a_large_vocabulary(temperature: float) -> None:
    """Logits are -log(rank) in a random order, so that the last half of the ranks has a few % of the mass."""
    size, rows = 151_936, 2048
    order = torch.randperm(size, generator=torch.Generator().manual_seed(3))
    logits = torch.empty(size)
    logits[order] = -torch.arange(1, size + 1, dtype=torch.float64).log().float()
    rank = torch.empty(size, dtype=torch.int64)
    rank[order] = torch.arange(size)
    ids, logprobs = (
        torch.cat(column)
        for column in zip(
            *(draw(logits, 16, seed=seed, temperature=temperature) for seed in range(rows // 16)), strict=True
        )
    )
    exact = (logits.double() / temperature).softmax(-1)
    torch.testing.assert_close(logprobs, exact[ids].log().float(), rtol=0, atol=1e-5)
    # One cell for every power of two of the rank.
    cells = torch.frexp(torch.arange(1.0, size + 1))[1] - 1
    shares = torch.zeros(18, dtype=torch.float64).index_add_(0, cells, exact[order])
    assert p_value(torch.bincount(cells[rank[ids]], minlength=18), shares * rows) > 1e-4


@pytest.mark.parametrize("size", [151_936, 2049, 700, 257, 256, 255, 3, 1])
def test_every_row_gets_the_column_that_is_first_in_float64(size: int) -> None:
    for shape in ("flat", "peaked", "long tail", "faint tail"):
        _check_draw(shape, size)


def _check_draw(shape: str, size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(size, generator=generator)
    if shape == "flat":
        logits = torch.zeros(size)
    if shape == "long tail":
        # Half of the mass on the first token, the other half spread over all the rest.
        logits = torch.zeros(size)
        logits[0] = math.log(size)
    if shape == "faint tail":
        # Each adds less than half a step of float32 to 1, but together they are 0.5 %: softmax's own sum misses many.
        logits = torch.full((size,), -17.3)
        logits[0] = 0.0
    if shape == "peaked":
        logits = logits * 8
    rows = 64
    numbers = torch.empty(rows, numbers_for(size)).exponential_(generator=generator)
    ids, logprobs = columns.draw(logits.expand(rows, -1), numbers)
    exact = logits.double().softmax(-1)
    tiles = exact.split(256)
    for number, found in zip(numbers.double(), ids.tolist(), strict=True):
        first = (number[256:] / torch.stack([tile.sum() for tile in tiles])).sort()
        inside = (number[: len(tiles[first.indices[0]])] / tiles[first.indices[0]]).sort()
        # Where the first two are equal but for rounding, either may be.
        clear = all(len(each.values) == 1 or each.values[1] > each.values[0] * (1 + 1e-5) for each in (first, inside))
        assert not clear or found == int(first.indices[0]) * 256 + int(inside.indices[0])
    torch.testing.assert_close(logprobs, exact[ids].log().float(), rtol=0, atol=1e-5)


def test_each_token_of_a_tail_that_float32_cannot_add_to_one_has_its_own_numbers() -> None:
    size, places = 1000, torch.tensor([1, 2, 500, 999])
    # e^-25 is less than a step of float32 at 1.
    scores = torch.full((size,), -25.0)
    scores[0] = 0.0
    numbers = torch.ones(len(places), numbers_for(size))
    for row, place in enumerate(places.tolist()):
        numbers[row, [place % 256, 256 + place // 256]] = 1e-20
    ids, logprobs = columns.draw(scores.expand(len(places), -1), numbers)
    assert ids.tolist() == places.tolist()
    torch.testing.assert_close(logprobs, scores.double().log_softmax(-1)[places].float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.5}, {"top_k": 1000}])
def test_rounding_changes_hardly_any_answer(sampling: dict[str, float]) -> None:
    """Other rows in a batch round logits otherwise. A cumulative sum over the vocabulary changes 1 token in 300."""
    size, rows, generator = 20_000, 2000, torch.Generator().manual_seed(6)
    logits = (torch.randn(size, generator=generator) * 3).expand(rows // 10, -1)
    changed = 0
    for part in range(10):
        seeds = answer_seeds(part, range(len(logits)))
        found = []
        for error in (0.0, 1e-5):
            prompts = Ragged.from_list([[0]] * len(logits))
            sampler = Sampler(SamplingParams(**sampling), prompts, seeds, frozenset(), size, CPU, raw=False)
            found.append(sampler(logits + torch.randn(size, generator=generator) * error).ids)
        changed += int((found[0] != found[1]).sum())
    assert changed <= 1


def test_argmax_returns_the_first_of_equal_columns() -> None:
    for size in (1, 255, 2048, 2049, 5000):
        _check_argmax(size)


def _check_argmax(size: int) -> None:
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(6, size, generator=generator)
    # Many ties; the best at the very end; all equal; only the last finite; only one in the middle finite.
    rows[1] = torch.randint(3, (size,), generator=generator).float()
    rows[2, -1] = rows[2].max() + 1
    rows[3] = -7.0
    rows[4, :-1], rows[5, :] = -math.inf, -math.inf
    rows[5, size // 2] = -9.0
    assert argmax(rows).tolist() == [row.index(max(row)) for row in rows.tolist()]


def test_the_logprob_of_any_id_is_exact() -> None:
    """Also if softmax underflows, and if its own sum misses a faint tail (see above)."""
    for size in (3, 151_936):
        _check_logprob(size)


def _check_logprob(size: int) -> None:
    logits = torch.randn(6, size, generator=torch.Generator().manual_seed(5)) * 3
    logits[5] = -17.3
    logits[:, 1] = torch.tensor([0.0, -50.0, -150.0, -1e4, 60.0, 0.0])
    ids = torch.tensor([0, 1, 1, 1, 1, 1])
    exact = logits.double().log_softmax(-1)[torch.arange(6), ids]
    torch.testing.assert_close(log_softmax_at(logits, ids).double(), exact, rtol=2e-7, atol=2e-6)


def test_a_token_without_mass_is_never_chosen() -> None:
    for size in (1000, 3000):
        scores, kept = torch.full((4, size), -math.inf), [300, 301, size - 1]
        scores[:, kept] = 0.0
        # Every other column has a number that is less.
        numbers = torch.full((4, numbers_for(size)), 1e-30)
        for place in kept:
            numbers[:, [place % 256, 256 + place // 256]] = torch.rand(4, 2)
        ids, logprobs = columns.draw(scores, numbers)
        assert {*ids.tolist()} <= {*kept}
        torch.testing.assert_close(logprobs, torch.full((4,), -math.log(3)))


@pytest.mark.parametrize("size", [700, 5000, 151_936])
def test_a_row_gets_the_same_numbers_in_any_company(size: int) -> None:
    """Bit for bit, at every step: rows share memory, and are reduced together or apart as the width has it."""
    for sampling in ({}, {"temperature": 0.7}, {"temperature": 0.0}, {"top_k": 5000}):
        _check_company(size, sampling)


def _check_company(size: int, sampling: dict[str, float]) -> None:
    rows, seeds = 7, answer_seeds(2, range(7))

    def sampler(of: range) -> Sampler:
        prompts = Ragged.from_list([[0]] * len(of))
        return Sampler(SamplingParams(**sampling), prompts, seeds[list(of)], frozenset(), size, CPU, raw=True)

    together, alone = sampler(range(rows)), [sampler(range(row, row + 1)) for row in range(rows)]
    for step in range(2):
        logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(step)) * 3
        kept = logits.clone()
        drawn = together(logits)
        single = [each(logits[row : row + 1]) for row, each in enumerate(alone)]
        assert drawn.ids.tolist() == [int(one.ids) for one in single]
        assert drawn.logprobs.tolist() == [float(one.logprobs) for one in single]
        assert torch.equal(logits, kept)
        exact = logits.double().log_softmax(-1).gather(-1, drawn.ids[:, None])[:, 0]
        torch.testing.assert_close(drawn.logprobs.double(), exact, rtol=0, atol=1e-5)


def test_ties_are_cut_to_the_requested_size() -> None:
    cases = (({"top_k": 3}, 3), ({"top_p": 0.5}, 4), ({"top_p": 1e-9}, 1), ({"min_p": 1.0}, 8), ({"top_k": 100}, 8))
    for sampling, kept in cases:
        scores, _ = truncated(torch.zeros(1, 8), SamplingParams(**sampling))
        assert int(scores.isfinite().sum()) == kept, sampling


def test_a_stream_depends_on_its_seed_only() -> None:
    seeds = answer_seeds(9, range(5))
    together = ExponentialStreams(seeds, 3, CPU)
    alone = ExponentialStreams(seeds[3:4], 3, CPU)
    first = [(together()[3], alone()[0]) for _ in range(40)]
    together.keep(torch.tensor([1, 3]))
    later = [(together()[1], alone()[0]) for _ in range(100)]
    assert all(torch.equal(a, b) for a, b in first + later)
    assert len({each for a, _ in first + later for each in a.tolist()}) == 3 * 140


def test_numbers_are_those_of_splitmix64() -> None:
    """The first outputs for the state 1234567 that the authors of other implementations check theirs by."""
    outputs = (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821)
    states = torch.tensor(1234567) + torch.arange(1, 6) * _GOLDEN
    expected = [-math.log1p(-(each >> 11) / 2**53) for each in outputs]
    assert _exponentials(states).tolist() == pytest.approx(expected, rel=1e-6)


def test_numbers_are_independent_of_those_of_other_steps_rows_and_columns() -> None:
    streams = ExponentialStreams(answer_seeds(3, range(40)), 500, CPU)
    numbers = torch.stack([streams() for _ in range(100)]).double()
    # Mean and variance 1, with an error of 1 / sqrt(2,000,000) times 1 and about 3.
    assert float(numbers.mean()) == pytest.approx(1.0, abs=4e-3)
    assert float(numbers.var()) == pytest.approx(1.0, abs=1e-2)
    for dim in range(3):
        size = numbers.shape[dim]
        one, other = numbers.narrow(dim, 0, size - 1) - 1.0, numbers.narrow(dim, 1, size - 1) - 1.0
        assert abs(float((one * other).mean())) < 4e-3


def test_a_longer_list_of_candidates_gives_the_same_tokens() -> None:
    """Top-p tries a short list for all rows, and sorts the vocabulary if that is not enough for one of them."""
    size, rows = 3000, 6
    logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(8)) * 4
    # The whole vocabulary is the nucleus of this row only.
    wide = torch.cat([logits, torch.zeros(1, size)])
    sampling, seeds = SamplingParams(top_p=0.95), answer_seeds(4, range(rows + 1))
    found = []
    for some in (logits, wide):
        prompts = Ragged.from_list([[0]] * len(some))
        sampler = Sampler(sampling, prompts, seeds[: len(some)], frozenset(), size, CPU, raw=False)
        found.append(torch.stack([sampler(some).ids[:rows] for _ in range(20)]))
    assert torch.equal(*found)


def test_raw_logprobs_are_the_models_even_if_sampling_changes_the_distribution() -> None:
    ids, logprobs = draw(LOGITS, 50, raw=True, temperature=0.3, top_p=0.5)
    torch.testing.assert_close(logprobs, LOGITS.log_softmax(-1)[ids], rtol=0, atol=1e-5)


def test_greedy_takes_the_best_with_logprob_zero() -> None:
    ids, logprobs = draw(LOGITS, 3, temperature=0.0)
    assert ids.tolist() == [int(LOGITS.argmax())] * 3 and logprobs.tolist() == [0.0] * 3
    _, raw = draw(LOGITS, 1, temperature=0.0, raw=True)
    torch.testing.assert_close(raw[0], LOGITS.log_softmax(-1).max())


def test_penalties_count_the_ids_of_their_own_row() -> None:
    sampling = SamplingParams(temperature=0.0, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)
    prompts = Ragged.from_list([[1], [2, 3]])
    sampler = Sampler(sampling, prompts, torch.tensor([0, 1]), frozenset(), 5, CPU, raw=False)
    logits = torch.tensor([[1.0, 3.0, 2.6, -1.0, 0.0], [1.0, 3.0, 2.6, -1.0, 0.0]])
    # Row 0: 3.0 / 2 loses to 2.6, then 2.6 / 2 - 0.75 to 3.0 / 2, which after that is 1.5 - 0.75 against 1.0.
    # Row 1: 3.0, then 3.0 / 2 - 0.75 = 0.75 loses to 2.6 / 2 = 1.3, then 1.3 - 0.75 and 0.75 to 1.0.
    steps = [sampler(logits).ids.tolist() for _ in range(3)]
    assert steps == [[2, 1], [1, 2], [0, 0]]

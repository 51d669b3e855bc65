"""The ids that each token was drawn from and the most probable ids, compared with an enumeration of the vocabulary."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from corelm import DynamicBatcher
from corelm.errors import CapabilityError, InvalidRequestError
from corelm.spec import GenerateRequest, GenerateResult, Ragged, SamplingParams, TokenSets
from corelm_engine_kit.sampling import Sampler
from helpers import oracle
from helpers.enumeration import Enumerated, enumerated
from helpers.plain_forward import Open, spoil_cache_after
from helpers.requests import generation
from helpers.tiny_models import random_rows, tiny_model

V, STEPS, TOP = 12, 4, 5
PROMPTS = [[0, 1, 1], [5], [7, 2, 11, 3]]
BANNED = {2, 4}
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": -0.2}


# The sampler --------------------------------------------------------------------------------------------------------


MORE: list[dict[str, float]] = [{}, PENALTIES, {"min_new_tokens": 2}, {**PENALTIES, "min_new_tokens": 3}]


@pytest.mark.parametrize(("temperature", "extra", "raw"), [(0.2, 3, False), (1.7, 0, True), (1.0, 1, False)])
def test_every_combination_of_cuts(temperature: float, extra: int, raw: bool) -> None:
    _check_cuts(temperature, MORE[extra], raw)


@pytest.mark.nightly
def test_every_combination_of_cuts_and_penalties() -> None:
    for case in itertools.product([0.2, 1.0, 1.7], MORE, [False, True]):
        _check_cuts(*case)


def _check_cuts(temperature: float, extra: dict[str, float], raw: bool) -> None:
    generator = torch.Generator().manual_seed(int(10 * temperature))
    for top_k, top_p, min_p in itertools.product([None, 1, 3, 11, 40], [1.0, 0.9, 0.5, 0.02], [0.0, 0.04, 0.3, 1.0]):
        given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, **extra}
        steps = torch.randn(STEPS, len(PROMPTS), V, generator=generator) * 3
        seeds = torch.arange(len(PROMPTS))
        sampling, prompts = SamplingParams(**given), Ragged.from_list(PROMPTS)
        sampler = Sampler(
            sampling, prompts, seeds, frozenset(BANNED), V, torch.device("cpu"), raw, support=True, top=TOP
        )
        answers: list[list[int]] = [[], [], []]
        for logits in steps:
            drawn = sampler(logits)
            assert drawn.kept is not None and drawn.top is not None
            kept = Ragged(drawn.kept.ids, drawn.kept.counts).tolist()
            for row, table in enumerate(logits.tolist()):
                wanted = enumerated(table, prompt=PROMPTS[row], answer=answers[row], banned=BANNED, **given)
                assert not wanted.ties
                token, logprob = int(drawn.ids[row]), float(drawn.logprobs[row])
                untouched = enumerated(table)
                expected = math.log(untouched.full[token]) if raw else wanted.logprob(token)
                assert kept[row] == wanted.kept and token in kept[row], given
                assert logprob == pytest.approx(expected, abs=1e-5)
                assert float(drawn.kept.log_mass[row]) == pytest.approx(wanted.log_mass, abs=1e-5)
                assert drawn.kept.log_mass[row] <= 0
                check_top(
                    untouched if raw else wanted, drawn.top.ids[row], drawn.top.logprobs[row], drawn.top.tail[row]
                )
                answers[row].append(token)


def test_the_probabilities_of_the_ids_that_are_left_sum_to_one() -> None:
    logits, temperature = torch.randn(50, V, generator=torch.Generator().manual_seed(1)) * 3, 0.7
    for top_k, top_p, min_p in itertools.product([None, 1, 3, 11], [1.0, 0.9, 0.5], [0.0, 0.04, 0.3]):
        drawn = sampled(logits, top=V, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        mass = drawn.top.logprobs.double().exp()
        assert float((mass.sum(-1) - 1).abs().max()) < 1e-6
        # Those that have a probability are those that are left.
        assert [sorted(set(row) - {-1}) for row in drawn.top.ids.tolist()] == Ragged(
            drawn.kept.ids, drawn.kept.counts
        ).tolist()


def check_top(wanted: Enumerated, ids: Tensor, logprobs: Tensor, tail: Tensor) -> None:
    """Compare the most probable ids with those of an enumeration."""
    best = sorted(wanted.kept, key=lambda token: -wanted.full[token])
    few = min(len(ids), len(best))
    assert ids.tolist() == best[:few] + [-1] * (len(ids) - few)
    expected = [wanted.logprob(token) for token in best[:few]] + [-math.inf] * (len(ids) - few)
    torch.testing.assert_close(logprobs.double(), torch.tensor(expected).double(), rtol=0, atol=1e-5)
    rest = math.fsum(math.exp(wanted.logprob(token)) for token in best[few:])
    assert float(tail) == pytest.approx(math.log(rest) if rest else -math.inf, abs=1e-5)


def sampled(logits: Tensor, *, raw: bool = False, top: int = 0, **given: Any) -> Any:
    """Return what a sampler draws once from float32[rows, V], with the ids that are left."""
    rows, width = logits.shape
    prompts, device = Ragged.from_list([[0]] * rows), torch.device("cpu")
    sampler = Sampler(
        SamplingParams(**given), prompts, torch.arange(rows), frozenset(), width, device, raw, support=True, top=top
    )
    return sampler(logits)


def test_of_equal_ids_as_many_are_left_as_the_parameters_say() -> None:
    cuts: list[dict[str, float]] = [{"top_k": 3}, {"top_p": 0.45}, {"top_k": 6, "top_p": 0.5}, {"min_p": 1.0}]
    for cut in cuts:
        _check_ties(cut)


def _check_ties(cut: dict[str, float]) -> None:
    # One id is the best, seven are equal, four have next to nothing.
    logits = torch.tensor([[0.0] * 4 + [1.0] * 7 + [math.log(10.0)]])
    drawn = sampled(logits, **cut)
    wanted = enumerated(logits[0].tolist(), **cut)
    # With min_p=1 the best is left alone, and equals nothing.
    assert wanted.ties == ("min_p" not in cut)
    assert len(drawn.kept.ids) == len(wanted.kept) and V - 1 in drawn.kept.ids.tolist()
    assert float(drawn.kept.log_mass[0]) == pytest.approx(wanted.log_mass, abs=1e-5)
    assert drawn.kept.ids.tolist() == sorted(set(drawn.kept.ids.tolist()))
    assert {*drawn.kept.ids.tolist()} <= {*range(4, 12)}


@pytest.mark.parametrize("spread", [0.5, 3.0], ids=["most of the vocabulary is left", "little is left"])
@pytest.mark.parametrize("raw", [False, True], ids=["processed", "raw"])
def test_top_p_over_a_vocabulary_wider_than_its_short_list(spread: float, raw: bool) -> None:
    logits = torch.randn(4, 20_000, generator=torch.Generator().manual_seed(2)) * spread
    drawn = sampled(logits, raw=raw, top=1024, top_p=0.6, temperature=0.9)
    ends = drawn.kept.counts.cumsum(0).tolist()
    for row, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        mass = (logits[row].double() / 0.9).softmax(-1).sort(descending=True)
        size = 1 + int((mass.values.cumsum(-1) < 0.6).sum())
        assert drawn.kept.ids[start:end].tolist() == sorted(mass.indices[:size].tolist())
        assert float(drawn.kept.log_mass[row]) == pytest.approx(float(mass.values[:size].sum().log()), abs=1e-6)
        exact = logits[row].double().log_softmax(-1) if raw else (mass.values[:size] / mass.values[:size].sum()).log()
        best = exact.sort(descending=True).values
        some = min(1024, len(best))
        torch.testing.assert_close(drawn.top.logprobs[row, :some].double(), best[:some], rtol=0, atol=1e-5)
        rest = float(best[some:].exp().sum().log()) if some < len(best) else -math.inf
        assert float(drawn.top.tail[row]) == pytest.approx(rest, abs=1e-5)


@pytest.mark.parametrize("below", [10.0, 200.0])
def test_the_mass_of_a_faint_tail_is_exact(below: float) -> None:
    """The tail has 1e-9 of the mass or far less, down to what float32 rounds to 0."""
    size, k = 30_000, 64
    logits = torch.randn(2, size, generator=torch.Generator().manual_seed(4)) - below - math.log(size)
    logits[:, 100:163] = torch.linspace(3.0, 5.0, 63)
    drawn = sampled(logits, top=k, raw=True, top_k=63)
    exact = logits.double().log_softmax(-1)
    for row in range(2):
        others = torch.ones(size, dtype=torch.bool)
        others[drawn.top.ids[row]] = False
        assert float(drawn.top.tail[row]) == pytest.approx(float(exact[row][others].logsumexp(-1)), abs=1e-5)
    assert drawn.kept.log_mass.tolist() == pytest.approx(exact[:, 100:163].logsumexp(-1).tolist(), abs=1e-7)


def test_ids_whose_probability_underflows_are_left() -> None:
    logits = torch.tensor([[0.0, -500.0, -900.0, 3.0]])
    drawn = sampled(logits, top=4, top_k=3, temperature=0.5)
    assert drawn.kept.ids.tolist() == [0, 1, 3] and drawn.top.ids.tolist() == [[3, 0, 1, -1]]
    assert drawn.top.logprobs[0, 2] == pytest.approx(-1006.0, abs=1e-2)


def test_ids_beyond_16_bits_are_kept_as_they_are() -> None:
    logits = torch.full((2, 70_000), -9.0)
    first, second = [3, 65_537, 69_999], [1, 4, 65_540]
    logits[0, first], logits[1, second] = torch.tensor([2.0, 1.0, 3.0]), torch.tensor([1.0, 3.0, 2.0])
    drawn = sampled(logits, top_k=3)
    assert drawn.kept.ids.tolist() == [*first, *second] and drawn.kept.counts.tolist() == [3, 3]


# The loop -----------------------------------------------------------------------------------------------------------

ROWS = random_rows(3, 9, 1, 5, 5, vocab=V)
CUTS: dict[str, Any] = {"temperature": 0.8, "top_k": 7, "top_p": 0.85, "min_p": 0.02}


def asked(logprobs: str, prompts: list[list[int]] = ROWS, stop_ids: set[int] | None = None, **given: Any) -> Any:
    return generation(
        prompts,
        logprobs,
        **({"max_new_tokens": 9} | CUTS | given),
        seeds=torch.arange(len(prompts)) + 6,
        stop_ids=frozenset({4, 8, 10} if stop_ids is None else stop_ids),
        return_support=True,
        top_logprobs=TOP,
    )


def check(model: Any, request: GenerateRequest, result: GenerateResult) -> None:
    """Compare a result with the enumeration of each step, made from the model's plain forward."""
    kept, log_mass, top = result.kept_ids, result.kept_log_mass, result.top_ids
    assert kept is not None and log_mass is not None and top is not None and result.logprobs is not None
    assert result.top_logprobs is not None and result.tail_log_mass is not None
    assert torch.equal(kept.lengths, result.ids.lengths) and kept.ids.values.dtype == torch.int64
    assert log_mass.values.dtype == result.top_logprobs.values.dtype == result.tail_log_mass.values.dtype
    assert log_mass.values.dtype == torch.float32 and top.values.shape == (len(result.ids.values), TOP)
    sampling = {name: getattr(request.sampling, name) for name in (*CUTS, *PENALTIES, "min_new_tokens")}
    columns = (log_mass, top, result.top_logprobs, result.tail_log_mass, result.logprobs)
    rows = zip(request.prompts.tolist(), result.ids.tolist(), kept.tolist(), *(c.split() for c in columns), strict=True)
    for prompt, answer, sets, masses, ids, logprobs, tails, own in rows:
        if not answer:
            continue
        tables = oracle.next_logits(model, prompt + answer[:-1])[len(prompt) - 1 :].tolist()
        for step, token in enumerate(answer):
            wanted = enumerated(tables[step], prompt=prompt, answer=answer[:step], banned=request.stop_ids, **sampling)
            assert not wanted.ties and sets[step] == wanted.kept and token in wanted.kept
            assert float(masses[step]) == pytest.approx(wanted.log_mass, abs=1e-5)
            of = wanted if request.logprobs == "processed" else enumerated(tables[step])
            assert float(own[step]) == pytest.approx(of.logprob(token), abs=1e-5)
            check_top(of, ids[step], logprobs[step], tails[step])


@pytest.fixture
def model() -> Any:
    return tiny_model(vocab_size=V)


def test_each_token_of_each_row(open_model: Open, model: Any) -> None:
    more = {**PENALTIES, "min_new_tokens": 3}
    cases = ((True, "raw", more, {}), (True, "processed", more, {"max_batch_tokens": 30}), (False, "processed", {}, {}))
    for fast, logprobs, extra, options in cases:
        request = asked(logprobs, **extra)
        result = open_model(model, fast=fast, **options).engine.plugin.generate(request)
        # Rows leave the batch at different steps.
        assert len(set(result.ids.lengths.tolist())) > 1
        check(model, request, result)


def test_the_plain_ways_of_decoding_return_the_same(open_model: Open, model: Any) -> None:
    request, backend = asked("processed"), open_model(model)
    result = backend.engine.plugin.generate(request)
    # Its cache is wrong beyond three tokens, which the trials find.
    other = tiny_model(vocab_size=V)
    spoil_cache_after(other, 3)
    plugin = open_model(other).engine.plugin
    uncached = plugin.generate(request)
    assert uncached.kept_ids.tolist() == result.kept_ids.tolist()
    check(model, request, uncached)


@pytest.mark.usefixtures("short_answers_expected")
def test_rows_that_wait_and_are_read_again(open_model: Open) -> None:
    model = tiny_model(vocab_size=V, max_position_embeddings=40)
    plugin = open_model(model, max_batch_tokens=80).engine.plugin
    request = asked("processed", stop_ids=set(), max_new_tokens=None)
    result = plugin.generate(request)
    assert result.ids.lengths.tolist() == [40 - len(row) for row in ROWS]
    check(model, request, result)


def test_what_there_is_of_aborted_rows_comes_with_its_sets(open_model: Open, model: Any) -> None:
    action: dict[int, set[str]] = {}
    passes = 0

    def act(*_: Any) -> None:
        nonlocal passes
        passes += 1
        backend.abort(action.get(passes, set()))

    # The hook is there from the beginning, because the model is tried again with every new one.
    model.model.embed_tokens.register_forward_hook(act)
    # Two rows are the first batch, and the other three the second.
    backend = open_model(model, max_batch_tokens=36)
    plugin = backend.engine.plugin
    request = asked("raw", stop_ids=set())
    plugin.generate(request)
    passes, action[3] = 0, {"0", "1"}
    result = plugin.generate(request)
    assert result.finish_reasons == ("abort", "abort", "length", "length", "length")
    assert result.ids.lengths.tolist() == [0, 3, 9, 9, 9]
    check(model, request, result)
    passes, action[1] = 0, {"0", "1", "2", "3", "4"}
    nothing = plugin.generate(request)
    assert nothing.ids.lengths.tolist() == [0, 1, 0, 1, 0]
    check(model, request, nothing)


def test_stop_strings_and_streams_change_nothing(open_model: Open) -> None:
    model = tiny_model()
    plugin = open_model(model).engine.plugin
    prompts = random_rows(4, 8, 2)
    plain = asked("processed", prompts, set(), max_new_tokens=12)
    whole = plugin.generate(plain)
    stop = plugin.tokenizer.decode(whole.ids.tolist()[0][5:7])
    chunks: list[Any] = []
    request = asked("processed", prompts, set(), max_new_tokens=12, stop=(stop,))
    object.__setattr__(request, "on_tokens", chunks.append)
    result = plugin.generate(request)
    assert result.finish_reasons[0] == "stop" and len(result.ids.tolist()[0]) < 12
    for row, (ids, sets) in enumerate(zip(result.ids.tolist(), result.kept_ids.tolist(), strict=True)):
        assert [token for chunk in chunks if chunk.row == row for token in chunk.ids] == ids
        assert sets == whole.kept_ids.tolist()[row][: len(ids)]
    check(model, request, result)


def test_greedy_decoding_has_one_id(open_model: Open, model: Any) -> None:
    request = asked("processed", temperature=0.0, top_k=None, top_p=1.0, min_p=0.0)
    object.__setattr__(request, "return_support", False)
    result = open_model(model).engine.plugin.generate(request)
    nothing = [-1] * (TOP - 1)
    assert result.top_ids.values.tolist() == [[token, *nothing] for token in result.ids.values.tolist()]
    assert not result.top_logprobs.values[:, 0].any() and bool((result.tail_log_mass.values == -math.inf).all())
    assert result.kept_ids is None and result.kept_log_mass is None


def test_scoring_under_the_support_returns_the_samplers_numbers(open_model: Open) -> None:
    model = tiny_model()
    request = asked("processed", random_rows(4, 8, 2), set(), max_new_tokens=40, top_k=60, top_p=0.9)
    result = open_model(model).engine.plugin.generate(request)
    ratios = []
    for prompt, answer, sets, own, mass in zip(
        request.prompts.tolist(),
        result.ids.tolist(),
        result.kept_ids.tolist(),
        result.logprobs.split(),
        result.kept_log_mass.split(),
        strict=True,
    ):
        tables = oracle.next_logits(model, prompt + answer[:-1])[len(prompt) - 1 :] / request.sampling.temperature
        under = [table[ids].log_softmax(-1)[ids.index(t)] for table, ids, t in zip(tables, sets, answer, strict=True)]
        oracle.close(own, torch.stack(under))
        full = tables.log_softmax(-1)[torch.arange(len(answer)), torch.tensor(answer)]
        # Each of the two is rounded.
        torch.testing.assert_close(own + mass, full, rtol=0, atol=2e-5)
        ratios.append((full - own).exp())
    # Without the support the numbers are others.
    assert float(torch.cat(ratios).mean()) < 0.95


@pytest.mark.parametrize("extra", [{}, PENALTIES], ids=["no penalties", "penalties"])
def test_core_takes_the_sets_and_scores_over_them(open_model: Open, extra: dict[str, float]) -> None:
    backend, prompts = open_model(tiny_model()), random_rows(4, 8, 2)
    sampling = {"temperature": 0.8, "top_k": 60, "top_p": 0.9, "max_new_tokens": 20, "seed": 3, **extra}
    with DynamicBatcher(backend) as batcher:
        for each in (backend, batcher):
            out = each.generate(prompts, sampling, logprobs="processed", return_support=True, top_logprobs=TOP)
            assert out.logprobs is not None and out.kept_log_mass is not None and out.kept_ids is not None
            sequences = Ragged.from_list(prompts).join(out.ids)
            starts = [len(row) for row in prompts]
            scored = backend.score_logprobs(sequences, temperature=0.8, score_from=starts, support=out.kept_ids)
            apart = (scored.logprobs.values[scored.scored.values] - out.logprobs.values).abs().max()
            # No set makes up for a penalty.
            assert bool(apart > 1e-2) if extra else bool(apart < 1e-5)
        stream = backend.stream(prompts, sampling, logprobs="processed", return_support=True, top_logprobs=TOP)
        assert {chunk.row for chunk in stream} == {0, 1, 2}
        assert stream.result.kept_ids.tolist() == out.kept_ids.tolist()
        assert torch.equal(stream.result.top_ids.values, out.top_ids.values)


def test_beam_search_has_neither(open_model: Open) -> None:
    beams = {"num_beams": 2, "max_new_tokens": 3, "temperature": 0}
    for extra in ({"return_support": True}, {"top_logprobs": 3}):
        with pytest.raises((CapabilityError, InvalidRequestError)):
            open_model(tiny_model()).generate([[5]], beams, logprobs="none", **extra)


def test_no_table_of_all_tokens_is_made(open_model: Open) -> None:
    """The sets are flat, and no tensor on the way is as large as the tokens of a row times the vocabulary."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for each in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(each, Tensor):
                    self.numel = max(self.numel, each.numel())
            return out

    tokens, wide = 80, 2000
    model = tiny_model(vocab_size=wide, hidden_size=32)
    plugin = open_model(model).engine.plugin
    request = asked("raw", random_rows(4, 4), set(), max_new_tokens=tokens)
    plugin.generate(request)
    with Largest() as seen:
        result = plugin.generate(request)
    assert isinstance(result.kept_ids, TokenSets)
    # The head's weights have 64,000 elements.
    assert seen.numel < tokens * wide / 2
    assert len(result.kept_ids.ids.values) == int(result.kept_ids.ids.lengths.sum()) <= 2 * tokens * CUTS["top_k"]


def test_the_backend_declares_it(open_model: Open, model: Any) -> None:
    assert open_model(model).capabilities.return_support and open_model(model).capabilities.top_logprobs == V
    assert open_model(tiny_model(vocab_size=2000)).capabilities.top_logprobs == 1024

"""Samples follow the declared distribution, and what is said of other ids than the sampled one is true."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from corelm import Backend, Ragged, SamplingParams
from corelm.errors import CapabilityError
from corelm.spec import GenerateResult, ScoreResult
from corelm_testing.base import ConformanceBase, needs, not_applicable
from corelm_testing.reference import (
    MIN_P_VALUE,
    OPENINGS,
    enough_draws,
    gaps,
    min_p_of,
    p_value,
    reshaped,
    sampled_from,
    seeded,
    temperatures,
    top_p_of,
)
from corelm_testing.usage import in_range, legal

#: For each parameter, the value that keeps the k likeliest ids of log-probs[V]. A temperature keeps all ids.
CUTS: dict[str, Callable[[Tensor, int], Any]] = {
    "temperature": lambda logprobs, k: 1.5,
    "top_k": lambda logprobs, k: k,
    "top_p": top_p_of,
    "min_p": min_p_of,
}


class DistributionPromises(ConformanceBase, theme="distribution"):
    """Tests of the sampled distribution.

    Attributes:
        draws: number of one-token answers per test; tests of an order take fewer if these show it as surely. Fewer
            answers make a test faster and less sensitive.
    """

    draws: int = 2000

    @pytest.fixture(scope="class")
    @classmethod
    def pairs(cls, backend: Backend) -> list[list[int]]:
        """Answers of two tokens to the prompt of `_uneven`, which two tests share."""
        case = cls()
        case.vocab_size = backend.capabilities.vocab_size
        prompt, _ = case._uneven(backend)
        sampling = seeded(backend, {"num_samples": cls.draws, "max_new_tokens": 2, "ignore_eos": True})
        return backend.generate([prompt], sampling, logprobs="none").ids.tolist()

    def test_samples_follow_the_model(self, backend: Backend, pairs: list[list[int]]) -> None:
        _, logprobs = self._uneven(backend)
        assert p_value(torch.tensor([answer[0] for answer in pairs]), reshaped(logprobs)) > MIN_P_VALUE

    def test_later_tokens_follow_the_model_too(self, backend: Backend, pairs: list[list[int]]) -> None:
        prompt, _ = self._uneven(backend)
        first, second = torch.tensor(pairs).unbind(-1)
        common = int(first.mode().values)
        mass = reshaped(self.next_logprobs([*prompt, common], 1.0))
        assert p_value(second[first == common], mass) > MIN_P_VALUE

    @needs("sampling:temperature")
    def test_samples_follow_the_temperature(self, backend: Backend) -> None:
        prompt, logprobs = self._uneven(backend)
        usable = temperatures(backend, 0.6, 1.5)
        for temperature in usable:
            mass = reshaped(logprobs, temperature=temperature)
            draws = self.draws
            if temperature != usable[0]:
                # The first shows how exact the division is, the others that it is not capped, squared or turned over.
                wrong = (1.0, usable[0], temperature**2, 1 / temperature)
                draws = max(enough_draws(mass, reshaped(logprobs, temperature=each), draws) for each in wrong)
            self._assert_follows(backend, prompt, mass, draws, temperature=temperature)

    @needs("sampling:top_k")
    def test_top_k_keeps_the_k_likeliest(self, backend: Backend) -> None:
        prompt, logprobs = self._uneven(backend)
        top_k = self._cut(logprobs, "top_k")
        self._assert_follows(backend, prompt, reshaped(logprobs, top_k=top_k), top_k=top_k)

    @needs("sampling:top_p")
    def test_top_p_keeps_the_smallest_set_of_that_mass(self, backend: Backend) -> None:
        prompt, logprobs = self._uneven(backend)
        top_p = top_p_of(logprobs, self._cut(logprobs, "top_p"))
        self._assert_follows(backend, prompt, reshaped(logprobs, top_p=top_p), top_p=top_p)

    @needs("sampling:min_p")
    def test_min_p_keeps_ids_above_a_share_of_the_likeliest(self, backend: Backend) -> None:
        prompt, logprobs = self._uneven(backend)
        min_p = min_p_of(logprobs, self._cut(logprobs, "min_p"))
        self._assert_follows(backend, prompt, reshaped(logprobs, min_p=min_p), min_p=min_p)

    @needs("sampling:temperature", "sampling:top_p")
    def test_top_p_is_applied_after_the_temperature(self, backend: Backend) -> None:
        self._assert_order(backend, "temperature", "top_p")

    @needs("sampling:temperature", "sampling:min_p")
    def test_min_p_is_applied_after_the_temperature(self, backend: Backend) -> None:
        self._assert_order(backend, "temperature", "min_p")

    @needs("sampling:top_k", "sampling:top_p")
    def test_top_p_is_applied_after_top_k(self, backend: Backend) -> None:
        self._assert_order(backend, "top_k", "top_p")

    @needs("sampling:top_p", "sampling:min_p")
    def test_min_p_is_applied_after_top_p(self, backend: Backend) -> None:
        self._assert_order(backend, "top_p", "min_p")

    @needs("mode:processed")
    def test_processed_log_probs_are_those_of_the_truncated_distribution(self, backend: Backend) -> None:
        prompt, logprobs = self._uneven(backend)
        names = [name for name in ("top_k", "top_p", "min_p") if name in backend.capabilities.sampling]
        if not names:
            not_applicable("none of top_k, top_p and min_p is declared")
        k = self._cut(logprobs, *names)
        values = {"top_k": k, "top_p": top_p_of(logprobs, k), "min_p": min_p_of(logprobs, k)}
        declared = {name: value for name, value in values.items() if legal(backend, name, value)}
        if not declared:
            not_applicable(f"needs a range of {' or '.join(names)} that cuts off at the widest gap")
        for name, value in declared.items():
            sampling = seeded(backend, {"num_samples": 64, "max_new_tokens": 1, name: value})
            batch = backend.generate([prompt], sampling, logprobs="processed")
            assert batch.support == "truncated" and batch.logprobs is not None
            expected = reshaped(logprobs, top_k=k).log()[batch.ids.values.cpu()].float()
            self.assert_close(batch.logprobs.values, expected, f"{name}={value}")

    @needs("sampling:temperature")
    def test_greedy_takes_the_likeliest_token_at_every_step(self, backend: Backend) -> None:
        if not legal(backend, "temperature", 0.0):
            not_applicable("sampling:temperature is not declared with 0")
        prompts = [*self.rows(backend, 4, 1), *backend.tokenize(OPENINGS[:2]).ids.tolist()]
        batch = backend.generate(prompts, {"temperature": 0.0, "max_new_tokens": 4}, logprobs="none")
        for row, (prompt, answer) in enumerate(zip(prompts, batch.ids.tolist(), strict=True)):
            for step, token in enumerate(answer):
                logprobs = self.next_logprobs([*prompt, *answer[:step]], 1.0)
                # Ids whose log-probs differ by less than the tolerance count as equally likely.
                assert float(logprobs.max() - logprobs[token]) <= 2 * self.tolerance, (
                    f"row {row}, after a prompt of {len(prompt)} tokens that ends in {prompt[-4:]}, token {step}: "
                    f"id {token} has log-prob {float(logprobs[token]):.4g}, but id {int(logprobs.argmax())} has "
                    f"{float(logprobs.max()):.4g}"
                )

    # Helpers ---------------------------------------------------------------------------------------------------------

    @property
    def _least_gap(self) -> float:
        """The smallest gap, in nats, that rounding cannot close."""
        return max(0.01, 4 * self.tolerance)

    def _uneven(self, backend: Backend) -> tuple[list[int], Tensor]:
        """Return the prompt whose next-token distribution has the widest gap, and that distribution, log-probs[V]."""
        found = [(prompt, self.next_logprobs(prompt, 1.0)) for prompt in backend.tokenize(OPENINGS).ids.tolist()]
        return max(found, key=lambda pair: _widest(pair[1])[0])

    def _cut(self, logprobs: Tensor, *names: str) -> int:
        """Return how many ids are before the widest gap, where truncation by the parameters `names` can cut."""
        width, k = _widest(logprobs)
        if width < self._least_gap:
            self.declared_and_not_shown(names[0], "test with a model whose distributions are less flat")
        return k

    def _assert_order(self, backend: Backend, first: str, then: str) -> None:
        """Assert that `first` is applied before `then`, at values for which the order matters."""
        prompt, logprobs = self._uneven(backend)
        cases: list[tuple[float, Tensor, Tensor, dict[str, Any]]] = []
        for fewer, more in combinations(gaps(logprobs, self._least_gap)[:12], 2):
            one = {first: CUTS[first](logprobs, more)}
            two = {then: CUTS[then](reshaped(logprobs, **one).log(), fewer)}
            mass = reshaped(reshaped(logprobs, **one).log(), **two)
            swapped = reshaped(reshaped(logprobs, **two).log(), **one)
            if all(legal(backend, *each) for each in (one | two).items()):
                cases.append((float((mass - swapped).abs().sum()), mass, swapped, one | two))
        apart, mass, swapped, sampling = max(cases, key=lambda case: case[0], default=(0.0, logprobs, logprobs, {}))
        if apart <= 0.2:
            not_applicable(f"needs a distribution for which {first} before {then} makes a difference")
        try:
            self._assert_follows(backend, prompt, mass, enough_draws(mass, swapped, self.draws), **sampling)
        except CapabilityError as error:
            # An engine that applies them in another order may refuse the combination.
            assert error.capability in (first, then)
            not_applicable(f"the engine refuses {first} with {then}")

    def _assert_follows(
        self, backend: Backend, prompt: list[int], mass: Tensor, draws: int | None = None, **sampling: Any
    ) -> None:
        draws = draws or self.draws
        sampling = seeded(backend, {**sampling, "num_samples": draws, "max_new_tokens": 1})
        ids = backend.generate([prompt], sampling, logprobs="none").ids.values.cpu()
        assert len(ids) == draws
        outside = sorted(set(ids[mass[ids] == 0].tolist()))
        assert not outside, f"{sampling}: sampled ids {outside}, which must have probability 0"
        assert p_value(ids, mass) > MIN_P_VALUE, sampling


def _widest(logprobs: Tensor) -> tuple[float, int]:
    """Return the widest gap in nats and the number of ids before it.

    Only gaps after at least two ids are considered, and only those that cut off at least 15 % of the probability.
    """
    best = logprobs.double().sort(descending=True).values
    kept = best.exp().cumsum(0)[:-1]
    width = (best[:-1] - best[1:]).masked_fill(kept > 0.85, -1.0)
    width[0] = -1.0
    return float(width.max()), 1 + int(width.argmax())


#: Ids that a cut leaves at most: enough to be a set, few enough to list.
_MOST = 40
#: The most tokens of an answer of which every token is looked at.
_SHORT = 4

#: The temperatures of tests that score over given ids.
_TEMPERATURES = pytest.mark.parametrize(
    "temperature",
    [pytest.param(1.0, id="own"), pytest.param(0.6, id="tempered", marks=needs("score_temperature"))],
)


class SupportPromises(ConformanceBase, theme="support"):
    """Tests of `return_support` and `score_support`."""

    @needs("return_support")
    @pytest.mark.parametrize("tempered", [False, True], ids=["own", "tempered"])
    @pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
    def test_the_kept_ids_are_those_that_are_left(self, backend: Backend, name: str, tempered: bool) -> None:
        temperature = temperatures(backend, 0.6, 1.5)[0] if tempered else 1.0
        prompt, logprobs, k = self._clear_cut(backend, name, temperature)
        sampling = {name: CUTS[name](logprobs, k), "temperature": temperature, "num_samples": 16, "max_new_tokens": 1}
        batch = self._sample_with_support(backend, [prompt], sampling)
        assert batch.kept_ids is not None and batch.kept_log_mass is not None
        kept = logprobs.topk(k).indices.sort().values
        assert {tuple(ids) for row in batch.kept_ids.tolist() for ids in row} == {tuple(kept.tolist())}
        mass = logprobs[kept].logsumexp(-1)
        self.assert_close(batch.kept_log_mass.values, mass.expand(len(batch.ids)).float(), "the mass of the kept ids")
        if batch.mode == "processed":
            assert batch.logprobs is not None
            expected = (logprobs[batch.ids.values.cpu()] - mass).float()
            self.assert_close(batch.logprobs.values, expected, f"{sampling}")

    @needs("return_support")
    def test_every_token_of_every_row_has_its_own_kept_ids(self, backend: Backend) -> None:
        prompts = [*self.rows(backend, 3, 17), *backend.tokenize(OPENINGS[:2]).ids.tolist()]
        sampling = self._truncated(backend)
        temperature = sampling.get("temperature", 1.0)
        batch = self._sample_with_support(backend, prompts, {**sampling, "max_new_tokens": _SHORT, "num_samples": 2})
        assert batch.kept_ids is not None and batch.kept_log_mass is not None
        rows = zip(batch.ids.tolist(), batch.kept_ids.tolist(), batch.kept_log_mass.tolist(), strict=True)
        own = None if batch.logprobs is None or batch.mode != "processed" else batch.logprobs.tolist()
        for row, (answer, sets, masses) in enumerate(rows):
            for step, (token, ids, found) in enumerate(zip(answer, sets, masses, strict=True)):
                logprobs = self._tempered([*prompts[row // 2], *answer[:step]], temperature)
                where = f"row {row}, token {step}"
                kept = torch.tensor(ids)
                left_out = logprobs.index_fill(0, kept, -torch.inf)
                assert float(left_out.max() - logprobs[kept].min()) <= 2 * self.tolerance, f"{where}: kept {ids}"
                mass = float(logprobs[kept].logsumexp(-1))
                assert abs(mass - found) <= self.tolerance, f"{where}: log mass {found}, expected {mass}"
                if own is not None:
                    expected = float(logprobs[token]) - mass
                    assert abs(own[row][step] - expected) <= 2 * self.tolerance, f"{where}: {own[row][step]}"

    @needs("return_support", "per_answer_seeds")
    def test_the_kept_ids_do_not_depend_on_the_other_rows(self, backend: Backend) -> None:
        prompts = self.rows(backend, 5, 2, 11)
        sampling, seeds = {**self._truncated(backend), "max_new_tokens": _SHORT}, [4, 5, 6]
        together = self._sample_with_support(backend, prompts, sampling, seeds)
        for row, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            alone = self._sample_with_support(backend, [prompt], sampling, [seed])
            assert together.kept_ids is not None and alone.kept_ids is not None
            assert together.kept_ids.tolist()[row] == alone.kept_ids.tolist()[0], f"row {row}"

    @needs("return_support", "score_support")
    def test_scores_over_the_kept_ids_are_the_samplers_own(self, backend: Backend) -> None:
        sampling = self._truncated(backend)
        temperature = sampling.get("temperature", 1.0)
        if temperature != 1.0 and not backend.capabilities.score_temperature:
            sampling["temperature"] = temperature = 1.0
        prompts = [*self.rows(backend, 9, 2), *backend.tokenize(OPENINGS[:1]).ids.tolist()]
        batch = self._sample_with_support(backend, prompts, {**sampling, "max_new_tokens": _SHORT})
        if batch.logprobs is None or batch.mode != "processed":
            not_applicable("mode:processed is not declared")
        scores = backend.score_logprobs(
            Ragged.from_list(prompts).join(batch.ids),
            temperature=temperature,
            score_from=[len(prompt) for prompt in prompts],
            support=batch.kept_ids,
        )
        assert (scores.mode, scores.temperature, scores.support) == ("processed", temperature, "truncated")
        found = scores.logprobs.values[scores.scored.values]
        self.assert_close(found, batch.logprobs.values.cpu(), "the answers")

    @needs("score_support")
    @_TEMPERATURES
    def test_scores_are_normalised_over_the_given_ids(self, backend: Backend, temperature: float) -> None:
        rows = self.rows(backend, 4, 6)
        others = self.rows(backend, 3, 5, 1, 8, 2, 6, 4, 3, 7, 5, seed=1)
        # The last set is empty: the whole vocabulary.
        sets: list[list[list[int]]] = [[[] for _ in row] for row in rows]
        positions = [(row, at) for row, ids in enumerate(rows) for at in range(1, len(ids))][:-1]
        for (row, at), more in zip(positions, others, strict=False):
            sets[row][at] = sorted({rows[row][at], *more})
        grad = backend.capabilities.gradients
        scores = backend.score_logprobs(rows, temperature=temperature, support=sets, grad=grad)
        assert scores.logprobs.values.requires_grad == grad
        for row, (ids, found) in enumerate(zip(rows, scores.logprobs.split(), strict=True)):
            expected = torch.zeros(len(ids))
            for at in range(1, len(ids)):
                logprobs = self._tempered(ids[:at], temperature)
                kept = torch.tensor(sets[row][at] or range(self.vocab_size))
                expected[at] = logprobs[ids[at]] - logprobs[kept].logsumexp(-1)
            self.assert_close(found, expected, f"row {row}")

    # Helpers ---------------------------------------------------------------------------------------------------------

    def _sample_with_support(
        self, backend: Backend, prompts: list[list[int]], sampling: dict[str, Any], seeds: list[int] | None = None
    ) -> GenerateResult:
        """Sample with the kept ids, and with processed log-probs if the engine has them under these parameters."""
        sampling = sampling if seeds is not None else seeded(backend, sampling)
        try:
            return backend.generate(prompts, sampling, logprobs="processed", seeds=seeds, return_support=True)
        except CapabilityError as error:
            if error.capability != "generation_modes":
                raise
        return backend.generate(prompts, sampling, logprobs="none", seeds=seeds, return_support=True)

    def _tempered(self, ids: list[int], temperature: float) -> Tensor:
        """Return float64[V]: the log-probs of the next id at a temperature."""
        return (self.next_logprobs(ids, 1.0).double() / temperature).log_softmax(-1)

    def _truncated(self, backend: Backend) -> dict[str, Any]:
        """Return sampling parameters that truncate, with a temperature if the engine has one."""
        warm = {"temperature": 0.6} if legal(backend, "temperature", 0.6) else {}
        for name, values in (("top_k", (5, 20)), ("top_p", (0.9, 0.5)), ("min_p", (0.05, 0.01))):
            if usable := in_range(backend, name, *values):
                return {name: usable[0], **warm}
        self.declared_and_not_shown("return_support", "declare top_k, top_p or min_p with a range that truncates")

    def _clear_cut(self, backend: Backend, name: str, temperature: float) -> tuple[list[int], Tensor, int]:
        """Return a prompt, its tempered log-probs [V], and how many ids a cut leaves that rounding cannot move."""
        if name not in backend.capabilities.sampling:
            not_applicable(f"sampling:{name} is not declared")
        cuts = []
        for prompt in backend.tokenize(OPENINGS).ids.tolist():
            logprobs = self._tempered(prompt, temperature)
            order = logprobs.sort(descending=True).values
            for k in gaps(logprobs, max(0.01, 4 * self.tolerance)):
                # A mass near 1 leaves top_p little room; a rounding there would keep one id more.
                if k > _MOST or k >= len(order) or float(order[:k].exp().sum()) > 0.95:
                    break
                if legal(backend, name, CUTS[name](logprobs, k)):
                    cuts.append((float(order[k - 1] - order[k]), prompt, logprobs, k))
        if not cuts:
            not_applicable(f"needs a cut by {name} that rounding cannot move")
        return max(cuts, key=lambda cut: cut[0])[1:]


#: The largest k of these tests, if the engine and the vocabulary allow it.
_MANY = 20


class TopIdPromises(ConformanceBase, theme="top_ids"):
    """Tests of `top_logprobs`, `score_top_k` and `score_top_ids`."""

    @needs("top_logprobs")
    @pytest.mark.parametrize("k", [1, 3, _MANY])
    def test_the_most_probable_ids_of_answers_are_the_models(self, backend: Backend, k: int) -> None:
        self._assert_top_of_answers(backend, k, "raw", {})

    @needs("top_logprobs")
    def test_top_ids_are_the_models_own_at_every_temperature(self, backend: Backend) -> None:
        self._assert_top_of_answers(backend, 3, "raw", {"temperature": temperatures(backend, 0.6)[0]})

    @needs("top_logprobs", "mode:processed")
    def test_processed_top_ids_are_those_of_the_temperature(self, backend: Backend) -> None:
        self._assert_top_of_answers(backend, 3, "processed", {"temperature": temperatures(backend, 0.6)[0]})

    @needs("top_logprobs", "mode:processed", "sampling:top_k")
    def test_processed_top_ids_end_where_truncation_cuts(self, backend: Backend) -> None:
        values = in_range(backend, "top_k", 5, 20)
        if not values:
            not_applicable("needs a top_k that truncates")
        self._assert_top_of_answers(backend, values[0] + 2, "processed", {"top_k": values[0]})

    @needs("score_top_k")
    @pytest.mark.parametrize("k", [1, 3, _MANY])
    def test_the_most_probable_ids_of_scores_are_the_models(self, backend: Backend, k: int) -> None:
        self._assert_top_of_scores(backend, self._at_most(backend, k, "score_top_k"), 1.0)

    @needs("score_top_k", "score_temperature")
    def test_top_ids_of_scores_are_those_of_the_temperature(self, backend: Backend) -> None:
        self._assert_top_of_scores(backend, 3, 0.6)

    @needs("score_top_ids")
    @_TEMPERATURES
    def test_given_ids_get_their_log_probs(self, backend: Backend, temperature: float) -> None:
        rows = self.rows(backend, 4, 6)
        (others,) = self.rows(backend, 40, seed=1)
        # Two ids at each position, of which the second is missing at some.
        named = [[[others[at], -1 if at % 2 else others[-1 - at]] for at in range(len(row))] for row in rows]
        top_ids = Ragged(torch.tensor([ids for row in named for ids in row]), torch.tensor([4, 6]))
        grad = backend.capabilities.gradients
        scores = backend.score_logprobs(rows, temperature=temperature, top_ids=top_ids, grad=grad)
        assert scores.top_ids is not None and scores.top_logprobs is not None
        assert scores.top_logprobs.values.requires_grad == grad
        self._assert_top_of_rows(rows, scores, temperature, named)

    # Helpers ---------------------------------------------------------------------------------------------------------

    def _assert_top_of_answers(
        self, backend: Backend, k: int, mode: Literal["raw", "processed"], sampling: dict[str, Any]
    ) -> None:
        if mode not in backend.capabilities.generation_modes:
            not_applicable(f"mode:{mode} is not declared")
        k = self._at_most(backend, k, "top_logprobs")
        prompts = [*self.rows(backend, 3, 11), *backend.tokenize(OPENINGS[:1]).ids.tolist()]
        sampling = seeded(backend, {**sampling, "max_new_tokens": _SHORT})
        batch = backend.generate(prompts, sampling, logprobs=mode, top_logprobs=k)
        params = SamplingParams.make(sampling)
        for row, answer in enumerate(batch.ids.tolist()):
            for step in range(len(answer)):
                own = self.next_logprobs([*prompts[row], *answer[:step]], 1.0)
                expected = own.double()
                if mode == "processed":
                    expected = sampled_from(own, params, answer[:step], backend.eos_token_ids)
                self._assert_position(batch, int(batch.ids.offsets[row]) + step, expected, f"row {row}, token {step}")

    def _assert_top_of_scores(self, backend: Backend, k: int, temperature: float) -> None:
        rows = [*self.rows(backend, 3, 5), *backend.tokenize(OPENINGS[:1]).ids.tolist()]
        scores = backend.score_logprobs(rows, temperature=temperature, top_k=k)
        self._assert_top_of_rows(rows, scores, temperature)

    def _assert_top_of_rows(
        self, rows: list[list[int]], scores: ScoreResult, temperature: float, named: list[list[list[int]]] | None = None
    ) -> None:
        for row, ids in enumerate(rows):
            for at in range(1, len(ids)):
                expected = (self.next_logprobs(ids[:at], 1.0).double() / temperature).log_softmax(-1)
                place, where = int(scores.logprobs.offsets[row]) + at, f"row {row}, position {at}"
                self._assert_position(scores, place, expected, where, None if named is None else named[row][at])

    def _assert_position(
        self,
        found: GenerateResult | ScoreResult,
        place: int,
        expected: Tensor,
        where: str,
        named: list[int] | None = None,
    ) -> None:
        """Assert that the ids at one position are the most probable ones, or the named ones, with their log-probs."""
        assert found.top_ids is not None and found.top_logprobs is not None and found.tail_log_mass is not None
        ids = found.top_ids.values[place].cpu()
        values = found.top_logprobs.values[place].detach().cpu().double()
        tail = float(found.tail_log_mass.values[place].detach().exp())
        there = ids >= 0
        others = expected.index_fill(0, ids[there], -torch.inf)
        if named is not None:
            assert ids.tolist() == named, where
        else:
            possible = int((expected > -torch.inf).sum())
            assert int(there.sum()) == min(len(ids), possible), f"{where}: {ids.tolist()}"
            # Ids whose log-probs differ by less than the tolerance may be swapped.
            assert float(others.max() - expected[ids[there]].min()) <= 2 * self.tolerance, f"{where}: {ids.tolist()}"
        self.assert_close(values[there], expected[ids[there]], where)
        rest = float(others.exp().sum())
        assert abs(tail - rest) <= self.tolerance, f"{where}: the others have {tail:.3g}, expected {rest:.3g}"

    def _at_most(self, backend: Backend, k: int, capability: str) -> int:
        return min(k, getattr(backend.capabilities, capability), self.vocab_size)

"""Samples follow the declared distribution: chi-square tests against the oracle's numbers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from corelm import Backend
from corelm.errors import CapabilityError
from corelm_testing.base import ConformanceBase, needs, not_applicable
from corelm_testing.reference import (
    MIN_P_VALUE,
    OPENINGS,
    enough_draws,
    gaps,
    min_p_of,
    p_value,
    reshaped,
    seeded,
    top_p_of,
)
from corelm_testing.trials import in_range, legal

#: For each parameter, the value that keeps the k likeliest ids of log-probs[V]. A temperature keeps all ids.
CUTS: dict[str, Callable[[Tensor, int], Any]] = {
    "temperature": lambda logprobs, k: 1.5,
    "top_k": lambda logprobs, k: k,
    "top_p": top_p_of,
    "min_p": min_p_of,
}


class DistributionPromises(ConformanceBase):
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
        temperatures = in_range(backend, "temperature", 0.6, 1.5)
        if not temperatures:
            not_applicable("needs a temperature other than 0 and 1")
        for temperature in temperatures:
            mass = reshaped(logprobs, temperature=temperature)
            draws = self.draws
            if temperature != temperatures[0]:
                # The first shows how exact the division is, the others that it is not capped, squared or turned over.
                wrong = (1.0, temperatures[0], temperature**2, 1 / temperature)
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

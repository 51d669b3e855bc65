"""The same seed gives the same answer, regardless of the other rows and samples of the call."""

from __future__ import annotations

from typing import Any

import torch

from corelm import Backend
from corelm.backend.arguments import answer_seeds
from corelm_testing.base import ConformanceBase, needs, not_applicable
from corelm_testing.reference import OPENINGS

NEW = 8


class SeedPromises(ConformanceBase):
    @needs("per_answer_seeds")
    def test_the_same_seed_gives_the_same_answers(self, backend: Backend) -> None:
        assert self._seeded_answers(backend, seed=7) == self._seeded_answers(backend, seed=7)

    @needs("per_answer_seeds")
    def test_another_seed_gives_other_answers(self, backend: Backend) -> None:
        assert self._seeded_answers(backend, seed=7) != self._seeded_answers(backend, seed=8)

    @needs("per_answer_seeds")
    def test_without_a_seed_torchs_generator_decides(self, backend: Backend) -> None:
        if backend.capabilities.seeds_are_costly:
            not_applicable("seeds_are_costly is declared")
        answers = []
        for seed in (1, 1, 2):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                answers.append(self._seeded_answers(backend))
        assert answers[0] == answers[1] != answers[2]

    def test_answers_without_a_seed_differ(self, backend: Backend) -> None:
        first, second = (self._seeded_answers(backend, self._seed_prompts(backend)) for _ in range(2))
        assert first != second, "two calls without a seed gave the same answers"

    @needs("per_answer_seeds")
    def test_an_answer_does_not_depend_on_the_other_rows(self, backend: Backend) -> None:
        prompts = self._seed_prompts(backend)
        seeds = answer_seeds(5, range(len(prompts)))
        together = self._seeded_answers(backend, prompts, seeds=seeds)
        backwards = self._seeded_answers(backend, prompts[::-1], seeds=seeds.flip(0))
        assert backwards[::-1] == together
        for row in (0, len(prompts) - 1):
            alone = self._seeded_answers(backend, [prompts[row]], seeds=seeds[row : row + 1])
            assert alone == [together[row]]

    @needs("per_answer_seeds")
    def test_an_answer_does_not_depend_on_the_number_of_samples(self, backend: Backend) -> None:
        few = self._seeded_answers(backend, seed=7, num_samples=2)
        many = self._seeded_answers(backend, seed=7, num_samples=5)
        assert few == [answer for row, answer in enumerate(many) if row % 5 < 2]

    @needs("per_answer_seeds")
    def test_the_samples_of_a_prompt_differ(self, backend: Backend) -> None:
        answers = self._seeded_answers(backend, [self._seed_prompts(backend)[0]], seed=7, num_samples=6)
        assert len(set(map(tuple, answers))) > 1

    @needs("per_answer_seeds")
    def test_asking_for_log_probs_changes_no_answer(self, backend: Backend) -> None:
        answers = self._seeded_answers(backend, seed=7)
        # At temperature 1, raw and processed log-probs are the same, so an engine with one mode serves both.
        for mode in ("raw", "processed") if backend.capabilities.generation_modes else ():
            batch = backend.generate(self._seed_prompts(backend), {"max_new_tokens": NEW, "seed": 7}, logprobs=mode)
            assert batch.ids.tolist() == answers

    def _seed_prompts(self, backend: Backend) -> list[list[int]]:
        return [*self.rows(backend, 3, 30, 1, 11), *backend.tokenize(OPENINGS[:2]).ids.tolist()]

    def _seeded_answers(
        self, backend: Backend, prompts: list[list[int]] | None = None, *, seeds: Any = None, **sampling: Any
    ) -> list[list[int]]:
        prompts = self._seed_prompts(backend) if prompts is None else prompts
        sampling = {"max_new_tokens": NEW, **sampling}
        return backend.generate(prompts, sampling, logprobs="none", seeds=seeds).ids.tolist()

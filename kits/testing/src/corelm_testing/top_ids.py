"""The most probable ids at each position, or given ones: their log-probs and the mass of all others."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from corelm import Backend, Ragged, SamplingParams
from corelm.spec import GenerateResult, ScoreResult
from corelm_testing.base import ConformanceBase, needs, not_applicable
from corelm_testing.reference import OPENINGS, sampled_from, seeded
from corelm_testing.trials import in_range, legal

NEW = 4
#: The largest k of these tests, if the engine and the vocabulary allow it.
_MANY = 20


class TopIdPromises(ConformanceBase):
    """Tests of `top_logprobs`, `score_top_k` and `score_top_ids`."""

    @needs("top_logprobs")
    @pytest.mark.parametrize("k", [1, 3, _MANY])
    def test_the_most_probable_ids_of_answers_are_the_models(self, backend: Backend, k: int) -> None:
        self._assert_top_of_answers(backend, k, "raw", {})

    @needs("top_logprobs")
    def test_top_ids_are_the_models_own_at_every_temperature(self, backend: Backend) -> None:
        self._assert_top_of_answers(backend, 3, "raw", self._warm(backend))

    @needs("top_logprobs", "mode:processed")
    def test_processed_top_ids_are_those_of_the_temperature(self, backend: Backend) -> None:
        self._assert_top_of_answers(backend, 3, "processed", self._warm(backend))

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
    @pytest.mark.parametrize("tempered", [False, True], ids=["own", "tempered"])
    def test_given_ids_get_their_log_probs(self, backend: Backend, tempered: bool) -> None:
        if tempered and not backend.capabilities.score_temperature:
            not_applicable("score_temperature is not declared")
        temperature = 0.6 if tempered else 1.0
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
        sampling = seeded(backend, {**sampling, "max_new_tokens": NEW})
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
            # Ids whose log-probs differ by less than the tolerance may change places.
            assert float(others.max() - expected[ids[there]].min()) <= 2 * self.tolerance, f"{where}: {ids.tolist()}"
        self.assert_close(values[there], expected[ids[there]], where)
        rest = float(others.exp().sum())
        assert abs(tail - rest) <= self.tolerance, f"{where}: the others have {tail:.3g}, expected {rest:.3g}"

    def _at_most(self, backend: Backend, k: int, capability: str) -> int:
        return min(k, getattr(backend.capabilities, capability), self.vocab_size)

    def _warm(self, backend: Backend) -> dict[str, Any]:
        if not legal(backend, "temperature", 0.6):
            not_applicable("needs a temperature other than 0 and 1")
        return {"temperature": 0.6}

"""Support replay: the ids that truncation has left, their mass, and scores that are normalised over given ids."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from corelm import Backend, Ragged
from corelm.errors import CapabilityError
from corelm.spec import GenerateResult
from corelm_testing.base import ConformanceBase, needs, not_applicable
from corelm_testing.distribution import CUTS
from corelm_testing.reference import OPENINGS, gaps, seeded
from corelm_testing.trials import in_range, legal

#: Ids that a cut leaves at most: enough to be a set, few enough to list.
_MOST = 40
NEW = 4


class SupportPromises(ConformanceBase):
    """Tests of `return_support` and `score_support`."""

    @needs("return_support")
    @pytest.mark.parametrize("tempered", [False, True], ids=["own", "tempered"])
    @pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
    def test_the_kept_ids_are_those_that_are_left(self, backend: Backend, name: str, tempered: bool) -> None:
        temperature = self._temperature(backend) if tempered else 1.0
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
        batch = self._sample_with_support(backend, prompts, {**sampling, "max_new_tokens": NEW, "num_samples": 2})
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
        sampling, seeds = {**self._truncated(backend), "max_new_tokens": NEW}, [4, 5, 6]
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
        batch = self._sample_with_support(backend, prompts, {**sampling, "max_new_tokens": NEW})
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
    @pytest.mark.parametrize("tempered", [False, True], ids=["own", "tempered"])
    def test_scores_are_normalised_over_the_given_ids(self, backend: Backend, tempered: bool) -> None:
        if tempered and not backend.capabilities.score_temperature:
            not_applicable("score_temperature is not declared")
        temperature = 0.6 if tempered else 1.0
        rows = self.rows(backend, 4, 6)
        others = self.rows(backend, 3, 5, 1, 8, 2, 6, 4, 3, 7, 5, seed=1)
        # The last set is empty: the whole vocabulary.
        sets: list[list[list[int]]] = [[[] for _ in row] for row in rows]
        places = [(row, at) for row, ids in enumerate(rows) for at in range(1, len(ids))][:-1]
        for (row, at), more in zip(places, others, strict=False):
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
        modes: tuple[Literal["processed", "none"], ...] = ("processed", "none")
        for mode in modes:
            try:
                return backend.generate(prompts, sampling, logprobs=mode, seeds=seeds, return_support=True)
            except CapabilityError as error:
                if error.capability != "generation_modes" or mode == "none":
                    raise
        raise AssertionError("unreachable")

    def _tempered(self, ids: list[int], temperature: float) -> Tensor:
        """Return float64[V]: the log-probs of the next id at a temperature."""
        return (self.next_logprobs(ids, 1.0).double() / temperature).log_softmax(-1)

    def _temperature(self, backend: Backend) -> float:
        values = in_range(backend, "temperature", 0.6, 1.5)
        if "temperature" not in backend.capabilities.sampling or not values:
            not_applicable("needs a temperature other than 0 and 1")
        return float(values[0])

    def _truncated(self, backend: Backend) -> dict[str, Any]:
        """Return sampling parameters that truncate, with a temperature if the engine has one."""
        for name, values in (("top_k", (5, 20)), ("top_p", (0.9, 0.5)), ("min_p", (0.05, 0.01))):
            usable = in_range(backend, name, *values) if name in backend.capabilities.sampling else []
            if usable:
                warm = {"temperature": 0.6} if legal(backend, "temperature", 0.6) else {}
                return {name: usable[0], **warm}
        self.declared_and_not_shown("return_support", "declare top_k, top_p or min_p with a range that truncates")

    def _clear_cut(self, backend: Backend, name: str, temperature: float) -> tuple[list[int], Tensor, int]:
        """Return a prompt, its tempered log-probs [V], and how many ids a cut leaves that rounding cannot move."""
        if name not in backend.capabilities.sampling:
            not_applicable(f"sampling:{name} is not declared")
        best: tuple[float, list[int], Tensor, int] | None = None
        for prompt in backend.tokenize(OPENINGS).ids.tolist():
            logprobs = self._tempered(prompt, temperature)
            order = logprobs.sort(descending=True).values
            for k in gaps(logprobs, max(0.01, 4 * self.tolerance)):
                # A mass near 1 leaves top_p little room; a rounding there would keep one id more.
                if k > _MOST or k >= len(order) or float(order[:k].exp().sum()) > 0.95:
                    break
                if not legal(backend, name, CUTS[name](logprobs, k)):
                    continue
                width = float(order[k - 1] - order[k])
                if best is None or width > best[0]:
                    best = (width, prompt, logprobs, k)
        if best is None:
            not_applicable(f"needs a cut by {name} that rounding cannot move")
        return best[1:]

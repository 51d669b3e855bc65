"""Every log-probability equals the oracle's, which is computed without the backend."""

from __future__ import annotations

from collections import ChainMap
from typing import Any, Literal

import torch

from corelm import Backend
from corelm.errors import CapabilityError
from corelm.tensors.categorical import log_probs
from corelm_testing.base import ConformanceBase, needs, not_applicable
from corelm_testing.reference import LONGEST, OPENINGS, seeded
from corelm_testing.trials import DECLARABLE, TRIALS, in_range, legal, use

#: Unsorted, so that a backend that sorts rows has to put them back.
LENGTHS = (9, 300, 1, 131, 2, 40, 3)
NEW = 8
#: The parameters that change the distribution that tokens are drawn from.
RESHAPING = tuple(name for name in DECLARABLE if TRIALS[name].effect in ("temperature", "truncation", "penalty", "ban"))


class LogProbPromises(ConformanceBase):
    # Log-probs of sampled tokens -------------------------------------------------------------------------------------

    @needs("generation_modes")
    def test_the_first_response_token_has_its_log_prob(self, backend: Backend) -> None:
        prompts = self._rows_of_all_lengths(backend)
        self.assert_true_answers(prompts, backend.generate(prompts, seeded(backend, {"max_new_tokens": 1})))

    @needs("generation_modes")
    def test_every_sampled_token_has_its_log_prob(self, backend: Backend) -> None:
        prompts = self._rows_of_all_lengths(backend)
        self.assert_true_answers(prompts, backend.generate(prompts, seeded(backend, {"max_new_tokens": NEW})))

    @needs("mode:raw", "sampling:temperature")
    def test_raw_log_probs_are_the_models_own_at_every_temperature(self, backend: Backend) -> None:
        for temperature in _temperatures(backend):
            self._assert_true(backend, "raw", temperature=temperature)

    @needs("mode:raw")
    def test_raw_log_probs_are_the_models_own_under_all_parameters_together(self, backend: Backend) -> None:
        reshaping = {name: found for name in RESHAPING if (found := use(backend, name))}
        if not reshaping:
            not_applicable("no parameter is declared that changes the distribution")
        while reshaping:
            try:
                return self._assert_true(backend, "raw", **ChainMap(*reshaping.values()))
            except CapabilityError as error:
                # The parameter is declared, but the engine refuses it in this combination.
                reshaping.pop(str(error.capability))
        raise AssertionError("the engine refuses every declared parameter")

    @needs("mode:processed", "sampling:temperature")
    def test_processed_log_probs_are_those_of_the_temperature(self, backend: Backend) -> None:
        for temperature in _temperatures(backend):
            self._assert_true(backend, "processed", temperature=temperature)

    @needs("mode:processed", "sampling:temperature")
    def test_processed_log_probs_of_greedy_answers_are_zero(self, backend: Backend) -> None:
        if not legal(backend, "temperature", 0.0):
            not_applicable("sampling:temperature is not declared with 0")
        sampling = {"max_new_tokens": NEW, "temperature": 0.0}
        batch = backend.generate(self._rows_of_all_lengths(backend), sampling, logprobs="processed")
        assert batch.logprobs is not None and not bool(batch.logprobs.values.any())

    @needs("mode:scaled", "sampling:temperature")
    def test_scaled_log_probs_are_the_processed_ones_if_only_the_temperature_is_set(self, backend: Backend) -> None:
        for temperature in _temperatures(backend):
            self._assert_true(backend, "processed", temperature=temperature)

    @needs("mode:scaled")
    def test_scaled_log_probs_are_the_raw_ones_at_temperature_1_under_every_truncation(self, backend: Backend) -> None:
        for sampling in _plain(backend):
            self._assert_true(backend, "raw", **sampling)

    # Log-probs of given tokens ---------------------------------------------------------------------------------------

    @needs("score")
    def test_every_token_but_the_first_is_scored(self, backend: Backend) -> None:
        rows = self._rows_of_all_lengths(backend)
        self.assert_true_scores(rows, backend.score_logprobs(rows))

    @needs("score_temperature")
    def test_scores_are_those_of_the_temperature(self, backend: Backend) -> None:
        rows = self._rows_of_all_lengths(backend)
        for temperature in (0.5, 1.7):
            batch = backend.score_logprobs(rows, temperature=temperature)
            assert batch.temperature == temperature
            self.assert_true_scores(rows, batch)

    @needs("score")
    def test_score_from_leaves_later_scores_unchanged(self, backend: Backend) -> None:
        rows = self.rows(backend, 12, 5, 9, 1)
        starts = [4, 1, 8, 1]
        batch = backend.score_logprobs(rows, score_from=starts)
        for row, start, found, scored in zip(rows, starts, batch.logprobs.split(), batch.scored.split(), strict=True):
            # Positions before `start` may or may not be scored.
            assert bool(scored[start:].all())
            self.assert_close(found[start:], self.oracle(row, 1.0)[start:], f"from position {start} on")

    @needs("argmax")
    def test_the_argmax_is_the_most_probable_id(self, backend: Backend) -> None:
        rows = self._rows_of_all_lengths(backend)
        starts = [max(1, len(row) // 2) for row in rows]
        asked = backend.score_logprobs(rows, score_from=starts, return_argmax=True)
        assert asked.argmax is not None
        for row, found, scored in zip(rows, asked.argmax.split(), asked.scored.split(), strict=True):
            assert bool((found[~scored] == -1).all())
            for position in scored.nonzero().flatten().tolist()[:4]:
                best = int(found[position])
                # No other id may be more probable. The given one and a few others are tried.
                others = {row[position], 0, 1, (best + 1) % self.vocab_size, self.vocab_size - 1}
                scores = {each: float(self.oracle([*row[:position], each], 1.0)[position]) for each in (best, *others)}
                assert scores[best] >= max(scores.values()) - 1e-3, (row, position, scores)
        assert backend.score_logprobs(rows).argmax is None

    @needs("score", "max_context")
    def test_a_row_may_be_as_long_as_the_context(self, backend: Backend) -> None:
        limit = backend.capabilities.max_context
        assert limit is not None
        if limit > LONGEST:
            self.declared_and_not_shown("max_context", f"open the backend with a context of at most {LONGEST} tokens")
        rows = self.rows(backend, limit, 2)
        self.assert_true_scores(rows, backend.score_logprobs(rows))

    @needs("score")
    def test_every_id_of_the_vocabulary_can_be_scored(self, backend: Backend) -> None:
        last = self.vocab_size - 1
        rows = [[0, last], *self.rows(backend, 3), [last, 0, last]]
        self.assert_true_scores(rows, backend.score_logprobs(rows))

    @needs("score", "logits")
    def test_logits_are_the_models_own_before_any_temperature(self, backend: Backend) -> None:
        rows = self.rows(backend, 7, 1, 20)
        temperature = 2.0 if backend.capabilities.score_temperature else 1.0
        batch = backend.score_logprobs(rows, return_logits=True, temperature=temperature)
        assert batch.logits is not None
        for row, logits in zip(rows, batch.logits.split(), strict=True):
            chosen = log_probs(logits.detach().cpu().float()).gather(-1, torch.tensor(row)[:, None])[:, 0]
            self.assert_close(chosen[1:], self.oracle(row, 1.0)[1:], "logits, normalised")

    @needs("score", "gradients")
    def test_scores_carry_gradients_only_if_asked(self, backend: Backend) -> None:
        rows = self.rows(backend, 6, 3)
        assert not backend.score_logprobs(rows).logprobs.values.requires_grad
        batch = backend.score_logprobs(rows, grad=True)
        self.assert_true_scores(rows, batch)
        parameters = list(_leaves(batch.logprobs.values.grad_fn))
        gradients = torch.autograd.grad(batch.logprobs.values.sum(), parameters)
        assert any(bool(gradient.any()) for gradient in gradients)

    # Helpers ---------------------------------------------------------------------------------------------------------

    def _assert_true(self, backend: Backend, mode: Literal["raw", "processed"], **sampling: Any) -> None:
        """Assert that the log-probs of answers are the oracle's, and say so."""
        prompts = self._rows_of_all_lengths(backend)
        batch = backend.generate(prompts, seeded(backend, {"max_new_tokens": NEW, **sampling}), logprobs=mode)
        temperature = 1.0 if mode == "raw" else sampling["temperature"]
        assert (batch.mode, batch.temperature, batch.support) == (mode, temperature, "full")
        self.assert_true_answers(prompts, batch)

    def _rows_of_all_lengths(self, backend: Backend) -> list[list[int]]:
        """Return rows of 1 to 300 tokens, shorter if needed to leave room for an answer in the context."""
        limit = backend.capabilities.max_context or max(LENGTHS) + NEW
        random = self.rows(backend, *(min(length, limit - NEW) for length in LENGTHS))
        return [*random, *backend.tokenize(OPENINGS).ids.tolist()]


def _leaves(node: Any) -> dict[torch.Tensor, None]:
    """Return the parameters that a result depends on, in the order of the walk through its graph."""
    found: dict[torch.Tensor, None] = {}
    seen, todo = set(), [node]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found[node.variable] = None
        todo += [parent for parent, _ in node.next_functions]
    return found


def _plain(backend: Backend) -> list[dict[str, Any]]:
    """Return samplings: temperature 1, greedy, and temperature 1 with each truncation, if declared."""
    greedy = [{"temperature": 0.0}] if legal(backend, "temperature", 0.0) else []
    cuts = [use(backend, name) for name in RESHAPING if TRIALS[name].effect == "truncation"]
    return [{}, *greedy, *(cut for cut in cuts if cut)]


def _temperatures(backend: Backend) -> list[float]:
    """Return temperatures other than 0 and 1; not applicable if the backend declares none."""
    found = in_range(backend, "temperature", 0.6, 1.7)
    return found or not_applicable("needs a temperature other than 0 and 1")

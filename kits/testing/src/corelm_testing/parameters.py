"""A declared sampling parameter has its effect; an undeclared one is refused, never ignored silently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from corelm import Backend
from corelm.spec import FIELDS
from corelm.spec.sampling import EVERY_ENGINE
from corelm_testing.base import ConformanceBase, needs
from corelm_testing.reference import OPENINGS, repeatable
from corelm_testing.trials import in_range, legal

NEW = 10


class ParameterPromises(ConformanceBase):
    # Declarations ----------------------------------------------------------------------------------------------------

    def test_only_known_parameters_are_declared(self, backend: Backend) -> None:
        assert set(backend.capabilities.sampling) <= set(FIELDS) - EVERY_ENGINE

    def test_every_declared_parameter_is_taken(self, backend: Backend) -> None:
        # `test_engine_kwargs_change_answers` is the test of engine_kwargs.
        for name in sorted(set(backend.capabilities.sampling) - {"engine_kwargs"}):
            sampling = {"max_new_tokens": 4, **self.sampling_of(backend, name)}
            # Whole characters, because vLLM looks for stop strings in a prompt that ends in half of one.
            prompts = backend.tokenize(OPENINGS[:1]).ids
            assert len(backend.generate(prompts, sampling, logprobs="none").ids) == 1, name

    # Effects ---------------------------------------------------------------------------------------------------------

    @needs("sampling:engine_kwargs")
    def test_engine_kwargs_change_answers(self, backend: Backend) -> None:
        sampling = self.sampling_of(backend, "engine_kwargs")
        plain = {name: value for name, value in sampling.items() if name != "engine_kwargs"}
        answers = []
        for given in (plain, sampling):
            given = {"max_new_tokens": NEW, "ignore_eos": True, **given}
            # Greedy or with a seed, so that nothing but engine_kwargs can change the answers.
            given = given if "temperature" in given else repeatable(backend, given)
            answers.append(backend.generate(self._penalty_prompts(backend), given, logprobs="none").ids.tolist())
        assert answers[0] != answers[1], "engine_kwargs changed no answer"

    @needs("sampling:presence_penalty")
    def test_a_presence_penalty_is_subtracted_once_per_id(self, backend: Backend) -> None:
        self._assert_penalised(backend, "presence_penalty", lambda count, penalty: penalty * (count > 0))

    @needs("sampling:frequency_penalty")
    def test_a_frequency_penalty_is_subtracted_per_occurrence(self, backend: Backend) -> None:
        self._assert_penalised(backend, "frequency_penalty", lambda count, penalty: penalty * count)

    @needs("sampling:repetition_penalty")
    def test_a_repetition_penalty_disfavours_the_ids_of_prompt_and_answer(self, backend: Backend) -> None:
        (penalty,) = self._penalties(backend, "repetition_penalty", 1.5)[:1]
        prompts = self._penalty_prompts(backend)
        moved = 0
        for prompt, answer in zip(prompts, self._penalised_answers(backend, prompts, penalty, NEW), strict=True):
            for step, token in enumerate(answer):
                moved += self._assert_order_is_kept([*prompt, *answer[:step]], token, penalty)
        assert moved, "the penalty never changed the likeliest id"

    @needs("sampling:repetition_penalty")
    def test_a_repetition_penalty_counts_the_whole_prompt(self, backend: Backend) -> None:
        # Below 1 the penalty favours repeated ids, and the likeliest of them most. Where that one is the first id of
        # the prompt, an engine that does not count it takes another repeated id. Above 1, that is so where the first
        # id is the second likeliest.
        penalties = self._penalties(backend, "repetition_penalty", 0.05, 20.0)
        first, last = 0, -1
        limit = backend.capabilities.max_context or 512
        rows = self.rows(backend, *(length for length in (4, 24, 150) if length < limit))
        for penalty, row, place in product(penalties, rows, (first, last)):
            ranked = self.next_logprobs(row, 1.0).argsort(descending=True).tolist()
            best, second = [token for token in ranked if token not in row][:2]
            prompt = list(row)
            prompt[place] = best if penalty < 1 else second
            prompt[1] = row[1] if penalty < 1 else best
            (answer,) = self._penalised_answers(backend, [prompt], penalty, 1)
            self._assert_order_is_kept(prompt, answer[0], penalty)

    @needs("sampling:num_beams")
    def test_beams_find_answers_at_least_as_likely_as_greedy_ones(self, backend: Backend) -> None:
        prompts = self._penalty_prompts(backend)
        sampling = {"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True}
        totals = []
        for num_beams in (1, 4):
            batch = backend.generate(prompts, {**sampling, "num_beams": num_beams}, logprobs="none")
            answers = zip(prompts, batch.ids.tolist(), strict=True)
            totals.append(sum(float(self.oracle([*p, *answer], 1.0)[len(p) :].sum()) for p, answer in answers))
        assert totals[1] > totals[0]

    @needs("sampling:num_beams")
    def test_beams_search_and_do_not_sample(self, backend: Backend) -> None:
        prompts = self._penalty_prompts(backend)
        sampling = {"num_beams": 4, "max_new_tokens": NEW, "ignore_eos": True}
        greedy = {"temperature": 0.0} if legal(backend, "temperature", 0.0) else {}
        # At the default temperature, an engine that samples finds other answers.
        first, second, third = (
            backend.generate(prompts, {**sampling, **more}, logprobs="none").ids.tolist() for more in ({}, {}, greedy)
        )
        assert first == second == third, "searches of the same prompts found different answers"

    @needs("sampling:length_penalty")
    def test_a_larger_length_penalty_favours_longer_answers(self, backend: Backend) -> None:
        short, long = (self._beam_length(backend, length_penalty=penalty) for penalty in (-8.0, 8.0))
        assert short < long

    @needs("sampling:early_stopping")
    def test_early_stopping_ends_a_search_that_would_go_on(self, backend: Backend) -> None:
        if "length_penalty" not in backend.capabilities.sampling:
            self.declared_and_not_shown("early_stopping", "declare length_penalty as well")
        # With a penalty that favours length, a search that goes on finds longer answers.
        early, late = (self._beam_length(backend, length_penalty=8.0, early_stopping=stop) for stop in (True, False))
        assert early < late

    # Helpers ---------------------------------------------------------------------------------------------------------

    def _penalties(self, backend: Backend, name: str, *preferred: float) -> list[float]:
        """Return values of a penalty for greedy decoding, which shows its effect without chance."""
        found = in_range(backend, name, *preferred)
        if not found or not legal(backend, "temperature", 0.0):
            self.declared_and_not_shown(name, "declare temperature 0, so that its effect can be told from chance")
        return found

    def _penalised_answers(
        self, backend: Backend, prompts: list[list[int]], penalty: float, length: int
    ) -> list[list[int]]:
        """Return greedy answers under a repetition penalty."""
        sampling = {"temperature": 0.0, "max_new_tokens": length, "repetition_penalty": penalty, "ignore_eos": True}
        return backend.generate(prompts, sampling, logprobs="none").ids.tolist()

    def _assert_order_is_kept(self, context: list[int], token: int, penalty: float) -> bool:
        """Assert that a repetition penalty allows this greedy token, and return whether it changed the choice.

        By how much it changes a logit depends on the logit's sign, which log-probs do not show. But the order among
        repeated ids and the order among new ids stay the same. Above 1 no repeated id gains on a new one, and below 1
        no new id on a repeated one.
        """
        logprobs = self.next_logprobs(context, 1.0)
        seen = torch.zeros(self.vocab_size, dtype=torch.bool).index_fill(0, torch.tensor(context), True)
        best_seen, best_new = logprobs[seen].max(), logprobs[~seen].max()
        own, other = (best_seen, best_new) if seen[token] else (best_new, best_seen)
        favoured = bool(seen[token]) == (penalty < 1)
        rival = own if favoured else torch.maximum(own, other)
        assert float(rival - logprobs[token]) <= 2 * self.tolerance, (
            f"under a repetition penalty of {penalty:g}, id {token} was taken after {len(context)} tokens that end in "
            f"{context[-4:]}; its log-prob is {float(logprobs[token]):.4g}, that of another id {float(rival):.4g}"
        )
        return favoured and bool(other > own + 2 * self.tolerance)

    def _beam_length(self, backend: Backend, **options: Any) -> int:
        """Return the total length of the answers if every second id ends an answer."""
        stops = {"ignore_eos": True, "stop_token_ids": list(range(0, self.vocab_size, 2))}
        sampling = {"num_beams": 4, "temperature": 0.0, "max_new_tokens": NEW, **stops, **options}
        batch = backend.generate(self._penalty_prompts(backend), sampling, logprobs="none")
        return int(batch.ids.lengths.sum())

    def _penalty_prompts(self, backend: Backend) -> list[list[int]]:
        return [*self.rows(backend, 5, 24), *backend.tokenize(OPENINGS[:4]).ids.tolist()]

    def _assert_penalised(self, backend: Backend, name: str, amount: Callable[[Tensor, float], Tensor]) -> None:
        """Assert that greedy answers take the likeliest id after `amount` is subtracted, and that some ids change."""
        penalties = self._penalties(backend, name, -1.5, 1.5)
        prompts, changed = self._penalty_prompts(backend), 0
        for penalty in penalties:
            sampling = {"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True, name: penalty}
            answers = backend.generate(prompts, sampling, logprobs="none").ids.tolist()
            for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
                for step, token in enumerate(answer):
                    logprobs = self.next_logprobs([*prompt, *answer[:step]], 1.0)
                    count = torch.zeros(self.vocab_size)
                    for earlier, times in Counter(answer[:step]).items():
                        count[earlier] = times
                    penalised = logprobs - amount(count, penalty)
                    assert float(penalised.max() - penalised[token]) <= 2 * self.tolerance, (
                        f"{name}={penalty}, row {row}, token {step}: id {token}, but id {int(penalised.argmax())} leads"
                    )
                    changed += bool(logprobs.max() - logprobs[token] > 2 * self.tolerance)
        assert changed, f"{name} changed no answer"

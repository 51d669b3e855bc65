"""A declared sampling parameter has its effect; an undeclared one is refused, never ignored silently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from corelm import Backend
from corelm.errors import CapabilityError, InvalidRequestError
from corelm.spec.sampling import EVERY_ENGINE, FIELDS
from corelm.testing.base import ConformanceBase, needs, not_applicable
from corelm.testing.reference import OPENINGS, legal

#: Every parameter that an engine can declare, with a value that is not the default.
VALUES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.05},
    "min_new_tokens": {"min_new_tokens": 2},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "stop": {"stop": ["\n\n"]},
    "num_beams": {"num_beams": 2, "temperature": 0.0},
    "length_penalty": {"num_beams": 2, "temperature": 0.0, "length_penalty": 2.0},
    "early_stopping": {"num_beams": 2, "temperature": 0.0, "early_stopping": True},
    "engine_kwargs": {"engine_kwargs": {"an_option_of_another_engine": 1}},
}
NEW = 10


class ParameterPromises(ConformanceBase):
    # Declarations ----------------------------------------------------------------------------------------------------

    def test_only_known_parameters_are_declared(self, backend: Backend) -> None:
        assert set(backend.capabilities.sampling) <= set(FIELDS) - EVERY_ENGINE

    def test_every_declared_parameter_is_taken(self, backend: Backend) -> None:
        # Each engine defines its own engine_kwargs, so the kit cannot test them.
        for name in sorted(set(backend.capabilities.sampling) - {"engine_kwargs"}):
            if all(_declared(backend, key, value) for key, value in VALUES[name].items()):
                batch = backend.generate(self.rows(backend, 4), {**VALUES[name], "max_new_tokens": 3}, logprobs="none")
                assert len(batch.ids) == 1, name

    def test_every_parameter_that_is_not_declared_is_refused(self, backend: Backend) -> None:
        for name in sorted(set(VALUES) - set(backend.capabilities.sampling)):
            with pytest.raises(CapabilityError) as error:
                backend.generate(self.rows(backend, 4), {**VALUES[name], "max_new_tokens": 3}, logprobs="none")
            assert error.value.capability in VALUES[name], name
        if not backend.capabilities.per_answer_seeds:
            with pytest.raises(CapabilityError) as error:
                backend.generate(self.rows(backend, 4), {"seed": 1, "max_new_tokens": 3}, logprobs="none")
            assert error.value.capability == "per_answer_seeds"

    def test_a_value_outside_the_declared_range_is_refused(self, backend: Backend) -> None:
        spans = {name: span for name, span in backend.capabilities.sampling.items() if span is not None}
        if not spans:
            not_applicable("a parameter with a range")
        for name, (_, high) in spans.items():
            with pytest.raises(InvalidRequestError) as error:
                backend.generate(self.rows(backend, 4), {name: high + 1, "max_new_tokens": 3}, logprobs="none")
            assert error.value.field == name

    # Effects ---------------------------------------------------------------------------------------------------------

    @needs("sampling:temperature", "sampling:presence_penalty")
    def test_a_presence_penalty_is_subtracted_once_per_id(self, backend: Backend) -> None:
        self._assert_penalised(backend, "presence_penalty", lambda count, penalty: penalty * (count > 0))

    @needs("sampling:temperature", "sampling:frequency_penalty")
    def test_a_frequency_penalty_is_subtracted_per_occurrence(self, backend: Backend) -> None:
        self._assert_penalised(backend, "frequency_penalty", lambda count, penalty: penalty * count)

    @needs("sampling:temperature", "sampling:repetition_penalty")
    def test_a_repetition_penalty_disfavours_the_ids_of_prompt_and_answer(self, backend: Backend) -> None:
        if not legal(backend, "temperature", 0.0):
            not_applicable("sampling:temperature=0")
        prompts = self._penalty_prompts(backend)
        sampling = {"temperature": 0.0, "max_new_tokens": NEW, "repetition_penalty": 1.5, "ignore_eos": True}
        answers = backend.generate(prompts, sampling, logprobs="none").ids.tolist()
        avoided = 0
        for prompt, answer in zip(prompts, answers, strict=True):
            for step, token in enumerate(answer):
                context = [*prompt, *answer[:step]]
                logprobs = self.next_logprobs(context, 1.0)
                seen = torch.zeros(self.vocab_size, dtype=torch.bool).index_fill(0, torch.tensor(context), True)
                # The size of the penalty depends on the sign of the logit, which log-probs do not show. But the order
                # among seen ids and the order among new ids stay the same, and no seen id gains on a new one.
                best_seen, best_new = logprobs[seen].max(), logprobs[~seen].max()
                rivals = best_new if not seen[token] else torch.maximum(best_seen, best_new)
                assert float(rivals - logprobs[token]) <= 2 * self.tolerance, f"step {step}"
                avoided += bool(best_seen > best_new + 2 * self.tolerance) and not bool(seen[token])
        assert avoided, "the penalty never made the engine avoid a repeated id"

    @needs("sampling:num_beams", "sampling:temperature")
    def test_beams_find_answers_at_least_as_likely_as_greedy_ones(self, backend: Backend) -> None:
        prompts = self._penalty_prompts(backend)
        sampling = {"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True}
        totals = []
        for num_beams in (1, 4):
            batch = backend.generate(prompts, {**sampling, "num_beams": num_beams}, logprobs="none")
            answers = zip(prompts, batch.ids.tolist(), strict=True)
            totals.append(sum(float(self.oracle([*p, *answer], 1.0)[len(p) :].sum()) for p, answer in answers))
        assert totals[1] > totals[0]

    @needs("sampling:num_beams", "sampling:temperature", "sampling:length_penalty")
    def test_a_larger_length_penalty_favours_longer_answers(self, backend: Backend) -> None:
        short, long = (self._beam_length(backend, length_penalty=penalty) for penalty in (-8.0, 8.0))
        assert short < long

    @needs("sampling:num_beams", "sampling:temperature", "sampling:length_penalty", "sampling:early_stopping")
    def test_early_stopping_ends_a_search_that_would_go_on(self, backend: Backend) -> None:
        # With a penalty that favours length, a search that goes on finds longer answers.
        early, late = (self._beam_length(backend, length_penalty=8.0, early_stopping=stop) for stop in (True, False))
        assert early < late

    @needs("sampling:num_beams")
    def test_log_probs_of_beams_are_refused(self, backend: Backend) -> None:
        with pytest.raises(CapabilityError) as error:
            backend.generate(self.rows(backend, 4), {**VALUES["num_beams"], "max_new_tokens": 3}, logprobs="raw")
        assert error.value.capability == "num_beams"

    # Helpers ---------------------------------------------------------------------------------------------------------

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
        penalties = [value for value in (-1.5, 1.5) if legal(backend, name, value)]
        if not penalties or not legal(backend, "temperature", 0.0):
            not_applicable(f"sampling:{name}=1.5 with temperature=0")
        prompts, changed = self._penalty_prompts(backend), 0
        for penalty in penalties:
            sampling = {"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True, name: penalty}
            answers = backend.generate(prompts, sampling, logprobs="none").ids.tolist()
            for prompt, answer in zip(prompts, answers, strict=True):
                for step, token in enumerate(answer):
                    logprobs = self.next_logprobs([*prompt, *answer[:step]], 1.0)
                    count = torch.zeros(self.vocab_size)
                    for earlier, times in Counter(answer[:step]).items():
                        count[earlier] = times
                    penalised = logprobs - amount(count, penalty)
                    assert float(penalised.max() - penalised[token]) <= 2 * self.tolerance, f"{penalty}, step {step}"
                    changed += bool(logprobs.max() - logprobs[token] > 2 * self.tolerance)
        assert changed, f"{name} changed no answer"


def _declared(backend: Backend, name: str, value: Any) -> bool:
    is_number = isinstance(value, (int, float))
    return legal(backend, name, value) if is_number else name in backend.capabilities.sampling

"""New weights take effect once they are loaded, and every row reports its weight version."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from tensordict import TensorDict

from corelm import Backend, LLMPolicy
from corelm.errors import CapabilityError, InvalidRequestError
from corelm_testing.base import ConformanceBase, needs, not_applicable, require

if TYPE_CHECKING:
    from corelm_testing.base import Oracle


class WeightPromises(ConformanceBase):
    @pytest.fixture(scope="class")
    @classmethod
    def updated(cls, backend: Backend, open_backend: Callable[[], Backend]) -> Iterator[tuple[Backend, Oracle]]:
        """Open another backend, use it, load weights "tuned" into it; yield it and the oracle of those weights."""
        require(backend, "update_weights")
        case = cls()
        weights, oracle = case.new_weights()
        row = case.rows(backend, 40)[0]
        apart = float((oracle(row, 1.0) - case.oracle(row, 1.0))[1:].abs().max())
        assert apart > case.tolerance, "the new weights equal the old ones, so no test could tell them apart"
        with open_backend() as other:
            # Fill the caches: a cache that is not cleared with the weights would hold these rows.
            other.generate(case.rows(other, 5, 40), {"max_new_tokens": 4}, logprobs="none")
            if other.capabilities.score:
                other.score_logprobs(case.rows(other, 5, 40))
            try:
                assert other.update_weights(weights, version="tuned") == "tuned"
            except CapabilityError as error:
                remedy = f"return weights in a form that the engine takes from new_weights; it said: {error}"
                case.declared_and_not_shown("update_weights", remedy)
            yield other, oracle

    def test_the_first_weights_are_version_0(self, backend: Backend) -> None:
        assert backend.weight_version == "0"
        answers = backend.generate(self.rows(backend, 3, 4), {"max_new_tokens": 2}, logprobs="none")
        assert answers.weight_versions == ("0", "0")

    def test_every_row_reports_the_weights_it_came_from(self, updated: tuple[Backend, Oracle]) -> None:
        backend, _ = updated
        assert backend.weight_version == "tuned"
        answers = backend.generate(self.rows(backend, 3, 4), {"max_new_tokens": 2}, logprobs="none")
        assert answers.weight_versions == ("tuned", "tuned")
        if backend.capabilities.score:
            assert backend.score_logprobs(self.rows(backend, 3, 4)).weight_versions == ("tuned", "tuned")

    def test_generating_uses_the_new_weights(self, updated: tuple[Backend, Oracle]) -> None:
        backend, oracle = updated
        if not backend.capabilities.generation_modes:
            if not backend.capabilities.score:
                self.declared_and_not_shown("update_weights", "return log-probs, which show the weights")
            not_applicable("generation_modes is not declared")
        prompts = self.rows(backend, 5, 40)
        self.assert_true_answers(prompts, backend.generate(prompts, {"max_new_tokens": 6}), oracle)

    @needs("score")
    def test_scoring_uses_the_new_weights(self, updated: tuple[Backend, Oracle]) -> None:
        backend, oracle = updated
        rows = self.rows(backend, 5, 40)
        self.assert_true_scores(rows, backend.score_logprobs(rows), oracle)

    @needs("score")
    def test_the_containers_carry_the_version(self, updated: tuple[Backend, Oracle]) -> None:
        backend, _ = updated
        policy = LLMPolicy(backend, input_mode="tokens", generate=False)
        out = policy(TensorDict(tokens=torch.tensor(self.rows(backend, 4, 4)), batch_size=[2]))
        assert out["log_probs"].provenance.weight_version == "tuned"

    @needs("update_weights", "score")
    def test_weights_that_do_not_fit_change_nothing(self, updated: tuple[Backend, Oracle]) -> None:
        backend, oracle = updated
        with pytest.raises((InvalidRequestError, CapabilityError)):
            backend.update_weights({"no.such.parameter": torch.zeros(3)}, version="wrong")
        assert backend.weight_version == "tuned"
        rows = self.rows(backend, 6)
        self.assert_true_scores(rows, backend.score_logprobs(rows), oracle)

    def test_the_owner_may_say_that_the_weights_have_changed(self, updated: tuple[Backend, Oracle]) -> None:
        backend, _ = updated
        # The same label, as other tests share the backend.
        assert backend.weights_changed("tuned") == "tuned" == backend.weight_version
        answers = backend.generate(self.rows(backend, 3, 4), {"max_new_tokens": 2}, logprobs="none")
        assert answers.weight_versions == ("tuned", "tuned")

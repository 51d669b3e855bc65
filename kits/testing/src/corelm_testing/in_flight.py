"""Weights that change in the middle of an answer: every token says which weights it came from, and it is true."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from corelm import Backend
from corelm.spec import GenerateResult
from corelm_testing.base import ConformanceBase, require

if TYPE_CHECKING:
    from corelm.spec import VersionRuns
    from corelm_testing.base import Oracle

    #: Prompts, their answers, the oracle of the new weights, and answers to the prompts after the update.
    InFlight = tuple[list[list[int]], GenerateResult, Oracle, GenerateResult]

#: How often an engine may be done with an answer before the update comes.
_TRIES = 3
#: The longest answer, in tokens.
_LONGEST = 256
#: Tokens that a caller reads before it updates the weights.
_READ = 3


class InFlightPromises(ConformanceBase):
    """Tests of `updates_in_flight`.

    Attributes:
        recomputes_in_flight: whether the engine computes what it has cached anew after an update in flight. Its tokens
            are then those of the new weights alone. If it keeps the cache, they depend on both.
    """

    recomputes_in_flight: bool = True

    @pytest.fixture(scope="class")
    @classmethod
    def in_flight(cls, backend: Backend, open_backend: Callable[[], Backend]) -> InFlight:
        """Update weights in the middle of answers."""
        require(backend, "updates_in_flight")
        case = cls()
        if not (backend.capabilities.streaming and backend.capabilities.generation_modes):
            case.declared_and_not_shown("updates_in_flight", "declare streaming, and return log-probs")
        weights, oracle = case.new_weights()
        for _ in range(_TRIES):
            with open_backend() as other:
                prompts = case.rows(other, 5, 9)
                room = (other.capabilities.max_context or 10 * _LONGEST) - 9
                sampling = {"max_new_tokens": min(_LONGEST, room), "ignore_eos": True}
                with other.stream(prompts, sampling) as stream:
                    read, updated = 0, False
                    for chunk in stream:
                        read += len(chunk.ids)
                        if read >= _READ and not updated:
                            assert other.update_weights(weights, version="tuned", when="now") == "tuned"
                            updated = True
                    answers = stream.result
                if any(len(runs) > 1 for runs in answers.version_runs or ()):
                    return prompts, answers, oracle, other.generate(prompts, {"max_new_tokens": 4})
        case.declared_and_not_shown("updates_in_flight", "return version_runs of answers that an update comes into")

    def test_tokens_before_an_update_are_those_of_the_old_weights(self, in_flight: InFlight) -> None:
        prompts, answers, *_ = in_flight
        for row, runs in enumerate(_runs(answers)):
            versions = [version for version, _ in runs]
            assert versions in (["0"], ["tuned"], ["0", "tuned"], ["tuned", "tuned"]), f"row {row}"
            if runs[0][0] == "0":
                end = runs[1][1] if len(runs) > 1 else int(answers.ids.lengths[row])
                self._assert_true(prompts, answers, row, slice(0, end), self.oracle)

    def test_tokens_after_an_update_are_those_of_the_new_weights(self, in_flight: InFlight) -> None:
        prompts, answers, oracle, _ = in_flight
        for row, runs in enumerate(_runs(answers)):
            version, start = runs[-1]
            if version != "tuned":
                continue
            # A row that began after the update has cached nothing with the old weights.
            if self.recomputes_in_flight or start == 0:
                self._assert_true(prompts, answers, row, slice(start, None), oracle)
            else:
                found, expected = self._both(prompts, answers, row, self.oracle)
                apart = float((found - expected)[start : start + _READ].abs().max())
                assert apart > self.tolerance, f"row {row}: tokens from {start} on are those of the old weights"

    def test_an_answer_that_begins_after_an_update_is_of_the_new_weights(self, in_flight: InFlight) -> None:
        prompts, _, oracle, later = in_flight
        assert later.weight_versions == ("tuned",) * len(prompts) and later.version_runs is None
        self.assert_true_answers(prompts, later, oracle)

    # Helpers ---------------------------------------------------------------------------------------------------------

    def _both(self, prompts: list[list[int]], answers: GenerateResult, row: int, oracle: Oracle) -> tuple:  # type: ignore[type-arg]
        """Return the log-probs of an answer, and those of an oracle."""
        assert answers.logprobs is not None
        ids = [*prompts[row], *answers.ids.tolist()[row]]
        return answers.logprobs.split()[row].cpu(), oracle(ids, 1.0)[len(prompts[row]) :]

    def _assert_true(
        self, prompts: list[list[int]], answers: GenerateResult, row: int, tokens: slice, oracle: Oracle
    ) -> None:
        found, expected = self._both(prompts, answers, row, oracle)
        self.assert_close(found[tokens], expected[tokens], f"row {row}, tokens {tokens.start} to {tokens.stop}")


def _runs(answers: GenerateResult) -> tuple[VersionRuns, ...]:
    assert answers.version_runs is not None
    return answers.version_runs

"""Weights that are loaded, put to sleep or adapted are those that answer, and every row names them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from corelm import Backend, LLMPolicy
from corelm.errors import BackendAsleepError, CapabilityError, InvalidRequestError
from corelm.spec import GenerateResult
from corelm_testing.base import ConformanceBase, needs, not_applicable, require

if TYPE_CHECKING:
    from corelm.spec import Adapter
    from corelm_testing.base import Oracle


class WeightPromises(ConformanceBase, theme="weights"):
    """New weights take effect once they are loaded, and every row reports its weight version."""

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


#: How often an engine may be done with an answer before the update comes.
_TRIES = 3
#: The longest answer, in tokens.
_LONGEST = 256
#: Tokens that a caller reads before it updates the weights.
_READ = 3


class InFlight(NamedTuple):
    """Prompts, answers that an update came into, the oracle of the new weights, and answers after that."""

    prompts: list[list[int]]
    answers: GenerateResult
    oracle: Oracle
    later: GenerateResult

    def log_probs(self, row: int, oracle: Oracle) -> tuple[Tensor, Tensor]:
        """Return the log-probs of an answer, and those of an oracle."""
        assert self.answers.logprobs is not None
        prompt, answer = self.prompts[row], self.answers.ids.tolist()[row]
        return self.answers.logprobs.split()[row].cpu(), oracle([*prompt, *answer], 1.0)[len(prompt) :]


class InFlightPromises(ConformanceBase, theme="in_flight"):
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
                    return InFlight(prompts, answers, oracle, other.generate(prompts, {"max_new_tokens": 4}))
        case.declared_and_not_shown("updates_in_flight", "return version_runs of answers that an update comes into")

    def test_tokens_before_an_update_are_those_of_the_old_weights(self, in_flight: InFlight) -> None:
        for row, runs in enumerate(in_flight.answers.version_runs or ()):
            versions = [version for version, _ in runs]
            assert versions in (["0"], ["tuned"], ["0", "tuned"], ["tuned", "tuned"]), f"row {row}"
            if runs[0][0] == "0":
                self._assert_from(self.oracle, in_flight, row, 0, runs[1][1] if len(runs) > 1 else None)

    def test_tokens_after_an_update_are_those_of_the_new_weights(self, in_flight: InFlight) -> None:
        for row, runs in enumerate(in_flight.answers.version_runs or ()):
            version, start = runs[-1]
            if version != "tuned":
                continue
            # A row that began after the update has cached nothing with the old weights.
            if self.recomputes_in_flight or start == 0:
                self._assert_from(in_flight.oracle, in_flight, row, start, None)
            else:
                found, expected = in_flight.log_probs(row, self.oracle)
                apart = float((found - expected)[start : start + _READ].abs().max())
                assert apart > self.tolerance, f"row {row}: tokens from {start} on are those of the old weights"

    def test_an_answer_that_begins_after_an_update_is_of_the_new_weights(self, in_flight: InFlight) -> None:
        prompts, later = in_flight.prompts, in_flight.later
        assert later.weight_versions == ("tuned",) * len(prompts) and later.version_runs is None
        self.assert_true_answers(prompts, later, in_flight.oracle)

    def _assert_from(self, oracle: Oracle, in_flight: InFlight, row: int, start: int, stop: int | None) -> None:
        found, expected = in_flight.log_probs(row, oracle)
        self.assert_close(found[start:stop], expected[start:stop], f"row {row}, tokens {start} to {stop or 'the end'}")


class SleepPromises(ConformanceBase, theme="sleeping"):
    """An engine that slept answers as before, and one that slept without its weights answers with the new ones."""

    @needs("sleep_levels")
    def test_an_engine_that_slept_has_its_weights_and_their_label(self, open_backend: Callable[[], Backend]) -> None:
        with open_backend() as backend:
            if 1 not in backend.capabilities.sleep_levels:
                not_applicable("sleep level 1 is not declared")
            self.assert_weights(backend, self.oracle, "sleep_levels")
            backend.sleep(level=1)
            with pytest.raises(BackendAsleepError):
                backend.generate(self.rows(backend, 3), {"max_new_tokens": 1}, logprobs="none")
            assert backend.health() and backend.tokenize("awake").ids.lengths.sum() > 0
            backend.wake()
            assert backend.weight_version == "0"
            self.assert_weights(backend, self.oracle, "sleep_levels")

    @needs("sleep_levels", "update_weights")
    def test_weights_loaded_before_the_cache_wakes_are_in_force(self, open_backend: Callable[[], Backend]) -> None:
        weights, oracle = self.new_weights()
        with open_backend() as backend:
            levels = sorted(backend.capabilities.sleep_levels)
        for level in levels:
            # Each with a fresh engine: after the first update, an engine that brings old weights back has the new ones.
            with open_backend() as backend:
                self.assert_weights(backend, self.oracle, "sleep_levels")
                backend.sleep(level)
                backend.wake("weights")
                backend.update_weights(weights, version="tuned")
                backend.wake("kv_cache")
                assert backend.weight_version == "tuned"
                self.assert_weights(backend, oracle, "sleep_levels")


#: How often two adapters and the base weights take turns, or are asked at the same time.
_ROUNDS = 2


class AdapterPromises(ConformanceBase, theme="adapters"):
    """Adapters: every call runs with the one that it names, and leaves the others and the base weights as they are."""

    @pytest.fixture(scope="class")
    @classmethod
    def adapted(cls, backend: Backend, open_backend: Callable[[], Backend]) -> Iterator[tuple[Backend, list[Oracle]]]:
        """Open another backend, use it, load the adapters "one" and "two"; yield it and their oracles."""
        require(backend, "adapters")
        case = cls()
        (one, oracle_of_one), (two, oracle_of_two) = case.new_adapters()
        row = case.rows(backend, 40)[0]
        oracles = [case.oracle, oracle_of_one, oracle_of_two]
        for first, second in ((0, 1), (0, 2), (1, 2)):
            apart = float((oracles[first](row, 1.0) - oracles[second](row, 1.0))[1:].abs().max())
            assert apart > case.tolerance, "an adapter equals the other or the base weights: no test could tell"
        with open_backend() as other:
            # Any cache may hold this row now. The tests ask for it again.
            case._assert_is(other, None, case.oracle, "0")
            assert other.load_adapter("one", **one) == "1"
            assert other.load_adapter("two", **two, version="step-7") == "step-7"
            yield other, oracles[1:]

    def test_every_call_runs_with_the_adapter_that_it_names(self, adapted: tuple[Backend, list[Oracle]]) -> None:
        backend, (one, two) = adapted
        # In turns, and each again: what one of them has cached must not answer for another.
        for _ in range(_ROUNDS):
            self._assert_is(backend, "one", one, "0+one@1")
            self._assert_is(backend, "two", two, "0+two@step-7")
            self._assert_is(backend, False, self.oracle, "0+none")
            self._assert_is(backend, None, self.oracle, "0")

    def test_calls_at_once_each_run_with_their_adapter(self, adapted: tuple[Backend, list[Oracle]]) -> None:
        backend, (one, two) = adapted
        cases: list[tuple[Adapter, Oracle, str]] = [
            ("one", one, "0+one@1"),
            ("two", two, "0+two@step-7"),
            (False, self.oracle, "0+none"),
        ]
        with ThreadPoolExecutor(len(cases) * _ROUNDS) as threads:
            calls = [threads.submit(self._assert_is, backend, *case) for case in cases * _ROUNDS]
            for call in calls:
                call.result()

    def test_an_adapter_that_is_loaded_again_is_replaced(self, adapted: tuple[Backend, list[Oracle]]) -> None:
        backend, oracles = adapted
        for version, ((given, _), oracle) in enumerate(zip(self.new_adapters(), oracles, strict=True), 1):
            assert backend.load_adapter("policy", **given) == str(version)
            self._assert_is(backend, "policy", oracle, f"0+policy@{version}")
        self._assert_is(backend, False, self.oracle, "0+none")
        assert backend.weight_version == "0"
        backend.unload_adapter("policy")

    def test_an_adapter_that_was_unloaded_is_refused(self, adapted: tuple[Backend, list[Oracle]]) -> None:
        backend, (one, _) = adapted
        (given, _), _ = self.new_adapters()
        backend.load_adapter("gone", **given)
        self._assert_is(backend, "gone", one, "0+gone@1")
        backend.unload_adapter("gone")
        assert "gone" not in backend.adapters
        self._assert_refused(backend, "gone")
        self._assert_is(backend, None, self.oracle, "0")

    def test_an_adapter_that_is_not_there_is_refused(self, adapted: tuple[Backend, list[Oracle]]) -> None:
        backend, (one, _) = adapted
        self._assert_refused(backend, "three")
        with pytest.raises(InvalidRequestError):
            backend.unload_adapter("three")
        self._assert_is(backend, "one", one, "0+one@1")

    def test_an_adapter_that_does_not_fit_changes_nothing(
        self, adapted: tuple[Backend, list[Oracle]], tmp_path: Path
    ) -> None:
        backend, (one, _) = adapted
        given = self.new_adapters()[0][0]
        wrong: dict[str, Any] = {"weights": tmp_path}
        if isinstance(given["weights"], Mapping):
            wrong = {"weights": {"no.such.parameter": torch.zeros(3)}, "config": given.get("config")}
        with pytest.raises((InvalidRequestError, CapabilityError)):
            backend.load_adapter("one", **wrong, version="wrong")
        assert backend.adapters["one"] == "1" and backend.weight_version == "0"
        self._assert_is(backend, "one", one, "0+one@1")

    @needs("adapters", "sleep_levels")
    def test_adapters_are_there_after_a_light_sleep(self, adapted: tuple[Backend, list[Oracle]]) -> None:
        backend, (one, _) = adapted
        if 1 not in backend.capabilities.sleep_levels:
            not_applicable("sleep level 1 is not declared")
        backend.sleep(level=1)
        backend.wake()
        self._assert_is(backend, "one", one, "0+one@1")
        self._assert_is(backend, False, self.oracle, "0+none")

    # Helpers ---------------------------------------------------------------------------------------------------------

    def _assert_is(self, backend: Backend, adapter: Adapter, oracle: Oracle, label: str) -> None:
        self.assert_weights(backend, oracle, "adapters", adapter, label)

    def _assert_refused(self, backend: Backend, adapter: str) -> None:
        rows = self.rows(backend, 4)
        with pytest.raises(InvalidRequestError) as caught:
            backend.generate(rows, {"max_new_tokens": 1}, logprobs="none", adapter=adapter)
        assert caught.value.field == "adapter"
        if backend.capabilities.score:
            with pytest.raises(InvalidRequestError) as caught:
                backend.score_logprobs(rows, adapter=adapter)
            assert caught.value.field == "adapter"

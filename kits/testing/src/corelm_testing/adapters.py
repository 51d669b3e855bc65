"""Adapters: every call runs with the one that it names, and leaves the others and the base weights as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from corelm import Backend
from corelm.errors import CapabilityError, InvalidRequestError
from corelm_testing.base import ConformanceBase, needs, not_applicable, require

if TYPE_CHECKING:
    from corelm.spec import Adapter
    from corelm_testing.base import Oracle

#: How often two adapters and the base weights take turns, or are asked at the same time.
_ROUNDS = 2


class AdapterPromises(ConformanceBase):
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

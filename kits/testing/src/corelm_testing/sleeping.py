"""An engine that slept answers as before, and one that slept without its weights answers with the new ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from corelm import Backend
from corelm.errors import BackendAsleepError
from corelm_testing.base import ConformanceBase, needs, not_applicable

if TYPE_CHECKING:
    pass


class SleepPromises(ConformanceBase):
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

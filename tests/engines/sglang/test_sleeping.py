"""A real server sleeps and wakes.

On a CPU there is no memory saver, so a server frees nothing and declares no level. Its routes, the order in which they
are called and what they do to its cache are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from corelm import Backend
from corelm.errors import BackendAsleepError, CapabilityError
from engines.sglang.test_weights import ROWS, agrees

#: It launches a server of its own for one test.
pytestmark = pytest.mark.nightly


@pytest.fixture
def sleeper(launch: Callable[[], Backend]) -> Iterator[Backend]:
    """A server behind a backend that takes it for one with a memory saver."""
    with launch() as backend:
        with pytest.raises(CapabilityError, match="lacks sleep_levels"):
            backend.sleep()
        engine = backend.engine.plugin
        able = replace(engine.capabilities, sleep_levels=frozenset({1, 2}))
        engine.info = replace(engine.info, capabilities=able)
        yield Backend.from_plugin(backend.engine.plugin, "sglang")


def test_a_server_wakes_with_its_weights_or_with_new_ones(sleeper: Backend, model, other_model, other_folder) -> None:
    assert agrees(sleeper, model)
    sleeper.sleep()
    with pytest.raises(BackendAsleepError):
        sleeper.score_logprobs(ROWS)
    assert sleeper.health()
    sleeper.wake()
    assert agrees(sleeper, model)
    sleeper.sleep(level=2)
    sleeper.wake(["weights"])
    sleeper.update_weights(other_folder)
    sleeper.wake(["kv_cache"])
    assert agrees(sleeper, other_model) and sleeper.weight_version == "1"

"""How much time a call has left, and whose timeout it was."""

import pytest

from corelm.errors import BackendTimeoutError
from corelm.spec import Deadline, opening_within


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_time_left_shrinks_until_it_is_over():
    clock = Clock()
    deadline = Deadline(2.0, clock)
    assert deadline.left() == 2.0
    clock.now += 1.5
    deadline.check()
    assert deadline.left() == 0.5
    assert not deadline.is_over()
    clock.now += 0.5
    for ask in (deadline.left, deadline.check):
        with pytest.raises(TimeoutError, match="not done within the timeout; allow more time"):
            ask()
    assert deadline.is_over()


def test_a_call_without_a_timeout_has_no_end():
    clock = Clock()
    deadline = Deadline(None, clock)
    clock.now = 1e9
    deadline.check()
    assert deadline.left() is None and not deadline.is_over()


def test_opening_blames_its_own_timeout_only_if_that_has_passed():
    passed = r"open_timeout=1e-09 passed while opening an engine: not done"
    with pytest.raises(BackendTimeoutError, match=passed), opening_within(1e-9, "an engine") as deadline:
        deadline.check()
    hangs = BackendTimeoutError("GET /health: the server hangs; nothing was sent or received for 5 s")
    with pytest.raises(BackendTimeoutError) as caught, opening_within(300.0, "an engine"):
        raise hangs
    assert caught.value is hangs and str(hangs).startswith("GET /health")

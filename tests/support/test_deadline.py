"""How much time a call has left."""

from __future__ import annotations

import pytest

from corelm.support import Deadline


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
    clock.now += 0.5
    for ask in (deadline.left, deadline.check):
        with pytest.raises(TimeoutError, match="not done within 2 s; allow more time"):
            ask()


def test_a_call_without_a_timeout_has_no_end():
    clock = Clock()
    deadline = Deadline(None, clock)
    clock.now = 1e9
    deadline.check()
    assert deadline.left() is None

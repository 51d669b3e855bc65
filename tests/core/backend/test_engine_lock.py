"""`EngineLock`: many threads shared or one exclusive; no thread starves or waits forever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from corelm.backend.engine import EngineLock, Turn
from helpers.each import each
from helpers.interrupts import interrupt_everywhere


def hold(lock: EngineLock, how: str, function: Callable[[], Any] = lambda: None, timeout: float | None = None):
    """Call the function while this thread holds the lock: "shared" or "exclusive"."""
    return inside(lock, lock.nested(Turn(how == "exclusive")), function, timeout)


def inside(lock: EngineLock, turn: Turn, function: Callable[[], Any], timeout: float | None = None):
    """Call the function in this turn."""
    outside = getattr(lock.local, "turn", None)
    try:
        lock.acquire(turn, timeout)
        return function()
    finally:
        lock.holders.pop(turn, None)
        lock.local.turn = outside
        lock.wake()


class Holder:
    """A thread that acquires the lock, reports it, and holds the lock until `leave` is called."""

    def __init__(self, pool: ThreadPoolExecutor, lock: EngineLock, how: str) -> None:
        self.inside, self.may_leave = threading.Event(), threading.Event()
        self.done: Future[None] = pool.submit(hold, lock, how, self._stay)

    def _stay(self) -> None:
        self.inside.set()
        assert self.may_leave.wait(timeout=10)

    def leave(self) -> None:
        self.may_leave.set()
        self.done.result(timeout=10)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def test_shared_holders_hold_it_together(pool):
    lock = EngineLock("fake")
    holders = [Holder(pool, lock, "shared") for _ in range(4)]
    assert all(holder.inside.wait(timeout=10) for holder in holders)
    for holder in holders:
        holder.leave()


@pytest.mark.parametrize(
    ("first", "then"), [("exclusive", "exclusive"), ("exclusive", "shared"), ("shared", "exclusive")]
)
def test_exclusive_excludes_every_other_thread(pool, first, then):
    lock = EngineLock("fake")
    one = Holder(pool, lock, first)
    assert one.inside.wait(timeout=10)
    with pytest.raises(TimeoutError):
        hold(lock, then, timeout=0.01)
    two = Holder(pool, lock, then)
    assert not two.inside.is_set()
    one.leave()
    assert two.inside.wait(timeout=10)
    two.leave()


def test_a_thread_waiting_for_exclusive_is_not_overtaken(pool):
    lock = EngineLock("fake")
    early = Holder(pool, lock, "shared")
    assert early.inside.wait(timeout=10)
    exclusive = Holder(pool, lock, "exclusive")
    # The exclusive thread waits now or soon; from then on no other thread gets the lock shared.
    refused = False
    while not refused:
        try:
            hold(lock, "shared", timeout=0.01)
        except TimeoutError:
            refused = True
    late = Holder(pool, lock, "shared")
    early.leave()
    assert exclusive.inside.wait(timeout=10) and not late.inside.is_set()
    exclusive.leave()
    assert late.inside.wait(timeout=10)
    late.leave()


def test_a_timeout_while_waiting_for_exclusive_blocks_no_thread(pool):
    lock = EngineLock("fake")
    early = Holder(pool, lock, "shared")
    assert early.inside.wait(timeout=10)
    with pytest.raises(TimeoutError):
        hold(lock, "exclusive", timeout=0.01)
    late = Holder(pool, lock, "shared")
    assert late.inside.wait(timeout=10)
    early.leave()
    late.leave()


@pytest.mark.parametrize("outer", ["exclusive", "shared"])
@pytest.mark.parametrize("inner", ["exclusive", "shared"])
def test_a_holder_may_acquire_again(pool, outer, inner):
    lock = EngineLock("fake")

    def in_it():
        hold(lock, inner, timeout=1.0)
        if outer == "shared":
            return None
        # Releasing the inner one does not let other threads in.
        other = Holder(pool, lock, "shared")
        assert not other.inside.wait(timeout=0.01)
        return other

    other = hold(lock, outer, in_it, timeout=1.0)
    if other is not None:
        other.leave()
    hold(lock, "exclusive", timeout=1.0)


def test_a_thread_that_works_for_a_holder_may_acquire_again(pool):
    """A call with a timeout holds the lock on a thread that its caller waits for."""
    lock = EngineLock("fake")

    def in_it():
        turn = lock.nested(Turn(True))
        return pool.submit(inside, lock, turn, lambda: hold(lock, "exclusive", lambda: 7, 1.0), 1.0).result(timeout=10)

    assert hold(lock, "exclusive", in_it) == 7 and not lock.holders


def test_two_holders_that_would_wait_for_each_other_are_told_at_once(pool):
    lock, together = EngineLock("fake"), threading.Barrier(2)

    def upgrade():
        together.wait(timeout=10)
        return hold(lock, "exclusive", lambda: "alone")

    futures = [pool.submit(hold, lock, "shared", upgrade) for _ in range(2)]
    ends = [future.exception(timeout=10) or future.result() for future in futures]
    assert sorted(type(end).__name__ for end in ends) == ["EngineError", "str"] and not lock.holders


def test_an_exception_releases_the_lock():
    lock = EngineLock("fake")

    def fail():
        raise KeyError

    for how in ("exclusive", "shared"):
        with pytest.raises(KeyError):
            hold(lock, how, fail)
    hold(lock, "exclusive", timeout=1.0)


@each("how", ["exclusive", "shared"])
def test_an_interrupt_at_any_point_releases_the_lock(how):
    lock, points = EngineLock("fake"), []
    with ThreadPoolExecutor(1) as other:
        for point in interrupt_everywhere(lambda: hold(lock, how, lambda: hold(lock, how))):
            points.append(point)
            assert not lock.holders
            other.submit(hold, lock, "exclusive", timeout=5.0).result(timeout=10)
    assert len(points) > 20


def test_a_waiting_thread_that_nothing_woke_looks_again(pool, monkeypatch):
    """An interrupt can keep the thread that leaves from waking the others."""
    lock = EngineLock("fake")
    monkeypatch.setattr(lock, "wake", lambda: None)
    early = Holder(pool, lock, "exclusive")
    assert early.inside.wait(timeout=10)
    late = Holder(pool, lock, "exclusive")
    assert not late.inside.wait(timeout=0.01)
    early.leave()
    assert late.inside.wait(timeout=10)
    late.leave()

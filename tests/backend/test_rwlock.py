"""`ReadersWriterLock`: many threads shared or one exclusive; no thread starves or waits forever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest

from corelm.backend.rwlock import ReadersWriterLock

Enter = Callable[..., AbstractContextManager[None]]


class Visitor:
    """A thread that acquires the lock, reports it, and holds the lock until `leave` is called."""

    def __init__(self, pool: ThreadPoolExecutor, enter: Enter) -> None:
        self.inside, self.may_leave = threading.Event(), threading.Event()
        self.done: Future[None] = pool.submit(self._visit, enter)

    def _visit(self, enter: Enter) -> None:
        with enter():
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
    lock = ReadersWriterLock()
    visitors = [Visitor(pool, lock.shared) for _ in range(4)]
    assert all(visitor.inside.wait(timeout=10) for visitor in visitors)
    for visitor in visitors:
        visitor.leave()


@pytest.mark.parametrize(
    ("first", "then"), [("exclusive", "exclusive"), ("exclusive", "shared"), ("shared", "exclusive")]
)
def test_exclusive_excludes_every_other_thread(pool, first, then):
    lock = ReadersWriterLock()
    one = Visitor(pool, getattr(lock, first))
    assert one.inside.wait(timeout=10)
    with pytest.raises(TimeoutError), getattr(lock, then)(0.01):
        pass
    two = Visitor(pool, getattr(lock, then))
    assert not two.inside.is_set()
    one.leave()
    assert two.inside.wait(timeout=10)
    two.leave()


def test_a_thread_waiting_for_exclusive_is_not_overtaken(pool):
    lock = ReadersWriterLock()
    early = Visitor(pool, lock.shared)
    assert early.inside.wait(timeout=10)
    exclusive = Visitor(pool, lock.exclusive)
    # The exclusive thread waits now or soon; from then on no other thread gets the lock shared.
    refused = False
    while not refused:
        try:
            with lock.shared(0.01):
                pass
        except TimeoutError:
            refused = True
    late = Visitor(pool, lock.shared)
    early.leave()
    assert exclusive.inside.wait(timeout=10) and not late.inside.is_set()
    exclusive.leave()
    assert late.inside.wait(timeout=10)
    late.leave()


def test_a_timeout_while_waiting_for_exclusive_blocks_no_thread(pool):
    lock = ReadersWriterLock()
    early = Visitor(pool, lock.shared)
    assert early.inside.wait(timeout=10)
    with pytest.raises(TimeoutError), lock.exclusive(0.01):
        pass
    late = Visitor(pool, lock.shared)
    assert late.inside.wait(timeout=10)
    early.leave()
    late.leave()


@pytest.mark.parametrize("outer", ["exclusive", "shared"])
@pytest.mark.parametrize("inner", ["exclusive", "shared"])
def test_a_holder_may_acquire_again(pool, outer, inner):
    lock = ReadersWriterLock()
    with getattr(lock, outer)(1.0):
        with getattr(lock, inner)(1.0):
            pass
        if outer == "exclusive":
            # Releasing the inner one does not let other threads in.
            other = Visitor(pool, lock.shared)
            assert not other.inside.wait(timeout=0.01)
    if outer == "exclusive":
        other.leave()
    with lock.exclusive(1.0):
        pass


def test_an_exception_releases_the_lock():
    lock = ReadersWriterLock()
    for enter in (lock.exclusive, lock.shared):
        with pytest.raises(KeyError), enter():
            raise KeyError
    with lock.exclusive(1.0):
        pass

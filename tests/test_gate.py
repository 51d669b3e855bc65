"""`Gate`: many together or one alone, nobody starved, nobody left waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest

from corelm.backend.rwlock import Gate

Enter = Callable[..., AbstractContextManager[None]]


class Visitor:
    """A thread that enters, says so, and stays until it is told to leave."""

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


def test_those_who_share_are_inside_together(pool):
    gate = Gate()
    visitors = [Visitor(pool, gate.shared) for _ in range(4)]
    assert all(visitor.inside.wait(timeout=10) for visitor in visitors)
    for visitor in visitors:
        visitor.leave()


@pytest.mark.parametrize(("first", "then"), [("alone", "alone"), ("alone", "shared"), ("shared", "alone")])
def test_whoever_is_alone_keeps_others_out_until_it_leaves(pool, first, then):
    gate = Gate()
    one = Visitor(pool, getattr(gate, first))
    assert one.inside.wait(timeout=10)
    with pytest.raises(TimeoutError), getattr(gate, then)(0.01):
        pass
    two = Visitor(pool, getattr(gate, then))
    assert not two.inside.is_set()
    one.leave()
    assert two.inside.wait(timeout=10)
    two.leave()


def test_one_that_waits_to_be_alone_is_not_overtaken(pool):
    gate = Gate()
    early = Visitor(pool, gate.shared)
    assert early.inside.wait(timeout=10)
    alone = Visitor(pool, gate.alone)
    # It waits by now, or soon will: from then on nobody else gets in to share.
    refused = False
    while not refused:
        try:
            with gate.shared(0.01):
                pass
        except TimeoutError:
            refused = True
    late = Visitor(pool, gate.shared)
    early.leave()
    assert alone.inside.wait(timeout=10) and not late.inside.is_set()
    alone.leave()
    assert late.inside.wait(timeout=10)
    late.leave()


def test_one_that_gave_up_waiting_to_be_alone_keeps_nobody_out(pool):
    gate = Gate()
    early = Visitor(pool, gate.shared)
    assert early.inside.wait(timeout=10)
    with pytest.raises(TimeoutError), gate.alone(0.01):
        pass
    late = Visitor(pool, gate.shared)
    assert late.inside.wait(timeout=10)
    early.leave()
    late.leave()


@pytest.mark.parametrize("outer", ["alone", "shared"])
@pytest.mark.parametrize("inner", ["alone", "shared"])
def test_a_thread_inside_may_enter_again(pool, outer, inner):
    gate = Gate()
    with getattr(gate, outer)(1.0):
        with getattr(gate, inner)(1.0):
            pass
        if outer == "alone":
            # Leaving the inner one does not let others in.
            other = Visitor(pool, gate.shared)
            assert not other.inside.wait(timeout=0.01)
    if outer == "alone":
        other.leave()
    with gate.alone(1.0):
        pass


def test_an_exception_inside_opens_the_gate():
    gate = Gate()
    for enter in (gate.alone, gate.shared):
        with pytest.raises(KeyError), enter():
            raise KeyError
    with gate.alone(1.0):
        pass

"""The event loop on its own thread: results, errors, timeouts and stopping, for any number of threads."""

from __future__ import annotations

import _thread
import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from queue import SimpleQueue

import pytest

from corelm.waiting import done_within, next_item
from corelm_engine_kit.event_loop import EventLoopThread
from helpers.processes import PATIENCE


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    made = EventLoopThread("a loop of the tests")
    yield made
    made.stop()


class Watched:
    """A coroutine that never ends by itself and records when it began and when it was cancelled."""

    def __init__(self) -> None:
        self.begun, self.cancelled = threading.Event(), threading.Event()

    async def __call__(self) -> None:
        try:
            self.begun.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


async def give(value: int) -> int:
    return value


def test_many_threads_run_coroutines_at_once(loop: EventLoopThread) -> None:
    here: list[str] = []
    all_here = asyncio.Event()

    async def met() -> None:
        here.append(threading.current_thread().name)
        if len(here) == 8:
            all_here.set()
        await all_here.wait()

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(loop.run, met(), 30) for _ in range(8)]:
            future.result()
    assert here == ["a loop of the tests"] * 8


def test_a_timeout_cancels_the_coroutine(loop: EventLoopThread) -> None:
    watched = Watched()
    with pytest.raises(TimeoutError):
        loop.run(watched(), timeout=0.01)
    assert watched.cancelled.wait(30)


def test_cancel_ends_running_coroutines_and_the_loop_goes_on(loop: EventLoopThread) -> None:
    watched = Watched()
    future = loop.submit(watched())
    assert watched.begun.wait(30)
    loop.cancel()
    assert watched.cancelled.is_set()
    with pytest.raises(CancelledError):
        future.result(30)
    assert loop.run(give(7)) == 7


def test_stop_cancels_coroutines_lets_them_clean_up_and_ends_the_thread() -> None:
    loop = EventLoopThread("to be stopped")
    cleaned = []

    async def tidy() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    future = loop.submit(tidy())
    loop.run(give(0))
    loop.stop()
    assert cleaned == [True] and future.cancelled()
    assert "to be stopped" not in [thread.name for thread in threading.enumerate()]
    loop.stop()


def test_a_stopped_loop_refuses_a_coroutine_and_closes_it() -> None:
    loop = EventLoopThread("stopped")
    loop.stop()
    coroutine = give(1)
    with pytest.raises(RuntimeError, match="was stopped"):
        loop.run(coroutine)
    with pytest.raises(RuntimeError, match="already"):
        # It is closed, so it does not warn that it was never awaited.
        coroutine.send(None)


def test_the_loops_own_thread_cannot_wait_for_itself(loop: EventLoopThread) -> None:
    async def inside() -> None:
        loop.run(give(1))

    async def ending() -> None:
        loop.stop()

    for coroutine in (inside(), ending()):
        with pytest.raises(RuntimeError, match="own thread"):
            loop.run(coroutine)
    assert loop.run(give(2)) == 2


def test_a_caller_during_stop_is_refused_or_cancelled_and_never_waits_forever() -> None:
    for _ in range(20):
        loop = EventLoopThread("contended")
        start = threading.Barrier(5)

        def ask(loop: EventLoopThread = loop, start: threading.Barrier = start) -> bool:
            start.wait(30)
            try:
                loop.run(asyncio.sleep(3600), timeout=30)
            except (RuntimeError, CancelledError):
                return True
            return False

        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(ask) for _ in range(4)]
            start.wait(30)
            loop.stop()
            assert all(future.result(30) for future in asked)


# Waits for another thread end with Ctrl-C -----------------------------------------------------------------------------


WAITS: list[Callable[[EventLoopThread], object]] = [
    lambda loop: next_item(SimpleQueue(), PATIENCE),
    lambda loop: done_within(Future(), PATIENCE),
    lambda loop: loop.run(asyncio.sleep(PATIENCE)),
]


@pytest.mark.parametrize("wait", WAITS)
def test_an_interrupt_that_ends_no_wait_is_noticed(wait: Callable[[EventLoopThread], object]) -> None:
    """`interrupt_main` sets Python's flag only, as a signal does that arrives before the wait begins."""
    loop = EventLoopThread("waiting")
    threading.Timer(0.1, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        wait(loop)
    loop.stop()

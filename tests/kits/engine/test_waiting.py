"""Waits for another thread end with Ctrl-C, also with one that came just before the wait."""

from __future__ import annotations

import _thread
import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

import pytest

from corelm.waiting import done_within, next_item
from corelm_engine_kit import EventLoopThread
from helpers.processes import PATIENCE

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

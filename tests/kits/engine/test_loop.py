"""`Loop`: whoever is inside gets out, whatever ends his call."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from corelm_engine_kit.loop import Call, Loop
from helpers.requests import generation

REQUEST = generation(seeds=torch.arange(1))
Work = Callable[[], Generator[Any, Any, Any]]


def loop_of(answer: Callable[[Any], Any]) -> Loop:
    def step(calls: Sequence[Call]) -> None:
        for call in calls:
            call.give(answer(call.wants))

    return Loop(step, lambda key: nullcontext())


def run(loop: Loop, work: Work) -> Any:
    with loop.start(REQUEST) as call:
        return loop.run(call, work())


def wants(value: Any) -> Generator[Any, Any, Any]:
    return (yield value)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_others_go_on_if_closing_the_work_of_a_caller_who_has_left_fails(error: type[BaseException]) -> None:
    """Ctrl-C may come meanwhile, and what the author frees may fail."""

    def work() -> Generator[Any, Any, Any]:
        try:
            while True:
                yield 1
        finally:
            raise error

    loop, left = loop_of(lambda value: value), Call(REQUEST)
    left.begin(work())
    left.go_on()
    loop._stepping.append(left)
    with suppress(KeyboardInterrupt), loop.held():
        # Now its caller leaves. The thread that is inside closes its work as it goes.
        left.left = True
    results: list[Any] = []
    other = threading.Thread(target=lambda: results.append(run(loop, lambda: wants(3))), daemon=True)
    other.start()
    other.join(10)
    assert results == [3] and not loop.under_way and not loop._stepping


def test_the_main_thread_waits_for_no_caller_who_has_left() -> None:
    loop, left = loop_of(lambda value: value), Call(REQUEST)
    left.begin(wants(1))
    left.go_on()
    left.left = True
    loop._stepping.append(left)
    loop._step_is_due = True
    with loop.start(replace(REQUEST, timeout=5.0)) as call:
        assert loop.run(call, wants(3)) == 3
    assert not loop._stepping


def test_an_interrupt_in_the_work_of_another_caller_ends_the_call_of_the_main_thread() -> None:
    loop, results = loop_of(lambda value: value), list[Any]()

    def other() -> Generator[Any, Any, Any]:
        yield 1
        signal.raise_signal(signal.SIGINT)
        return (yield 2)

    def mine() -> Generator[Any, Any, Any]:
        yield 0
        thread.start()
        while len(loop._stepping) < 2:
            threading.Event().wait(0.001)
        while True:
            yield 0

    thread = threading.Thread(target=lambda: results.append(run(loop, other)), daemon=True)
    with pytest.raises(KeyboardInterrupt):
        run(loop, mine)
    thread.join(60)
    assert results == [2] and not loop.under_way and not loop._stepping

"""`Loop`: whoever is inside gets out, whatever ends his call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext, suppress
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

    def last() -> Generator[Any, Any, Any]:
        yield 2
        # Now its caller leaves. The thread that is inside closes it as it goes.
        left.left = True
        return 2

    loop = loop_of(lambda value: value)
    left = Call(REQUEST)
    left.begin(work())
    loop._stepping.append(left)
    with suppress(KeyboardInterrupt):
        assert run(loop, last) == 2
    results: list[Any] = []
    other = threading.Thread(target=lambda: results.append(run(loop, lambda: wants(3))), daemon=True)
    other.start()
    other.join(10)
    assert results == [3] and not loop.under_way and not loop._stepping

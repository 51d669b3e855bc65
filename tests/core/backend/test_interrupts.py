"""A `KeyboardInterrupt` at any point of a call leaves the backend usable for every other thread."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from corelm import Backend, DynamicBatcher
from helpers.batching_fakes import SEEDED, GatedEngine, all_capabilities, lone_answer
from helpers.each import each
from helpers.interrupts import interrupt_everywhere


class Engine(GatedEngine):
    """A `GatedEngine` without a lock of its own, which an interrupt could leave locked."""

    def wait_for_permit(self, request):
        return set()


CALLS = {
    "generate": lambda backend: backend.generate([[4]], SEEDED),
    "generate with a timeout": lambda backend: backend.generate([[4]], SEEDED, timeout=20.0),
    "score with gradients": lambda backend: backend.score_logprobs([[4, 5]], grad=True),
    "update": lambda backend: backend.update_weights({}),
}


# An interrupt in the finalizer of a generator is dropped, as CPython does with a real one.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <generator:pytest.PytestUnraisableExceptionWarning")
@each("concurrent", [False, True])
@each("batched", [False, True])
@each("call", CALLS)
def test_other_threads_are_served_after_an_interrupt(call, batched, concurrent):
    backend = Backend.from_plugin(Engine(**all_capabilities(concurrent_calls=concurrent)), "gated")
    if batched:
        backend = DynamicBatcher(backend)
    points = 0
    with ThreadPoolExecutor(1) as other, backend:
        # An odd step, so that every second run does not end at the same kind of point.
        for _ in interrupt_everywhere(lambda: CALLS[call](backend), step=7):
            points += 1
            answer = other.submit(backend.generate, [[6]], SEEDED, timeout=10.0).result(timeout=20)
            assert answer.ids.tolist() == [lone_answer([6])]
    assert points > 10

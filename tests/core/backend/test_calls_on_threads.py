"""Calls that another thread makes: refused where they would wait for themselves, and made in their caller's modes."""

import asyncio
import contextvars
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tensordict import TensorDict

from corelm import AnswerChunk, Backend, DynamicBatcher, LLMPolicy, hookimpl
from corelm.errors import InvalidRequestError
from helpers.batching_fakes import LONG, SEEDED, GatedEngine, all_capabilities, lone_answer, wait_until
from helpers.each import each
from helpers.fakes import fake
from helpers.interrupts import interrupt_everywhere
from helpers.refusals import refused
from helpers.streaming_fakes import Dripping

FOUR = {"max_new_tokens": 4, "ignore_eos": True}


async def read_all(stream) -> list[AnswerChunk]:
    return [chunk async for chunk in stream]


STREAMS = {
    "stream": lambda backend: list(backend.stream([[5]], FOUR, timeout=0.5)),
    "astream": lambda backend: asyncio.run(read_all(backend.astream([[5]], FOUR, timeout=0.5))),
    "aforward": lambda backend: asyncio.run(
        LLMPolicy(backend, input_mode="text", sampling_params=FOUR).aforward(TensorDict(text=["a"]), timeout=0.5)
    ),
}


@each("batching", [False, True])
@each("method", STREAMS)
def test_what_would_wait_for_itself_in_a_wrapper_is_refused_there(method, batching):
    class Wrapper:
        outer = True

        @hookimpl(wrapper=True)
        def generate(self, request):
            batch = yield
            if self.outer:
                self.outer = False
                with pytest.raises(InvalidRequestError, match="use `generate`") as caught:
                    STREAMS[method](self.backend)
                self.field = caught.value.field
                assert self.backend.generate([[5]], FOUR).ids.tolist() == [[5] * 4]
            return batch

    wrapper = Wrapper()
    backend = wrapper.backend = Backend.from_plugin(Dripping(), "dripping", wrappers=[wrapper])
    with DynamicBatcher(backend) if batching else backend as wrapper.backend:
        assert wrapper.backend.generate([[3]], FOUR).ids.tolist() == [[3] * 4]
    assert wrapper.field == method


def test_a_stream_in_a_callback_of_a_batcher_is_refused():
    errors = []

    def callback(future):
        with refused(InvalidRequestError, field="stream") as caught:
            list(batcher.stream([[5]], FOUR, timeout=0.5))
        errors.append(caught.value)

    engine = Dripping(0)
    with DynamicBatcher(Backend.from_plugin(engine, "dripping")) as batcher:
        future = batcher.submit_generate([[3]], FOUR)
        future.add_done_callback(callback)
        engine.allow(None)
        wait_until(lambda: bool(errors))


VARIABLE = contextvars.ContextVar("VARIABLE", default="nothing")
WAYS = {
    "generate": lambda backend: backend.generate([[3]], FOUR),
    "generate with a timeout": lambda backend: backend.generate([[3]], FOUR, timeout=LONG),
    "submit_generate": lambda backend: backend.submit_generate([[3]], FOUR).result(LONG),
    "stream": lambda backend: list(backend.stream([[3]], FOUR)),
    "astream": lambda backend: asyncio.run(read_all(backend.astream([[3]], FOUR))),
}


def modes():
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


@each("way", WAYS)
def test_every_way_to_call_has_the_modes_and_variables_of_its_caller(way):
    seen = []

    def note(batch):
        seen.append((*modes(), VARIABLE.get()))
        return batch

    backend, token = fake(note), VARIABLE.set("mine")
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        WAYS[way](backend)
    VARIABLE.reset(token)
    WAYS[way](backend)
    assert seen == [(False, True, torch.float16, "mine"), (*modes(), "nothing")]


@each("way", WAYS)
def test_a_batched_call_has_the_modes_of_its_caller(way):
    seen = []

    def note(batch):
        seen.append(modes())
        return batch

    with DynamicBatcher(fake(note)) as batcher:
        with torch.no_grad(), torch.autocast("cpu", torch.float16):
            WAYS[way](batcher)
        WAYS[way](batcher)
    assert seen == [(False, True, torch.float16), modes()]


# A `KeyboardInterrupt` at any point of a call -------------------------------------------------------------------------


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

"""Calls that another thread makes: refused where they would wait for themselves, and made in their caller's modes."""

import asyncio
import contextvars

import pytest
import torch
from tensordict import TensorDict

from corelm import AnswerChunk, Backend, DynamicBatcher, LLMPolicy, hookimpl
from corelm.errors import InvalidRequestError
from helpers.batching_fakes import LONG, wait_until
from helpers.each import each
from helpers.fakes import fake
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

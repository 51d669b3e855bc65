"""Streaming from vLLM in this process: the tokens come step by step and are those of the result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from corelm import Backend
from corelm.errors import BackendTimeoutError
from engines.vllm.conftest import Open
from engines.vllm.engine_access import unfinished_requests
from helpers.processes import wait_until
from helpers.tiny_models import CONTEXT, random_rows, tiny_tokenizer

PROMPTS = random_rows(4, 9, 6)
SAMPLING = {"max_new_tokens": 16, "seed": 3, "num_samples": 2}
LONG = {"max_new_tokens": CONTEXT - 9, "ignore_eos": True}

Check = Callable[[Backend], None]


def test_streamed_text_ends_before_a_stop_string(shared: Backend) -> None:
    free = shared.generate(PROMPTS, SAMPLING, logprobs="none").ids.tolist()
    texts = [tiny_tokenizer().decode(ids, skip_special_tokens=True) for ids in free]
    stop = [text[3:5] for text in texts if len(text) > 6 and "\ufffd" not in text[3:5]][:2]
    check_stream(shared, {**SAMPLING, "stop": stop}, "raw")


def check_stream(backend: Backend, sampling: dict[str, object], logprobs: str) -> None:
    expected = backend.generate(PROMPTS, sampling, logprobs=logprobs)
    stream = backend.stream(PROMPTS, sampling, logprobs=logprobs)
    chunks = list(stream)
    assert stream.result.finish_reasons == expected.finish_reasons
    for row, ids in enumerate(expected.ids.tolist()):
        own = [chunk for chunk in chunks if chunk.row == row]
        assert [i for chunk in own for i in chunk.ids] == ids
        assert len(ids) < 4 or len(own) > 2, "the answer came in one piece"
        if logprobs != "none":
            assert stream.result.logprobs is not None
            assert [v for chunk in own for v in chunk.logprobs] == stream.result.logprobs.split()[row].tolist()


def test_leaving_a_stream_aborts_the_request_in_vllm(shared: Backend) -> None:
    with shared.stream(PROMPTS, LONG, logprobs="none") as stream:
        next(stream)
    assert wait_until(lambda: unfinished_requests(shared) == 0)


def test_cancelling_a_task_aborts_the_request_in_vllm(shared: Backend) -> None:
    async def read() -> None:
        async for _ in shared.astream(PROMPTS, LONG, logprobs="none"):
            pass

    async def run() -> None:
        task = asyncio.create_task(read())
        assert await asyncio.to_thread(wait_until, lambda: unfinished_requests(shared) > 0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    assert wait_until(lambda: unfinished_requests(shared) == 0)


def test_a_timeout_ends_a_stream(shared: Backend) -> None:
    with pytest.raises(BackendTimeoutError):
        list(shared.stream(PROMPTS, LONG, logprobs="none", timeout=0.1))
    assert wait_until(lambda: unfinished_requests(shared) == 0)


def test_the_synchronous_engine_streams(open_vllm: Open) -> None:
    with open_vllm(engine="sync") as backend:
        check_stream(backend, SAMPLING, "raw")

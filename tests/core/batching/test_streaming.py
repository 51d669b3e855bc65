"""Streams of callers that share the engine's calls: each gets the tokens of its own rows, and no others."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from corelm import Backend
from corelm.batching import DynamicBatcher, Limits
from corelm.errors import EngineError, InvalidRequestError
from helpers.batching_fakes import LONG, POISON, ids, wait_until
from helpers.streaming_fakes import Dripping

FOUR = {"max_new_tokens": 4, "ignore_eos": True, "seed": 1}


class Shared:
    """A batcher in front of a `Dripping` engine that is held in a first call, so that what follows shares the next."""

    def __init__(self, **options: Any) -> None:
        self.engine = Dripping(0, **options)
        self.batcher = DynamicBatcher(Backend.from_plugin(self.engine, "dripping"), Limits(batching_timeout=0.05))

    def __enter__(self) -> Shared:
        self.first = self.batcher.submit_generate([[3]], FOUR)
        self.engine.wait_for_calls(1)
        return self

    def __exit__(self, *exc: object) -> None:
        self.engine.allow(None)
        self.batcher.close()
        assert self.batcher.state().threads == self.batcher.state().queued == 0

    def go(self) -> None:
        self.engine.allow(None)
        assert ids(self.first) == [[3] * 4]


def by_row(chunks):
    return {row: [c.ids for c in chunks if c.row == row and c.ids] for row in {c.row for c in chunks}}


def test_each_caller_gets_the_tokens_of_its_own_rows():
    with Shared() as shared:
        one = shared.batcher.stream([[4], [5]], FOUR)
        plain = shared.batcher.submit_generate([[6]], FOUR)
        other = shared.batcher.stream([[7]], FOUR, on_error="skip")
        shared.go()
        assert by_row(list(one)) == {0: [(4,)] * 4, 1: [(5,)] * 4}
        assert by_row(list(other)) == {0: [(7,)] * 4}
        assert one.result.ids.tolist() == [[4] * 4, [5] * 4] and ids(plain) == [[6] * 4]
        assert len(shared.engine.calls) == 2, "the callers did not share a call"


def test_a_chunk_of_no_row_is_given_to_nobody():
    with Shared(bend=lambda chunk: replace(chunk, row=chunk.row or -1)) as shared:
        readers = [shared.batcher.stream([[token]], FOUR) for token in (4, 5)]
        shared.engine.allow(None)
        for reader in readers:
            with pytest.raises(EngineError):
                next(reader)


def test_a_call_without_a_reader_is_sent_without_on_tokens():
    with Shared() as shared:
        both = [shared.batcher.submit_generate([[token]], FOUR) for token in (4, 5)]
        shared.go()
        assert [ids(each) for each in both] == [[[4] * 4], [[5] * 4]]
        assert [call.on_tokens for call in shared.engine.calls] == [None, None]


def test_a_failure_after_some_chunks_fails_those_who_were_given_some_and_serves_the_others():
    with Shared() as shared:
        reader = shared.batcher.stream([[4]], FOUR)
        bad = shared.batcher.submit_generate([[POISON]], FOUR)
        plain = shared.batcher.submit_generate([[6]], FOUR)
        shared.go()
        assert next(reader).ids == (4,)
        with pytest.raises(EngineError, match="poisoned"):
            next(reader)
        assert ids(plain) == [[6] * 4]
        with pytest.raises(EngineError, match="poisoned"):
            bad.result(LONG)


def test_a_failure_before_the_first_chunk_leaves_the_bad_request_alone():
    with Shared() as shared:
        shared.engine.fails_after = 0
        reader = shared.batcher.stream([[4]], FOUR)
        bad = shared.batcher.stream([[POISON]], FOUR)
        shared.go()
        assert by_row(list(reader)) == {0: [(4,)] * 4}
        with pytest.raises(EngineError):
            list(bad)


@pytest.mark.parametrize("fails_at", ["the first chunk", "the end"])
def test_a_listener_that_fails_takes_no_other_caller_with_it(fails_at: str):
    def listen(chunk: Any) -> None:
        if fails_at == "the first chunk" or chunk.finish_reason:
            raise ValueError("my own mistake")

    with Shared() as shared:
        mine = shared.batcher.submit_generate([[4]], FOUR, on_tokens=listen)
        plain = shared.batcher.submit_generate([[6]], FOUR)
        reader = shared.batcher.stream([[5]], FOUR)
        shared.go()
        assert ids(plain) == [[6] * 4] and by_row(list(reader)) == {0: [(5,)] * 4}
        with pytest.raises(InvalidRequestError, match=r"on_tokens: it failed.*my own mistake"):
            mine.result(LONG)
        assert len(shared.engine.calls) == 2, "the callers did not share a call"


def test_a_reader_that_leaves_is_aborted_and_the_others_go_on():
    with Shared(abort=True) as shared:
        leaving = shared.batcher.stream([[4]], FOUR, request_ids=["leaving"])
        staying = shared.batcher.stream([[5]], FOUR, request_ids=["staying"])
        shared.engine.allow(5)
        assert next(leaving).ids == (4,)
        leaving.close()
        wait_until(lambda: shared.engine.aborted == {"leaving"})
        shared.go()
        assert by_row(list(staying)) == {0: [(5,)] * 4}


def test_a_reader_that_leaves_the_queue_is_not_sent():
    with Shared(abort=True) as shared:
        stream = shared.batcher.stream([[4]], FOUR)
        stream.close()
        shared.go()
        shared.batcher.generate([[5]], FOUR)
        assert [call.prompts.tolist() for call in shared.engine.calls] == [[[3]], [[5]]]


def test_tasks_share_calls_and_each_reads_its_own():
    async def read(batcher: DynamicBatcher, token: int) -> list[int]:
        return [i async for chunk in batcher.astream([[token]], FOUR) for i in chunk.ids]

    async def run(shared: Shared) -> list[list[int]]:
        tasks = [asyncio.create_task(read(shared.batcher, token)) for token in range(4, 12)]
        while shared.batcher.state().queued < len(tasks):
            await asyncio.sleep(0.001)
        shared.engine.allow(None)
        return await asyncio.gather(*tasks)

    with Shared() as shared:
        assert asyncio.run(run(shared)) == [[token] * 4 for token in range(4, 12)]
        shared.go()
        assert len(shared.engine.calls) == 2, "the tasks did not share a call"


def test_requests_made_under_different_autocast_do_not_share_a_call():
    with Shared() as shared:
        with torch.autocast("cpu", torch.bfloat16):
            under = [shared.batcher.stream([[token]], FOUR) for token in (4, 5)]
        plain = [shared.batcher.submit_generate([[token]], FOUR) for token in (6, 7)]
        shared.go()
        assert [by_row(list(each))[0] for each in under] == [[(4,)] * 4, [(5,)] * 4]
        assert [ids(each) for each in plain] == [[[6] * 4], [[7] * 4]]
        assert [call.prompts.tolist() for call in shared.engine.calls] == [[[3]], [[4], [5]], [[6], [7]]]

"""`Backend.stream` and `astream`: chunks as they come, the same result, and nothing left behind."""

import asyncio
import gc
import threading
from dataclasses import replace

import pytest

from corelm import AnswerChunk, Backend
from corelm.errors import BackendTimeoutError, CapabilityError, EngineError, InvalidRequestError
from corelm.spec import TokenChunk
from helpers.batching_fakes import LONG, POISON, returns, wait_until
from helpers.each import each
from helpers.fakes import fake
from helpers.interrupts import interrupt_everywhere
from helpers.streaming_fakes import Dripping, dripping, engine_of

FOUR = {"max_new_tokens": 4, "ignore_eos": True}


@pytest.fixture(autouse=True)
def no_thread_is_left():
    """Assert that each test ends the threads that it started."""
    before = set(threading.enumerate())
    yield
    left = lambda: {one for one in threading.enumerate() if one.name.startswith("corelm")} - before  # noqa: E731
    if left():
        gc.collect()
    wait_until(lambda: not left())


def said(chunks):
    return [(chunk.row, chunk.ids, chunk.logprobs, chunk.text, chunk.finish_reason) for chunk in chunks]


# Reading to the end --------------------------------------------------------------------------------------------------


def test_a_stream_yields_tokens_as_the_engine_samples_them():
    backend = dripping(0)
    with backend.stream([[3], [10]], FOUR) as stream:
        for step in range(4):
            engine_of(backend).allow(1)
            assert said([next(stream), next(stream)]) == [
                (0, (3,), (-float(step),), "3", None),
                (1, (10,), (-float(step),), "a", None),
            ]
        assert said(stream) == [(0, (), (), "", "length"), (1, (), (), "", "length")]
    engine_of(backend).allow(None)
    assert stream.result.ids.tolist() == backend.generate([[3], [10]], FOUR).ids.tolist() == [[3] * 4, [10] * 4]
    assert list(stream) == []


def test_an_engine_that_does_not_stream_gives_each_answer_in_one_piece():
    backend = fake()
    stream = backend.stream([[3], [10]], FOUR)
    assert said(stream) == [(0, (3,) * 4, (-1.0,) * 4, "3333", "length"), (1, (10,) * 4, (-1.0,) * 4, "aaaa", "length")]
    assert stream.result.finish_reasons == ("length", "length")
    assert backend.engine.plugin.requests[0].on_tokens is None


def test_rows_keep_the_callers_numbers_next_to_skipped_ones_and_with_samples():
    stream = dripping().stream([[3], [99], [10]], {**FOUR, "num_samples": 2}, on_error="skip")
    chunks = list(stream)
    assert {row: [c.ids for c in chunks if c.row == row and c.ids] for row in range(6)} == {
        **{row: [(3,)] * 4 for row in (0, 1)},
        **{row: [] for row in (2, 3)},
        **{row: [(10,)] * 4 for row in (4, 5)},
    }
    assert [c.finish_reason for c in chunks if c.row in (2, 3)] == ["error", "error"]
    assert "vocabulary" in stream.result.errors[2]


def test_a_slow_reader_keeps_no_other_caller_waiting():
    backend = dripping()
    with backend.stream([[3]], FOUR) as stream:
        next(stream)
        assert backend.generate([[5]], FOUR, timeout=LONG).ids.tolist() == [[5] * 4]
        assert len(list(stream)) == 4


# Mistakes of callers and plugins -------------------------------------------------------------------------------------


def test_a_bad_request_is_refused_when_the_stream_is_made():
    with pytest.raises(InvalidRequestError) as caught:
        dripping().stream([[3], [99]], FOUR)
    assert caught.value.rows == (1,)
    with pytest.raises(CapabilityError):
        dripping().stream([[3]], {"top_k": 5})


@each(
    "bend, message",
    [
        (lambda chunk: replace(chunk, ids=[7]), "row 0: handed 4 tokens to on_tokens that are not the 4 it returned"),
        (lambda chunk: replace(chunk, logprobs=[-9.0]), "row 0: handed other log-probs to on_tokens"),
        (lambda chunk: replace(chunk, ids=[3, 3], logprobs=[-1.0, -1.0]), "row 0: handed 8 tokens"),
        (lambda chunk: replace(chunk, row=1), "row 1 is not one of the 1 rows"),
        (lambda chunk: replace(chunk, row="0"), "row '0' is not one of the 1 rows"),
        (lambda chunk: replace(chunk, ids=[99]), "row 0: id 99 is not an int in the vocabulary of 16"),
        (lambda chunk: replace(chunk, logprobs=[float("nan")]), "row 0: handed other log-probs"),
        (lambda chunk: replace(chunk, logprobs=[]), "row 0: handed other log-probs"),
        (lambda chunk: replace(chunk, finish_reason="length"), "row 0: got more after its last chunk"),
        (lambda chunk: replace(chunk, finish_reason="done"), "finish reason 'done' in|got more after its last"),
        (lambda chunk: {"row": 0}, "on_tokens: AttributeError"),
    ],
)
def test_chunks_that_are_not_the_result_fail_the_call(bend, message):
    backend = dripping(None, bend)
    with pytest.raises(EngineError, match=message) as caught:
        list(backend.stream([[3]], FOUR))
    assert caught.value.usable and "hook generate" in str(caught.value)
    assert backend.generate([[3]], FOUR).ids.tolist() == [[3] * 4]


def test_a_last_chunk_with_its_finish_reason_is_handed_on_once():
    def bend(chunk: TokenChunk) -> TokenChunk:
        return replace(chunk, finish_reason="length" if chunk.logprobs == [-3.0] else None)

    chunks = list(dripping(None, bend).stream([[3], [10]], FOUR))
    for row, token in ((0, 3), (1, 10)):
        own = [(chunk.ids, chunk.finish_reason) for chunk in chunks if chunk.row == row]
        assert own == [((token,), None)] * 3 + [((token,), "length")]


def test_a_finish_reason_that_is_not_the_results_fails_the_call():
    def bend(chunk: TokenChunk) -> TokenChunk:
        return replace(chunk, finish_reason="stop" if chunk.logprobs == [-3.0] else None)

    with pytest.raises(EngineError, match="finish reason 'stop' in on_tokens, 'length' in the result"):
        list(dripping(None, bend).stream([[3]], FOUR))


async def read_all(stream) -> list[AnswerChunk]:
    return [chunk async for chunk in stream]


# Errors after some chunks --------------------------------------------------------------------------------------------


def test_an_error_after_some_chunks_is_raised_and_not_retried():
    engine = Dripping()
    backend = Backend.from_plugin(engine, "dripping", retry=3)
    stream = backend.stream([[POISON]], FOUR)
    assert next(stream).ids == (POISON,)
    with pytest.raises(EngineError):
        next(stream)
    assert len(engine.calls) == 1 and list(stream) == []


def test_an_error_before_the_first_chunk_is_retried():
    engine = Dripping()
    engine.fails_after = 0
    backend = Backend.from_plugin(engine, "dripping", retry=3)
    with pytest.raises(EngineError):
        list(backend.stream([[POISON]], FOUR))
    assert len(engine.calls) == 3


def test_a_timeout_ends_a_stream_with_its_own_error():
    read = []
    # On a loaded machine, the first token may take longer than a short timeout.
    for timeout in (0.2, 2.0, LONG):
        backend = dripping(1)
        stream = backend.stream([[3]], FOUR, timeout=timeout)
        with pytest.raises(BackendTimeoutError):
            read.extend(chunk.ids for chunk in stream)
        assert list(stream) == []
        engine_of(backend).allow(None)
        if read:
            break
    assert read == [(3,)]


# Leaving early -------------------------------------------------------------------------------------------------------


def test_leaving_the_block_aborts_the_request():
    backend = dripping(1, abort=True)
    with backend.stream([[3], [5]], FOUR, request_ids=["a", "b"]) as stream:
        next(stream)
    assert engine_of(backend).aborted == {"a", "b"} and list(stream) == []
    stream.close()
    engine_of(backend).allow(None)
    assert backend.generate([[5]], FOUR).ids.tolist() == [[5] * 4]


def test_an_engine_that_cannot_abort_finishes_alone():
    backend = dripping(1)
    with backend.stream([[3]], FOUR) as stream:
        next(stream)
    assert engine_of(backend).taken == 1
    engine_of(backend).allow(None)
    assert backend.generate([[5]], FOUR).ids.tolist() == [[5] * 4]


def test_closing_a_stream_that_waits_for_its_turn_waits_for_no_other_call(monkeypatch):
    monkeypatch.setattr("corelm.backend.streams._GRACE_PERIOD", 50 * LONG)
    backend = dripping(0, abort=True)
    other = backend.submit_generate([[3]], FOUR)
    engine_of(backend).wait_for_calls(1)
    assert returns(backend.stream([[5]], FOUR).close) and not other.done()
    engine_of(backend).allow(None)
    assert other.result(LONG).ids.tolist() == [[3] * 4]
    assert len(engine_of(backend).calls) == 1 and not engine_of(backend).aborted


def test_a_stream_that_is_dropped_is_aborted():
    backend = dripping(1, abort=True)
    stream = backend.stream([[3]], FOUR, request_ids=["a"])
    next(stream)
    del stream
    wait_until(lambda: engine_of(backend).aborted == {"a"})


def test_an_interrupt_at_any_point_of_reading_ends_the_request():
    backend = dripping(abort=True)

    def read() -> None:
        with backend.stream([[3]], {"max_new_tokens": 2, "ignore_eos": True}) as stream:
            for _ in stream:
                pass

    for _ in interrupt_everywhere(read, step=7):
        assert backend.generate([[5]], FOUR, timeout=LONG).ids.tolist() == [[5] * 4]


# Asynchronously ------------------------------------------------------------------------------------------------------


def test_cancelling_the_task_aborts_the_request():
    backend = dripping(1, abort=True)

    async def run() -> None:
        task = asyncio.create_task(read_all(backend.astream([[3]], FOUR, request_ids=["a"])))
        await asyncio.to_thread(wait_until, lambda: engine_of(backend).taken == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    wait_until(lambda: engine_of(backend).aborted == {"a"})


def test_leaving_an_asynchronous_block_aborts_the_request():
    backend = dripping(1, abort=True)

    async def read() -> None:
        async with backend.astream([[3]], FOUR, request_ids=["a"]) as stream:
            async for _ in stream:
                break

    asyncio.run(read())
    assert engine_of(backend).aborted == {"a"}

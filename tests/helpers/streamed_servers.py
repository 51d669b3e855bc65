"""What a backend behind a URL promises about streams, for every kind of server."""

import threading
from typing import Any

import pytest

from corelm import Backend
from corelm.errors import BackendTimeoutError, EngineError
from helpers.batching_fakes import LONG
from helpers.http_server import FaultServer, event_stream

PROMPTS = [[5, 17, 300], [8], [40, 41]]
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}


def check_stream(backend: Backend, logprobs: str, **sampling: Any) -> None:
    """Assert that what is streamed is what `generate` returns, in more than one piece."""
    expected = backend.generate(PROMPTS, {**GREEDY, **sampling}, logprobs=logprobs)
    stream = backend.stream(PROMPTS, {**GREEDY, **sampling}, logprobs=logprobs)
    chunks = list(stream)
    assert stream.result.finish_reasons == expected.finish_reasons
    for row, ids in enumerate(expected.ids.tolist()):
        own = [chunk for chunk in chunks if chunk.row == row]
        assert [i for chunk in own for i in chunk.ids] == ids == stream.result.ids.tolist()[row]
        assert len([chunk for chunk in own if chunk.ids]) == len(ids)
        assert own[-1].finish_reason == expected.finish_reasons[row]
        found = [value for chunk in own for value in chunk.logprobs]
        assert found == ([] if expected.logprobs is None else expected.logprobs.split()[row].tolist())


def check_tokens_come_one_by_one(backend: Backend, fake: Any) -> None:
    """Assert that a token is read while the server holds the next one back."""
    gates = [threading.Event() for _ in range(6)]
    fake.pause = lambda step: gates[step].wait(LONG)
    stream = backend.stream(PROMPTS[:1], GREEDY, logprobs="none")
    for gate in gates:
        gate.set()
        assert len(next(stream).ids) == 1
    assert [chunk.finish_reason for chunk in stream] in ([], ["length"])


def check_leaving_closes_the_connection(backend: Backend, fake: Any, server: FaultServer) -> None:
    """Assert that the server's request ends soon after the reader has left, and that the backend still serves."""
    gate = threading.Event()
    fake.pause = lambda step: step > 1 and gate.wait(LONG)
    with backend.stream(PROMPTS[:1], GREEDY, logprobs="none") as stream:
        next(stream)
    gate.set()
    server.wait_for(lambda: server.in_flight == 0)
    fake.pause = lambda step: None
    assert backend.generate(PROMPTS[:1], GREEDY, logprobs="none").ids.lengths.tolist() == [6]


def check_a_timeout(backend: Backend, fake: Any) -> None:
    """Assert that a timeout ends a stream that never ends by itself."""
    gate = threading.Event()
    fake.pause = lambda step: step > 1 and gate.wait(LONG)
    # On a busy machine the time may be over before the first token.
    with pytest.raises(BackendTimeoutError):
        list(backend.stream(PROMPTS[:1], GREEDY, logprobs="none", timeout=0.5))
    gate.set()


def check_a_stream_that_breaks_off(backend: Backend, fake: Any, path: str, first: Any) -> None:
    """Assert that a row whose stream breaks off after a token fails and is not sent again.

    Args:
        first: returns the first event of the reply to a request's body.
    """
    sent = []

    def fault(request: Any) -> Any:
        if request.path != path:
            return None
        sent.append(request.body)
        return event_stream([first(request.body)], ends=False)

    fake.fault = fault
    stream = backend.stream(PROMPTS[:1], GREEDY, logprobs="none", on_error="skip")
    assert len(next(stream).ids) == 1
    with pytest.raises(EngineError, match="not sent again"):
        list(stream)
        assert stream.result.errors is not None
        raise EngineError(stream.result.errors[0])
    assert len(sent) == 1

"""Calls over a connection end however either side fails, and callers do not hold each other up."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest

from corelm.errors import EngineError, InvalidRequestError
from corelm_fleet.hosting.channel import Channel, Kind
from corelm_fleet.hosting.connection import Connection
from corelm_fleet.hosting.packing import Failure
from corelm_fleet.hosting.server import send_value

Ends = tuple[Connection, Channel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A connection, and the channel at its other end."""
    here, there = socket.socketpair()
    host = Channel(there)
    connection = Connection(Channel(here), lambda: "it ended")
    yield connection, host
    connection.close()
    host.close()


def start(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_a_callback_may_call_the_host(ends: Ends) -> None:
    connection, host = ends

    def serve() -> None:
        outer = host.receive()
        assert outer is not None
        host.send(Kind.EVENT, outer.call, ("on_tokens", (1,)))
        inner = host.receive()
        assert inner is not None
        host.send(Kind.RESULT, inner.call, "inner")
        host.send(Kind.RESULT, outer.call, "outer")

    thread, found = start(serve), list[Any]()
    callbacks = {"on_tokens": lambda number: found.append((number, connection.send(Kind.CALL, "inner", 3)))}
    assert connection.send(Kind.CALL, "outer", 5, callbacks) == "outer"
    assert found == [(1, "inner")]
    thread.join()


def test_a_slow_callback_holds_up_no_other_caller(ends: Ends) -> None:
    connection, host = ends
    go_on, entered = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        entered.set()
        go_on.wait(20)

    slow = start(lambda: connection.send(Kind.CALL, "slow", 20, {"on_tokens": wait}))
    outer = host.receive()
    assert outer is not None
    host.send(Kind.EVENT, outer.call, ("on_tokens", ()))
    assert entered.wait(5)

    def serve() -> None:
        frame = host.receive()
        assert frame is not None
        host.send(Kind.RESULT, frame.call, "quick")

    thread = start(serve)
    assert connection.send(Kind.CALL, "quick", 3) == "quick"
    go_on.set()
    host.send(Kind.RESULT, outer.call, "slow")
    for each in (slow, thread):
        each.join(5)


def test_a_frame_that_does_not_fit_in_memory_ends_all_calls(ends: Ends) -> None:
    connection, host = ends

    def serve() -> None:
        host.receive()
        host.end.sendall(struct.pack("<4sBQQI", b"clm1", Kind.RESULT, 0, 2**62, 0))

    start(serve)
    with pytest.raises(EngineError) as failure:
        connection.send(Kind.CALL, "x", 5)
    assert failure.value.usable is False and connection.lost


def test_calls_end_if_a_request_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (MemoryError(), OSError(22, "Invalid argument")):
        here, there = socket.socketpair()
        connection = Connection(Channel(here), lambda: "it ended")

        def fail(*_: object, error: Exception = error) -> NoReturn:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(Channel, "send_packed", fail)
            with pytest.raises(EngineError):
                connection.send(Kind.CALL, "x", 5)
        connection.close()
        there.close()


def test_what_cannot_be_sent_is_refused_with_a_type(ends: Ends) -> None:
    connection, _ = ends
    with pytest.raises(InvalidRequestError):
        connection.send(Kind.CALL, lambda: None, 5)


class Unreadable:
    def __reduce__(self) -> NoReturn:
        raise OSError("a result that cannot be packed")


def test_a_result_that_cannot_be_packed_is_the_failure_of_its_call() -> None:
    here, there = map(Channel, socket.socketpair())
    here.end.settimeout(5)
    send_value(there, Kind.RESULT, 7, Unreadable())
    frame = here.receive()
    assert frame is not None and (frame.kind, frame.call) == (Kind.ERROR, 7)
    value = frame.value()
    assert isinstance(value, Failure) and "cannot be packed" in value.message
    here.close()
    there.close()

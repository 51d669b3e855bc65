"""Frames on a socket: whole, in order, from many threads, of any size."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import torch

from corelm_fleet.hosting.channel import Channel, Kind


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    here, there = map(Channel, socket.socketpair())
    yield here, there
    here.close()
    there.close()


def test_frames_of_any_size_arrive_whole(ends: tuple[Channel, Channel]) -> None:
    here, there = ends
    # More tensors than the system sends in one call, and more bytes than the socket holds.
    tensors = [torch.arange(size, dtype=torch.int64) for size in (0, 1, 700, 100_003)]
    values = [tensors * 300, "text", {"big": torch.ones(3_000_001, dtype=torch.uint8)}]

    def send() -> None:
        for number, value in enumerate(values):
            here.send(Kind.CALL, number, value)

    thread = threading.Thread(target=send)
    thread.start()
    for number, value in enumerate(values):
        frame = there.receive()
        assert frame is not None and (frame.kind, frame.call) == (Kind.CALL, number)
        found = frame.value()
        if isinstance(value, list):
            assert all(torch.equal(one, other) for one, other in zip(found, value, strict=True))
            assert all(one.data_ptr() % one.element_size() == 0 for one in found)
        elif isinstance(value, dict):
            assert torch.equal(found["big"], value["big"])
        else:
            assert found == value
    thread.join()


def test_threads_do_not_mix_their_frames(ends: tuple[Channel, Channel]) -> None:
    here, there = ends

    def send(number: int) -> None:
        for _ in range(20):
            here.send(Kind.RESULT, number, torch.full((5000,), number))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(160):
        frame = there.receive()
        assert frame is not None and bool((frame.value() == frame.call).all())
    for thread in threads:
        thread.join()


def test_half_a_frame_is_the_end(ends: tuple[Channel, Channel]) -> None:
    here, there = ends
    here.end.sendall(b"clm1\x01")
    here.close()
    assert there.receive() is None


def test_what_is_no_frame_is_refused(ends: tuple[Channel, Channel]) -> None:
    here, there = ends
    here.end.sendall(b"HTTP/1.1 200 OK" * 10)
    with pytest.raises(ValueError, match="expected a frame"):
        there.receive()

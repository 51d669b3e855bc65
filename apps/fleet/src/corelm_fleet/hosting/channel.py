"""`Channel`: frames on a socket between two processes. A frame has a kind, the number of its call, and a value."""

from __future__ import annotations

import enum
import os
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from corelm_fleet.hosting.packing import Packed, pack, unpack

#: Functions of a request by the names of their fields.
Callbacks = Mapping[str, Callable[..., object]]


@dataclass(frozen=True, slots=True)
class Call:
    """What a `HostedEngine` asks for.

    Attributes:
        part: "hook", or "tokenizer" for a function of `TokenizerServer`.
        name: the name of the hook or function.
        args: its arguments; a hook has one, its request.
        kwargs: its arguments by name.
        callbacks: the fields of the request that are functions. The request has None there.
    """

    part: Literal["hook", "tokenizer"]
    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    callbacks: tuple[str, ...] = ()


class Sender(Protocol):
    """Sends frames to another process, in order."""

    def send_packed(self, kind: Kind, call: int, packed: Packed) -> None:
        """Send a frame. Any thread may send.

        Raises:
            OSError: the other process has ended.
        """


class Transport(Sender, Protocol):
    """Carries frames between two processes. `Channel` does it with a socket."""

    def receive(self) -> Frame | None:
        """Return the next frame; None if the other process has ended, or after `shut_down`. One thread receives.

        Raises:
            Exception: the connection broke.
        """

    def shut_down(self) -> None:
        """End the connection; any thread may. The thread that receives gets None."""

    def close(self) -> None:
        """Give back what the connection holds. The thread that receives calls this when it has got None."""


class Host(Protocol):
    """A process that holds an engine, as a `HostedEngine` sees it. `HostProcess` is a child of this process."""

    @property
    def lost(self) -> bool:
        """Whether the process has ended, so that it will not reply any more."""

    def call(self, call: Call, timeout: float | None = None, callbacks: Callbacks | None = None) -> Any:
        """Have the process make a call and return its result. See `Connection.send`."""

    def close(self) -> None:
        """Have the process end. It has closed its engine. In a fork of the process that opened it, do nothing."""

    def kill(self) -> None:
        """End the process although it may not reply. Calls under way fail. In a fork, do nothing."""


#: Both sides must have the same. Count it up when frames or what is in them change.
WIRE_VERSION = 4

_HEAD = struct.Struct("<4sBQQI")
_MAGIC = b"clm1"
#: macOS refuses to send or receive more bytes in one call than a C int can count.
_MOST_BYTES = 2**28


class Kind(enum.IntEnum):
    """What a frame is about.

    HELLO: the host's versions. OPEN: which engine to open. CALL: a hook or a method of the tokenizer. FORGET: no caller
    waits for the call any more. RESULT and ERROR: how a call ended. EVENT: an argument for one of its callbacks.
    """

    HELLO = 1
    OPEN = 2
    CALL = 3
    FORGET = 4
    RESULT = 5
    ERROR = 6
    EVENT = 7


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame that has arrived.

    Attributes:
        kind: what it is about.
        call: the number of the call.
        packed: its value, see `unpack`.
        buffers: the bytes of the value's large tensors.
    """

    kind: Kind
    call: int
    packed: memoryview
    buffers: tuple[memoryview, ...]

    def value(self) -> Any:
        return unpack(self.packed, self.buffers)


class Channel:
    """Sends frames on one end of a socket and receives those of the other end.

    Any thread may send; one thread receives.
    """

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._sending = threading.Lock()
        _channels.add(self)

    def send(self, kind: Kind, call: int, value: Any) -> None:
        """Send a frame. A thread that is interrupted in here leaves half a frame, so the main thread must not call it.

        Raises:
            OSError: the other process has closed its end, or has ended.
            Exception: the value cannot be packed; nothing was sent.
        """
        self.send_packed(kind, call, pack(value))

    def send_packed(self, kind: Kind, call: int, packed: Packed) -> None:
        """Send a frame whose value is packed already. See `send`."""
        pickled, buffers = packed[0], [buffer.raw() for buffer in packed[1]]
        sizes = struct.pack(f"<{len(buffers)}Q", *map(len, buffers))
        head = _HEAD.pack(_MAGIC, kind, call, len(pickled), len(buffers))
        with self._sending:
            for piece in (memoryview(head + sizes + pickled), *buffers):
                for start in range(0, len(piece), _MOST_BYTES):
                    self.end.sendall(piece[start : start + _MOST_BYTES])

    def receive(self) -> Frame | None:
        """Return the next frame; None if the other process has closed its end or has ended.

        Raises:
            OSError: the connection broke.
            ValueError: what arrived is not a frame.
        """
        head = self._receive(_HEAD.size)
        if head is None:
            return None
        magic, kind, call, length, count = _HEAD.unpack(head)
        if magic != _MAGIC:
            raise ValueError(f"expected a frame that begins with {_MAGIC!r}, got {magic!r}")
        first = self._receive(8 * count + length)
        if first is None:
            return None
        # One by one: a tensor needs an aligned place in memory.
        buffers = []
        for size in struct.unpack_from(f"<{count}Q", first):
            if (data := self._receive(size)) is None:
                return None
            buffers.append(data)
        return Frame(Kind(kind), call, first[8 * count :], tuple(buffers))

    def shut_down(self) -> None:
        """End the connection. The thread that receives here gets None, and threads that send get an error."""
        with suppress(OSError):
            self.end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end. Only the thread that receives may call this, or any thread when none receives."""
        self.shut_down()
        with self._sending:
            self.end.close()

    def _receive(self, size: int) -> memoryview | None:
        # Not a bytearray, which would be filled with zeros first.
        try:
            data: memoryview = torch.empty(size, dtype=torch.uint8, device="cpu").numpy().data
        except (RuntimeError, TypeError, OverflowError) as error:
            raise ValueError(f"a frame of {size:,} bytes does not fit in memory") from error
        have = 0
        while have < size:
            count = self.end.recv_into(data[have : have + _MOST_BYTES])
            if not count:
                return None
            have += count
        return data


_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def _close_in_fork() -> None:
    # Not `Channel.close`, which would end the connection of the parent, too. As long as a fork held the socket open,
    # the other process would not notice that this one has ended.
    for channel in list(_channels):
        with suppress(OSError):
            channel.end.close()


# Windows has no forks.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_fork)

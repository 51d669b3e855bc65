"""`Connection`: calls into a host. Requests leave in order, and each reply reaches the caller that waits for it."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from corelm.errors import BackendClosedError, EngineError, InvalidRequestError, brief, described
from corelm.waiting import next_item
from corelm_fleet.hosting.channel import Call, Callbacks, Frame, Kind, Transport
from corelm_fleet.hosting.packing import Failure, pack

_log = logging.getLogger(__name__)


class Connection:
    """Calls into the host at the other end of a transport. Any number of threads may wait for replies.

    A thread of the connection writes, so that Ctrl-C in a caller never leaves half a request on the socket, and so that
    a host which does not read holds up no caller beyond its timeout.

    Args:
        channel: this end.
        lost: returns why the host has ended, for the error of those who wait. It is called once, on another thread.
    """

    def __init__(self, channel: Transport, lost: Callable[[], str]) -> None:
        self._channel, self._why_lost = channel, lost
        self._outgoing: SimpleQueue[tuple[Kind, int, Any] | None] = SimpleQueue()
        self._hello: SimpleQueue[Frame | None] = SimpleQueue()
        self._waiting: dict[int, SimpleQueue[Frame | None]] = {}
        self._lost: str | None = None
        self._numbers = itertools.count()
        self._process = os.getpid()
        for name, work in (("read", self._read), ("write", self._write)):
            threading.Thread(target=work, name=f"corelm-host-{name}", daemon=True).start()

    @property
    def lost(self) -> bool:
        """Whether the host has ended, or this is a fork of the process that opened the connection."""
        return self._lost is not None or os.getpid() != self._process

    def send(self, kind: Kind, value: Any, timeout: float | None = None, callbacks: Callbacks | None = None) -> Any:
        """Send a frame and return the result of the call.

        Args:
            kind: OPEN or CALL.
            value: what to send.
            timeout: seconds to wait for the reply; None for no limit.
            callbacks: functions of the request, by the names of their fields. They are called on this thread, so that
                they may call the host, and hold up no other caller.

        Raises:
            TimeoutError: there was no reply in time. The host is told that no caller waits.
            EngineError: the host has ended.
            BackendClosedError: this is a fork of the process that opened the connection.
            InvalidRequestError: `value` cannot be packed.
            Exception: the call failed in the host.
        """
        if os.getpid() != self._process:
            raise BackendClosedError("the engine belongs to another process, which this one is a fork of")
        try:
            packed = pack(value)
        except Exception as error:
            raise InvalidRequestError(
                f"the process that holds the engine cannot be sent this: {described(error)}"
            ) from error
        number, replies = next(self._numbers), SimpleQueue[Frame | None]()
        self._waiting[number] = replies
        if self._lost is not None:
            # The reader may have ended before it could see this call.
            replies.put(None)
        try:
            self._outgoing.put((kind, number, packed))
            frame = _reply(replies, timeout, callbacks or {})
        except BaseException:
            # A timeout, or for example a KeyboardInterrupt.
            if number:
                self._outgoing.put((Kind.FORGET, number, pack(None)))
            raise
        finally:
            self._waiting.pop(number, None)
        if frame is None:
            raise EngineError(str(self._lost), usable=False)
        try:
            result = frame.value()
        except Exception as error:
            raise EngineError(
                f"the answer of the process that holds the engine cannot be read: {described(error)}"
            ) from error
        if frame.kind is Kind.ERROR and isinstance(result, Failure):
            raise result.error()
        return result

    def call(self, call: Call, timeout: float | None = None, callbacks: Callbacks | None = None) -> Any:
        """Have the host make a call and return its result. See `send`."""
        return self.send(Kind.CALL, call, timeout, callbacks)

    def hello(self, timeout: float) -> Any:
        """Return the first thing that the host says.

        Raises:
            TimeoutError: it said nothing in time.
            EngineError: the host has ended.
        """
        try:
            frame = next_item(self._hello, timeout)
        except Empty:
            raise TimeoutError(f"it said nothing within {timeout:g} s") from None
        if frame is None:
            raise EngineError(str(self._lost), usable=False)
        return frame.value()

    def close(self) -> None:
        """Close this end of the socket. Calls that wait for a reply fail."""
        self._outgoing.put(None)
        self._channel.shut_down()

    def _read(self) -> None:
        """Hand what arrives to those who wait for it, until the host ends."""
        why, broken = "the process that holds the engine has ended", ""
        try:
            while (frame := self._channel.receive()) is not None:
                if frame.kind is Kind.HELLO:
                    self._hello.put(frame)
                elif replies := self._waiting.get(frame.call):
                    replies.put(frame)
        except Exception as error:
            broken = f"; the connection broke: {described(error)}"
        finally:
            # No error in here may let a caller wait for ever.
            with suppress(Exception):
                why = self._why_lost()
            self._lost = why + broken
            self._outgoing.put(None)
            self._hello.put(None)
            for replies in list(self._waiting.values()):
                replies.put(None)
            # Not earlier: the system could give the number of the socket to another file while this thread reads.
            self._channel.close()

    def _write(self) -> None:
        """Send what callers have queued."""
        while (item := self._outgoing.get()) is not None:
            try:
                self._channel.send_packed(*item)
            except Exception as error:
                # The host has ended, or half a frame was sent. The reader tells the callers.
                _log.debug("a request could not be sent to a host: %s", brief(described(error)))
                self._channel.shut_down()
                return
            del item


def _reply(replies: SimpleQueue[Frame | None], timeout: float | None, callbacks: Callbacks) -> Frame | None:
    """Return the frame that ends a call, or None if the host has ended. Call the callbacks until then.

    Raises:
        TimeoutError: there was no reply in time.
    """
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        try:
            frame = next_item(replies, None if end is None else end - time.monotonic())
        except Empty:
            raise TimeoutError(f"the process that holds the engine did not answer within {timeout:g} s") from None
        if frame is None or frame.kind is not Kind.EVENT:
            return frame
        try:
            name, args = frame.value()
            callbacks[name](*args)
        except Exception as error:
            _log.error("a callback of a request raised %s", brief(described(error)), exc_info=error)

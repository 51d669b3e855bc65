"""The host: `main` opens the engine that its parent names, and serves it.

The parent holds the other end of the socket. When that end closes, on purpose or because the parent was killed,
the host ends with every process in its group.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import Any, NoReturn

from corelm._version import __version__
from corelm.spec import API_VERSION
from corelm_fleet.hosting.channel import WIRE_VERSION, Channel, Frame, Kind
from corelm_fleet.hosting.packing import Failure
from corelm_fleet.hosting.server import EngineServer, Session, open_server, send_value, value_of

#: Seconds that an engine has to close after the parent has ended.
CLOSE_TIMEOUT = 5.0
#: Linux: the option of `prctl` that sets which signal a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1


def main(descriptor: str) -> NoReturn:
    """Serve the parent until it ends.

    Args:
        descriptor: the number of an open socket. The parent has the other end.
    """
    # The parent handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wake_without_parent()
    channel = Channel(socket.socket(fileno=int(descriptor)))
    channel.send(Kind.HELLO, 0, versions())
    order = channel.receive()
    if order is None:
        end_group()
    served = _Served(channel)
    threading.Thread(target=served.read, name="corelm-host-reader", daemon=True).start()
    served.open(order)
    # Engines may expect that the main thread runs, and signals need it.
    while True:
        signal.pause()


def wake_without_parent() -> None:
    """Have the kernel continue this process when its parent ends: stopped, it would not notice that and stay for ever.

    Linux alone can do this. The kernel also sends the signal when the parent's thread that started this process ends.
    SIGCONT does nothing to a process that runs, so that is harmless.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT.value, 0, 0, 0)


def versions() -> dict[str, Any]:
    """Return what both sides compare before an engine is opened."""
    return {"core": __version__, "api": API_VERSION, "wire": WIRE_VERSION, "python": platform.python_version()}


class _Served:
    """An engine that is being opened, or is open, for the process at the other end of a channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._server: EngineServer | None = None
        self._session: Session | None = None

    def open(self, frame: Frame) -> None:
        """Open the engine that a frame names, and say that it is open, or why it did not open."""
        try:
            order = value_of(frame)
            self._server, label = open_server(order["name"], order["model"], order["options"])
            self._session = Session(self._server, self._channel)
            opened = self._server.opened(), label
        except BaseException as error:  # an engine can raise SystemExit, too
            send_value(self._channel, Kind.ERROR, 0, Failure.of(error))
        else:
            send_value(self._channel, Kind.RESULT, 0, opened)

    def read(self) -> None:
        """Serve what arrives, until the other end closes."""
        try:
            while (frame := self._channel.receive()) is not None:
                assert self._session is not None, "a call arrived before the engine was open"
                self._session.handle(frame)
        finally:
            self._end()

    def _end(self) -> NoReturn:
        try:
            threading.Timer(CLOSE_TIMEOUT, end_group).start()
            if self._server is not None:
                self._server.end()
        finally:
            end_group()


def end_group() -> NoReturn:
    """End this process and all that it has started: it leads its process group."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    signal.raise_signal(signal.SIGKILL)
    raise AssertionError("a process survived SIGKILL")

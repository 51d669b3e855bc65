"""`RayHost`: an actor that holds an engine, as a driver sees it; `RayTransport` carries frames to it and back."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
import uuid
from contextlib import suppress
from typing import Any

import ray

from corelm.errors import brief, described
from corelm_fleet.hosting import Call, Callbacks, Connection, Frame, Kind, Packed
from ray_backend.actor import RayFrame, frame_for_ray, frame_of_ray

_log = logging.getLogger(__name__)

#: Seconds between two looks whether the connection was shut down.
_PAUSE = 0.5
#: Seconds that Ray has to end an actor before this process kills it, if it is on this machine.
_END = 2.0


class RayTransport:
    """Carries the frames of one driver to an actor, and those of the actor back.

    Attributes:
        why: why the actor is lost, in the words of Ray; "" while it is not.
        ended: set when nothing is received any more.
    """

    def __init__(self, actor: Any, driver: str) -> None:
        self._actor, self._driver = actor, driver
        self._waiting: list[RayFrame | None] = []
        self._down = threading.Event()
        self.why = ""
        self.ended = threading.Event()

    def send_packed(self, kind: Kind, call: int, packed: Packed) -> None:
        if self._down.is_set() or not ray.is_initialized():
            # Otherwise Ray would start another cluster.
            raise OSError("the connection to the actor is closed")
        self._actor.send.remote(self._driver, frame_for_ray(kind, call, packed))

    def receive(self) -> Frame | None:
        while not self._down.is_set():
            if self._waiting:
                frame = self._waiting.pop(0)
                if frame is None:
                    self.why = "the actor has forgotten this driver, which was silent for too long"
                return None if frame is None else frame_of_ray(frame)
            try:
                self._waiting = self._fetched()
            except Exception as error:
                self.why = brief(described(error))
                return None
        return None

    def shut_down(self) -> None:
        self._down.set()

    def close(self) -> None:
        self.ended.set()

    def _fetched(self) -> list[RayFrame | None]:
        if not ray.is_initialized():
            raise OSError("Ray was shut down")
        found = self._actor.receive.remote(self._driver)
        while not self._down.is_set():
            if ray.wait([found], timeout=_PAUSE)[0]:
                return list(ray.get(found))
        return []


class RayHost:
    """An actor with an engine. It is the host of a `HostedEngine`.

    Args:
        owned: whether this driver has created the actor, and ends it.

    Attributes:
        pid: the actor's process.
        node: the node that it is on.
    """

    def __init__(self, actor: Any, hello: dict[str, Any], name: str, owned: bool) -> None:
        self.pid, self.node = int(hello["pid"]), str(hello["node"])
        self.driver = uuid.uuid4().hex
        self._actor, self._name, self._owned = actor, name, owned
        self._process = os.getpid()
        self._closed = False
        self._handle = _process_handle(self.pid) if owned and self._is_here() else None
        self._transport: RayTransport | None = None
        self._connection: Connection | None = None

    def connect(self) -> None:
        """Begin to receive answers; the actor knows the driver."""
        self._transport = RayTransport(self._actor, self.driver)
        self._connection = Connection(self._transport, self._why_lost)

    @property
    def lost(self) -> bool:
        return self._connection is None or self._connection.lost

    def call(self, call: Call, timeout: float | None = None, callbacks: Callbacks | None = None) -> Any:
        assert self._connection is not None
        return self._connection.call(call, timeout, callbacks)

    def close(self) -> None:
        """Leave the actor, and end it if this driver has created it."""
        if os.getpid() == self._process:
            self._closed = True
            self._end()

    def kill(self) -> None:
        """Like `close`. The actor is not asked for anything."""
        self.close()

    def _end(self) -> None:
        if ray.is_initialized():
            with suppress(Exception):
                if self._owned:
                    ray.kill(self._actor, no_restart=True)
                else:
                    self._actor.detach.remote(self.driver)
        if self._connection is not None and self._transport is not None:
            self._connection.close()
            if threading.current_thread().name != "corelm-host-read":
                self._transport.ended.wait(_END)
        if self._handle is not None:
            # Ray does not end a process that was stopped by SIGSTOP.
            handle, self._handle = self._handle, None
            _kill(handle, _END)

    def _is_here(self) -> bool:
        return self.node == ray.get_runtime_context().get_node_id()

    def _why_lost(self) -> str:
        if self._closed:
            return "the backend is closed, and its actor was left"
        why = self._transport.why if self._transport is not None else ""
        return f"{self._name}, an actor in process {self.pid} of node {self.node[:8]}, was lost: {why}"


def _process_handle(pid: int) -> int | None:
    """Return a descriptor that stands for a process, and for no later one with its number; None if there is none."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _kill(handle: int, patience: float) -> None:
    """Kill a process that does not end by itself."""
    try:
        end = time.monotonic() + patience
        if not select.select([handle], [], [], max(0.0, end - time.monotonic()))[0]:
            with suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
    finally:
        os.close(handle)

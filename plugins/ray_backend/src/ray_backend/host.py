"""`RayHost`: an actor that holds an engine, as a driver sees it; `RayTransport` carries frames to it and back."""

from __future__ import annotations

import os
import select
import signal
import threading
from contextlib import suppress
from typing import Any

import ray

from corelm.errors import brief, described
from corelm_fleet.hosting import Call, Callbacks, Connection, Frame, Kind, Packed
from ray_backend.actor import RayFrame, frame_for_ray, frame_of_ray

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
        try:
            while not self._waiting:
                if not ray.is_initialized():
                    raise OSError("Ray was shut down")
                found = self._actor.receive.remote(self._driver)
                while not ray.wait([found], timeout=_PAUSE)[0]:
                    if self._down.is_set():
                        return None
                self._waiting = list(ray.get(found))
        except Exception as error:
            self.why = brief(described(error))
            return None
        frame = self._waiting.pop(0)
        if frame is None:
            self.why = "the actor has forgotten this driver, which was silent for too long"
        return None if frame is None or self._down.is_set() else frame_of_ray(frame)

    def shut_down(self) -> None:
        self._down.set()

    def close(self) -> None:
        self.ended.set()


class RayHost:
    """An actor with an engine, which knows the driver. It is the host of a `HostedEngine`.

    Args:
        driver: the name by which the actor knows this driver.
        owned: whether this driver has created the actor, and ends it.

    Attributes:
        pid: the actor's process.
    """

    def __init__(self, actor: Any, driver: str, hello: dict[str, Any], name: str, owned: bool) -> None:
        self.pid, self._node = int(hello["pid"]), str(hello["node"])
        self._actor, self._driver, self._name, self._owned = actor, driver, name, owned
        self._process, self._closed = os.getpid(), False
        # A descriptor stands for this process, and for no later one with its number. macOS has none.
        self._handle: int | None = None
        if owned and hasattr(os, "pidfd_open") and self._node == ray.get_runtime_context().get_node_id():
            with suppress(OSError):
                self._handle = os.pidfd_open(self.pid)
        self._transport = RayTransport(actor, driver)
        self._connection = Connection(self._transport, self._why_lost)

    @property
    def lost(self) -> bool:
        return self._connection.lost

    def call(self, call: Call, timeout: float | None = None, callbacks: Callbacks | None = None) -> Any:
        return self._connection.call(call, timeout, callbacks)

    def close(self) -> None:
        """Leave the actor, and end it if this driver has created it. It is not asked for anything."""
        if os.getpid() != self._process:
            return
        self._closed = True
        if ray.is_initialized():
            with suppress(Exception):
                if self._owned:
                    ray.kill(self._actor, no_restart=True)
                else:
                    self._actor.detach.remote(self._driver)
        self._connection.close()
        if threading.current_thread().name != "corelm-host-read":
            self._transport.ended.wait(_END)
        handle, self._handle = self._handle, None
        if handle is not None:
            try:
                # Ray does not end a process that was stopped by SIGSTOP.
                if not select.select([handle], [], [], _END)[0]:
                    with suppress(ProcessLookupError, PermissionError):
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)

    kill = close

    def _why_lost(self) -> str:
        if self._closed:
            return "the backend is closed, and its actor was left"
        return f"{self._name}, an actor in process {self.pid} of node {self._node[:8]}, was lost: {self._transport.why}"

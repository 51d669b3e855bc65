"""`EngineActor`: the Ray actor that holds an engine and serves the frames of its drivers."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import numpy as np
import ray
import torch

import corelm
from corelm.errors import EngineError
from corelm_fleet.hosting import EngineServer, Failure, Frame, Kind, Opened, Packed, Session, open_server, pack, unpack
from ray_backend.meter import Meter

F = TypeVar("F", bound=Callable[..., Any])

#: A frame as Ray carries it: its kind, the number of its call, its pickle, and the bytes of its large tensors.
RayFrame = tuple[int, int, bytes, list[Any]]

#: Threads for the calls of drivers that wait for answers: one for each driver.
DRIVERS = 32
#: Methods of one group wait for each other, and for no other group.
GROUPS = {"send": 1, "receive": DRIVERS, "control": DRIVERS}
#: Seconds that one call to `receive` waits for an answer.
_LISTEN = 10.0
#: Frames that one call to `receive` returns at most.
_MOST_FRAMES = 64
#: Seconds after which a driver that does not ask for answers counts as gone. Its calls are then aborted.
_SILENCE = 60.0


def _method(**options: Any) -> Callable[[F], F]:
    """Return Ray's decorator, which says nothing about its types."""
    decorator: Callable[[F], F] = ray.method(**options)
    return decorator


def frame_for_ray(kind: Kind, call: int, packed: Packed) -> RayFrame:
    """Return a frame as Ray carries it. Ray takes the arrays out of band, and copies them once."""
    return int(kind), call, packed[0], [np.frombuffer(buffer.raw(), dtype=np.uint8) for buffer in packed[1]]


def frame_of_ray(frame: RayFrame) -> Frame:
    """Return the frame that Ray has carried. Its tensors are copied: Ray's memory is read-only, and is given back."""
    kind, call, pickled, arrays = frame
    return Frame(Kind(kind), call, memoryview(pickled), tuple(np.array(each).data for each in arrays))


class _Outbox:
    """The answers that a driver has not fetched yet: the transport of its session."""

    def __init__(self) -> None:
        self.frames: SimpleQueue[RayFrame | None] = SimpleQueue()
        self.heard = time.monotonic()

    def send_packed(self, kind: Kind, call: int, packed: Packed) -> None:
        self.frames.put(frame_for_ray(kind, call, packed))

    def receive(self) -> Frame | None:
        raise NotImplementedError("drivers send their frames to EngineActor.send")

    def shut_down(self) -> None:
        self.frames.put(None)

    def close(self) -> None:
        pass

    def fetch(self) -> list[RayFrame | None]:
        """Return the next frames. None among them says that there will be no more."""
        self.heard = time.monotonic()
        try:
            found = [self.frames.get(timeout=_LISTEN)]
            while len(found) < _MOST_FRAMES:
                found.append(self.frames.get_nowait())
        except Empty:
            pass
        self.heard = time.monotonic()
        return found


class EngineActor:
    """Holds one engine.

    Values cross as pickles of core, because Ray cannot unpickle every exception and takes a tensor's whole storage.
    """

    def __init__(self) -> None:
        self._opened = threading.Event()
        self._result: Opened | Failure | None = None
        self._facts: dict[str, Any] = {}
        self._server: EngineServer | None = None
        self._meter = Meter(self._claim)
        self._sessions: dict[str, tuple[Session, _Outbox]] = {}
        self._lock = threading.Lock()

    @_method(concurrency_group="control")
    def hello(self) -> dict[str, Any]:
        """Return what a driver checks before it opens the engine, and where this process is."""
        return {
            "core": corelm.__version__,
            "python": platform.python_version(),
            "pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id(),
        }

    def open(self, packed: bytes) -> None:
        """Open the engine. `attach` says what became of it."""
        try:
            order = unpack(packed)
            # Ray sets OMP_NUM_THREADS only for some actors, and torch may have been imported before that.
            torch.set_num_threads(order["threads"])
            self._facts, self._meter.starts = order["facts"], order["starts"]
            self._server, _ = open_server(order["name"], order["model"], order["options"], [self._meter])
            self._result = self._server.opened()
        except BaseException as error:  # an engine can raise SystemExit, too
            self._result = Failure.of(error)
        self._opened.set()
        threading.Thread(target=self._watch_drivers, name="corelm-ray-drivers", daemon=True).start()

    @_method(concurrency_group="control")
    def wait_until_open(self) -> None:
        """Return once the engine is open, or did not open."""
        self._opened.wait()

    @_method(concurrency_group="control")
    def attach(self, driver: str, facts: dict[str, Any] | None) -> bytes:
        """Let a driver send frames once the engine is open, if it expects the facts of this engine.

        Returns:
            A pickle of the facts, and of what `EngineServer.opened` returned or why the driver cannot attach.
        """
        self._opened.wait()
        if self._server is None or facts not in (None, self._facts):
            return pack((self._facts, self._result))[0]
        with self._lock:
            why = ""
            if len(self._sessions) >= DRIVERS - 1:
                why = f"{len(self._sessions)} drivers use the actor, and it can serve no more"
            elif facts is not None and self._meter.changed and self._sessions.keys() - {driver}:
                why = "its weights were changed after it was opened, or it sleeps; no other driver may join it"
            if why:
                return pack((self._facts, Failure.of(EngineError(why))))[0]
            outbox = _Outbox()
            self._sessions[driver] = Session(self._server, outbox), outbox
        return pack((self._facts, self._result))[0]

    @_method(concurrency_group="send", num_returns=0)
    def send(self, driver: str, frame: RayFrame) -> None:
        """Take a frame of a driver; return at once."""
        found = self._sessions.get(driver)
        if found is not None:
            found[0].handle(frame_of_ray(frame))

    @_method(concurrency_group="receive")
    def receive(self, driver: str) -> list[RayFrame | None]:
        """Return frames for a driver as soon as there are some; nothing after some seconds without one."""
        found = self._sessions.get(driver)
        return [None] if found is None else found[1].fetch()

    @_method(concurrency_group="send")
    def detach(self, driver: str) -> None:
        """Forget a driver and abort its calls."""
        self._forget(driver)

    @_method(concurrency_group="control")
    def status(self) -> dict[str, Any]:
        """Return how the engine is doing."""
        open_or_not = "healthy" if self._server is not None else "dead"
        state = open_or_not if self._opened.is_set() else "joining"
        return {"state": state, "drivers": len(self._sessions), **self._meter.figures()}

    def _claim(self) -> int:
        with self._lock:
            self._meter.changed |= len(self._sessions) <= 1
            return len(self._sessions)

    def _forget(self, driver: str) -> None:
        with self._lock:
            found = self._sessions.pop(driver, None)
        if found is not None:
            session, outbox = found
            session.end()
            outbox.shut_down()

    def _watch_drivers(self) -> None:
        """Forget drivers that have ended without a word."""
        while True:
            time.sleep(_SILENCE / 4)
            late = time.monotonic() - _SILENCE
            for driver, (_, outbox) in list(self._sessions.items()):
                if outbox.heard < late:
                    self._forget(driver)

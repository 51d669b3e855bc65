"""`EngineActor`: the Ray actor that holds an engine and serves the frames of its drivers; `Meter` wraps the engine."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import numpy as np
import ray
import torch

import corelm
from corelm.errors import CapabilityError, EngineError, InvalidRequestError
from corelm.spec import (
    GenerateRequest,
    GenerateResult,
    ScoreRequest,
    ScoreResult,
    SleepRequest,
    WakeRequest,
    WeightUpdate,
    hookimpl,
)
from corelm.validate import invalid
from corelm_fleet import Throughput
from corelm_fleet.hosting import EngineServer, Failure, Frame, Kind, Opened, Packed, Session, open_server, pack, unpack

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
#: With a type, which Ray's own has not.
_method: Callable[..., Callable[[F], F]] = ray.method


def frame_for_ray(kind: Kind, call: int, packed: Packed) -> RayFrame:
    """Return a frame as Ray carries it. Ray takes the arrays out of band, and copies them once."""
    return int(kind), call, packed[0], [np.frombuffer(buffer.raw(), dtype=np.uint8) for buffer in packed[1]]


def frame_of_ray(frame: RayFrame) -> Frame:
    """Return the frame that Ray has carried. Its tensors are copied: Ray's memory is read-only, and is given back."""
    kind, call, pickled, arrays = frame
    return Frame(Kind(kind), call, memoryview(pickled), tuple(np.array(each).data for each in arrays))


class _Outbox:
    """The answers that a driver has not fetched yet: where its session sends frames."""

    def __init__(self) -> None:
        self.frames: SimpleQueue[RayFrame | None] = SimpleQueue()
        self.heard = time.monotonic()

    def send_packed(self, kind: Kind, call: int, packed: Packed) -> None:
        self.frames.put(frame_for_ray(kind, call, packed))

    def fetch(self) -> list[RayFrame | None]:
        """Return the next frames. None among them says that there will be no more."""
        self.heard, found = time.monotonic(), list[RayFrame | None]()
        with suppress(Empty):
            found.append(self.frames.get(timeout=_LISTEN))
            while len(found) < _MOST_FRAMES:
                found.append(self.frames.get_nowait())
        return found


class Meter:
    """Wraps the hooks of an engine: counts what it does, and keeps its weights from changing under another driver.

    Args:
        claim: sets `changed` unless several drivers use the engine; returns how many do.

    Attributes:
        starts: how often the replica was started, this time included.
        changed: whether its weights are other ones than it was opened with, or are being changed, or it sleeps. No
            other driver may join it then.
    """

    def __init__(self, claim: Callable[[], int]) -> None:
        self._claim = claim
        self.starts = 1
        self.changed = self._woken_as = False
        self._epoch = self._rows = 0
        self._speed = Throughput(time.monotonic())
        self._lock = threading.Lock()

    @hookimpl(wrapper=True)
    def generate(self, request: GenerateRequest) -> Generator[None, GenerateResult, GenerateResult]:
        with self._working_on(len(request.prompts)):
            result = yield
        with self._lock:
            self._speed.add(int(result.ids.lengths.sum()), time.monotonic())
        return result

    @hookimpl(wrapper=True)
    def score_logprobs(self, request: ScoreRequest) -> Generator[None, ScoreResult, ScoreResult]:
        with self._working_on(len(request.sequences)):
            return (yield)

    @hookimpl(wrapper=True)
    def update_weights(self, request: WeightUpdate) -> Generator[None, bool, bool]:
        with self._alone("update_weights", "get answers of new weights under the label of the old ones"):
            loaded = yield
        self._epoch += 1
        return loaded

    @hookimpl(wrapper=True)
    def sleep(self, request: SleepRequest) -> Generator[None, bool, bool]:
        self._woken_as = self.changed or request.level > 1
        with self._alone("sleep_levels", "get no answers while it sleeps"):
            return (yield)

    @hookimpl(wrapper=True)
    def wake(self, request: WakeRequest) -> Generator[None, bool, bool]:
        awake = yield
        if request.last and self._epoch == 0:
            self.changed = self._woken_as
        return awake

    def figures(self) -> dict[str, Any]:
        """Return what a `ReplicaStatus` says of rows, tokens, weights and starts."""
        with self._lock:
            speed = self._speed.per_second(time.monotonic())
            return {"rows": self._rows, "tokens_per_second": speed, "epoch": self._epoch, "starts": self.starts}

    @contextmanager
    def _working_on(self, rows: int) -> Iterator[None]:
        with self._lock:
            self._rows += rows
        try:
            yield
        finally:
            with self._lock:
                self._rows -= rows

    @contextmanager
    def _alone(self, capability: str, what: str) -> Iterator[None]:
        """Let no driver join from now on, unless the engine refuses what the ``with`` block asks for.

        Args:
            what: what would happen to the other drivers, if there were some.
        """
        before, drivers = self.changed, self._claim()
        if drivers > 1:
            raise CapabilityError(
                f"{drivers} drivers use the actor, and the others would {what}; close their backends first, or give "
                "them another actor_name",
                capability=capability,
            )
        try:
            yield
        except (InvalidRequestError, CapabilityError):
            self.changed = before
            raise


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
        return {"core": corelm.__version__, "pid": os.getpid(), "node": ray.get_runtime_context().get_node_id()}

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
    def attach(self, driver: str, facts: dict[str, str] | None) -> bytes:
        """Let a driver send frames to the engine, which is open, if it expects the facts of this engine.

        Returns:
            A pickle of what `EngineServer.opened` returned, or of why the driver cannot attach.
        """
        if self._server is None:
            return pack(self._result)[0]
        refusal: Exception | None = None
        with self._lock:
            if facts is not None and facts != self._facts:
                refusal = _other_facts(self._facts, facts)
            elif len(self._sessions) >= DRIVERS - 1:
                refusal = EngineError(f"{len(self._sessions)} drivers use the actor, and it can serve no more")
            elif facts is not None and self._meter.changed and self._sessions.keys() - {driver}:
                why = "its weights were changed after it was opened, or it sleeps; no other driver may join it"
                refusal = EngineError(why)
            else:
                outbox = _Outbox()
                self._sessions[driver] = Session(self._server, outbox), outbox
        return pack(self._result if refusal is None else Failure.of(refusal))[0]

    @_method(concurrency_group="send", num_returns=0)
    def send(self, driver: str, frame: RayFrame) -> None:
        """Take a frame of a driver; return at once."""
        if (found := self._sessions.get(driver)) is not None:
            found[0].handle(frame_of_ray(frame))

    @_method(concurrency_group="receive")
    def receive(self, driver: str) -> list[RayFrame | None]:
        """Return frames for a driver as soon as there are some; nothing after some seconds without one."""
        found = self._sessions.get(driver)
        return [None] if found is None else found[1].fetch()

    @_method(concurrency_group="send")
    def detach(self, driver: str) -> None:
        """Forget a driver and abort its calls."""
        with self._lock:
            found = self._sessions.pop(driver, None)
        if found is not None:
            session, outbox = found
            session.end()
            outbox.frames.put(None)

    @_method(concurrency_group="control")
    def status(self) -> dict[str, Any]:
        """Return how the engine is doing."""
        state = "joining" if not self._opened.is_set() else "dead" if self._server is None else "healthy"
        return {"state": state, **self._meter.figures()}

    def _claim(self) -> int:
        with self._lock:
            self._meter.changed |= len(self._sessions) <= 1
            return len(self._sessions)

    def _watch_drivers(self) -> None:
        """Forget drivers that have ended without a word."""
        while True:
            time.sleep(_SILENCE / 4)
            late = time.monotonic() - _SILENCE
            for driver, (_, outbox) in list(self._sessions.items()):
                if outbox.heard < late:
                    self.detach(driver)


def _other_facts(has: Mapping[str, str], wanted: Mapping[str, str]) -> InvalidRequestError:
    each = [(name, has.get(name, "nothing"), wanted.get(name, "nothing")) for name in sorted({*has, *wanted})]
    differing = [(name.removeprefix("option "), ours, theirs) for name, ours, theirs in each if ours != theirs]
    listed = "; ".join(f"{name}: it has {ours}, this call asks for {theirs}" for name, ours, theirs in differing)
    return invalid(
        "actor_name", f"the actor was created with other options: {listed}. Give the same ones, or another actor_name"
    )

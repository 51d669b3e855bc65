"""`FleetRunner`: carries out what the state machine decides about rows, replicas and weights.

Every event goes to the state machine through `do`, which holds the lock. An engine may take long, so each job runs on a
separate thread; no engine is called while the lock is held.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from corelm.application import join, renumbered, uninterrupted
from corelm.errors import (
    BackendAsleepError,
    BackendClosedError,
    BackendTimeoutError,
    CapabilityError,
    EngineError,
    InvalidRequestError,
    brief,
    described,
    message,
)
from corelm.spec import GenerateResult, WeightUpdate
from corelm_engine_kit.joining import Result
from corelm_fleet.canary import Canary
from corelm_fleet.lives import Lives
from corelm_fleet.parts import request_of_rows
from corelm_fleet.pending import PendingCall
from corelm_fleet.records import (
    Abandon,
    AskCanary,
    Decision,
    Deliver,
    Fail,
    FleetLimits,
    Life,
    Load,
    Start,
    State,
    Stop,
    Updated,
    UpdateFailed,
)
from corelm_fleet.replica import Member, OpenReplica
from corelm_fleet.routing import Loads, Policy, assign
from corelm_fleet.state import FleetState
from corelm_fleet.status import ReplicaStatus, Throughput

_log = logging.getLogger(__name__)

#: Seconds without a reply after which a health check is missed.
_HEALTH = 5.0
#: Seconds without a reply to a health check after which an engine is not asked to close, but ended if that can be done.
_SLOW = 1.0
#: Seconds that closing waits for threads after the engines were closed.
_PATIENCE = 2.0
#: An engine that ends its calls in time may do so this many seconds before the caller's wait ends.
_EARLY = 0.1
#: What happened to a job that could not begin.
_NO_THREAD = EngineError("the system has no room for a thread", usable=True)


@dataclass(slots=True, eq=False)
class Flying:
    """Rows of a call on a replica.

    Attributes:
        number: the number of the flight.
        life: the replica.
        replica: its engine.
        call: the call.
        rows: the rows of the call that were sent.
        names: one name per row, which no other flight has, for `abort`.
    """

    number: int
    life: Life
    replica: OpenReplica
    call: PendingCall
    rows: list[int]
    names: list[str]

    @property
    def numbers(self) -> list[int]:
        """The fleet's numbers of the rows."""
        return [self.call.first + row for row in self.rows]


class FleetRunner:
    """A fleet at work. `FleetEngine` explains the arguments; `opened` are the replicas, which are open.

    Attributes:
        state: the state machine.
        lives: the engines.
        closed: whether the fleet was closed.

    Raises:
        InvalidRequestError: two replicas would not answer alike.
    """

    def __init__(
        self,
        members: Sequence[Member],
        opened: Mapping[str, OpenReplica],
        limits: FleetLimits,
        canary: Canary,
        policy: Policy,
    ) -> None:
        self._lock = threading.RLock()
        self.state = FleetState(limits)
        self.closed = False
        self._policy, self._loads = policy, Loads()
        self._numbers = 0
        self._calls: dict[int, PendingCall] = {}
        self._named: dict[str, set[int]] = {}
        self._flying: dict[int, Flying] = {}
        self._work: dict[int, tuple[Life, float]] = {}
        self._speeds: dict[str, Throughput] = {}
        # What to do because the system has no room for a thread.
        self._late: list[Callable[[], None]] = []
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._process = os.getpid()
        self.lives = Lives(members, opened, canary, self.state, self._lock, self.do)
        self._checks: dict[Life, float] = {}
        self._updates: SimpleQueue[Updated | UpdateFailed | Exception] | None = None
        for name, replica in opened.items():
            self._speeds[name] = Throughput(time.monotonic())
            most = None if replica.capabilities.concurrent_calls else 1
            self.do(self.state.join, name, most_flights=most)

    # For the hooks ----------------------------------------------------------------------------------------------------

    def do(self, event: Callable[..., list[Decision]], *args: Any, **named: Any) -> None:
        """Tell the state machine of an event, and carry out what it decides."""
        with self._lock:
            if not self.closed:
                self._obey(event(*args, now=time.monotonic(), **named))
                self._go_on()

    def update(self, update: WeightUpdate) -> SimpleQueue[Updated | UpdateFailed | Exception]:
        """Begin an update, and return the queue that gets its end.

        Raises:
            EngineError: another update is under way.
            BackendClosedError: the fleet is closed.
        """
        with self._lock:
            if self.closed:
                raise BackendClosedError("the fleet is closed")
            decisions = self.state.update(time.monotonic())
            ended = self._updates = SimpleQueue[Updated | UpdateFailed | Exception]()
            if self.state.updating is not None:
                self.lives.begin_update(self.state.updating, update)
            self._obey(decisions)
            self._go_on()
            return ended

    def retire(self) -> None:
        """End all calls with an error, and start no engine any more, because the program ends."""
        if os.getpid() != self._process or self.closed:
            # A fork has none of the threads, one of which may have held the lock.
            return
        with self._lock:
            self.lives.ended = True
            for call in {id(each): each for each in self._calls.values()}.values():
                call.fail_all(BackendClosedError("the program ends"))
                self._drop(call)
            self._go_on()

    def close(self) -> None:
        """End all calls with an error, and close all engines."""
        # Only this part must not be interrupted half-way. A thread that `threading` did not start does it, and joining
        # another thread there would leave a trace of it.
        for thread in uninterrupted(self._begin_to_close):
            thread.join()
        join([each for each in self._threads if each is not threading.current_thread()], _PATIENCE)

    def _begin_to_close(self) -> list[threading.Thread]:
        """End all calls, and return the threads that close the engines."""
        with self._lock:
            if self.closed:
                return []
            self.closed = self.lives.ended = True
            for call in {id(each): each for each in self._calls.values()}.values():
                call.fail_all(BackendClosedError("the fleet was closed"))
            if self._updates is not None:
                self._updates.put(BackendClosedError("the fleet was closed during the update"))
            late = time.monotonic() - _SLOW
            hung = {self.lives.running.get(life) for life, since in self._checks.items() if since < late}
            replicas = self.lives.replicas()
            self.lives.running.clear()
        closing = [
            threading.Thread(target=replica.close, args=(replica in hung,), name="corelm-fleet-close", daemon=True)
            for replica in replicas
        ]
        for thread in closing:
            thread.start()
        return closing

    def join(self, member: Member) -> None:
        """Begin to open one more engine.

        Raises:
            BackendClosedError: the fleet is closed.
            BackendAsleepError: the fleet sleeps.
            InvalidRequestError: a replica of this name has not left.
        """
        with self._lock:
            if self.closed:
                raise BackendClosedError("the fleet is closed")
            if self.state.asleep:
                raise BackendAsleepError("an engine cannot join a fleet that sleeps; call backend.wake() first")
            one_call = any(not each.capabilities.concurrent_calls for each in self.lives.replicas())
            now = time.monotonic()
            decisions = self.state.join(member.name, now, 1 if one_call else None)
            self.lives.admit(member)
            self._speeds[member.name] = Throughput(now)
            self._obey(decisions)
            self._go_on()

    def label(self) -> str:
        """Return the label of the weights in force, as an engine that has them knows it."""
        labels = [
            replica.label
            for life, replica in list(self.lives.running.items())
            if self.state.replicas[life.replica].weights == self.state.epoch
        ]
        return labels[0] if labels else ""

    def status(self) -> list[ReplicaStatus]:
        """Return how each replica is doing."""
        now = time.monotonic()
        with self._lock:
            return [
                ReplicaStatus(
                    name=name,
                    state=each.state.value,
                    epoch=each.weights,
                    rows=sum(len(flight.rows) for flight in each.flights.values()),
                    tokens_per_second=self._speeds[name].per_second(now),
                    starts=each.life.number,
                    why=each.why,
                )
                for name, each in self.state.replicas.items()
            ]

    def look_around(self) -> None:
        """Check the health of every engine and run the work that is due. A thread calls this every second."""
        now = time.monotonic()
        for life, replica in list(self.lives.running.items()):
            since = self._checks.setdefault(life, now)
            if since == now:
                self._spawn(self._check, life, replica, otherwise=partial(self._unchecked, life))
            elif now - since > _HEALTH:
                self.do(self.state.missed, life, why=f"it did not reply to a health check within {_HEALTH:g} s")
        self.do(self.state.tick)

    # Decisions --------------------------------------------------------------------------------------------------------

    def _obey(self, decisions: Iterable[Decision], flying: Flying | None = None, outcome: Any = None) -> None:
        """Carry decisions out.

        Args:
            decisions: the decisions.
            flying: the flight that has returned, for `Deliver`.
            outcome: what it has returned, or the error with which its replica refused it.
        """
        for each in decisions:
            match each:
                case Start(life):
                    if not self.lives.ended:
                        self._spawn(self.lives.start, life, otherwise=partial(self._no_thread, life))
                case Stop(life):
                    self._stop(life)
                case Load(life, epoch):
                    self._spawn(self.lives.load, life, epoch, otherwise=partial(self._no_thread, life))
                case AskCanary(life, epoch):
                    self._spawn(self.lives.ask, life, epoch, otherwise=partial(self._no_thread, life))
                case Deliver(rows, _):
                    assert flying is not None
                    self._deliver(flying, rows, outcome)
                case Fail(row, error):
                    self._fail(row, error)
                case Abandon(_, number, rows):
                    for row in rows:
                        self._unload(row)
                    if (abandoned := self._flying.get(number)) is not None:
                        self._abort(abandoned, rows, partial(self._is_flying, number))
                case Updated() | UpdateFailed():
                    self.lives.end_update(self.state.epoch)
                    if self._updates is not None:
                        self._updates.put(each)
                        self._updates = None

    def _stop(self, life: Life) -> None:
        for row in [row for row, (where, _) in self._work.items() if where == life]:
            del self._work[row]
        self._loads.forget(life.replica)
        self._checks.pop(life, None)
        known = self.state.replicas[life.replica]
        by_force = known.state is State.DEAD
        if by_force:
            _log.warning("%s was lost: %s", life, brief(known.why))
        replica = self.lives.begin_stop(life)
        if replica is not None:
            self._spawn(self.lives.stop, life, replica, by_force)

    # Threads ----------------------------------------------------------------------------------------------------------

    def _is_flying(self, number: int) -> bool:
        return number in self._flying

    def _unchecked(self, life: Life) -> None:
        self._checks.pop(life, None)

    def _check(self, life: Life, replica: OpenReplica) -> None:
        why, ended = "", False
        try:
            if not replica.health():
                ended = replica.ended
                why = "it has ended" if ended else "it says that it cannot serve"
            elif changed := self._was_silent(life, replica) and replica.changed():
                why, ended = f"it did not answer for a while, and then as another one: {changed}", True
        except BaseException as error:
            why = message(error)
        self._checks.pop(life, None)
        if why:
            self.do(self.state.died if ended else self.state.missed, life, why=why)
        else:
            self.do(self.state.heard, life)

    def _was_silent(self, life: Life, replica: OpenReplica) -> bool:
        """Return whether an engine that serves has missed health checks, and no call shows that it went on."""
        with self._lock:
            known = self.state.replicas[life.replica]
            silent = known.life == life and known.misses > 0 and known.state in (State.HEALTHY, State.SUSPECT)
            return silent and not any(flying.replica is replica for flying in self._flying.values())

    def _no_thread(self, life: Life) -> None:
        self._obey(self.state.died(life, time.monotonic(), message(_NO_THREAD)))

    # Calls ------------------------------------------------------------------------------------------------------------

    def begin(self, call: PendingCall) -> None:
        """Begin to answer a call.

        Raises:
            BackendClosedError: the fleet is closed.
        """
        with self._lock:
            if self.closed:
                raise BackendClosedError("the fleet is closed")
            if call.left:
                return
            call.first = self._numbers
            self._numbers += call.rows
            rows = range(call.first, call.first + call.rows)
            for row, name in zip(rows, call.request.request_ids, strict=True):
                self._calls[row] = call
                self._named.setdefault(name, set()).add(row)
            self.do(self.state.add, rows)

    def leave(self, call: PendingCall) -> None:
        """Forget a call whose caller has stopped waiting."""
        with self._lock:
            call.left = True
            if not self.closed:
                self._drop(call)
                self._go_on()

    def abort(self, names: Iterable[str]) -> None:
        """End rows by their names: those in flight on their replicas, and those that wait at once."""
        with self._lock:
            on_replicas: dict[int, list[int]] = {}
            for row in [row for name in names for row in self._named.get(name, ())]:
                call, known = self._calls[row], self.state.rows.all[row]
                call.aborted.add(row - call.first)
                if known.flight is None:
                    self._leave_out(call, [row])
                elif known.flight.number in self._flying:
                    on_replicas.setdefault(known.flight.number, []).append(row)
            for number, rows in on_replicas.items():
                self._abort(self._flying[number], rows, partial(self._holds_any, number, rows))
            if not self.closed:
                self._go_on()

    # Rows that are settled --------------------------------------------------------------------------------------------

    def _deliver(self, flying: Flying, rows: Sequence[int], outcome: Any) -> None:
        call = flying.call
        if isinstance(outcome, Exception):
            call.fail_all(outcome)
            self._drop(call)
            return
        places = {number: at for at, number in enumerate(flying.numbers)}
        call.take(outcome, [places[row] for row in rows], [row - call.first for row in rows])
        for row in rows:
            self._forget(row)

    def _fail(self, row: int, error: EngineError) -> None:
        call = self._calls.get(row)
        if call is None:
            return
        local, why = row - call.first, error.problems[row]
        self._forget(row)
        if error.usable:
            _log.warning("a row fails alone: %s", brief(why))
            call.fail(local, why)
            return
        text = message(error).replace(f"row {row}: ", "", 1)
        call.fail_all(EngineError(text, usable=error.usable, problems={local: why}))
        self._drop(call)

    def _drop(self, call: PendingCall) -> None:
        """Take all rows of a call back."""
        rows = [row for row in range(call.first, call.first + call.rows) if self._calls.get(row) is call]
        self._obey(self.state.cancel(rows, time.monotonic()))
        for row in rows:
            self._forget(row)

    def _forget(self, row: int) -> None:
        call = self._calls.pop(row, None)
        if call is not None:
            name = call.request.request_ids[row - call.first]
            self._named[name].discard(row)
            if not self._named[name]:
                del self._named[name]
        self._unload(row)

    def _unload(self, row: int) -> None:
        life, work = self._work.pop(row, (None, 0.0))
        if life is not None:
            self._loads.add(life.replica, -work)

    # Sending ----------------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Send what can be sent now."""
        self._place()
        while self._late:
            self._late.pop()()
            self._place()

    def _place(self) -> None:
        """Send accused rows alone, then the fresh rows of each call in as few flights as there are replicas."""
        while trials := self.state.trials():
            row, name = trials[0]
            call = self._calls[row]
            if not self._leave_out(call, [row]):
                (group,) = call.groups([row - call.first])
                self._loads.add(name, group.work)
                self._fly(name, call, {row: group.work})
        self._loads.takers = self.state.takers
        if not self._loads.takers or not self.state.rows.fresh:
            return
        waiting: dict[int, list[int]] = {}
        for row in self.state.rows.fresh:
            waiting.setdefault(self._calls[row].first, []).append(row)
        for rows in waiting.values():
            call = self._calls[rows[0]]
            left_out = self._leave_out(call, rows)
            rows = [row - call.first for row in rows if row not in left_out]
            self._loads.takers = self.state.takers
            if not self._loads.takers:
                return
            flights: dict[str, dict[int, float]] = {}
            for name, group in assign(call.groups(rows), self._loads, self._policy):
                flights.setdefault(name, {}).update(dict.fromkeys(group.rows, group.work_of_a_row))
            for name, works in flights.items():
                self._fly(name, call, works)

    def _leave_out(self, call: PendingCall, rows: Iterable[int]) -> set[int]:
        """Settle the rows that must not be sent, and return them."""
        left_out = {row for row in rows if call.leave_out(row - call.first)}
        if left_out:
            self._obey(self.state.cancel(left_out, time.monotonic()))
            for row in left_out:
                self._forget(row)
        return left_out

    def _fly(self, name: str, call: PendingCall, works: Mapping[int, float]) -> None:
        """Send rows of a call to a replica; their work is in `Loads` already."""
        numbers = sorted(works)
        flight = self.state.send(name, numbers, time.monotonic())
        rows = [number - call.first for number in numbers]
        # A row may be sent again while its replica, which was lost, still works on it.
        names = [f"{call.request.request_ids[row]}-{flight.number}" for row in rows]
        flying = Flying(flight.number, flight.life, self.lives.running[flight.life], call, rows, names)
        self._flying[flight.number] = flying
        self._work.update({row: (flight.life, work) for row, work in works.items()})
        teller = call.teller(rows, partial(self.do, self.state.producing, flight.number))
        self._spawn(self._call, flying, teller, otherwise=partial(self._returned, flying, _NO_THREAD))

    # On the thread of a flight ----------------------------------------------------------------------------------------

    def _call(self, flying: Flying, teller: Any) -> None:
        """Ask a replica, on a thread of the flight."""
        call = flying.call
        if flying.replica.ended:
            with self._lock:
                self._flying.pop(flying.number, None)
                self.do(self.state.unsent, flying.number)
            return
        outcome: Any
        try:
            left = call.seconds_left()
            if left is not None and left <= 0:
                raise BackendTimeoutError("the timeout passed before a replica was asked")
            # A call that the engine does not end in time goes on until it is aborted, so it is waited for here.
            limit = left if flying.replica.capabilities.stops_at_timeout else None
            request = request_of_rows(call.request, flying.rows, flying.names, limit, teller)
            outcome = call.in_modes(lambda: flying.replica.serve(request, partial(self._wanted, flying.number)))
            # Rows without an answer are the fault of the replica if it does not serve any more.
            lost = next(filter(None, outcome.errors or ()), "")
            if lost and flying.replica.health():
                lost = self._fault(flying.replica, lost)
        except (InvalidRequestError, CapabilityError) as error:
            fault = self._fault(flying.replica, message(error))
            outcome, lost = EngineError(fault, usable=False) if fault else error, ""
        except BaseException as error:
            outcome, lost = error, ""
        with self._lock:
            try:
                if not self.closed:
                    self._returned(flying, outcome, lost)
                    self._go_on()
            except Exception as error:
                _log.exception("a call to %s could not be ended", flying.life)
                call.fail_all(EngineError(f"the fleet failed, which is a mistake in core: {described(error)}"))
                self._drop(call)
            finally:
                self._flying.pop(flying.number, None)

    def _fault(self, replica: OpenReplica, why: str) -> str:
        """Return why an engine is at fault for rows that it has refused; "" if the rows are.

        A server that was started again with another model refuses every row, with the status 404.

        Args:
            replica: the engine.
            why: why it has refused them.
        """
        with suppress(Exception):
            if changed := replica.changed():
                return f"it refused rows ({why}), and its canary disagrees: {changed}"
        return ""

    def _returned(self, flying: Flying, outcome: Any, lost: str = "") -> None:
        """Tell the state machine how a flight has ended.

        Args:
            flying: the flight.
            outcome: the result, or the error.
            lost: why the rows that have an error in the result were lost with the replica; "" if they were not.
        """
        self._flying.pop(flying.number, None)
        now, number, call = time.monotonic(), flying.number, flying.call
        if not isinstance(outcome, BaseException):
            self._count(flying, outcome, now)
            errors = outcome.errors if lost else None
            rows = [row for at, row in enumerate(flying.numbers) if not (errors and errors[at])]
            self._obey(self.state.answered(number, rows, now), flying, outcome)
            if errors:
                self._obey(self.state.died(flying.life, now, lost))
        elif isinstance(outcome, (InvalidRequestError, CapabilityError)):
            told = renumbered(outcome, torch.tensor(flying.rows))
            self._obey(self.state.refused(number, now), flying, told)
        elif getattr(outcome, "usable", None) is False or (
            isinstance(outcome, BackendClosedError) and flying.replica.closed
        ):
            self._obey(self.state.died(flying.life, now, message(outcome)))
        elif isinstance(outcome, TimeoutError) and (call.seconds_left() or 0.0) <= _EARLY and call.end is not None:
            # The caller's own wait ends now.
            return
        else:
            if self._wanted(number):
                for row in flying.numbers:
                    self._unload(row)
            why = message(outcome) if isinstance(outcome, EngineError) else described(outcome)
            self._obey(self.state.failed(number, now, why))

    def _count(self, flying: Flying, result: Result, now: float) -> None:
        if isinstance(result, GenerateResult):
            self._speeds[flying.life.replica].add(int(result.ids.values.shape[0]), now)

    def _wanted(self, number: int) -> bool:
        """Return whether a flight has rows that are not settled."""
        return not self.closed and number in self.state.rows.flights

    def _holds_any(self, number: int, rows: Iterable[int]) -> bool:
        """Return whether one of the rows is in this flight."""
        flight = self.state.rows.flights.get(number)
        return not self.closed and flight is not None and any(row in flight.rows for row in rows)

    def _abort(self, flying: Flying, rows: Iterable[int], under_way: Callable[[], bool]) -> None:
        names = dict(zip(flying.numbers, flying.names, strict=True))
        flying.replica.abort(tuple(names[row] for row in rows), under_way)

    def _spawn(self, job: Callable[..., None], *args: Any, otherwise: Callable[[], None] | None = None) -> None:
        """Run a job on a new thread; call `otherwise` later if the system has no room for one."""
        thread = threading.Thread(target=job, args=args, name=f"corelm-fleet-{job.__name__.strip('_')}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if otherwise is not None:
                self._late.append(otherwise)
            return
        self._threads.add(thread)

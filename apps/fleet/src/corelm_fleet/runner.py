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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from corelm_fleet.canary import Canary
from corelm_fleet.pending import PendingCall, request_of_rows
from corelm_fleet.records import (
    Abandon,
    AskCanary,
    Decision,
    Deliver,
    Fail,
    FleetLimits,
    Load,
    ReplicaRun,
    ReplicaStatus,
    Start,
    State,
    Stop,
    Throughput,
    Updated,
    UpdateFailed,
)
from corelm_fleet.replica import Member, OpenReplica
from corelm_fleet.replica_runs import ReplicaRuns
from corelm_fleet.routing import Loads, Policy, assign
from corelm_fleet.state import Dispatch, FleetState

_log = logging.getLogger(__name__)

#: Seconds without a reply after which a health check is missed.
_HEALTH = 5.0
#: Seconds without a reply to a health check after which an engine is not asked to close, but ended if that can be done.
_SLOW = 1.0
#: Seconds that closing waits for threads after the engines were closed.
_CLOSE = 2.0
#: An engine that ends its calls in time may do so this many seconds before the caller's wait ends.
_EARLY = 0.1


@dataclass(slots=True, eq=False)
class SentCall:
    """Rows of a call on a replica. They may have been taken back since, while the engine still works on them.

    Attributes:
        dispatch: the dispatch.
        replica: the engine.
        call: the call.
        names: the name of each row for `abort`, which no other dispatch has, by the fleet's number of the row.
    """

    dispatch: Dispatch
    replica: OpenReplica
    call: PendingCall
    names: dict[int, str]

    @property
    def rows(self) -> list[int]:
        """The rows of the call that were sent."""
        return [number - self.call.first for number in self.names]


class FleetRunner:
    """A fleet at work. `FleetEngine` explains the arguments.

    Attributes:
        state: the state machine.
        runs: the engines.
        delayed: jobs of replicas that could not begin because the system has no room for a thread.
        closed: whether the fleet was closed.
    """

    def __init__(self, limits: FleetLimits, canary: Canary, policy: Policy) -> None:
        self._lock = threading.RLock()
        self.state = FleetState(limits)
        self.closed = False
        self._policy = policy
        self._numbers = 0
        # The calls by the numbers of their rows, and by the numbers of their dispatches while an engine has them.
        self._calls: dict[int, PendingCall] = {}
        # The numbers of the rows in `_calls`, by their names for `abort`.
        self._named: dict[str, set[int]] = {}
        self._sent: dict[int, SentCall] = {}
        self._speeds: dict[str, Throughput] = {}
        self.delayed: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        # Calls for which the system has no room for a thread.
        self._unsent: list[SentCall] = []
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._process = os.getpid()
        self.runs = ReplicaRuns(canary, self.state, self._lock, self.do)
        # When a health check that has no answer yet began.
        self._checks: dict[ReplicaRun, float] = {}
        self._updates: SimpleQueue[Updated | UpdateFailed | Exception] | None = None

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
            self._must_be_open()
            decisions = self.state.update(time.monotonic())
            ended = self._updates = SimpleQueue[Updated | UpdateFailed | Exception]()
            if self.state.updating is not None:
                self.runs.begin_update(self.state.updating, update)
            self._obey(decisions)
            self._go_on()
            return ended

    def retire(self) -> None:
        """End all calls with an error, and start no engine any more, because the program ends."""
        if os.getpid() != self._process or self.closed:
            # A fork has none of the threads, one of which may have held the lock.
            return
        with self._lock:
            self.runs.ended = True
            for call in set(self._calls.values()):
                call.fail_all(BackendClosedError("the program ends"))
                self._drop(call)

    def close(self) -> None:
        """End all calls with an error, and close all engines."""
        # Only this part must not be interrupted half-way. A thread that `threading` did not start does it, and joining
        # another thread there would leave a trace of it.
        for thread in uninterrupted(self._begin_to_close):
            thread.join()
        join([each for each in self._threads if each is not threading.current_thread()], _CLOSE)

    def _begin_to_close(self) -> list[threading.Thread]:
        """End all calls, and return the threads that close the engines."""
        with self._lock:
            if self.closed:
                return []
            self.closed = self.runs.ended = True
            for call in set(self._calls.values()):
                call.fail_all(BackendClosedError("the fleet was closed"))
            if self._updates is not None:
                self._updates.put(BackendClosedError("the fleet was closed during the update"))
            late = time.monotonic() - _SLOW
            hung = {self.runs.running.get(run) for run, since in self._checks.items() if since < late}
            jobs = [partial(replica.close, replica in hung) for replica in self.runs.running.values()]
            jobs += [partial(job, *args) for job, args in self.delayed if job == self.runs.stop]
            self.runs.running.clear()
        closing, without_thread = [], []
        for job in jobs:
            thread = threading.Thread(target=job, name="corelm-fleet-close", daemon=True)
            if _has_started(thread):
                closing.append(thread)
            else:
                without_thread.append(job)
        # An engine that fails to close, or takes long, holds up none that has a thread.
        for job in without_thread:
            with suppress(Exception):
                job()
        return closing

    def join(self, member: Member) -> None:
        """Begin to open one more engine.

        Raises:
            BackendClosedError: the fleet is closed.
            BackendAsleepError: the fleet sleeps.
            InvalidRequestError: a replica of this name has not left.
        """
        with self._lock:
            self._must_be_open()
            if self.state.asleep:
                raise BackendAsleepError("an engine cannot join a fleet that sleeps; call backend.wake() first")
            now = time.monotonic()
            decisions = self.state.join(member.name, now)
            self.runs.members[member.name] = member
            self._speeds[member.name] = Throughput(now)
            self._obey(decisions)
            self._go_on()

    def _must_be_open(self) -> None:
        if self.closed:
            raise BackendClosedError("the fleet is closed")

    def label(self) -> str:
        """Return the label of the weights in force, as an engine that has them knows it."""
        labels = [
            replica.label
            for run, replica in list(self.runs.running.items())
            if self.state.replicas[run.replica].weights == self.state.epoch
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
                    rows=sum(len(dispatch.rows) for dispatch in each.dispatches.values()),
                    tokens_per_second=self._speeds[name].per_second(now),
                    starts=each.run.number,
                    why=each.why,
                )
                for name, each in self.state.replicas.items()
            ]

    def look_around(self) -> None:
        """Check the health of every engine and run the work that is due. A thread calls this every second."""
        now = time.monotonic()
        with self._lock:
            if self.closed:
                return
            delayed, self.delayed = self.delayed, []
            for job, args in delayed:
                self._begin_job(job, *args)
        for run, replica in list(self.runs.running.items()):
            since = self._checks.setdefault(run, now)
            if since == now and not self._spawn(self._check, run, replica):
                self._checks.pop(run, None)
            elif now - since > _HEALTH:
                self.do(self.state.missed, run, why=f"it did not reply to a health check within {_HEALTH:g} s")
        self.do(self.state.tick)

    # Decisions --------------------------------------------------------------------------------------------------------

    def _obey(self, decisions: Iterable[Decision], sent: SentCall | None = None, outcome: Any = None) -> None:
        """Carry decisions out.

        Args:
            decisions: the decisions.
            sent: the call that has returned, for `Deliver`.
            outcome: what it has returned, or the error with which its replica refused it.
        """
        for each in decisions:
            match each:
                case Start(run):
                    if not self.runs.ended:
                        self._begin_job(self.runs.start, run)
                case Stop(run):
                    self._stop(run)
                case Load(run, epoch):
                    self._begin_job(self.runs.load, run, epoch)
                case AskCanary(run, epoch):
                    self._begin_job(self.runs.ask, run, epoch)
                case Deliver(rows):
                    assert sent is not None
                    self._deliver(sent, rows, outcome)
                case Fail(row, error):
                    self._fail(row, error)
                case Abandon(number, rows):
                    if (abandoned := self._sent.get(number)) is not None:
                        self._abort(abandoned, rows, partial(self._sent.__contains__, number))
                case Updated() | UpdateFailed():
                    self.runs.end_update(self.state.epoch)
                    if self._updates is not None:
                        self._updates.put(each)
                        self._updates = None

    def _stop(self, run: ReplicaRun) -> None:
        self._checks.pop(run, None)
        known = self.state.replicas[run.replica]
        by_force = known.state is State.DEAD
        if by_force:
            _log.warning("%s was lost: %s", run, brief(known.why))
        replica = self.runs.begin_stop(run)
        if replica is not None:
            self._begin_job(self.runs.stop, run, replica, by_force)

    # Threads ----------------------------------------------------------------------------------------------------------

    def _begin_job(self, job: Callable[..., None], *args: Any) -> None:
        """Run a job of a replica on a new thread; if there is no room for one, `look_around` tries again."""
        if not self._spawn(job, *args):
            self.delayed.append((job, args))

    def _spawn(self, job: Callable[..., None], *args: Any) -> bool:
        """Run a job on a new thread. Return False if the system has no room for one."""
        thread = threading.Thread(target=job, args=args, name=f"corelm-fleet-{job.__name__.strip('_')}", daemon=True)
        started = _has_started(thread)
        if started:
            self._threads.add(thread)
        return started

    def _check(self, run: ReplicaRun, replica: OpenReplica) -> None:
        why, ended = "", False
        try:
            if not replica.health():
                ended = replica.ended
                why = "it has ended" if ended else "it says that it cannot serve"
            elif changed := self._was_silent(run, replica) and replica.changed():
                why, ended = f"it did not answer for a while, and then as another one: {changed}", True
        except BaseException as error:
            why = message(error)
        self._checks.pop(run, None)
        if why:
            self.do(self.state.died if ended else self.state.missed, run, why=why)
        else:
            self.do(self.state.heard, run)

    def _was_silent(self, run: ReplicaRun, replica: OpenReplica) -> bool:
        """Return whether an engine that serves has missed health checks, and no call shows that it went on."""
        with self._lock:
            known = self.state.replicas[run.replica]
            silent = known.run == run and known.misses > 0 and known.state in (State.HEALTHY, State.SUSPECT)
            return silent and not any(sent.replica is replica for sent in self._sent.values())

    # Calls ------------------------------------------------------------------------------------------------------------

    def begin(self, call: PendingCall) -> None:
        """Begin to answer a call.

        Raises:
            BackendClosedError: the fleet is closed.
        """
        with self._lock:
            self._must_be_open()
            if call.left:
                return
            call.first = self._numbers
            self._numbers += call.rows
            for row, name in zip(call.numbers, call.request.request_ids, strict=True):
                self._calls[row] = call
                self._named.setdefault(name, set()).add(row)
            self.do(self.state.add, call.numbers)

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
            if self.closed:
                return
            in_engines: dict[int, list[int]] = {}
            for row in [row for name in {*names} for row in self._named.get(name, ())]:
                call, dispatch = self._calls[row], self.state.rows.all[row].dispatch
                call.aborted.add(row - call.first)
                if dispatch is None:
                    self._leave_out(call, [row])
                elif dispatch.number in self._sent:
                    in_engines.setdefault(dispatch.number, []).append(row)
            for number, rows in in_engines.items():
                self._abort(self._sent[number], rows, partial(self._holds_any, number, rows))
            self._go_on()

    # Rows that are settled --------------------------------------------------------------------------------------------

    def _deliver(self, sent: SentCall, rows: Sequence[int], outcome: Any) -> None:
        call = sent.call
        if isinstance(outcome, Exception):
            call.fail_all(outcome)
            self._drop(call)
            return
        index = {number: at for at, number in enumerate(sent.names)}
        call.take(outcome, [index[row] for row in rows], [row - call.first for row in rows])
        for row in rows:
            self._forget(row)

    def _fail(self, row: int, error: EngineError) -> None:
        if row not in self._calls:
            # Another row has failed the whole call.
            return
        call = self._forget(row)
        local, why = row - call.first, error.problems[row]
        if error.usable:
            _log.warning("a row fails alone: %s", brief(why))
            call.fail(local, why)
            return
        call.fail_all(EngineError(message(error), usable=error.usable, problems={local: why}))
        self._drop(call)

    def _drop(self, call: PendingCall) -> None:
        """Take all rows of a call back."""
        self._cancel([row for row in call.numbers if self._calls.get(row) is call])

    def _cancel(self, rows: Collection[int]) -> None:
        for row in rows:
            self._forget(row)
        self._obey(self.state.cancel(rows, time.monotonic()))

    def _forget(self, row: int) -> PendingCall:
        """Forget a row that is settled, and return its call."""
        call = self._calls.pop(row)
        name = call.request.request_ids[row - call.first]
        self._named[name].remove(row)
        if not self._named[name]:
            del self._named[name]
        return call

    # Sending ----------------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Send what can be sent now."""
        self._send_waiting()
        while self._unsent:
            self._returned(self._unsent.pop(), EngineError("the system has no room for a thread", usable=True))
            self._send_waiting()

    def _send_waiting(self) -> None:
        """Send accused rows alone, then the fresh rows of each call in as few dispatches as there are replicas."""
        while retries := self.state.isolated_retries():
            row, name = retries[0]
            call = self._calls[row]
            if not self._leave_out(call, [row]):
                (group,) = call.groups([row - call.first])
                self._send(name, call, {row: group.work})
        waiting: dict[PendingCall, list[int]] = {}
        for row in self.state.rows.fresh if self.state.takers else ():
            waiting.setdefault(self._calls[row], []).append(row)
        for call, rows in waiting.items():
            left_out = self._leave_out(call, rows)
            if not (takers := self.state.takers):
                return
            works: dict[str, dict[int, float]] = {}
            groups = call.groups([row - call.first for row in rows if row not in left_out])
            try:
                assigned = assign(groups, Loads(takers), self._policy)
            except Exception as error:
                # A policy of the user has failed. The event may be that of another call, which goes on.
                call.fail_all(error)
                self._drop(call)
                continue
            for name, group in assigned:
                works.setdefault(name, {}).update(dict.fromkeys(group.rows, group.work_of_a_row))
            for name, of_rows in works.items():
                self._send(name, call, dict(sorted(of_rows.items())))

    def _leave_out(self, call: PendingCall, rows: Iterable[int]) -> set[int]:
        """Settle the rows that must not be sent, and return them."""
        left_out = {row for row in rows if call.leave_out(row - call.first)}
        if left_out:
            self._cancel(left_out)
        return left_out

    def _send(self, name: str, call: PendingCall, works: Mapping[int, float]) -> None:
        """Send rows of a call to a replica, given the work of each."""
        dispatch = self.state.send(name, works, time.monotonic())
        # A row may be sent again while its replica, which was lost, still works on it.
        names = {row: f"{call.request.request_ids[row - call.first]}-{dispatch.number}" for row in works}
        sent = SentCall(dispatch, self.runs.running[dispatch.run], call, names)
        self._sent[dispatch.number] = sent
        teller = call.teller(sent.rows, partial(self.do, self.state.producing, dispatch.number))
        if not self._spawn(self._call, sent, teller):
            self._unsent.append(sent)

    def _call(self, sent: SentCall, teller: Any) -> None:
        """Ask a replica, on a thread of the dispatch."""
        call, number = sent.call, sent.dispatch.number
        if sent.replica.ended:
            with self._lock:
                self._sent.pop(number, None)
                self.do(self.state.unsent, number)
            return
        outcome: Any
        try:
            left = call.seconds_left()
            if left is not None and left <= 0:
                raise BackendTimeoutError("the timeout passed before a replica was asked")
            # A call that the engine does not end in time goes on until it is aborted, so it is waited for here.
            limit = left if sent.replica.capabilities.stops_at_timeout else None
            request = request_of_rows(call.request, sent.rows, tuple(sent.names.values()), limit, teller)
            outcome = call.in_modes(lambda: sent.replica.serve(request, partial(self._wanted, number)))
            # Rows without an answer are the fault of the replica if it does not serve any more.
            lost = next(filter(None, outcome.errors or ()), "")
            if lost and sent.replica.health():
                lost = self._fault(sent.replica, lost)
        except (InvalidRequestError, CapabilityError) as error:
            fault = self._fault(sent.replica, message(error))
            outcome, lost = EngineError(fault, usable=False) if fault else error, ""
        except BaseException as error:
            outcome, lost = error, ""
        with self._lock:
            try:
                if not self.closed:
                    self._returned(sent, outcome, lost)
                    self._go_on()
            except Exception as error:
                _log.exception("a call to %s could not be ended", sent.dispatch.run)
                call.fail_all(EngineError(f"the fleet failed, which is a mistake in core: {described(error)}"))
                self._drop(call)
            finally:
                self._sent.pop(number, None)

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

    def _returned(self, sent: SentCall, outcome: Any, lost: str = "") -> None:
        """Tell the state machine how a dispatch has ended.

        Args:
            sent: the call.
            outcome: the result, or the error.
            lost: why the rows that have an error in the result were lost with the replica; "" if they were not.
        """
        now, number, run, call = time.monotonic(), sent.dispatch.number, sent.dispatch.run, sent.call
        self._sent.pop(number, None)
        if not isinstance(outcome, BaseException):
            if isinstance(outcome, GenerateResult):
                self._speeds[run.replica].add(int(outcome.ids.values.shape[0]), now)
            errors = outcome.errors if lost else None
            rows = [row for at, row in enumerate(sent.names) if not (errors and errors[at])]
            self._obey(self.state.answered(number, rows, now), sent, outcome)
            if errors:
                self._obey(self.state.died(run, now, lost))
        elif isinstance(outcome, (InvalidRequestError, CapabilityError)):
            self._obey(self.state.refused(number, now), sent, renumbered(outcome, torch.tensor(sent.rows)))
        elif getattr(outcome, "usable", None) is False or (
            isinstance(outcome, BackendClosedError) and sent.replica.closed
        ):
            self._obey(self.state.died(run, now, message(outcome)))
        elif isinstance(outcome, TimeoutError) and (call.seconds_left() or 0.0) <= _EARLY and call.end is not None:
            # The caller's own wait ends now.
            return
        else:
            why = message(outcome) if isinstance(outcome, EngineError) else described(outcome)
            self._obey(self.state.failed(number, now, why))

    def _wanted(self, number: int) -> bool:
        """Return whether a dispatch has rows that are not settled."""
        return not self.closed and number in self.state.rows.dispatches

    def _holds_any(self, number: int, rows: Iterable[int]) -> bool:
        """Return whether one of the rows is in this dispatch."""
        dispatch = self.state.rows.dispatches.get(number)
        return not self.closed and dispatch is not None and any(row in dispatch.rows for row in rows)

    def _abort(self, sent: SentCall, rows: Iterable[int], under_way: Callable[[], bool]) -> None:
        sent.replica.abort(tuple(sent.names[row] for row in rows), under_way)


def _has_started(thread: threading.Thread) -> bool:
    """Start a thread, and return whether the system had room for it."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True

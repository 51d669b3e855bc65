"""`Loop`: many calls into an engine of this process, which go on together step by step.

The loop has no thread. The thread of a caller makes the steps of all calls until its own call has ended; then the
thread of another caller goes on. So a call that is alone stays on its caller's thread, with all that belongs to it.
Python raises KeyboardInterrupt in the main thread, so that thread makes no steps while there are calls of others: it
leaves its own to them and waits. An interrupt then ends one call, and no work of another is cut in the middle.

A call is a generator, its work. It yields what it wants of the engine, is sent the engine's answer when the step is
done, and returns its result. It may be gone on with by any thread, so it must not hold what belongs to a thread across
a ``yield``: see `Call.key`. The work and the steps of a call have the autocast of its caller, whichever thread it is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from corelm.errors import EngineError, described
from corelm.spec import Deadline, GenerateRequest, ScoreRequest
from corelm.waiting import NOTICE

_log = logging.getLogger(__name__)
T = TypeVar("T")

#: Of each kind of device with autocast on, the dtype.
Autocast = tuple[tuple[str, torch.dtype], ...]

#: Seconds that closing waits for the calls under way.
_CLOSING_SECONDS = 5.0
#: The kinds of devices on which a caller may autocast: the CPU, and the accelerator that torch was built for.
_ACCELERATOR = torch.accelerator.current_accelerator()
_KINDS = ("cpu",) if _ACCELERATOR is None else ("cpu", _ACCELERATOR.type)
#: What is around no call.
_NOTHING: tuple[Any, Autocast] = (object(), ())


class Aborted(Exception):
    """All rows of the request were aborted."""


class NotDone(Exception):
    """A step was not made for a call, because of other rows. It may ask for the step again."""


class Call:
    """One request under way.

    Attributes:
        deadline: the time that it has left.
        aborted: the numbers of its aborted rows. Other threads add to them.
        key: what has to be entered around its work: see `Loop`. After a change the work yields None, and then goes on
            within it.
        wants: what it has yielded.
        is_mains: whether its caller is the main thread.
    """

    def __init__(self, request: GenerateRequest | ScoreRequest, key: Any = None) -> None:
        self.deadline = Deadline(request.timeout)
        self.aborted: set[int] = set()
        self.key = key
        self._autocast = _autocast()
        self.wants: Any = None
        # Whether there is an answer that its work is to be sent.
        self.ready, self._answer = True, None
        self.left = self.done = False
        self.is_mains = threading.current_thread() is threading.main_thread()
        self._result: Any = None
        self._error: BaseException | None = None
        self._work: Generator[Any, Any, Any] | None = None
        self._names = request.request_ids

    @property
    def around(self) -> tuple[Any, Autocast]:
        """What has to be entered around its work and its steps: its key, and the autocast of its caller."""
        return self.key, self._autocast

    def abort(self, names: Collection[str]) -> None:
        """Note that the rows with these names were aborted."""
        self.aborted.update([row for row, name in enumerate(self._names) if name in names])

    @property
    def is_wanted(self) -> bool:
        """Whether there is a row that was not aborted."""
        return len(self.aborted) < len(self._names)

    @property
    def is_stepping(self) -> bool:
        """Whether its caller waits for steps of it."""
        return not (self.left or self.done)

    def check_wanted(self) -> None:
        """Raise `Aborted` if all rows were aborted."""
        if not self.is_wanted:
            raise Aborted

    def aborted_among(self, rows: Tensor) -> set[int]:
        """Return which of these rows, int64[n], were aborted: their places in `rows`."""
        if not self.aborted:
            return set()
        return {place for place, row in enumerate(rows.tolist()) if row in self.aborted}

    def give(self, answer: Any) -> None:
        """Set what the work is sent next; an exception is raised in it."""
        self._answer, self.ready = answer, True

    def go_on(self) -> None:
        """Go on with the work until it wants something or ends."""
        assert self._work is not None
        try:
            answer, self.ready = self._answer, False
            if isinstance(answer, BaseException):
                self.wants = self._work.throw(answer)
            else:
                self.wants = self._work.send(answer)
            if self.wants is None:
                self.give(None)
        except StopIteration as end:
            self._result, self.done = end.value, True
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        self._error, self.done = error, True

    def result(self) -> Any:
        """Return what the work has returned, or raise what it has raised."""
        if self._error is None:
            return self._result
        try:
            raise self._error
        finally:
            # The frames of the error hold this call.
            self._error = None

    def begin(self, work: Generator[Any, Any, Any]) -> None:
        self._work = work

    def end(self) -> None:
        """Close the work. What that raises is logged: the call has ended, or its caller has left."""
        work, self._work = self._work, None
        if work is not None:
            try:
                work.close()
            except Exception as error:
                _log.error("what a call held could not be freed: %s", described(error), exc_info=error)


class Loop:
    """Makes the steps of all calls. One thread at a time is inside.

    Args:
        answer: given calls with the same key and autocast, calls `Call.give` of each with what it wants. If it raises,
            it has done so for each, or nothing of the step is left in the engine for those without an answer.
        within: returns what is entered around the work and the steps of the calls with a key. It is left when another
            thread may come in.

    Attributes:
        under_way: all calls, those that do not go on by steps as well.
    """

    def __init__(
        self,
        answer: Callable[[Sequence[Call]], None],
        within: Callable[[Any], AbstractContextManager[None]],
    ) -> None:
        self.under_way: list[Call] = []
        self._answer, self._within = answer, within
        self._changed = threading.Condition()
        # The thread that is inside, and an object that no other entry has.
        self._holder: tuple[int, object] | None = None
        # Those who wait to have the engine for themselves, and whether a step comes before them.
        self._guests: set[object] = set()
        self._step_is_due = False
        self._stepping: list[Call] = []
        self._entered, self._around = ExitStack(), _NOTHING
        self._closed = False

    @contextmanager
    def start(self, request: GenerateRequest | ScoreRequest, key: Any = None) -> Iterator[Call]:
        """Yield the call of a request. Inside, `abort` reaches it."""
        call = Call(request, key)
        self.under_way.append(call)
        try:
            if self._closed:
                raise EngineError("the engine was closed", usable=False)
            yield call
        finally:
            self.under_way.remove(call)

    def abort(self, names: Collection[str]) -> None:
        """Abort the rows with these names. They end when their call looks next, after a step for example."""
        for call in list(self.under_way):
            call.abort(names)

    def run(self, call: Call, work: Generator[Any, Any, T], *, alone: bool = False) -> T:
        """Return what the work of a call returns.

        Args:
            alone: make no step of other calls until it has.

        Raises:
            TimeoutError: the call's time is over.
        """
        call.begin(work)
        if alone or self._is_here():
            with self._inside(call.deadline):
                # Those of the step in the middle of which this thread is, if it is in one.
                outer, self._entered, self._around = (self._entered, self._around), ExitStack(), _NOTHING
                try:
                    self._go_on(call, [call])
                finally:
                    self._entered, self._around = outer
                    call.end()
        else:
            try:
                self._stepping.append(call)
                while not call.done:
                    with self._inside(call.deadline, call):
                        if not call.done:
                            # A call that comes while the main thread is inside is not its to make.
                            self._go_on(call, [call] if call.is_mains else self._stepping)
            finally:
                call.left = True
                with self._changed:
                    # Otherwise the thread that is inside does it.
                    if self._holder is None:
                        self._leave_behind()
                        self._changed.notify_all()
        result: T = call.result()
        return result

    @contextmanager
    def held(self, deadline: Deadline | None = None) -> Iterator[None]:
        """Make no step while this thread uses the engine. A thread that is inside may enter again.

        Raises:
            TimeoutError: the time was over before the engine was free.
        """
        with self._inside(deadline):
            yield

    def close(self) -> bool:
        """Abort the calls under way, refuse later ones, and return whether all have ended within five seconds."""
        self._closed = True
        deadline = Deadline(_CLOSING_SECONDS)
        for call in list(self.under_way):
            call.aborted.update(range(len(call._names)))
        with self._changed:
            while self.under_way and not deadline.is_over():
                self._changed.wait(0.02)
        return not self.under_way

    # Who is inside ----------------------------------------------------------------------------------------------------

    def _is_here(self) -> bool:
        return self._holder is not None and self._holder[0] == threading.get_ident()

    @contextmanager
    def _inside(self, deadline: Deadline | None, call: Call | None = None) -> Iterator[None]:
        """Be the thread that is inside, as a guest or for the steps of a call, or return when that call is done."""
        entry = (threading.get_ident(), object())
        try:
            if not self._is_here():
                with self._changed:
                    if call is None:
                        self._guests.add(entry)
                    while not self._may_enter(call) and not (call is not None and call.done):
                        left = None if deadline is None else deadline.left()
                        # Python may miss an interrupt that comes just before a wait.
                        self._changed.wait(NOTICE if left is None else min(NOTICE, left))
                    if call is None or not call.done:
                        self._holder = entry
                        self._guests.discard(entry)
            yield
        finally:
            self._guests.discard(entry)
            try:
                if self._holder is entry:
                    self._leave_behind()
            finally:
                # Also if there is another interrupt meanwhile.
                if self._holder is entry:
                    self._step_is_due = call is None and bool(self._stepping)
                    self._holder = None
                with self._changed:
                    self._changed.notify_all()

    def _may_enter(self, call: Call | None) -> bool:
        if self._holder is not None:
            return False
        due = self._step_is_due and any(each.is_stepping for each in self._stepping)
        if call is None:
            return not due
        return (due or not self._guests) and not self._is_for_others(call)

    def _is_for_others(self, call: Call) -> bool:
        """Return whether the caller of a call leaves its steps to other threads."""
        # A call whose caller has left is still there until the next step closes it. Nobody makes steps for it.
        return call.is_mains and any(each is not call and each.is_stepping for each in self._stepping)

    def _leave_behind(self) -> None:
        """Close the works of calls that have ended or whose callers have left."""
        for call in [each for each in self._stepping if each.done or each.left]:
            self._stepping.remove(call)
            call.end()

    # Inside -----------------------------------------------------------------------------------------------------------

    def _go_on(self, mine: Call, calls: list[Call]) -> None:
        """Make steps until a call is done, or another thread is to come in."""
        try:
            while not mine.done:
                self._step(mine, calls)
                if mine in self._stepping and (self._guests or self._is_for_others(mine)):
                    return
        finally:
            self._leave()

    def _step(self, mine: Call, calls: list[Call]) -> None:
        if calls is self._stepping:
            self._leave_behind()
        for call in list(calls):
            while call.ready and not call.done and self._enters(call.around, [call]):
                call.go_on()
            if call.done and call is not mine:
                with self._changed:
                    self._changed.notify_all()
        waiting = [call for call in calls if not (call.ready or call.done)]
        for around in dict.fromkeys([call.around for call in waiting]):
            some = [call for call in waiting if call.around == around]
            if self._enters(around, some):
                self._answer(some)

    def _enters(self, around: tuple[Any, Autocast], calls: Sequence[Call]) -> bool:
        """Enter what is to be around calls, if it is another than before. If that fails, so do the calls."""
        if around == self._around:
            return True
        self._leave()
        key, autocast = around
        try:
            if autocast != _autocast():
                self._entered.enter_context(_autocasting(autocast))
            self._entered.enter_context(self._within(key))
            self._around = around
        except Exception as error:
            for call in calls:
                call.fail(error)
            return False
        return True

    def _leave(self) -> None:
        self._around = _NOTHING
        self._entered.close()


def _autocast() -> Autocast:
    """Return how this thread autocasts."""
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in _KINDS if torch.is_autocast_enabled(kind))


@contextmanager
def _autocasting(autocast: Autocast) -> Iterator[None]:
    """Autocast like that inside, and not as this thread does."""
    dtypes = dict(autocast)
    with ExitStack() as stack:
        for kind in _KINDS:
            stack.enter_context(torch.autocast(kind, dtypes.get(kind), enabled=kind in dtypes))
        yield

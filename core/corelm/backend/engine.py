"""`OpenEngine`: an open engine. Every call enters it through `OpenEngine.call`, when `EngineLock` lets it.

`PreparedCall` is a call that is ready to be made.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, Literal, NoReturn, TypeVar

import tenacity
import torch
from torch import Tensor, nn

from corelm.backend.call_log import log_retry, logged, logger, place
from corelm.backend.check_results import CHECKS, WrongResult
from corelm.backend.engine_call import Call, Delivery, EngineCall, Origin
from corelm.backend.futures import Outcome, start
from corelm.backend.hooks import GO_ON, OUT_OF_TURN, READ_WEIGHTS, RETRIED, Hook, hooks_of, to_containers
from corelm.backend.program_end import at_program_end, end_stuck, interrupted, program_deadline
from corelm.backend.skipping import renumbered
from corelm.backend.weights import Weights, WeightsListener
from corelm.errors import (
    BackendClosedError,
    BackendTimeoutError,
    CapabilityError,
    CoreLMError,
    EngineError,
    described,
    is_interrupt,
    is_main_thread,
    message,
)
from corelm.spec import records
from corelm.spec.capabilities import Capabilities
from corelm.spec.row_results import generate_result, score_result
from corelm.tensors.modes import in_caller_modes, no_inference_mode
from corelm.validate import invalid, seconds, shown

T = TypeVar("T")
R = TypeVar("R", records.GenerateResult, records.ScoreResult)

#: Seconds that closing waits for a call whose caller has stopped waiting.
GRACE_PERIOD = 5.0
#: Seconds between two looks whether calls have ended.
_PAUSE = 0.02
#: Seconds between two calls of `remind`.
_REMINDER = 0.1
#: Seconds after which a waiting thread looks again even if it was not woken: the thread that should have
#: woken it may have been interrupted.
_LOOK_AGAIN = 0.25
_STATE = records.WeightsStateRequest()


@dataclass(eq=False, slots=True)
class Turn:
    """One turn of a call: it waits for the lock, holds it, and releases it.

    Attributes:
        exclusive: whether it holds the lock alone.
        hook: the hook that is called in it.
        request_ids: the requests that are made in it.
        caller_waits: returns whether a caller waits for its result; None if one does as long as `left` is not set.
        concurrent_with: hooks whose turns it does not wait for, although it is exclusive. The same holds for
            the turns inside it. One that does not hold the lock yet waits for it as for any other.
        around: the turns in which it is taken, from the innermost to the outermost; see `EngineLock.nested`.
        entered: whether it has held the lock.
        left: whether its caller has stopped waiting for it.
    """

    exclusive: bool
    hook: str = ""
    request_ids: tuple[str, ...] = ()
    caller_waits: Callable[[], bool] | None = None
    concurrent_with: frozenset[str] = frozenset()
    around: tuple[Turn, ...] = ()
    entered: bool = False
    left: bool = False

    @property
    def abandoned(self) -> bool:
        """Whether no caller waits for it any more."""
        return self.left or (self.caller_waits is not None and not self.caller_waits())


class EngineLock:
    """A lock that is held shared or exclusive.

    A thread that waits for exclusive access goes before threads that later ask for shared access, so it never
    starves. A turn may be taken inside another one, in either mode.

    An interrupt, such as a `KeyboardInterrupt`, can be raised between any two calls of the main thread. It must never
    leave the lock held. The lock is held by the turns in `holders`, which one C call each adds and removes. So who
    acquires it removes its turn in the first step of a ``finally``: a function of our own could be interrupted before
    it has done anything. Everything else is only there to wake the waiting threads sooner. `OpenEngine.call` shows how.

    Attributes:
        holders: the turns that hold the lock.
        waiting: the turns that wait for it, each with what wakes its thread.
        local: `turn` is the innermost one that a thread is in.
    """

    def __init__(self, name: str) -> None:
        self.holders: dict[Turn, None] = {}
        self.waiting: dict[Turn, SimpleQueue[None]] = {}
        self.local = threading.local()
        self._name = name
        # A lock in C: its `with` statement cannot be interrupted half-way. Reentrant, because a signal
        # handler and a finalizer may call this on a thread that is in here.
        self._mutex = threading.RLock()

    def turns(self) -> tuple[Turn, ...]:
        """Return the turns that this thread is in, from the innermost to the outermost."""
        inner: Turn | None = getattr(self.local, "turn", None)
        # Those that do not hold the lock are left over from an interrupt.
        return () if inner is None else tuple([each for each in (inner, *inner.around) if each in self.holders])

    def nested(self, turn: Turn) -> Turn:
        """Return a new turn as one that is taken inside those that this thread is in."""
        if around := self.turns():
            turn.around, turn.concurrent_with = around, turn.concurrent_with | around[0].concurrent_with
        return turn

    def acquire(self, turn: Turn, timeout: float | None = None, remind: Callable[[], object] | None = None) -> None:
        """Wait until a new turn holds the lock. It may have been made on another thread, which waits for this one.

        Args:
            remind: called every `_REMINDER` seconds while others hold the lock, to make them release it. What
                it raises ends the wait.

        Raises:
            BackendTimeoutError: others held the lock for `timeout` seconds.
            EngineError: the lock is held shared around an exclusive turn, and another such turn waits already.
        """
        with self._mutex:
            if not (self.holders or self.waiting):
                self.holders[turn] = None
        if turn not in self.holders:
            self._wait(turn, timeout, remind)
        self.local.turn, turn.entered = turn, True

    def wake(self) -> None:
        """Wake those of the waiting threads whose turn it may be."""
        with self._mutex:
            for turn, bell in list(self.waiting.items()):
                if not turn.exclusive:
                    bell.put(None)
                elif not self._others(turn):
                    bell.put(None)
                    return

    def busy(self) -> BackendTimeoutError:
        """Return the error of a call whose turn does not come."""
        return BackendTimeoutError(f"backend {self._name!r} was busy with other calls for the whole timeout")

    def _wait(self, turn: Turn, timeout: float | None, remind: Callable[[], object] | None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        pause = _LOOK_AGAIN if remind is None else _REMINDER
        bell: SimpleQueue[None] = SimpleQueue()
        try:
            while True:
                with self._mutex:
                    # First, or a thread that releases the lock now would wake nobody.
                    self.waiting[turn] = bell
                    if self._may_enter(turn):
                        self.holders[turn] = None
                        return
                left = pause if end is None else min(pause, end - time.monotonic())
                if left <= 0:
                    raise self.busy()
                try:
                    bell.get(timeout=left)
                except Empty:
                    if remind is not None:
                        remind()
        finally:
            self.waiting.pop(turn, None)

    def _may_enter(self, turn: Turn) -> bool:
        others, nested = self._others(turn), self._is_nested(turn)
        # A copy, made in one step: a thread that stops waiting does not take the mutex.
        exclusive = [other for other in list(self.waiting) if other.exclusive and other is not turn]
        if not turn.exclusive:
            # A list and no generator: Ctrl-C while a generator that is not exhausted is closed would be lost.
            alone = [other for other in others if other.exclusive]
            return not alone and (nested or not exclusive)
        if others and nested and any(map(self._is_nested, exclusive)):
            why = "two calls under way each want to update the weights, and would wait for each other"
            advice = "this one is refused. Update the weights outside other calls"
            raise EngineError(f"backend {self._name!r}: {why}; {advice}", usable=True)
        return not others

    def _others(self, turn: Turn) -> list[Turn]:
        concurrent = turn.concurrent_with
        return [each for each in list(self.holders) if each not in turn.around and each.hook not in concurrent]

    def _is_nested(self, turn: Turn) -> bool:
        return not self.holders.keys().isdisjoint(turn.around)


class OpenEngine:
    """An engine that is open: its hooks, what it can do, its tokenizer, and the weights in force.

    A `Backend` and a `DynamicBatcher` in front of it hold the same `OpenEngine`.

    One thread at a time enters an engine that does not declare `concurrent_calls`. New weights are loaded into any
    engine while no other call is under way. A call belongs to the process that opened the engine, and not to its forks.

    Args:
        plugin: what the plugin's ``open`` returned.
        software: the distributions and versions of the plugin and the engine, as far as they are known.
        model: the model object that the plugin was given, if it was given one.
        name, model_name, wrappers, retry, timeout: see `Backend` and `get_backend`.

    Attributes:
        hooks: its hooks by name, bound when it was opened.
        own: the names of those that are core's own.
        weights: their labels, the adapters, and what sleeps.
        lock: whose turn it is.
        listener: what is told of every change of the weights; None at first.
        given_model: returns the `model`, as long as others keep it alive.
        closed: whether the engine takes no more calls.
        wrapped: whether wrappers see its calls.
        on_caller_threads: whether the threads of its callers make its steps, for all calls under way.

    Raises:
        BackendIncompatibleError: the plugin does not fit the hook specification.
        InvalidRequestError: an illegal `retry` or `timeout`.
    """

    def __init__(
        self,
        plugin: Any,
        name: str,
        *,
        model_name: str = "",
        software: str = "",
        wrappers: Sequence[object] = (),
        retry: int | tenacity.BaseRetrying | None = None,
        timeout: float | None = None,
        model: nn.Module | None = None,
    ) -> None:
        self.plugin, self.name = plugin, name
        self.hooks, self.own = hooks_of(plugin, name, wrappers)
        self.capabilities: Capabilities = plugin.capabilities
        self.tokenizer: Any = plugin.tokenizer
        ids = self.capabilities.eos_token_ids
        # That of a tokenizer in another process costs a call to it.
        eos = getattr(self.tokenizer, "eos_token_id", None) if ids is None else None
        self.eos_token_ids = ids or frozenset([] if eos is None else [eos])
        self.given_model = (lambda: None) if model is None else weakref.ref(model)
        self.model_name, self.software = model_name, software
        self.timeout = None if timeout is None else seconds("timeout", timeout)
        self.listener: WeightsListener | None = None
        self.closed = False
        self._retry = _retrying(retry)
        self.wrapped = bool(wrappers)
        self.on_caller_threads: bool = getattr(plugin, "on_caller_threads", False)
        self._supervised = self.wrapped or self._retry is not None
        self._exclusive = not self.capabilities.concurrent_calls
        self._turnless = OUT_OF_TURN | self.own
        self.lock = EngineLock(name)
        self._process = os.getpid()
        # Acquired once, by the thread that calls the engine's `close`: the one that closes, or, if it has
        # stopped waiting, the one that makes the last call.
        self._release_claim = threading.Lock()
        self._release_late = False
        self.weights = Weights(self)
        self._asked: dict[str, Hook] = {**self.hooks}
        if self.capabilities.updates_in_flight:
            self._asked["generate"] = self.weights.sample
        _open.add(self)

    # What it is ------------------------------------------------------------------------------------------------------

    @property
    def weight_version(self) -> str:
        return self.weights.version_with(None)

    @property
    def pad_id(self) -> int:
        for name in ("pad_token_id", "eos_token_id"):
            if (token := getattr(self.tokenizer, name, None)) is not None:
                return int(token)
        return 0

    def implements(self, hook: str) -> bool:
        """Return whether the engine or core implements the hook, or a wrapper does so in the engine's place."""
        return hook in self.hooks

    def require(self, capability: str, why: str) -> None:
        """Raise a `CapabilityError` if the engine did not declare a capability.

        `why` says what it is needed for, or what to do without it, unless the plugin's `reasons` do.
        """
        if not getattr(self.capabilities, capability):
            why = getattr(self.plugin, "reasons", {}).get(capability, why)
            raise CapabilityError(f"backend {self.name!r} lacks {capability}: {why}", capability=capability)

    def fault(self, hook: str) -> Callable[[str], EngineError]:
        """Return a function that makes the error for a result that breaks the specification."""
        return lambda what: EngineError(f"backend {self.name!r}, hook {hook}: {what}", usable=True)

    def require_open(self) -> None:
        """Raise a `BackendClosedError` if the engine is closed, or in a fork of the process that opened it."""
        if self.closed:
            raise BackendClosedError(f"backend {self.name!r} is closed; open it again with get_backend")
        if os.getpid() != self._process:
            self.require_here()

    def require_here(self) -> None:
        """Raise a `BackendClosedError` in a fork of the process that opened the engine."""
        if os.getpid() != self._process:
            where = "belongs to another process, which this one is a fork of; call get_backend in this process"
            raise BackendClosedError(f"backend {self.name!r} {where}")

    @property
    def elsewhere(self) -> bool:
        """Whether this is a fork of the process that opened the engine. Its threads and connections are not here."""
        return os.getpid() != self._process

    @property
    def entered(self) -> bool:
        """Whether this thread is in a call to the engine, for example in a wrapper."""
        return bool(self.lock.turns())

    def works_on(self, names: Sequence[str]) -> bool:
        """Return whether a call with these requests, and no others, is in the engine."""
        return bool(names) and any(turn.request_ids == names for turn in list(self.lock.holders))

    # Calling it ------------------------------------------------------------------------------------------------------

    def call(
        self,
        call: Call,
        timeout: float | None = None,
        caller_waits: Callable[[], bool] | None = None,
        *,
        turn: Turn | None = None,
    ) -> Any:
        """Make a call: take the engine's turn, ask the hook, check what it returned, finish it. Type every failure.

        `caller_waits` returns whether a caller still waits for the result; None if this thread does. Only
        `_supervise` gives a `turn`: it has done all that is to be done around the call. A timeout is instead
        of the request's own, and bounds the wait for the turn and the engine's work together.

        Raises:
            BackendClosedError: the engine is closed, or no caller waits any more when the call's turn comes.
            BackendAsleepError: the hook needs a part of the engine that sleeps, or weights that it has not got.
            CapabilityError, BackendTimeoutError: the engine has no such hook, or did not answer in time.
            EngineError: the hook raised another exception (chained), or returned None or what cannot be read.
        """
        hook, request, lock, weights = call.hook, call.request, self.lock, self.weights
        if turn is None:
            if self.closed or os.getpid() != self._process:
                self.require_open()
            if hook not in self._asked:
                raise CapabilityError(f"backend {self.name!r} has no hook {hook}", capability=hook)
            timeout = getattr(request, "timeout", None) if timeout is None else timeout
            more = self._supervised or timeout is not None or not call.rows or call.deliveries
            if more or torch.is_inference_mode_enabled() or logger.isEnabledFor(logging.INFO):
                return self._supervise(call, timeout, caller_waits)
            turn = Turn(self._exclusive, hook, getattr(request, "request_ids", ()), caller_waits)
            if getattr(lock.local, "turn", None) is not None:
                lock.nested(turn)
        end = None if timeout is None else time.monotonic() + timeout
        grad, outside = torch.is_grad_enabled(), getattr(lock.local, "turn", None)
        try:
            if hook not in self._turnless:
                lock.acquire(turn, timeout)
            if self.closed:
                self.require_open()
            if (turn.left or turn.caller_waits is not None) and turn.abandoned:
                raise BackendClosedError(f"backend {self.name!r}: the caller has cancelled this call or left it")
            state, seen = weights.state, None
            if hook in READ_WEIGHTS:
                if state.asleep or state.without_weights:
                    weights.refuse_to_answer()
                if weights.noticed:
                    seen = self.ask("weights_state", _STATE)
                    if seen is not None and state.known.get(seen) != state.label:
                        seen, state = weights.look()
            if end is not None:
                request = replace(request, timeout=self._left(end))
            try:
                result = self._asked[hook](request)
            except BaseException as error:
                _reraise(error, self.name, hook, call.failed)
            changed = seen is not None and self.ask("weights_state", _STATE) != seen
            if changed or (seen is not None and weights.state is not state):
                weights.require_same(hook, state, changed)
            if result is None:
                raise self.fault(hook)("returned None; a hook must return a result")
            try:
                if hook in CHECKS:
                    result = CHECKS[hook](result, request, self.capabilities)
                finished = call.finish(result)
            except CoreLMError:
                raise
            except WrongResult as wrong:
                raise self.fault(hook)(str(wrong)) from None
            except Exception as error:
                raise self.fault(hook)(f"its result cannot be read: {described(error)}") from error
            # `finish` has labelled the numbers. Another thread may have noticed a change in the meantime.
            if seen is not None and weights.state is not state:
                weights.require_same(hook, state)
            return finished
        finally:
            # Ctrl-C may come between any two calls, so the first of them releases the lock.
            lock.holders.pop(turn, None)
            lock.local.turn = outside
            if lock.waiting or self._release_late:
                self._turn_ended()
            if torch.is_grad_enabled() != grad:
                # The engine has switched gradients on or off.
                torch.set_grad_enabled(grad)

    def alone(self, function: Callable[[], T], hook: str = "", when: records.When = "drain") -> T:
        """Return what the function returns. It is called while no call is in the engine, and calls hooks with `ask`.

        With ``when="abort"`` the answers in the engine are ended; with "now" they go on.
        """
        self.require_open()
        turn = self.lock.nested(Turn(True, hook, concurrent_with=GO_ON if when == "now" else frozenset()))
        remind: Callable[[], object] | None = None
        if when == "abort":
            # An abort that reaches the engine before its request does is lost, so it is repeated.
            remind = partial(self._abort, self.lock.holders, "generate")
            remind()
        outside, told = getattr(self.lock.local, "turn", None), EngineCall(self.name, place(self.model_name))
        with no_inference_mode(), logged(self.name, hook or "a turn", None), told.under_way():
            try:
                self.lock.acquire(turn, remind=remind)
                self.require_open()
                return function()
            finally:
                self.lock.holders.pop(turn, None)
                self.lock.local.turn = outside
                self._turn_ended()

    def ask(self, hook: str, request: Any) -> Any:
        """Return what a hook returns, in a turn that `call` or `alone` has taken."""
        try:
            return self.hooks[hook](request)
        except BaseException as error:
            _reraise(error, self.name, hook)

    def convert(self, hook: Literal["tokenize", "to_containers"], request: Any, own: Hook | None = None) -> Any:
        """Return what one of these hooks makes of a request. Core's own are plain functions, and take no turn.

        `own` is what core's `to_containers` calls, if the caller has imported it.
        """
        around = self._supervised or torch.is_inference_mode_enabled() or logger.isEnabledFor(logging.INFO)
        if around or hook not in self.own:
            return self.call(Call(hook, request))
        self.require_open()
        try:
            function = self.hooks[hook]
            result = (own if own is not None and function is to_containers else function)(request)
            return CHECKS[hook](result, request, self.capabilities) if hook in CHECKS else result
        except WrongResult as wrong:
            raise self.fault(hook)(str(wrong)) from None
        except BaseException as error:
            _reraise(error, self.name, hook)

    def _supervise(self, call: Call, timeout: float | None, caller_waits: Callable[[], bool] | None) -> Any:
        """Make a call that has a timeout, retries, a reader of its tokens, wrappers or a log around it."""
        hook = call.hook
        told = EngineCall(self.name, place(self.model_name), call.origins)
        end = None if timeout is None else time.monotonic() + timeout

        def attempt() -> Any:
            left = None if end is None else self._left(end)
            turn = self.lock.nested(Turn(self._exclusive, hook, getattr(call.request, "request_ids", ()), caller_waits))
            with told.under_way():
                if left is None or self.capabilities.stops_at_timeout or getattr(call.request, "grad", False):
                    return self.call(call, left, turn=turn)
                try:
                    return call_for(left, partial(self.call, call, left, turn=turn), f"corelm-{self.name}-{hook}")
                except BaseException as error:
                    # For example a KeyboardInterrupt.
                    turn.left = True
                    if not isinstance(error, TimeoutError) or isinstance(error, BackendTimeoutError):
                        raise
                    if not turn.entered:
                        raise self.lock.busy() from None
                    late = "no answer within the timeout"
                    still = "the engine still works on the call, and later calls wait for it"
                    raise BackendTimeoutError(f"backend {self.name!r}, hook {hook}: {late}; {still}") from None

        with no_inference_mode():
            if not call.rows:
                return call.nothing()
            with logged(self.name, hook, call.request):
                try:
                    reading = [each.begin() for each in call.deliveries]
                    if reading and len(reading) == call.callers and not any(reading):
                        raise BackendClosedError("the caller has cancelled this request")
                    if self._retry is None or hook not in RETRIED:
                        return attempt()
                    return _repeated(self._retry, end, call.deliveries)(attempt)
                finally:
                    for each in call.deliveries:
                        each.end()

    def _turn_ended(self) -> None:
        if self.lock.waiting:
            self.lock.wake()
        if self._release_late and not self.lock.holders:
            self._release()

    def _left(self, end: float) -> float:
        left = end - time.monotonic()
        if left <= 0:
            raise BackendTimeoutError(f"backend {self.name!r}: the timeout passed before the engine was called")
        return left

    # Health, aborting, closing ---------------------------------------------------------------------------------------

    def health(self) -> bool:
        if self.closed or self.elsewhere:
            return False
        return not self.implements("health") or bool(self.call(Call("health", records.HealthRequest())))

    def abort(self, request_ids: Sequence[str]) -> None:
        self.require("abort", "its requests cannot be aborted")
        self.call(Call("abort", records.AbortRequest(request_ids=tuple(request_ids))))

    def close(self, grace: float = GRACE_PERIOD, *, abort: bool = False) -> None:
        """Call the engine's `close`, once. The engine counts as closed from then on, even if `close` fails.

        An engine that takes one call at a time finishes that call first, as long as its caller waits for it. With
        `abort`, it aborts it if it can. A call whose caller has stopped waiting is aborted, with `grace` seconds
        to end; after these, its end calls the engine's `close`, and this raises a `BackendTimeoutError`. An engine
        with `concurrent_calls` ends the calls under way. In a fork of the process that opened it, this does nothing.
        """
        if self.elsewhere:
            return
        if not self.capabilities.concurrent_calls:
            turn, outside = self.lock.nested(Turn(True)), getattr(self.lock.local, "turn", None)
            last_awaited = time.monotonic()

            def end_abandoned() -> None:
                nonlocal last_awaited
                holders = list(self.lock.holders)
                abandoned = [each for each in holders if each.abandoned]
                self._abort_quietly(holders if abort else abandoned)
                if len(abandoned) < len(holders):
                    last_awaited = time.monotonic()
                elif time.monotonic() - last_awaited > grace:
                    raise TimeoutError

            try:
                self.lock.acquire(turn, remind=end_abandoned)
                self.closed = True
            except TimeoutError:
                self.closed = self._release_late = True
                if self.lock.holders:
                    still = "still works on a call whose caller has stopped waiting; it is closed to new calls"
                    told = f"backend {self.name!r} {still}, and the engine is released when that call ends"
                    raise BackendTimeoutError(told) from None
            finally:
                self.lock.holders.pop(turn, None)
                self.lock.local.turn = outside
                self._turn_ended()
        self.closed = True
        self._release()

    def end_calls(self) -> bool:
        """Refuse later calls and abort those in the engine if it can. Return whether none is left to wait for."""
        # Those of an engine with `concurrent_calls` work on threads of its own, unless its plugin says otherwise.
        if self.elsewhere or not (self._exclusive or self.on_caller_threads):
            return True
        self.closed = True
        self._abort_quietly(self.lock.holders)
        return not self.lock.holders

    def _release(self) -> None:
        if self._release_claim.acquire(blocking=False):
            if self.implements("close"):
                self.ask("close", records.CloseRequest())
            logger.info("%s: closed", self.name)

    def _abort_quietly(self, turns: Iterable[Turn]) -> None:
        with suppress(CoreLMError):
            self._abort(turns)

    def _abort(self, turns: Iterable[Turn], hook: str = "") -> None:
        names = tuple(name for turn in list(turns) if hook in ("", turn.hook) for name in turn.request_ids)
        if names and self.capabilities.abort:
            self.ask("abort", records.AbortRequest(request_ids=names))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedCall(Call, Generic[R]):
    """A call with a checked request that has not been made yet.

    Attributes:
        caller_rows: int64: the caller's row for each row of the request.
        tokens: most tokens that the engine has to hold: those given and those that may be sampled.
        on_caller_thread: the call has to be made on its caller's own thread, where autograd's settings are.
    """

    engine: OpenEngine
    hook: Literal["generate", "score_logprobs"]
    request: records.GenerateRequest | records.ScoreRequest
    finish: Callable[[Any], R]  # type: ignore[assignment]
    caller_rows: Tensor
    rows: int
    tokens: int
    origins: Sequence[Origin] = ()
    deliveries: Sequence[Delivery] = ()
    on_caller_thread: bool = False

    def nothing(self) -> R:
        if isinstance(self.request, records.GenerateRequest):
            return self.finish(generate_result(self.request, []))
        none = score_result(self.request, {})
        if self.request.return_logits:
            logits = torch.zeros(0, self.engine.capabilities.vocab_size)
            none = replace(none, logits=none.logprobs.with_values(logits))
        return self.finish(none)

    def failed(self, error: CoreLMError) -> CoreLMError:
        return renumbered(error, self.caller_rows)


def _reraise(
    error: BaseException, name: str, hook: str, failed: Callable[[CoreLMError], CoreLMError] | None = None
) -> NoReturn:
    """Raise the error for the caller of a hook that has raised `error`: itself if it is core's or ends the program."""
    told: BaseException = error
    # An engine can raise asyncio.CancelledError or SystemExit, too. They are its failure and end no program.
    # On the main thread, a SystemExit may be that of the program's own handler of a signal.
    own = isinstance(error, CoreLMError) or is_interrupt(error) or (isinstance(error, SystemExit) and is_main_thread())
    if not own and isinstance(error, TimeoutError):
        told = BackendTimeoutError(f"backend {name!r}, hook {hook}: {message(error)}")
    elif not own:
        told = EngineError(f"backend {name!r}, hook {hook}: {described(error)}")
    if failed is not None and isinstance(told, CoreLMError):
        told = failed(told)
    if told is error:
        raise error
    raise told from error


_left_behind: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def call_for(timeout: float, function: Callable[[], T], name: str) -> T:
    """Return what the function returns, but wait for at most `timeout` seconds. It runs in the caller's torch modes.

    If the wait ends early with a `TimeoutError`, the function goes on in its daemon thread, and its result is
    dropped. An `EngineError` says that the system has no room for a thread.
    """
    outcome = Outcome()
    thread = threading.Thread(target=outcome.of, args=(in_caller_modes(function),), name=name, daemon=True)
    start(thread, "a call with a timeout")
    try:
        result: T = outcome.get(timeout)
    except BaseException as error:
        # If this is the function's own error, its thread is ending and costs no wait.
        _left_behind.add(thread)
        if isinstance(error, Empty):
            raise TimeoutError from None
        raise
    return result


def _retrying(retry: int | tenacity.BaseRetrying | None) -> tenacity.BaseRetrying | None:
    """Return what repeats a failed call: for a number of attempts, or as a tenacity `Retrying` says."""
    if retry is None:
        return None
    if isinstance(retry, tenacity.Retrying):
        # Raise the last error itself instead of tenacity's wrapper of it.
        return retry.copy(reraise=True, before_sleep=retry.before_sleep or log_retry)
    if isinstance(retry, bool) or not isinstance(retry, int) or retry < 1:
        raise invalid("retry", f"expected an integer of at least 1 or a tenacity.Retrying, got {shown(retry)}")
    return tenacity.Retrying(
        stop=tenacity.stop_after_attempt(retry),
        wait=tenacity.wait_random_exponential(multiplier=0.1, max=10),
        retry=tenacity.retry_if_exception(lambda error: isinstance(error, EngineError) and error.usable is not False),
        before_sleep=log_retry,
        reraise=True,
    )


def _repeated(retry: tenacity.BaseRetrying, end: float | None, deliveries: Sequence[Delivery]) -> tenacity.BaseRetrying:
    """Return a copy for one call: it ends before `end`, and once a caller has been given part of the result."""

    def stop(state: tenacity.RetryCallState) -> bool:
        return retry.stop(state) or (end is not None and time.monotonic() + state.upcoming_sleep >= end)

    def unheard(state: tenacity.RetryCallState) -> bool:
        return not any(each.started for each in deliveries)

    return retry.copy(stop=stop, retry=tenacity.retry_all(retry.retry, unheard))


_open: weakref.WeakSet[OpenEngine] = weakref.WeakSet()


def end_calls(engines: Iterable[OpenEngine], end: float) -> bool:
    """Refuse later calls to these engines, and abort those in them until `end`. Return whether all ended."""
    # All are told to end before one is waited for.
    while engines := [engine for engine in engines if not engine.end_calls()]:
        if time.monotonic() >= end:
            return False
        time.sleep(_PAUSE)
    return True


@at_program_end
def _end_calls() -> None:
    if not end_calls(list(_open), program_deadline()) and interrupted():
        end_stuck()
    for thread in list(_left_behind):
        thread.join(max(0.0, program_deadline() - time.monotonic()))

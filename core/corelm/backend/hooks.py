"""`EngineHooks`: calls the hooks of one engine, in turn, with retries if asked, and gives every failure a type.

pluggy calls every plugin that is registered, but a user opens one engine by name. So each open engine has its own
`PluginManager`, which holds the engine, core's default hooks and the wrappers that the user passed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import tenacity

from corelm.backend.asking import ask
from corelm.backend.call_log import log_closed, logged
from corelm.backend.default_hooks import DefaultHooks
from corelm.backend.engine_call import EngineCall, Origin
from corelm.backend.hook_kinds import GO_ON, OUT_OF_TURN, READ_WEIGHTS, RETRIED
from corelm.backend.registering import implementers, registered
from corelm.backend.retries import retrying, unless, until
from corelm.backend.turns import EngineLock, Turn, WouldDeadlock, reaper
from corelm.backend.waits import call_for
from corelm.backend.weights import Weights
from corelm.errors import (
    BackendClosedError,
    BackendTimeoutError,
    CapabilityError,
    CoreLMError,
    EngineError,
    described,
)
from corelm.spec.hookspecs import BackendSpec
from corelm.spec.records import AbortRequest, CloseRequest, When
from corelm.tensors.modes import no_inference_mode

T = TypeVar("T")

#: The names of all hooks.
SPECIFIED = tuple(name for name in vars(BackendSpec) if not name.startswith("_"))
#: Seconds that closing waits for a call whose caller has stopped waiting.
PATIENCE = 5.0


class EngineHooks:
    """Calls the hooks of one engine.

    One thread at a time enters an engine that does not declare `concurrent_calls`. New weights are loaded into any
    engine while no other call is under way. A call belongs to the process that opened the engine, and not to its forks.

    A call with a timeout into an engine that does not declare `stops_at_timeout` is made on a thread that the caller
    waits for: when the time is over, the caller gets its error, and the engine finishes the call alone. Scoring with
    gradients always runs on the caller's thread, where autograd's settings are.

    Args:
        engine: what the plugin's ``open`` returned.
        name: the name that the engine was opened by.
        wrappers: objects with ``@hookimpl(wrapper=True)`` methods.
        retry: how often a failed call is tried in all, or a tenacity `Retrying`; None never retries.
        model: the name that labels the engine's numbers.

    Attributes:
        capabilities: what the engine can do, as it declared when it was opened.
        weights: their labels, the adapters, and what sleeps.

    Raises:
        BackendIncompatibleError: the engine lacks `capabilities` or `tokenizer`, or has a hook that the specification
            does not know or that takes other arguments.
        InvalidRequestError: `retry` is neither a count nor a `Retrying`.
    """

    def __init__(
        self,
        engine: Any,
        name: str,
        wrappers: Sequence[object],
        retry: int | tenacity.BaseRetrying | None,
        model: str = "",
    ) -> None:
        self.closed = False
        self._name, self._model = name, model
        self._retry = retrying(retry)
        self._lock = EngineLock()
        # Acquired once, by the thread that calls the engine's `close`: the one that closes, or, if it has stopped
        # waiting, the one that makes the last call.
        self._release_claim = threading.Lock()
        self._release_late = False
        self._process = os.getpid()
        self.capabilities, self._hooks = registered(engine, name, wrappers)
        self._implemented = frozenset(hook for hook in SPECIFIED if implementers(self._hooks, hook))
        self._ask = partial(ask, self._hooks, name)
        # Core's own hooks do not wait for the engine. Tokenizing waits for other tokenizing, because encoding changes
        # the encoder's settings.
        self._own_turns: dict[str, AbstractContextManager[object]] = {
            hook: turn
            for hook, turn in (("tokenize", threading.RLock()), ("to_containers", nullcontext()))
            if all(isinstance(plugin, DefaultHooks) for plugin in implementers(self._hooks, hook))
        }
        self._unwatched = {hook for hook in self._own_turns if len(getattr(self._hooks, hook).get_hookimpls()) == 1}
        self.weights = Weights(self, name, self._lock, self._ask)

    def implements(self, hook: str) -> bool:
        """Return whether the engine or core implements the hook, or a wrapper does so in the engine's place."""
        return hook in self._implemented

    def require_open(self) -> None:
        """Refuse a call to a closed engine, and to one that another process has opened.

        Raises:
            BackendClosedError: the engine is closed, or this is a fork of the process that opened it.
        """
        if self.closed:
            raise BackendClosedError(f"backend {self._name!r} is closed; open it again with get_backend")
        if os.getpid() != self._process:
            self.require_here()

    def require_here(self) -> None:
        """Refuse what a fork of the process that opened the engine cannot do.

        Raises:
            BackendClosedError: this is such a fork.
        """
        if self.elsewhere:
            raise BackendClosedError(
                f"backend {self._name!r} belongs to another process, which this one is a fork of; "
                "call get_backend in this process"
            )

    @property
    def elsewhere(self) -> bool:
        """Whether this is a fork of the process that opened the engine. Its threads and connections are not here."""
        return os.getpid() != self._process

    @property
    def entered(self) -> bool:
        """Whether this thread is in a call to the engine, for example in a wrapper."""
        return bool(self._lock.turns())

    @property
    def under_way(self) -> bool:
        """Whether a call is in the engine."""
        return bool(self._lock.holders)

    def works_on(self, names: Sequence[str]) -> bool:
        """Return whether a call with these requests, and no others, is in the engine."""
        return bool(names) and any(turn.request_ids == names for turn in list(self._lock.holders))

    def fault(self, hook: str) -> Callable[[str], EngineError]:
        """Return a function that makes the error for a result that breaks the specification."""
        return lambda what: EngineError(f"backend {self._name!r}, hook {hook}: {what}", usable=True)

    def call(
        self,
        hook: str,
        request: Any,
        finish: Callable[[Any], Any] = lambda result: result,
        attended: Callable[[], bool] | None = None,
        failed: Callable[[CoreLMError], CoreLMError] = lambda error: error,
        delivered: Callable[[], bool] = lambda: False,
        origins: Sequence[Origin] = (),
    ) -> Any:
        """Call a hook and return what `finish` makes of its result.

        Args:
            hook: the hook's name.
            request: its request.
            finish: makes the result from what the engine returned, while no other call can change the weights.
            attended: returns whether a caller still waits for the result; None if this thread does.
            failed: makes the caller's error from the one that the hook raised, while no other call can change the
                weights.
            delivered: returns whether a caller has been given part of the result. The call is then not tried again.
            origins: the users' calls that this one serves, for wrappers that measure.

        Raises:
            BackendClosedError: the engine is closed, or no caller waits any more when the call's turn comes.
            BackendAsleepError: the hook needs a part of the engine that sleeps, or weights that it has not got.
            CapabilityError: the engine has no such hook.
            BackendTimeoutError: waiting for a turn and the engine's work together took longer than ``request.timeout``.
            EngineError: the hook raised another exception (chained), or returned None or what `finish` cannot read.
        """
        self.require_open()
        if not self.implements(hook):
            raise CapabilityError(f"backend {self._name!r} has no hook {hook}", capability=hook)
        if hook in self._unwatched:
            # Core asks itself, and no wrapper sees it.
            with self._own_turns[hook], no_inference_mode():
                self.require_open()
                return finish(self._ask(hook, request))
        timeout = getattr(request, "timeout", None)
        end = None if timeout is None else time.monotonic() + timeout
        call = EngineCall(self._name, self._model, origins)
        serve = partial(self._serve, call, hook, request, finish, failed, end)
        attempt = partial(self._attempt, hook, request, serve, end, attended)
        with logged(self._name, hook, request):
            if self._retry is None or hook not in RETRIED:
                return attempt()
            return until(end, unless(delivered, self._retry))(attempt)

    def alone(self, function: Callable[[], T], hook: str = "", when: When = "drain") -> T:
        """Return what the function returns. It is called while no call is in the engine.

        Args:
            function: what to call. It calls hooks with `ask`.
            hook: the one that it is about.
            when: `abort` ends the answers in the engine; beside `now`, they go on.
        """
        self.require_open()
        turn = Turn(self._lock, True, hook, concurrent_with=GO_ON if when == "now" else frozenset())
        # An abort that reaches the engine before its request does is lost, so it is repeated.
        remind = self._abort_answers if when == "abort" else None
        if remind is not None:
            remind()
        with no_inference_mode(), logged(self._name, hook or "a turn", None):
            result: T = self._in_turn(turn, function, None, remind)
        return result

    def ask(self, hook: str, request: Any) -> Any:
        """Return what a hook returns, in a turn that `alone` has taken."""
        with EngineCall(self._name, self._model).under_way():
            return self._ask(hook, request)

    def close(self, patience: float = PATIENCE, *, abort: bool = False) -> None:
        """Call the engine's `close`, once. The engine counts as closed from then on, even if `close` fails.

        An engine that takes one call at a time finishes that call first, as long as its caller waits for it. An engine
        with `concurrent_calls` ends the calls under way. In a fork of the process that opened the engine, this does
        nothing.

        Args:
            patience: seconds to wait for a call whose caller has stopped waiting. The engine aborts it if it can.
            abort: also abort the calls that callers wait for.

        Raises:
            BackendTimeoutError: the engine still works on such a call. It takes no other, and its `close` is called
                when that call ends.
        """
        if self.elsewhere:
            return
        if self.capabilities.concurrent_calls:
            self._shut()
        else:
            try:
                remind = reaper(self._lock, patience, self._abort_quietly, abort)
                self._lock.hold(Turn(self._lock, True), self._shut, remind=remind)
            except TimeoutError:
                self.closed = self._release_late = True
                if self._lock.holders:
                    raise BackendTimeoutError(
                        f"backend {self._name!r} still works on a call whose caller has stopped waiting; it is closed "
                        "to new calls, and the engine is released when that call ends"
                    ) from None
        self._release()

    def end_calls(self) -> bool:
        """Refuse later calls and abort those in the engine if it can. Return whether none is left in it.

        An engine with `concurrent_calls` works on threads or in processes of its own, and is not waited for.
        """
        if self.elsewhere or self.capabilities.concurrent_calls:
            return True
        self.closed = True
        self._abort_quietly(self._lock.holders)
        return not self._lock.holders

    def _shut(self) -> None:
        self.closed = True

    def _release(self) -> None:
        if self._release_claim.acquire(blocking=False):
            if self.implements("close"):
                self._ask("close", CloseRequest())
            log_closed(self._name)

    def _attempt(
        self,
        hook: str,
        request: Any,
        serve: Callable[[], Any],
        end: float | None,
        attended: Callable[[], bool] | None,
    ) -> Any:
        if hook in OUT_OF_TURN:
            return serve()
        if hook in self._own_turns:
            with self._own_turns[hook]:
                self.require_open()
                return serve()
        names = request.request_ids if hook in READ_WEIGHTS else ()
        turn = Turn(self._lock, not self.capabilities.concurrent_calls, hook, names, attended)
        in_turn = partial(self._in_turn, turn, serve, end)
        if end is None or self.capabilities.stops_at_timeout or getattr(request, "grad", False):
            return in_turn()
        try:
            return call_for(self._left(end), in_turn, f"corelm-{self._name}-{hook}")
        except TimeoutError as error:
            turn.left = True
            if isinstance(error, BackendTimeoutError):
                raise
            if not turn.entered:
                raise self._busy() from None
            raise BackendTimeoutError(
                f"backend {self._name!r}, hook {hook}: no answer within {request.timeout:g} s; the engine still works "
                "on the call, and later calls wait for it"
            ) from None
        except BaseException:
            # For example a KeyboardInterrupt.
            turn.left = True
            raise

    def _in_turn(
        self,
        turn: Turn,
        serve: Callable[[], Any],
        end: float | None,
        remind: Callable[[], object] | None = None,
    ) -> Any:
        def inside() -> Any:
            self.require_open()
            if turn.abandoned:
                raise BackendClosedError(f"backend {self._name!r}: the caller has cancelled this call or left it")
            return serve()

        try:
            return self._lock.hold(turn, inside, None if end is None else self._left(end), remind)
        except WouldDeadlock:
            raise EngineError(
                f"backend {self._name!r}: two calls under way each want to update the weights, and would wait for each "
                "other; this one is refused. Update the weights outside other calls",
                usable=True,
            ) from None
        except TimeoutError:
            if turn.entered:
                raise
            raise self._busy() from None
        finally:
            if self._release_late and not self._lock.holders:
                self._release()

    def _serve(
        self,
        call: EngineCall,
        hook: str,
        request: Any,
        finish: Callable[[Any], Any],
        failed: Callable[[CoreLMError], CoreLMError],
        end: float | None,
    ) -> Any:
        with no_inference_mode():
            before = self.weights.look(to_answer=True) if hook in READ_WEIGHTS else None
            if end is not None:
                request = replace(request, timeout=self._left(end))
            try:
                with call.under_way():
                    if hook in GO_ON and self.capabilities.updates_in_flight:
                        result = self.weights.sample(request)
                    else:
                        result = self._ask(hook, request)
            except CoreLMError as error:
                told = failed(error)
                if told is error:
                    raise
                raise told from error
            if result is None:
                raise self.fault(hook)("returned None; a hook must return a result")
            if before is not None:
                self.weights.require_same(hook, before)
            try:
                finished = finish(result)
            except CoreLMError:
                raise
            except Exception as error:
                raise self.fault(hook)(f"its result cannot be read: {described(error)}") from error
            # `finish` labels the numbers. Another thread may have noticed a change in the meantime.
            if before is not None and self.weights.state is not before[1]:
                self.weights.require_same(hook, before, ask=False)
            return finished

    def _abort_answers(self) -> None:
        self._abort(turn for turn in list(self._lock.holders) if turn.hook == "generate")

    def _abort_quietly(self, turns: Iterable[Turn]) -> None:
        with suppress(CoreLMError):
            self._abort(turns)

    def _abort(self, turns: Iterable[Turn]) -> None:
        names = tuple(name for turn in list(turns) for name in turn.request_ids)
        if names and self.capabilities.abort:
            self._ask("abort", AbortRequest(request_ids=names))

    def _busy(self) -> BackendTimeoutError:
        return BackendTimeoutError(f"backend {self._name!r} was busy with other calls for the whole timeout")

    def _left(self, end: float) -> float:
        left = end - time.monotonic()
        if left <= 0:
            raise BackendTimeoutError(f"backend {self._name!r}: the timeout passed before the engine was called")
        return left

"""`EngineHooks`: the hooks of one engine, called in turn, retried if asked, with every failure typed.

pluggy broadcasts and a name selects, so every opened engine has a `PluginManager` of its own. It holds the engine,
core's defaults and the wrappers its user passed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pluggy
import tenacity

from corelm.backend.default_hooks import DefaultHooks
from corelm.backend.rwlock import ReadersWriterLock
from corelm.errors import (
    BackendClosedError,
    BackendIncompatibleError,
    BackendTimeoutError,
    CapabilityError,
    CoreLMError,
    EngineError,
    InvalidRequestError,
)
from corelm.spec.capabilities import Capabilities
from corelm.spec.hookspecs import PROJECT, BackendSpec
from corelm.spec.records import AbortRequest, CloseRequest
from corelm.tensors.modes import no_inference_mode

#: Repeating these changes nothing but the time it takes.
RETRIED = frozenset({"tokenize", "generate", "score_logprobs"})
#: These are about a call that is under way, so they do not wait for it.
OUT_OF_TURN = frozenset({"abort", "health"})


class EngineHooks:
    """Calls the hooks of `engine`. One that does not declare `concurrent_calls` is entered by one thread at a time; new
    weights are loaded into either kind while no other call is under way.

    Args:
        retry: how often a failed call is tried in all, or a tenacity `Retrying`; None never retries.

    Raises:
        BackendIncompatibleError: an engine without capabilities or tokenizer, or a hook that the specification does not
            know, or with other arguments.
        InvalidRequestError: a `retry` of another kind.
    """

    def __init__(
        self, engine: Any, name: str, wrappers: Sequence[object], retry: int | tenacity.BaseRetrying | None
    ) -> None:
        self.closed = False
        self._name = name
        self._retry = _retrying(retry)
        self._lock = ReadersWriterLock()
        self._closing = threading.Lock()
        self._in_flight: dict[object, tuple[str, ...]] = {}
        capabilities = getattr(engine, "capabilities", None)
        if not isinstance(capabilities, Capabilities) or not hasattr(engine, "tokenizer"):
            raise self._misfit(f"open returned a {type(engine).__name__} without `capabilities` or `tokenizer`")
        self._concurrent = capabilities.concurrent_calls
        self._can_abort = capabilities.abort
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(BackendSpec)
        try:
            manager.register(DefaultHooks(engine.tokenizer))
            manager.register(engine, name)
            for plugin in wrappers:
                manager.register(plugin)
                if not manager.get_hookcallers(plugin):
                    raise self._misfit(f"{plugin!r} was passed as a plugin and has no hook; mark its methods @hookimpl")
            # Without this a misspelt hook would be silence.
            manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            raise self._misfit(str(error)) from error
        self._hooks = manager.hook
        # What core does by itself does not wait for the engine. Tokenizing waits for other tokenizing: an encoder's
        # settings are changed while it encodes.
        self._own_turns: dict[str, AbstractContextManager[object]] = {
            hook: turn
            for hook, turn in (("tokenize", threading.RLock()), ("to_containers", nullcontext()))
            if all(isinstance(each.plugin, DefaultHooks) for each in getattr(manager.hook, hook).get_hookimpls())
        }

    def implements(self, hook: str) -> bool:
        return bool(getattr(self._hooks, hook).get_hookimpls())

    def require_open(self) -> None:
        """Raises:
        BackendClosedError: the engine is closed.
        """
        if self.closed:
            raise BackendClosedError(f"backend {self._name!r} is closed; open it again with get_backend")

    def fault(self, hook: str) -> Callable[[str], EngineError]:
        """Makes the error for a result that breaks the specification."""
        return lambda what: EngineError(f"backend {self._name!r}, hook {hook}: {what}", usable=True)

    def call(self, hook: str, request: Any, finish: Callable[[Any], Any] = lambda result: result) -> Any:
        """The hook's answer, as `finish` makes it while the engine is still this call's: nobody can have changed the
        weights in between.

        Raises:
            BackendClosedError, CapabilityError: the engine is closed, or has no such hook.
            BackendTimeoutError: the wait for one's turn and the engine together took longer than ``request.timeout``.
            EngineError: the hook raised something else (chained), or answered None.
        """
        self.require_open()
        if not self.implements(hook):
            raise CapabilityError(f"backend {self._name!r} has no hook {hook}", capability=hook)
        timeout = getattr(request, "timeout", None)
        attempt = partial(self._attempt, hook, request, finish, None if timeout is None else time.monotonic() + timeout)
        return attempt() if self._retry is None or hook not in RETRIED else self._retry.copy()(attempt)

    def close(self) -> None:
        """Call the engine's `close`, once; the engine counts as closed from the start, and even if that fails.

        An engine that takes one call at a time finishes that one first; another ends what is under way.
        """
        with nullcontext() if self._concurrent else self._lock.exclusive():
            with self._closing:
                if self.closed:
                    return
                self.closed = True
            if self.implements("close"):
                self._ask("close", CloseRequest())

    def _attempt(self, hook: str, request: Any, finish: Callable[[Any], Any], end: float | None) -> Any:
        if hook == "update_weights" and not request.drain:
            self._abort_all()
        with self._turn(hook, request, end), no_inference_mode(), self._listed(hook, request):
            if end is not None:
                request = replace(request, timeout=self._left(end))
            result = self._ask(hook, request)
            if result is None:
                raise self.fault(hook)("returned None, which is no result")
            return finish(result)

    def _ask(self, hook: str, request: Any) -> Any:
        try:
            return getattr(self._hooks, hook)(request=request)
        except CoreLMError:
            raise
        except TimeoutError as error:
            raise BackendTimeoutError(f"backend {self._name!r}, hook {hook}: {error}") from error
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            raise EngineError(f"backend {self._name!r}, hook {hook}: {cause}") from error

    def _turn(self, hook: str, request: Any, end: float | None) -> AbstractContextManager[object]:
        if hook in OUT_OF_TURN:
            return nullcontext()
        if hook == "update_weights":
            # An abort that comes before its answer has reached the engine is lost, so it is repeated.
            remind = None if request.drain else self._abort_all
            return self._in_turn(partial(self._lock.exclusive, remind=remind), end)
        return self._own_turns.get(hook) or self._in_turn(
            self._lock.shared if self._concurrent else self._lock.exclusive, end
        )

    @contextmanager
    def _in_turn(
        self, enter: Callable[[float | None], AbstractContextManager[None]], end: float | None
    ) -> Iterator[None]:
        with ExitStack() as stack:
            try:
                stack.enter_context(enter(None if end is None else self._left(end)))
            except TimeoutError:
                busy = f"backend {self._name!r} was busy with other calls until the time was over"
                raise BackendTimeoutError(busy) from None
            self.require_open()
            yield

    @contextmanager
    def _listed(self, hook: str, request: Any) -> Iterator[None]:
        """The names of answers under way, so that they can be ended."""
        call = object()
        self._in_flight[call] = request.request_ids if hook == "generate" else ()
        try:
            yield
        finally:
            del self._in_flight[call]

    def _abort_all(self) -> None:
        names = tuple(name for names in list(self._in_flight.values()) for name in names)
        if names and self._can_abort:
            self._ask("abort", AbortRequest(request_ids=names))

    def _left(self, end: float) -> float:
        left = end - time.monotonic()
        if left <= 0:
            raise BackendTimeoutError(f"backend {self._name!r}: the time was over before the engine was asked")
        return left

    def _misfit(self, what: str) -> BackendIncompatibleError:
        return BackendIncompatibleError(f"backend {self._name!r} does not fit the hook specification: {what}")


def _retrying(retry: int | tenacity.BaseRetrying | None) -> tenacity.BaseRetrying | None:
    if retry is None:
        return None
    if isinstance(retry, tenacity.Retrying):
        # The last error itself, not tenacity's wrapping of it.
        return retry.copy(reraise=True)
    if not isinstance(retry, int) or retry < 1:
        raise InvalidRequestError(
            f"retry: expected a count from 1 or a tenacity.Retrying, got {retry!r}", field="retry"
        )
    return tenacity.Retrying(
        stop=tenacity.stop_after_attempt(retry),
        wait=tenacity.wait_random_exponential(multiplier=0.1, max=10),
        retry=tenacity.retry_if_exception(lambda error: isinstance(error, EngineError) and error.usable is not False),
        reraise=True,
    )

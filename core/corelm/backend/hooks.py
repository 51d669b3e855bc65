"""`EngineHooks`: calls the hooks of one engine, in turn, with retries if asked, and gives every failure a type.

pluggy calls every plugin that is registered, but a user opens one engine by name. So each open engine has its own
`PluginManager`, which holds the engine, core's default hooks and the wrappers that the user passed.
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

#: Hooks that may be repeated: repeating them changes nothing but the time taken.
RETRIED = frozenset({"tokenize", "generate", "score_logprobs"})
#: Hooks that do not wait for the calls under way: `abort` ends one of them, and `health` must answer at any time.
OUT_OF_TURN = frozenset({"abort", "health"})


class EngineHooks:
    """Calls the hooks of one engine.

    One thread at a time enters an engine that does not declare `concurrent_calls`. New weights are loaded into any
    engine while no other call is under way.

    Args:
        engine: what the plugin's ``open`` returned.
        name: the name that the engine was opened by.
        wrappers: objects with ``@hookimpl(wrapper=True)`` methods.
        retry: how often a failed call is tried in all, or a tenacity `Retrying`; None never retries.

    Raises:
        BackendIncompatibleError: the engine lacks `capabilities` or `tokenizer`, or has a hook that the specification
            does not know or that takes other arguments.
        InvalidRequestError: `retry` is neither a count nor a `Retrying`.
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
            for wrapper in wrappers:
                manager.register(wrapper)
                if not manager.get_hookcallers(wrapper):
                    raise self._misfit(
                        f"the wrapper {wrapper!r} has no hook; mark its methods with @hookimpl(wrapper=True)"
                    )
            # Otherwise a misspelt hook would be ignored silently.
            manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            raise self._misfit(str(error)) from error
        self._hooks = manager.hook
        # Core's own hooks do not wait for the engine. Tokenizing waits for other tokenizing, because encoding changes
        # the encoder's settings.
        self._own_turns: dict[str, AbstractContextManager[object]] = {
            hook: turn
            for hook, turn in (("tokenize", threading.RLock()), ("to_containers", nullcontext()))
            if all(isinstance(each.plugin, DefaultHooks) for each in getattr(manager.hook, hook).get_hookimpls())
        }

    def implements(self, hook: str) -> bool:
        """Return whether the engine, core or a wrapper implements the hook."""
        return bool(getattr(self._hooks, hook).get_hookimpls())

    def require_open(self) -> None:
        """Refuse a call to a closed engine.

        Raises:
            BackendClosedError: the engine is closed.
        """
        if self.closed:
            raise BackendClosedError(f"backend {self._name!r} is closed; open it again with get_backend")

    def fault(self, hook: str) -> Callable[[str], EngineError]:
        """Return a function that makes the error for a result that breaks the specification."""
        return lambda what: EngineError(f"backend {self._name!r}, hook {hook}: {what}", usable=True)

    def call(self, hook: str, request: Any, finish: Callable[[Any], Any] = lambda result: result) -> Any:
        """Call a hook and return what `finish` makes of its result.

        `finish` runs before another call may enter the engine, so no other caller can have changed the weights.

        Raises:
            BackendClosedError: the engine is closed.
            CapabilityError: the engine has no such hook.
            BackendTimeoutError: waiting for a turn and the engine's work together took longer than ``request.timeout``.
            EngineError: the hook raised another exception (chained), or returned None.
        """
        self.require_open()
        if not self.implements(hook):
            raise CapabilityError(f"backend {self._name!r} has no hook {hook}", capability=hook)
        timeout = getattr(request, "timeout", None)
        attempt = partial(self._attempt, hook, request, finish, None if timeout is None else time.monotonic() + timeout)
        return attempt() if self._retry is None or hook not in RETRIED else self._retry.copy()(attempt)

    def close(self) -> None:
        """Call the engine's `close`, once. The engine counts as closed from then on, even if `close` fails.

        An engine that takes one call at a time finishes that call first. An engine with `concurrent_calls` ends the
        calls under way.
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
                raise self.fault(hook)("returned None; a hook must return a result")
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
            # An abort that reaches the engine before its request does is lost, so it is repeated.
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
                busy = f"backend {self._name!r} was busy with other calls for the whole timeout"
                raise BackendTimeoutError(busy) from None
            self.require_open()
            yield

    @contextmanager
    def _listed(self, hook: str, request: Any) -> Iterator[None]:
        """Remember the names of answers under way, so that they can be aborted."""
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
            raise BackendTimeoutError(f"backend {self._name!r}: the timeout passed before the engine was called")
        return left

    def _misfit(self, what: str) -> BackendIncompatibleError:
        return BackendIncompatibleError(f"backend {self._name!r} does not fit the hook specification: {what}")


def _retrying(retry: int | tenacity.BaseRetrying | None) -> tenacity.BaseRetrying | None:
    if retry is None:
        return None
    if isinstance(retry, tenacity.Retrying):
        # Raise the last error itself instead of tenacity's wrapper of it.
        return retry.copy(reraise=True)
    if not isinstance(retry, int) or retry < 1:
        raise InvalidRequestError(
            f"retry: expected an integer of at least 1 or a tenacity.Retrying, got {retry!r}", field="retry"
        )
    return tenacity.Retrying(
        stop=tenacity.stop_after_attempt(retry),
        wait=tenacity.wait_random_exponential(multiplier=0.1, max=10),
        retry=tenacity.retry_if_exception(lambda error: isinstance(error, EngineError) and error.usable is not False),
        reraise=True,
    )

"""`HookCaller`: the hooks of one engine, called in turn, retried if asked, with every failure typed.

pluggy broadcasts and a name selects, so every opened engine has a `PluginManager` of its own. It holds the engine,
core's defaults and the wrappers its user passed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pluggy
import tenacity

from corelm.defaults import DefaultHooks
from corelm.errors import (
    BackendClosedError,
    BackendIncompatibleError,
    BackendTimeoutError,
    CapabilityError,
    CoreLMError,
    EngineError,
)
from corelm.hookspecs import PROJECT, BackendSpec
from corelm.messages import CloseRequest

R = TypeVar("R")

#: Repeating these changes nothing but the time it takes.
RETRIED = frozenset({"tokenize", "generate", "score_logprobs"})


class HookCaller:
    """Calls the hooks of `engine`. One that does not declare `concurrent_calls` is entered by one thread at a time.

    Args:
        retry: how often a failed call is tried in all, or a tenacity `Retrying`; None never retries.

    Raises:
        BackendIncompatibleError: a hook that the specification does not know, or with other arguments.
    """

    def __init__(
        self, engine: Any, name: str, plugins: Sequence[object], retry: int | tenacity.BaseRetrying | None
    ) -> None:
        self.closed = False
        self._engine = engine
        self._name = name
        self._retry = _retrying(retry)
        self._turn = threading.RLock()
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(BackendSpec)
        try:
            manager.register(DefaultHooks(engine.tokenizer))
            manager.register(engine, name)
            for plugin in plugins:
                manager.register(plugin)
            # Without this a misspelt hook would be silence.
            manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            raise BackendIncompatibleError(f"backend {name!r} does not fit the hook specification: {error}") from error
        self._hooks = manager.hook

    def implements(self, hook: str) -> bool:
        return bool(getattr(self._hooks, hook).get_hookimpls())

    def fault(self, hook: str) -> Callable[[str], EngineError]:
        """Makes the error for a result that breaks the specification."""
        return lambda what: EngineError(f"backend {self._name!r}, hook {hook}: {what}", usable=True)

    def call(self, hook: str, request: Any) -> Any:
        """The hook's answer.

        Raises:
            BackendClosedError, CapabilityError: the engine is closed, or has no such hook.
            BackendTimeoutError: the engine, or the wait for one's turn, took longer than ``request.timeout``.
            EngineError: the hook raised something else (chained), or answered None.
        """
        if self.closed:
            raise BackendClosedError(f"backend {self._name!r} is closed; open it again with get_backend")
        if not self.implements(hook):
            raise CapabilityError(f"backend {self._name!r} has no hook {hook}", capability=hook)
        if self._retry is None or hook not in RETRIED:
            return self._attempt(hook, request)
        return self._retry.copy()(self._attempt, hook, request)

    def close(self) -> None:
        """Call the engine's `close`, once; the engine counts as closed even if that fails."""
        with self._turn:
            if self.closed:
                return
            try:
                if self.implements("close"):
                    self.call("close", CloseRequest())
            finally:
                self.closed = True

    def _attempt(self, hook: str, request: Any) -> Any:
        with self._in_turn(getattr(request, "timeout", None)):
            try:
                result = getattr(self._hooks, hook)(request=request)
            except CoreLMError:
                raise
            except TimeoutError as error:
                raise BackendTimeoutError(f"backend {self._name!r}, hook {hook}: {error}") from error
            except Exception as error:
                cause = f"{type(error).__name__}: {error}"
                raise EngineError(f"backend {self._name!r}, hook {hook}: {cause}") from error
        if result is None:
            raise self.fault(hook)("returned None, which is no result")
        return result

    @contextmanager
    def _in_turn(self, timeout: float | None) -> Iterator[None]:
        if self._engine.capabilities.concurrent_calls:
            yield
            return
        if not self._turn.acquire(timeout=-1 if timeout is None else timeout):
            raise BackendTimeoutError(f"backend {self._name!r} was busy with other calls for {timeout} s")
        try:
            if self.closed:
                raise BackendClosedError(f"backend {self._name!r} was closed while this call waited")
            yield
        finally:
            self._turn.release()


def _retrying(retry: int | tenacity.BaseRetrying | None) -> tenacity.BaseRetrying | None:
    if not isinstance(retry, int):
        return retry
    return tenacity.Retrying(
        stop=tenacity.stop_after_attempt(retry),
        wait=tenacity.wait_random_exponential(multiplier=0.1, max=10),
        retry=tenacity.retry_if_exception(lambda error: isinstance(error, EngineError) and error.usable is not False),
        reraise=True,
    )

"""`Call`: a call of a hook on its way through core, and what core tells wrappers about it.

A request says what the engine is to do. Plugins pickle requests and send them to other processes, so the callers'
context variables and clocks are not in it: a wrapper asks `current_call` on the thread on which its hook is called.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any, Protocol

from corelm.errors import CoreLMError


class Call:
    """A call of a hook: its request, and how its result becomes the caller's.

    Attributes:
        hook: the hook's name.
        request: its request.
        rows: number of rows. No engine is asked for a call without rows.
        delivery: hands tokens to callers while the engine works; None if none reads along.
    """

    hook: str
    request: Any
    rows: int = 1
    delivery: Delivering | None = None

    def __init__(self, hook: str, request: Any) -> None:
        self.hook, self.request = hook, request

    @property
    def origins(self) -> Sequence[Origin]:
        """The users' calls that it serves, for wrappers that measure."""
        return ()

    def nothing(self) -> Any:
        """Return the result of a call without rows."""

    def finish(self, result: Any) -> Any:
        """Return the caller's result, made from the engine's, which was checked. No other call can change the weights
        yet.
        """
        return result

    def failed(self, error: CoreLMError) -> CoreLMError:
        """Return the caller's error, made from that of the hook."""
        return error


class Delivering(Protocol):
    """Hands tokens to callers while the engine works on their call."""

    @property
    def started(self) -> bool:
        """Whether a caller has been given something. Such a call is not repeated."""

    def begin(self) -> bool:
        """Note that the engine begins with the call. Return False if all callers have left."""

    def end(self) -> None:
        """Note that the engine is done with the call."""


@dataclass(slots=True)
class Arrival:
    """When the tokens of one answer came out of the engine.

    Attributes:
        first: when the first tokens came, in the seconds of `time.monotonic`.
        last: when the last tokens so far came.
        later: how many tokens came after the first ones.
    """

    first: float
    last: float
    later: int = 0


@dataclass(eq=False, slots=True)
class Origin:
    """A user's call on its way to the engine, which the batcher may merge with others.

    Attributes:
        rows: its rows in the engine's result.
        arrivals: when the tokens of its rows came, by its own row numbers. Only rows whose tokens the engine delivers
            while it samples are in it, so it is empty if the caller does not read along.
        asked: when its arguments had been checked, in the seconds of `time.monotonic`.
        context: the context variables of the caller. Enter a copy of it: another thread may be in this one.
        sent: how often the engine has been asked for it.
    """

    rows: int
    arrivals: Mapping[int, Arrival] = field(default_factory=dict)
    asked: float = field(default_factory=time.monotonic)
    context: Context = field(default_factory=copy_context)
    sent: int = 0


@dataclass(eq=False, slots=True)
class EngineCall:
    """The call of a hook.

    Attributes:
        backend: the name that the engine was opened by.
        model: the name that labels its numbers.
        origins: the users' calls that it serves, in the order of their rows. Empty for hooks other than `generate` and
            `score_logprobs`, and for calls that core makes for itself.
        asked: when core was asked for it, in the seconds of `time.monotonic`. It has waited for the engine since then.
        attempt: how many times, this one included, the engine has been asked for it, or for a part of it.
    """

    backend: str
    model: str
    origins: Sequence[Origin] = ()
    asked: float = field(default_factory=time.monotonic)
    attempt: int = 0

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Make this the `current_call` of the thread in the block, in which the engine is asked once more."""
        for origin in self.origins:
            self.attempt = max(self.attempt, origin.sent)
        self.attempt += 1
        for origin in self.origins:
            origin.sent = self.attempt
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_current: ContextVar[EngineCall | None] = ContextVar("corelm_engine_call", default=None)


def current_call() -> EngineCall | None:
    """Return the call that this thread is in; None outside the hooks of an engine."""
    return _current.get()

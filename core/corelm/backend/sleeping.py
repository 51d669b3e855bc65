"""`sleep` and `wake`: give the memory of an engine's GPU to the trainer beside it, and take it back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from corelm.backend.engine import OpenEngine
from corelm.backend.sleep_state import sleep_level, sleep_tags
from corelm.errors import CapabilityError, CoreLMError, EngineError, InvalidRequestError
from corelm.spec.records import WHENS_OF_SLEEP, SleepRequest, WakeRequest, When
from corelm.validate import invalid, one_of, shown


def sleep(engine: OpenEngine, level: int, when: When) -> None:
    """Put an engine to sleep. Arguments and errors are those of `Backend.sleep`."""
    engine.require("sleep_levels", "it cannot sleep as it was opened; its README says how an engine that can is opened")
    hooks = engine.hooks
    if hooks.entered:
        raise EngineError(
            f"backend {engine.name!r}: it cannot sleep in the middle of a call, which would go on without its memory; "
            "call sleep outside other calls",
            usable=True,
        )
    one_of("when", when, WHENS_OF_SLEEP)
    request = SleepRequest(level=sleep_level(level, engine.capabilities.sleep_levels), when=when)
    state = hooks.sleep_state
    before = state.saved()

    def fill(request: SleepRequest) -> SleepRequest:
        nonlocal before
        # Notice what the owner has changed so far: once the engine sleeps, its weights are elsewhere.
        hooks.weights.look()
        before = state.saved()
        if request.level > 1 and engine.adapters.versions:
            names = ", ".join(engine.adapters.versions)
            raise invalid("level", f"2 drops the adapters as well; unload them first ({names}), or sleep at level 1")
        state.fall_asleep(request.level)
        return request

    def finish(done: Any) -> None:
        _require_done(engine, "sleep", done)
        # Weights that were moved are no weights that their owner has changed.
        hooks.weights.put(hooks.weights.label)

    def failed(error: CoreLMError) -> CoreLMError:
        if isinstance(error, (InvalidRequestError, CapabilityError)):
            state.restore(before)
        return error

    hooks.call("sleep", request, finish, fill, failed=failed)


def wake(engine: OpenEngine, tags: str | Iterable[str] | None) -> None:
    """Wake an engine, or a part of it. Arguments and errors are those of `Backend.wake`."""
    wanted = sleep_tags(tags)
    hooks, state = engine.hooks, engine.hooks.sleep_state
    if not wanted & state.asleep:
        hooks.require_open()
        return
    engine.require("sleep_levels", "it cannot sleep")

    def alone() -> None:
        # Not earlier: another thread may have woken it in the meantime, and an engine is not asked for nothing.
        woken = wanted & state.asleep
        if not woken:
            return
        if "weights" not in state.asleep:
            # Their owner may have changed them since they were woken.
            hooks.weights.look()

        def finish(done: Any) -> None:
            _require_done(engine, "wake", done)
            state.asleep -= woken
            hooks.weights.put(hooks.weights.label)
            if state.answers:
                engine.awake()

        hooks.call("wake", WakeRequest(tags=woken, last=woken == state.asleep), finish)

    hooks.alone(alone)


def _require_done(engine: OpenEngine, hook: str, done: Any) -> None:
    if done is not True:
        raise EngineError(f"backend {engine.name!r}, hook {hook}: returned {shown(done)} instead of True", usable=True)

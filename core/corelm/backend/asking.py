"""`ask`: calls one hook of an engine and gives every failure a type."""

from __future__ import annotations

from typing import Any

from corelm.errors import (
    BackendTimeoutError,
    CoreLMError,
    EngineError,
    described,
    is_interrupt,
    is_main_thread,
    message,
)


def ask(hooks: Any, name: str, hook: str, request: Any) -> Any:
    """Return what the engine's hook returns.

    Args:
        hooks: pluggy's caller of its hooks.
        name: the name that the engine was opened by.
        hook: the hook's name.
        request: its request.

    Raises:
        CoreLMError: as the hook raised it, or made from another exception: see `corelm.spec.hookspecs`.
    """
    try:
        return getattr(hooks, hook)(request=request)
    except CoreLMError:
        raise
    except TimeoutError as error:
        raise BackendTimeoutError(f"backend {name!r}, hook {hook}: {message(error)}") from error
    except BaseException as error:
        # An engine can raise asyncio.CancelledError or SystemExit, too. They are its failure and end no program. On
        # the main thread, a SystemExit may be that of the program's own handler of a signal.
        if is_interrupt(error) or (isinstance(error, SystemExit) and is_main_thread()):
            raise
        raise EngineError(f"backend {name!r}, hook {hook}: {described(error)}") from error

"""The engine that the flags of a command choose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from corelm.cli import flags, interrupt_ends_process

if TYPE_CHECKING:
    from corelm.cli.job import EngineChoice


def engine_choice(
    backend: str,
    model: str | None,
    base_url: str | None,
    option: list[str] | None,
    retry: int | None,
    timeout: float | None,
) -> EngineChoice:
    """Return what `get_backend` is to be called with."""
    options = flags.engine_options(option, base_url)
    with interrupt_ends_process():
        from corelm.cli.job import EngineChoice

    return EngineChoice(backend=backend, model=model, options=options, retry=retry, timeout=timeout)

"""`EngineChoice`: the engine that the flags of a command name. This module must not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from corelm_cli import flags
from corelm_cli.adapters import AdapterChoice

if TYPE_CHECKING:
    from corelm import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """What `get_backend` is called with, and the adapter that the command asks for."""

    backend: str
    model: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    retry: int | None = None
    timeout: float | None = None
    adapter: AdapterChoice | None = None

    @classmethod
    def from_flags(
        cls,
        backend: str,
        model: str | None,
        base_url: str | None,
        option: list[str] | None,
        *,
        retry: int | None = None,
        timeout: float | None = None,
        adapter: str | None = None,
    ) -> EngineChoice:
        """Return the choice that the shared flags of a command make."""
        options, chosen = flags.engine_options(option, base_url), AdapterChoice.of_flag(adapter)
        return cls(backend=backend, model=model, options=options, retry=retry, timeout=timeout, adapter=chosen)

    @property
    def adapter_name(self) -> str | None:
        """The adapter of every call."""
        return None if self.adapter is None else self.adapter.name

    def open(self, wrappers: Sequence[object] = ()) -> Backend:
        """Open the engine, and load the adapter if a folder was given.

        Args:
            wrappers: as for `get_backend`.
        """
        from corelm import get_backend

        limits: dict[str, Any] = {"retry": self.retry, "timeout": self.timeout}
        backend = get_backend(self.backend, self.model, wrappers=wrappers, **limits, **self.options)
        if self.adapter is not None:
            try:
                self.adapter.load(backend)
            except BaseException:
                backend.close()
                raise
        return backend

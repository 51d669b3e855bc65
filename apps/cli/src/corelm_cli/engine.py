"""`EngineChoice`: the engine that the flags of a command name. This module must not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import typer

from corelm_cli import flags

if TYPE_CHECKING:
    from corelm import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """What `get_backend` is called with, and the adapter that the command asks for.

    Attributes:
        adapter: the name of the adapter of every call.
        adapter_folder: where it is loaded from; None if the engine has it.
    """

    backend: str
    model: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    retry: int | None = None
    timeout: float | None = None
    adapter: str | None = None
    adapter_folder: str | None = None

    @classmethod
    def from_flags(
        cls,
        backend: str,
        model: str | None,
        base_url: str | None,
        option: list[str] | None,
        *,
        adapter: str | None = None,
        **limits: Any,
    ) -> EngineChoice:
        """Return the choice that the shared flags of a command make; `limits` are `retry` and `timeout`."""
        if backend == "transformers" and base_url is not None:
            raise typer.BadParameter(
                "the transformers backend runs a model in this process; give --backend vllm, sglang or openai as well",
                param_hint="--base-url",
            )
        options, (name, folder) = flags.engine_options(option, base_url), named_adapter(adapter)
        return cls(backend=backend, model=model, options=options, adapter=name, adapter_folder=folder, **limits)

    def open(self, wrappers: Sequence[object] = ()) -> Backend:
        """Open the engine, and load the adapter if a folder was given."""
        from corelm import get_backend

        limits: dict[str, Any] = {"retry": self.retry, "timeout": self.timeout}
        backend = get_backend(self.backend, self.model, wrappers=wrappers, **limits, **self.options)
        if self.adapter is not None and self.adapter_folder is not None:
            try:
                backend.load_adapter(self.adapter, self.adapter_folder)
            except BaseException:
                backend.close()
                raise
        return backend


def named_adapter(given: str | None) -> tuple[str | None, str | None]:
    """Return the name and the folder in ``NAME`` or ``NAME=FOLDER``, the value of ``--adapter``.

    Raises:
        typer.BadParameter: the name or the folder is empty.
    """
    if given is None:
        return None, None
    name, sign, folder = given.partition("=")
    if not name or (sign and not folder):
        raise typer.BadParameter(f"expected NAME or NAME=FOLDER, got {given!r}", param_hint="--adapter")
    return name, folder or None

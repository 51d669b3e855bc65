"""`get_backend`: open an engine by its backend's name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import tenacity

from corelm.backend.backend import Backend
from corelm.backend.registry import check_options, load_backend, open_error
from corelm.errors import CoreLMError, InvalidRequestError
from corelm.spec.records import CloseRequest


def get_backend(
    name: str,
    model: Any = None,
    *,
    wrappers: Sequence[object] = (),
    retry: int | tenacity.BaseRetrying | None = None,
    timeout: float | None = None,
    tokenizer: Any = None,
    **options: Any,
) -> Backend:
    """Open the engine called `name` on `model` (a path, a model object, or nothing for an engine behind a URL).

    Args:
        wrappers: objects with ``@hookimpl(wrapper=True)`` methods that observe or replace results.
        retry: how often a failed call is tried in all, or a tenacity `Retrying`. None never retries.
        timeout: seconds a call may take when it does not say otherwise.
        tokenizer: used instead of the model's own.
        options: the engine's own, passed to the plugin's ``open``.

    Raises:
        BackendNotFoundError, BackendNotInstalledError, BackendImportError, BackendConflictError,
            BackendIncompatibleError: see `corelm.registry`.
        InvalidRequestError: an option that the plugin does not know.
        EngineError: the engine did not open; its own error is the cause.
    """
    if not isinstance(name, str):
        raise InvalidRequestError(f"name: expected a backend's name, got {name!r}", field="name")
    plugin, info = load_backend(name)
    if tokenizer is not None:
        options["tokenizer"] = tokenizer
    check_options(plugin, info, model, options)
    try:
        engine = plugin.open(model, **options)
    except CoreLMError:
        raise
    except (Exception, SystemExit) as error:
        raise open_error(info, error) from error
    try:
        return Backend(
            engine, name, model_name=_model_name(model, options), wrappers=wrappers, retry=retry, timeout=timeout
        )
    except BaseException:
        # Nobody else holds the engine, and it may own processes.
        if callable(getattr(engine, "close", None)):
            engine.close(CloseRequest())
        raise


def _model_name(model: Any, options: Mapping[str, Any]) -> str:
    if isinstance(model, (str, os.PathLike)):
        return os.fspath(model)
    return str(options.get("base_url", "")) if model is None else type(model).__name__

"""`get_backend`: open an engine by its backend's name."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import metadata
from typing import Any, Protocol

import tenacity
from torch import nn

from corelm._version import __version__
from corelm.backend.backend import Backend
from corelm.backend.call_log import abilities, place
from corelm.backend.registry import open_plugin, options_named_by
from corelm.errors import BackendNotInstalledError, CoreLMError, how_to_install
from corelm.spec.records import CloseRequest
from corelm.validate import invalid

_log = logging.getLogger(__name__)

#: Opens one engine with the options of its plugin. Returns it, and the distributions and versions of plugin and engine.
OpenOne = Callable[[Mapping[str, Any]], tuple[Any, str]]

#: The entry points of openers. Their names are the options of `get_backend` that they take.
OPENERS = "corelm.openers"
#: The options of openers that come with this project, and the distribution that has the opener. A list as `base_url` is
#: given to the opener of `replicas`.
_KNOWN = dict.fromkeys(("python", "replicas", "fleet_limits", "canary"), "core-fleet")


class Opener(Protocol):
    """Opens an engine otherwise than in this process: what an entry point of the group ``corelm.openers`` returns.

    The entry point is called with the options of `get_backend` that it takes, as keywords; those that were not given
    are left out.
    """

    def open(self, open_one: OpenOne, name: str, model: Any, options: Mapping[str, Any]) -> tuple[Any, str]:
        """Open engines, with `open_one` where they are opened in this process. `options` are the others.

        Returns:
            An object with the hooks, and the distributions and versions of plugin and engine.
        """

    def opened(self, backend: Backend) -> None:
        """Look at the open backend. If this raises, the backend is closed."""


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
    """Open the engine called `name`.

    Args:
        name: the backend's name, as `list_backends` lists it.
        model: a path, a model object, or None for an engine behind a URL.
        wrappers: objects with ``@hookimpl(wrapper=True)`` methods that observe or replace results. Those that have a
            method ``attached(engine)`` are told the open engine first.
        retry: how often a failed call is tried in all, or a tenacity `Retrying`. None never retries.
        timeout: seconds that a call may take when the call does not say; None sets no limit. Opening is not a call:
            the backends behind a URL limit it with their own option `open_timeout`.
        tokenizer: replaces the model's own tokenizer.
        options: the engine's own options, passed to the plugin's ``open``, and those of openers, such as `python`,
            `replicas`, `fleet_limits` and `canary` of ``core-fleet`` (see `corelm_fleet.opening`). A plugin whose
            ``open`` lists an opener's option gets it instead.

    Raises:
        BackendNotFoundError: no backend of this name is known or allowed.
        BackendNotInstalledError: the backend, or the opener of an option, is not installed.
        BackendImportError: the plugin's module failed to import.
        BackendConflictError: several distributions claim the name.
        BackendIncompatibleError: the plugin does not fit this hook specification.
        InvalidRequestError: the plugin does not know an option, or options contradict one another.
        EngineError: the engine did not open; its own error is the cause.
        CoreLMError: what an opener raises.
    """
    if not isinstance(name, str):
        raise _not_a_name(name)
    if tokenizer is not None:
        options["tokenizer"] = tokenizer
    started = time.monotonic()
    openers = _openers(name, options)

    def open_one(options: Mapping[str, Any]) -> tuple[Any, str]:
        engine, info = open_plugin(name, model, options)
        return engine, info.software()

    open_all: OpenOne = open_one
    for opener in openers:
        open_all = partial(opener.open, open_all, name, model)
    opened, label = open_all(options)
    # A replay answers under the names of the engine that was recorded.
    names = {"name": name, "model_name": _model_name(model, options), "software": label}
    names |= getattr(opened, "answers_as", {})
    backend = None
    try:
        given = model if isinstance(model, nn.Module) else None
        backend = Backend.from_plugin(opened, **names, wrappers=wrappers, retry=retry, timeout=timeout, model=given)
        for opener in openers:
            opener.opened(backend)
    except BaseException:
        # The caller gets no backend to close, and the engine may own processes. Why it does not fit is what matters.
        with suppress(Exception):
            if backend is None:
                opened.close(CloseRequest())
            else:
                backend.close()
        raise
    told = (name, place(backend.model_name) or "an engine", time.monotonic() - started, label, __version__)
    _log.info("%s: opened %s in %.3g s with %s, core %s: %s", *told, abilities(backend.capabilities))
    return backend


def _openers(name: str, options: dict[str, Any]) -> list[Opener]:
    """Take the options of openers out of `options`, and return these openers. Refuse a missing one."""
    points = {point.name: point for point in metadata.entry_points(group=OPENERS)}
    found = {option for option in options if option in points or option in _KNOWN}
    for option in [option for option in found if options[option] is None or options[option] is False]:
        del options[option]
        found.remove(option)
    # A plugin that starts processes or replicas by itself gets these options.
    found -= options_named_by(name) if found else set()
    if isinstance(options.get("base_url"), (list, tuple)):
        found.add("replicas")
    if missing := sorted(found - points.keys()):
        what = f"{missing[0]}=" if missing[0] in options else "a list as base_url="
        raise BackendNotInstalledError(
            f"{what} needs {_KNOWN[missing[0]]}, which is not installed: {how_to_install(_KNOWN[missing[0]])}"
        )
    taken: dict[str, dict[str, Any]] = {}
    for option in sorted(found):
        given = taken.setdefault(points[option].value, {})
        if option in options:
            given[option] = options.pop(option)
    return [metadata.EntryPoint("", value, OPENERS).load()(**given) for value, given in taken.items()]


def _not_a_name(given: Any) -> CoreLMError:
    if isinstance(given, Backend):
        return invalid("name", f"expected the name of a backend to open, got {given!r}, which is open already; use it")
    kind, call = kind_and_call(given)
    return invalid("name", f"expected the name of a backend, got {kind}; call {call}")


def kind_and_call(given: Any) -> tuple[str, str]:
    """Return what was given instead of a backend or its name, and the call that opens one, for a message."""
    path = repr(os.fspath(given)) if isinstance(given, os.PathLike) else "'PATH'"
    model = "model, tokenizer=tokenizer" if isinstance(given, nn.Module) else path
    return "None" if given is None else f"a {type(given).__name__}", f"get_backend('transformers', {model})"


def _model_name(model: Any, options: Mapping[str, Any]) -> str:
    if isinstance(model, (str, os.PathLike)):
        return os.fspath(model)
    if model is not None:
        return type(model).__name__
    urls = options.get("base_url", "")
    return ", ".join(map(str, urls)) if isinstance(urls, (list, tuple)) else str(urls)

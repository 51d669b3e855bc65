"""`get_backend`: open an engine by its backend's name."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import tenacity
from torch import nn

from corelm._version import __version__
from corelm.backend.backend import Backend
from corelm.backend.call_log import abilities, place
from corelm.backend.registering import EngineLabels
from corelm.backend.registry import open_plugin, options_named_by
from corelm.errors import CoreLMError
from corelm.opening.fleets import open_fleet, options_of_each
from corelm.spec.records import CloseRequest
from corelm.validate import invalid

if TYPE_CHECKING:
    from corelm.fleet.canary import Canary
    from corelm.fleet.records import FleetLimits

_log = logging.getLogger(__name__)


def get_backend(
    name: str,
    model: Any = None,
    *,
    wrappers: Sequence[object] = (),
    retry: int | tenacity.BaseRetrying | None = None,
    timeout: float | None = None,
    tokenizer: Any = None,
    python: str | os.PathLike[str] | None = None,
    replicas: int | None = None,
    fleet_limits: FleetLimits | None = None,
    canary: bool | Canary = False,
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
        python: opens the engine in a new process of this interpreter, which has core and the plugin: the path of an
            executable, or the folder of an environment. This process then needs core alone. The option `env` adds
            variables to the environment of that process. See docs/scaling.md.
        replicas: how many such processes to open, each with the same engine. They answer as one engine, which
            re-runs the rows of a process that dies. `env` may then be a list with the variables of each. A list of URLs
            as ``base_url=`` is a fleet of servers in the same way. A plugin whose ``open`` lists `python`, `replicas`
            or `fleet_limits` gets these options, and opens its processes or replicas by itself, as the Ray backend
            does.
        fleet_limits: how patient such a fleet is with replicas that are silent or die; None for the defaults.
        canary: ask the engine a few fixed questions now and after every change of its weights, and raise a
            `StaleWeightsError` if it does not answer as they should. See `corelm.fleet.canary`.
        options: the engine's own options, passed to the plugin's ``open``.

    Raises:
        BackendNotFoundError: no backend of this name is known or allowed.
        BackendNotInstalledError: the backend is one of core's extras, and the extra is not installed.
        BackendImportError: the plugin's module failed to import.
        BackendConflictError: several distributions claim the name.
        BackendIncompatibleError: the plugin does not fit this hook specification.
        InvalidRequestError: the plugin does not know an option, or the engines of a fleet would not answer alike.
        CapabilityError: a canary was asked for, and nothing that the engine can do shows its weights.
        StaleWeightsError: the canary disagrees.
        EngineError: the engine did not open; its own error is the cause.
    """
    watched = None if canary is False else _canary(canary)
    if not isinstance(name, str):
        raise _not_a_name(name)
    if tokenizer is not None:
        options["tokenizer"] = tokenizer
    started = time.monotonic()
    opened: Any
    named = {"python": python, "replicas": replicas, "fleet_limits": fleet_limits}
    given = {option: value for option, value in named.items() if value is not None}
    places = options_named_by(name) if given else frozenset()
    # A plugin that starts processes or replicas by itself takes these options from us.
    options.update({option: value for option, value in given.items() if option in places})
    python, replicas = (None if "python" in places else python), (None if "replicas" in places else replicas)
    open_one = partial(_open_one, name, model, python)
    each = {} if "replicas" in places else options_of_each(options, replicas, python is not None)
    if each:
        opened, label = open_fleet(open_one, each, name, watched, fleet_limits, python is not None)
    elif fleet_limits is not None and "fleet_limits" not in places:
        raise invalid("fleet_limits", "one engine is no fleet: pass replicas=, or a list of URLs as base_url=, as well")
    else:
        opened, label = open_one(options)
    # A replay answers for the engine that was recorded.
    labels = getattr(opened, "labels", EngineLabels(name, _model_name(model, options), label))
    backend = None
    try:
        backend = Backend.from_plugin(
            opened,
            labels.name,
            model_name=labels.model,
            software=labels.software,
            wrappers=wrappers,
            retry=retry,
            timeout=timeout,
            model=model if isinstance(model, nn.Module) else None,
        )
        if watched is not None:
            from corelm.fleet.canary import watch

            watch(backend, watched)
    except BaseException:
        # The caller gets no backend to close, and the engine may own processes. Why it does not fit is what matters.
        with suppress(Exception):
            if backend is None:
                opened.close(CloseRequest())
            else:
                backend.close()
        raise
    _log.info(
        "%s: opened %s in %.3g s with %s, core %s: %s",
        name,
        place(backend.model_name) or "an engine",
        time.monotonic() - started,
        label,
        __version__,
        abilities(backend.capabilities),
    )
    return backend


def _canary(given: bool | Canary) -> Canary | None:
    # Only here: most engines are opened without one.
    from corelm.fleet.canary import Canary

    return Canary.make(given)


def _open_one(
    name: str, model: Any, python: str | os.PathLike[str] | None, options: Mapping[str, Any]
) -> tuple[Any, str]:
    """Open one engine. Return it, and the distributions and versions of its plugin and engine."""
    if python is None:
        engine, info = open_plugin(name, model, options)
        return engine, info.software()
    # Only here: an engine in this process needs none of it.
    from corelm.hosting.engine import open_in_process

    rest = {option: value for option, value in options.items() if option != "env"}
    return open_in_process(name, model, python, options.get("env"), rest)


def _not_a_name(given: Any) -> CoreLMError:
    if isinstance(given, Backend):
        return invalid("name", f"expected the name of a backend to open, got {given!r}, which is open already; use it")
    kind, call = f"a {type(given).__name__}", "get_backend('transformers', model, tokenizer=tokenizer)"
    if isinstance(given, os.PathLike):
        call = f"get_backend('transformers', {os.fspath(given)!r})"
    elif not isinstance(given, nn.Module):
        call, kind = "get_backend('transformers', 'PATH')", "None" if given is None else kind
    return invalid("name", f"expected the name of a backend, got {kind}; call {call}")


def _model_name(model: Any, options: Mapping[str, Any]) -> str:
    if isinstance(model, (str, os.PathLike)):
        return os.fspath(model)
    if model is not None:
        return type(model).__name__
    urls = options.get("base_url", "")
    return ", ".join(map(str, urls)) if isinstance(urls, (list, tuple)) else str(urls)

"""An engine as pluggy knows it, together with core's default hooks and the user's wrappers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pluggy

from corelm.backend.default_hooks import DefaultHooks
from corelm.errors import BackendIncompatibleError, described
from corelm.spec.capabilities import Capabilities
from corelm.spec.hookspecs import PROJECT, BackendSpec

#: Capability → the hook without which it cannot work.
_HOOKS = (
    *(("score", "score_logprobs"), ("update_weights", "update_weights"), ("adapters", "update_weights")),
    *(("sleep_levels", "sleep"), ("sleep_levels", "wake"), ("abort", "abort")),
)


def registered(engine: Any, name: str, wrappers: Sequence[object]) -> tuple[Capabilities, Any]:
    """Return what the engine can do, and pluggy's caller of its hooks.

    Raises:
        BackendIncompatibleError: see `EngineHooks`.
    """
    misfit = f"open returned a {type(engine).__name__} without `capabilities` or `tokenizer`"
    try:
        capabilities, tokenizer = engine.capabilities, engine.tokenizer
    except Exception as error:
        raise _misfit(name, f"{misfit}: {described(error)}") from error
    if not isinstance(capabilities, Capabilities):
        raise _misfit(name, f"{misfit}: `capabilities` is of the type {type(capabilities).__name__}")
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(BackendSpec)
    try:
        manager.register(DefaultHooks(tokenizer))
        manager.register(engine, name)
        for wrapper in wrappers:
            manager.register(wrapper)
            if not manager.get_hookcallers(wrapper):
                raise _misfit(
                    name, f"the wrapper {wrapper!r} has no hook; mark its methods with @hookimpl(wrapper=True)"
                )
        # Otherwise a misspelt hook would be ignored silently.
        manager.check_pending()
    except (pluggy.PluginValidationError, ValueError) as error:
        raise _misfit(name, str(error)) from error
    for capability, hook in _HOOKS:
        if getattr(capabilities, capability) and not implementers(manager.hook, hook):
            raise _misfit(name, f"it declares {capability} and has no hook {hook}(self, request)")
    return capabilities, manager.hook


def implementers(hooks: Any, hook: str) -> list[object]:
    """Return the plugins that implement a hook. Those that only wrap it, to observe it, do not.

    Args:
        hooks: pluggy's caller of the hooks.
        hook: the hook's name.
    """
    implementations = getattr(hooks, hook).get_hookimpls()
    return [each.plugin for each in implementations if not (each.wrapper or each.hookwrapper)]


def attach(wrappers: Sequence[object], engine: Any) -> None:
    """Tell each wrapper that has a method `attached` which engine it is around, before the engine is called.

    Args:
        engine: the `OpenEngine`.
    """
    for wrapper in wrappers:
        attached = getattr(wrapper, "attached", None)
        if callable(attached):
            attached(engine)


def _misfit(name: str, what: str) -> BackendIncompatibleError:
    return BackendIncompatibleError(f"backend {name!r} does not fit the hook specification: {what}")

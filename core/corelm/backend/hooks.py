"""The hooks of one engine, resolved when it is opened, and which of them do what.

pluggy calls every plugin that is registered, but a user opens one engine by name. So each engine has a
`PluginManager` of its own. It validates the plugin, and composes it with the wrappers that the user passed. A
hook that nothing wraps is called without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pluggy

from corelm.errors import BackendIncompatibleError, described
from corelm.rendering.encoding import Encoder
from corelm.spec.capabilities import Capabilities
from corelm.spec.hookspecs import PROJECT, BackendSpec, hookimpl
from corelm.spec.records import ContainerRequest

if TYPE_CHECKING:
    from tensordict import TensorDict

#: Hooks that may be repeated: repeating them changes nothing but the time taken.
RETRIED = frozenset({"tokenize", "generate", "score_logprobs"})
#: Hooks that do not wait for the calls under way: `abort` ends one of them, and `health` must answer at any time.
OUT_OF_TURN = frozenset({"abort", "health"})
#: Hooks whose results depend on the weights.
READ_WEIGHTS = frozenset({"generate", "score_logprobs"})
#: Hooks that go on while weights are updated in flight.
GO_ON = frozenset({"generate"})

#: Capability → the hook without which it cannot work.
_NEEDED = (
    *(("score", "score_logprobs"), ("update_weights", "update_weights"), ("adapters", "update_weights")),
    *(("sleep_levels", "sleep"), ("sleep_levels", "wake"), ("abort", "abort")),
)

#: A hook of an engine that is open, called with its request.
Hook = Callable[[Any], Any]


def hooks_of(engine: Any, name: str, wrappers: Sequence[object]) -> tuple[dict[str, Hook], frozenset[str]]:
    """Return the hooks of an open engine by name, and the names of those that are core's own and do not enter it.

    Refuse an engine without `capabilities` or `tokenizer`, or with a hook that is not, or not like this, specified.
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
        manager.register(engine, name)
        for wrapper in wrappers:
            manager.register(wrapper)
            if not manager.get_hookcallers(wrapper):
                mark = "mark its methods with @hookimpl(wrapper=True)"
                raise _misfit(name, f"the wrapper {wrapper!r} has no hook; {mark}")
        # Otherwise a misspelt hook would be ignored silently.
        manager.check_pending()
    except (pluggy.PluginValidationError, ValueError) as error:
        raise _misfit(name, str(error)) from error
    calls: dict[str, Hook] = {}
    for hook in (name for name in vars(BackendSpec) if not name.startswith("_")):
        caller = getattr(manager.hook, hook)
        # What only wraps a hook, to observe it, does not implement it.
        if [each for each in caller.get_hookimpls() if not (each.wrapper or each.hookwrapper)]:
            calls[hook] = _resolved(caller)
    own: dict[str, Hook] = {"tokenize": Encoder(tokenizer), "to_containers": to_containers}
    by_core = own.keys() - calls.keys()
    for hook, function in own.items():
        calls[hook] = function
        if (caller := getattr(manager.hook, hook)).get_hookimpls():
            # Wrappers see it, and an implementation that returns None leaves the request to it.
            # pluggy passes `request` by its name; the second parameter has a default and is not one of the hook.
            last = hookimpl(trylast=True)(lambda request, call=function: call(request))
            manager.register(SimpleNamespace(**{hook: last}))
            calls[hook] = _resolved(caller)
    for capability, hook in _NEEDED:
        if getattr(capabilities, capability) and hook not in calls:
            raise _misfit(name, f"it declares {capability} and has no hook {hook}(self, request)")
    return calls, frozenset(by_core)


def _resolved(caller: pluggy.HookCaller) -> Hook:
    (implementation, *others) = caller.get_hookimpls()
    if not others and implementation.argnames == ("request",):
        return implementation.function
    return lambda request: caller(request=request)


def to_containers(request: ContainerRequest) -> TensorDict:
    """Wrap rows as TensorClasses in a TensorDict: core's own hook."""
    # Only here: importing tensordict takes as long as opening a small model, and records need none.
    from corelm.containers.assemble import assemble

    return assemble(request)


def _misfit(name: str, what: str) -> BackendIncompatibleError:
    return BackendIncompatibleError(f"backend {name!r} does not fit the hook specification: {what}")

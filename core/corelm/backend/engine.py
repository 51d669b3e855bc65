"""`OpenEngine`: an engine that is open, and everything that core knows about it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import tenacity
from torch import nn

from corelm.backend.call_log import place
from corelm.backend.hooks import EngineHooks
from corelm.backend.program_end import at_program_end, end_stuck, interrupted
from corelm.backend.waits import program_deadline, seconds
from corelm.backend.weights import WeightsListener
from corelm.errors import CapabilityError
from corelm.spec.capabilities import Capabilities
from corelm.spec.provenance import Adapter
from corelm.spec.records import AbortRequest, HealthRequest

#: Seconds between two looks whether calls have ended.
_PAUSE = 0.02


class OpenEngine:
    """An engine that is open: its hooks, what it can do, its tokenizer, and the weights in force.

    A `Backend` and a `DynamicBatcher` in front of it hold the same `OpenEngine`.

    Args:
        plugin: what the plugin's ``open`` returned.
        name: the name that the engine was opened by.
        model_name: the name that labels its numbers.
        software: the distributions and versions of the plugin and the engine, as far as they are known.
        wrappers: objects with ``@hookimpl(wrapper=True)`` methods that observe or replace results.
        retry: how often a failed call is tried in all, or a tenacity `Retrying`; None never retries.
        timeout: seconds that a call may take when the call does not say; None sets no limit.
        model: the model object that the plugin was given, if it was given one.

    Attributes:
        plugin: the plugin's own object, for tests and for options that only this engine has.
        hooks: calls the plugin's hooks.
        capabilities: what the engine can do, as it declared when it was opened.
        name, model_name, software, timeout: as given.
        weights: their labels, the adapters, and what sleeps.
        given_model: returns the `model`, as long as others keep it alive.

    Raises:
        BackendIncompatibleError: the plugin does not fit the hook specification.
        InvalidRequestError: an illegal `retry` or `timeout`.
    """

    def __init__(
        self,
        plugin: Any,
        name: str,
        *,
        model_name: str = "",
        software: str = "",
        wrappers: Sequence[object] = (),
        retry: int | tenacity.BaseRetrying | None = None,
        timeout: float | None = None,
        model: nn.Module | None = None,
    ) -> None:
        self.plugin = plugin
        self.name = name
        self.given_model = (lambda: None) if model is None else weakref.ref(model)
        self.model_name = model_name
        self.software = software
        self.timeout = None if timeout is None else seconds("timeout", timeout)
        self.hooks = EngineHooks(plugin, name, wrappers, retry, place(model_name))
        self.capabilities: Capabilities = self.hooks.capabilities
        self.weights = self.hooks.weights
        _open.add(self)

    @property
    def tokenizer(self) -> Any:
        """The engine's tokenizer."""
        return self.plugin.tokenizer

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end an answer by themselves: the model's own list, else the tokenizer's EOS."""
        if self.capabilities.eos_token_ids is not None:
            return self.capabilities.eos_token_ids
        eos = getattr(self.tokenizer, "eos_token_id", None)
        return frozenset() if eos is None else frozenset([eos])

    @property
    def pad_id(self) -> int:
        """The id that fills dense tensors. No mask is ever derived from it."""
        tokenizer = self.tokenizer
        for name in ("pad_token_id", "eos_token_id"):
            if (token := getattr(tokenizer, name, None)) is not None:
                return int(token)
        return 0

    @property
    def listener(self) -> WeightsListener | None:
        """What is told of every change of the weights; None at first."""
        return self.weights.listener

    @listener.setter
    def listener(self, listener: WeightsListener | None) -> None:
        self.weights.listener = listener

    @property
    def weight_version(self) -> str:
        """The label of the weights in force, "0" until they first change."""
        return self.weights.version_with(None)

    def version_with(self, adapter: Adapter) -> str:
        """Return the label of rows that are made with this adapter and the weights in force."""
        return self.weights.version_with(adapter)

    def require(self, capability: str, why: str) -> None:
        """Refuse a call that needs a capability which the engine does not have.

        Args:
            capability: a field of `Capabilities`.
            why: why the call needs it, or what the caller can do without it, if the plugin's `reasons` do not say.

        Raises:
            CapabilityError: the engine did not declare the capability.
        """
        if not getattr(self.capabilities, capability):
            why = getattr(self.plugin, "reasons", {}).get(capability, why)
            raise CapabilityError(f"backend {self.name!r} lacks {capability}: {why}", capability=capability)

    def time_limit(self, timeout: float | None) -> float | None:
        """Return the seconds that a call may take: its own timeout, else the engine's."""
        return self.timeout if timeout is None else seconds("timeout", timeout)

    def health(self) -> bool:
        """Return whether the engine can serve. An engine that does not say is healthy while it is open."""
        if self.hooks.closed or self.hooks.elsewhere:
            return False
        return not self.hooks.implements("health") or bool(self.hooks.call("health", HealthRequest()))

    def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests. Answers keep the tokens sampled so far and get the finish reason `abort`.

        Raises:
            CapabilityError: the engine cannot abort.
        """
        self.require("abort", "its requests cannot be aborted")
        self.hooks.call("abort", AbortRequest(request_ids=tuple(request_ids)))


_open: weakref.WeakSet[OpenEngine] = weakref.WeakSet()


def end_calls(engines: Iterable[OpenEngine], end: float) -> bool:
    """Refuse later calls to these engines, and abort the calls in them until they have ended.

    Returns:
        Whether all have ended.

    Args:
        end: when to stop waiting for them, in the seconds of `time.monotonic`.
    """
    # All are told to end before one is waited for.
    while engines := [engine for engine in engines if not engine.hooks.end_calls()]:
        if time.monotonic() >= end:
            return False
        time.sleep(_PAUSE)
    return True


@at_program_end
def _end_calls() -> None:
    if not end_calls(list(_open), program_deadline()) and interrupted():
        end_stuck()

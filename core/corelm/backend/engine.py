"""`OpenEngine`: an engine that is open, and everything that core knows about it."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import tenacity
from torch import nn

from corelm.backend.adapters import Adapters, NewAdapter, checked_name, update_adapter
from corelm.backend.call_log import place
from corelm.backend.hooks import EngineHooks
from corelm.backend.program_end import at_program_end, end_stuck, interrupted
from corelm.backend.trained_model import NewWeights, checked_pairs, collected, weights_of
from corelm.backend.versions_in_flight import Attempt
from corelm.backend.waits import program_deadline, seconds
from corelm.errors import CapabilityError, CoreLMError, InvalidRequestError, brief
from corelm.spec.capabilities import Capabilities
from corelm.spec.provenance import Adapter
from corelm.spec.records import WHENS, WHENS_OF_ADAPTERS, AbortRequest, HealthRequest, WeightUpdate, When
from corelm.validate import invalid, one_of, shown

_log = logging.getLogger(__name__)

#: Seconds between two looks whether calls have ended.
_PAUSE = 0.02


class WeightsListener(Protocol):
    """Checks every change of an engine's weights. Core calls it while no other call is in the engine.

    It may call the engine from the thread that tells it.
    """

    def before_update(self, update: WeightUpdate) -> None:
        """Prepare for new weights. What this raises ends the update before it began."""

    def after_update(self, update: WeightUpdate) -> None:
        """Look at the engine, which has loaded the weights of `update`.

        Raises:
            EngineError: it does not answer as those weights should. They get a label that none had before.
        """

    def awake(self) -> None:
        """Look at the engine, which has slept and has the weights of before. Errors are those of `after_update`."""

    def update_failed(self, label: str) -> None:
        """Learn that weights have this new label because loading them failed, or because of an objection."""


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
        adapters: the adapters that were loaded, and their versions.
        listener: is told of every change of the weights; None at first.
        given_model: returns the `model`, as long as others keep it alive.
        weight_version: the label of the weights in force, "0" until they first change. It may be assigned.

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
        self.adapters = Adapters()
        self.listener: WeightsListener | None = None
        # An update that the listener could not look at, because the engine slept.
        self._unseen: WeightUpdate | None = None
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
    def weight_version(self) -> str:
        if not (self.hooks.closed or self.hooks.elsewhere or self.hooks.under_way):
            self.hooks.weights.look()
        return self.hooks.weights.label

    @weight_version.setter
    def weight_version(self, label: str) -> None:
        self.hooks.weights.put(label)

    def update_weights(
        self,
        weights: NewWeights,
        version: str | None,
        when: When,
        expect: object = None,
    ) -> str:
        """Load new weights and return their label. Arguments and errors are those of `Backend.update_weights`."""
        one_of("when", when, WHENS)
        self.require("update_weights", "its weights cannot be changed")
        if when == "now":
            self.require(
                "updates_in_flight", 'type when="drain" to let its answers finish, or when="abort" to end them'
            )
        update = WeightUpdate(version="", when=when, expect=self._heard(expect))
        if isinstance(weights, (str, os.PathLike)):
            return self._update(replace(update, path=Path(weights)), version)
        if isinstance(weights, nn.Module):
            weights = weights_of(weights)
        elif isinstance(weights, Iterable) and not isinstance(weights, Mapping):
            if self.capabilities.weight_stream:
                return self._update(replace(update, stream=checked_pairs(weights)), version)
            weights = collected(weights)
        if isinstance(weights, Mapping):
            return self._update(replace(update, state_dict=weights), version)
        raise invalid(
            "weights",
            f"expected a state dict, a model, a path, or an iterator of (name, tensor), got {type(weights).__name__}",
        )

    def version_with(self, adapter: Adapter) -> str:
        """Return the label of rows that are made with this adapter and the weights in force."""
        return self.adapters.version_with(adapter, self.weight_version)

    def load_adapter(self, name: str, weights: NewAdapter, config: Any, version: str | None, when: When) -> str:
        """Load an adapter and return its version. Arguments and errors are those of `Backend.load_adapter`."""
        name = checked_name(name)
        one_of("when", when, WHENS_OF_ADAPTERS)
        self.require("adapters", "it runs its base weights only; its README says which options make it take adapters")
        _check_label(version)
        source = self.adapters.source(name, weights, config)
        update = WeightUpdate(version="", when=when, adapter=name, **source)
        return update_adapter(self.hooks, self.adapters, update, version)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter. See `Backend.unload_adapter`."""
        name = checked_name(name)
        self.require("adapters", "it has none to unload")
        update_adapter(self.hooks, self.adapters, WeightUpdate(version="", adapter=name), None)

    def weights_changed(self, version: str | None, expect: object = None) -> str:
        """Give weights that their owner has changed a label, and return it. See `Backend.weights_changed`."""
        update = WeightUpdate(version="", expect=self._heard(expect))
        if self.capabilities.update_weights:
            return self._update(update, version)
        _check_label(version)

        def put() -> str:
            weights = self.hooks.weights
            unused = weights.next_label(version)
            self._before_update(update)
            try:
                self._put(unused, unused if version is None else version, update)
            except BaseException:
                self._update_failed(unused)
                raise
            return weights.label

        return self.hooks.alone(put)

    def _heard(self, expect: object) -> object:
        if expect is not None and self.listener is None:
            raise invalid("expect", "nothing compares the backend with it; core-fleet does: open it with canary=True")
        return expect

    def _before_update(self, update: WeightUpdate) -> None:
        if self.listener is not None:
            self.listener.before_update(update)

    def _update_failed(self, unused: str) -> None:
        """Tell the listener, if the weights were left with the label that they had meanwhile."""
        if self.listener is not None and self.hooks.weights.label == unused:
            self.listener.update_failed(unused)

    def _put(self, unused: str, label: str, update: WeightUpdate) -> None:
        """Put the label of new weights in force once the listener has not objected.

        Args:
            unused: the label that they have until then, and keep if it objects.
            label: the label to put in force.
            update: the new weights.
        """
        weights = self.hooks.weights
        if self.listener is not None:
            # The state that the weights have now belongs to this label. Otherwise the listener's calls would count a
            # change by the owner.
            weights.put(unused)
            update = replace(update, version=label)
            if self.hooks.sleep_state.answers:
                self.listener.after_update(update)
            else:
                self._unseen = update
        weights.put(label)
        if label != unused:
            weights.release(unused)

    def _update(self, request: WeightUpdate, version: str | None) -> str:
        """Put new weights in force and return their label.

        While they are loaded, the weights have a label that none had before. They keep it if loading fails half-way.

        Args:
            request: the weights, without a label.
            version: their label; None counts up from the last one.

        Raises:
            InvalidRequestError: the engine refused the weights, and the old ones are in force under their label.
            CapabilityError: as above.
            EngineError: loading failed, or the listener objects to what was loaded.
        """
        _check_label(version)
        weights = self.hooks.weights
        before, unused, label = weights.saved(), "", ""
        attempt: Attempt | None = None

        def fill(request: WeightUpdate) -> WeightUpdate:
            nonlocal before, unused, label, attempt
            if request.by_owner:
                # Only an update brings weights that were dropped.
                self.hooks.sleep_state.require_weights()
            self._before_update(request)
            # Not earlier: another update may have been in force in the meantime.
            before, unused = weights.saved(), weights.next_label(version)
            label = unused if version is None else version
            # Before the label changes: a call that begins now waits for the end of the update.
            attempt = self.hooks.in_flight.begin(label, unused, goes_on=request.when == "now")
            weights.put(unused)
            return replace(request, version=label, number=attempt.number)

        def finish(done: Any) -> str:
            if done is not True:
                raise self.hooks.fault("update_weights")(f"returned {shown(done)}: the new weights are not in force")
            self.hooks.sleep_state.without_weights = False
            self._put(unused, label, request)
            if attempt is not None:
                attempt.label = label
            return label

        def failed(error: CoreLMError) -> CoreLMError:
            if isinstance(error, (InvalidRequestError, CapabilityError)) and not request.by_owner:
                weights.restore(before)
                if attempt is not None:
                    attempt.label = None
            else:
                # The weights may have changed since they got it.
                weights.put(unused)
            return error

        try:
            loaded: str = self.hooks.call("update_weights", request, finish, fill, failed=failed)
        except BaseException:
            if weights.label == unused:
                # The engine no longer has the weights that the listener still had to look at.
                self._unseen = None
            self._update_failed(unused)
            raise
        _log.info("%s: weights %s are in force, after %s", self.name, brief(repr(loaded)), brief(repr(before[0])))
        return loaded

    def awake(self) -> None:
        """Let the listener look at an engine that was woken. No other call is in it.

        Raises:
            EngineError: the listener objects, or the engine failed. Its weights get a label that none had before.
        """
        update, self._unseen = self._unseen, None
        if self.listener is None:
            return
        try:
            if update is None:
                self.listener.awake()
            else:
                self.listener.after_update(update)
        except BaseException:
            unused = self.hooks.weights.next_label()
            self.hooks.weights.put(unused)
            self._update_failed(unused)
            raise

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


def _check_label(version: Any) -> None:
    if version is not None and not isinstance(version, str):
        raise invalid("version", f"expected a str, got {shown(version)}")


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

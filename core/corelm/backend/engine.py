"""`OpenEngine`: an engine that is open, and everything that core knows about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tenacity

from corelm.backend.hooks import EngineHooks
from corelm.backend.waits import seconds
from corelm.errors import CapabilityError, CoreLMError, InvalidRequestError
from corelm.spec.capabilities import Capabilities
from corelm.spec.records import AbortRequest, HealthRequest, WeightUpdate
from corelm.validate import shown


class OpenEngine:
    """An engine that is open: its hooks, what it can do, its tokenizer, and the weights in force.

    A `Backend` and a `DynamicBatcher` in front of it hold the same `OpenEngine`.

    Args:
        plugin: what the plugin's ``open`` returned.
        name: the name that the engine was opened by.
        model_name: the name that labels its numbers.
        wrappers: objects with ``@hookimpl(wrapper=True)`` methods that observe or replace results.
        retry: how often a failed call is tried in all, or a tenacity `Retrying`; None never retries.
        timeout: seconds that a call may take when the call does not say; None sets no limit.

    Attributes:
        plugin: the plugin's own object, for tests and for options that only this engine has.
        hooks: calls the plugin's hooks.
        name: the name that the engine was opened by.
        model_name: the name that labels its numbers.
        timeout: seconds that a call may take when the call does not say; None sets no limit.
        weight_version: the label of the weights in force, "0" until the first update. Assigning it remembers the label.

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
        wrappers: Sequence[object] = (),
        retry: int | tenacity.BaseRetrying | None = None,
        timeout: float | None = None,
    ) -> None:
        self.plugin = plugin
        self.name = name
        self.model_name = model_name
        self.timeout = None if timeout is None else seconds("timeout", timeout)
        self._weight_version = "0"
        self._used_versions = {"0"}
        self.hooks = EngineHooks(plugin, name, wrappers, retry)

    @property
    def capabilities(self) -> Capabilities:
        """What the engine can do, as it declared when it was opened."""
        return self.hooks.capabilities

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
        known = (getattr(self.tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
        return next((int(token) for token in known if token is not None), 0)

    @property
    def weight_version(self) -> str:
        return self._weight_version

    @weight_version.setter
    def weight_version(self, label: str) -> None:
        self._used_versions.add(label)
        self._weight_version = label

    def next_weight_version(self, given: str | None = None) -> str:
        """Return a label for new weights: it counts up from the last one, past every label that was used before.

        Args:
            given: a label that is about to be used, and is passed over as well.
        """
        label = self.weight_version
        while label in self._used_versions or label == given:
            # A label that the caller has chosen need not be a number, or may be longer than Python reads.
            label = str(int(label) + 1) if label.isdecimal() and len(label) < 19 else f"{label}+1"
        return label

    def update_weights(self, request: WeightUpdate, version: str | None) -> str:
        """Load new weights and return their label.

        While they are loaded, the weights have a label that none had before. They keep it if loading fails half-way.

        Args:
            request: the weights, without a label.
            version: their label; None counts up from the last one.

        Raises:
            InvalidRequestError: the engine refused the weights, and the old ones are in force under their label.
            CapabilityError: as above.
            EngineError: loading failed.
        """
        before = unused = label = ""

        def fill(request: WeightUpdate) -> WeightUpdate:
            nonlocal before, unused, label
            # Not earlier: another update may have been in force in the meantime.
            before, unused = self.weight_version, self.next_weight_version(version)
            label = unused if version is None else version
            self.weight_version = unused
            return replace(request, version=label)

        def settle(in_force: str) -> str:
            self.weight_version = in_force
            if in_force != unused:
                self._used_versions.discard(unused)
            return in_force

        def finish(done: Any) -> str:
            if done is not True:
                raise self.hooks.fault("update_weights")(f"returned {shown(done)}: the new weights are not in force")
            return settle(label)

        def failed(error: CoreLMError) -> CoreLMError:
            if isinstance(error, (InvalidRequestError, CapabilityError)):
                settle(before)
            return error

        loaded: str = self.hooks.call("update_weights", request, finish, fill, failed=failed)
        return loaded

    def require(self, capability: str, why: str) -> None:
        """Refuse a call that needs a capability which the engine does not have.

        Args:
            capability: a field of `Capabilities`.
            why: why the call needs it, or what the caller can do without it.

        Raises:
            CapabilityError: the engine did not declare the capability.
        """
        if not getattr(self.capabilities, capability):
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

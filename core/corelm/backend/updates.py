"""`WeightUpdates`: the methods of a `Backend` that change its weights and load its adapters."""

from __future__ import annotations

from typing import Any

from torch import nn

from corelm.backend.adapters import NewAdapter
from corelm.backend.engine import OpenEngine
from corelm.backend.trained_model import NewWeights
from corelm.spec.records import When


class WeightUpdates:
    engine: OpenEngine

    def update_weights(
        self,
        weights: NewWeights,
        version: str | None = None,
        when: When = "drain",
        expect: object = None,
    ) -> str:
        """Load new weights, and return the version that every later row carries.

        Args:
            weights: a model, a state dict or an iterator of (name, tensor) with the names of its checkpoint, or a path.
            version: the label of these weights; None counts up from the last label.
            when: "drain" lets answers in flight finish on the old weights first. "abort" ends them with the reason
                `abort`, in an engine that can. "now" lets them go on, on the new weights: their `version_runs` say from
                which token on. Scores never mix two sets of weights.
            expect: what the engine should answer, for what listens to its updates, such as a canary of ``core-fleet``
                before any other call is served. Without a listener, it is refused.

        Raises:
            InvalidRequestError: the weights do not fit; the old ones are still in force.
            CapabilityError: the engine cannot load them, or not while it answers; the old ones are still in force.
            StaleWeightsError: a listener finds other weights in the engine; as after the next error.
            EngineError: loading failed, or an iterator did half-way. As after an interrupt, weights may be partly new:
                `weight_version` and the tokens that follow get a label that none had before, until an update succeeds.
        """
        return self.engine.update_weights(weights, version, when, expect)

    def weights_changed(self, version: str | None = None, expect: object = None) -> str:
        """Say that the owner of the model has changed its weights, and return the version that later rows carry.

        Use it for changes that the engine may not notice. It waits for calls under way; the engine empties its caches.

        Args:
            version: the label of these weights; None counts up from the last label.
            expect: as for `update_weights`.

        Raises:
            BackendAsleepError: the engine has dropped its weights, or was opened without: only an update brings some.
            StaleWeightsError: a listener finds other weights; rows get a label that no weights had before.
        """
        return self.engine.weights_changed(version, expect)

    def runs(self, model: nn.Module) -> bool:
        """Return whether the engine runs this model object, so that training it in place changes the engine's weights.

        It does if it was opened with the object, or with one in it: PEFT and DDP wrap models. An engine that does not
        tell the state of its weights (the hook `weights_state`) runs a copy.
        """
        given = self.engine.given_model()
        if given is None or not self.engine.hooks.implements("weights_state"):
            return False
        own = {id(parameter) for parameter in given.parameters()}
        return bool(own) and own <= {id(parameter) for parameter in model.parameters()}

    @property
    def adapters(self) -> dict[str, str]:
        """The version of each adapter that `load_adapter` has loaded, by name."""
        return self.engine.adapters.versions

    def load_adapter(
        self,
        name: str,
        weights: NewAdapter,
        *,
        config: Any = None,
        version: str | None = None,
        when: When = "drain",
    ) -> str:
        """Load an adapter (LoRA, for example), or replace the one of this name, and return its version.

        Calls name it with ``adapter=name``. Their rows carry a label such as ``"0+policy@3"``: the version of the base
        weights, the adapter, and its version. The base weights and their version stay as they are.

        Args:
            name: the name; without any of ``@ + / \\``.
            weights: a PEFT model, of which the adapter of this name is read, or else the active one; a folder that PEFT
                wrote; or a state dict with the names that ``peft.get_peft_model_state_dict`` gives.
            config: PEFT's configuration of the adapter in a state dict, such as a ``LoraConfig`` or its dict. None for
                that of the adapter that is replaced.
            version: the label of this adapter; None counts up from the last one of this name, from "1".
            when: as for `update_weights`, but not "now": an answer is of one version of its adapter.

        Raises:
            InvalidRequestError: the adapter does not fit the model or the engine; what was loaded before stays.
            CapabilityError: the engine takes no adapters, or none of this kind; what was loaded before stays.
            EngineError: loading failed. The adapter gets a version that none had before, until it is loaded again.
        """
        return self.engine.load_adapter(name, weights, config, version, when)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter that `load_adapter` has loaded.

        Raises:
            InvalidRequestError: no adapter of this name was loaded.
            CapabilityError: the engine takes no adapters.
        """
        self.engine.unload_adapter(name)

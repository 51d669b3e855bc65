"""`EngineControls`: what a `Backend` does besides answering: weights, sleep, health, and the end of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import nn

from corelm.backend.call_log import logger
from corelm.backend.engine import OpenEngine
from corelm.backend.given_weights import NewAdapter, NewWeights, checked_name, source_of_adapter, source_of_weights
from corelm.errors import EngineError
from corelm.spec.records import (
    SLEEP_LEVELS,
    SLEEP_TAGS,
    WHENS,
    WHENS_OF_ADAPTERS,
    WHENS_OF_SLEEP,
    SleepRequest,
    WeightUpdate,
    When,
)
from corelm.validate import did_you_mean, invalid, is_bool, one_of, shown

T = TypeVar("T")


class EngineControls:
    """Controls an open engine.

    Attributes:
        engine: the engine.
    """

    engine: OpenEngine

    def _in_turn(self, change: Callable[[], T], when: When = "drain") -> T:
        """Change what the engine runs. A batcher first waits for the requests before it, if `when` is "drain"."""
        return change()

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
        one_of("when", when, WHENS)
        engine = self.engine
        engine.require("update_weights", "its weights cannot be changed")
        if when == "now":
            engine.require(
                "updates_in_flight", 'type when="drain" to let its answers finish, or when="abort" to end them'
            )
        self._require_listener(expect)
        source = source_of_weights(weights, engine.capabilities.weight_stream)
        update = WeightUpdate(version="", when=when, expect=expect, **source)
        return self._in_turn(partial(engine.weights.update, update, version), when)

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
        self._require_listener(expect)
        return self._in_turn(partial(self.engine.weights.update, WeightUpdate(version="", expect=expect), version))

    def runs(self, model: nn.Module) -> bool:
        """Return whether the engine runs this model object, so that training it in place changes the engine's weights.

        It does if it was opened with the object, or with one in it: PEFT and DDP wrap models. An engine that does not
        tell the state of its weights (the hook `weights_state`) runs a copy.
        """
        given = self.engine.given_model()
        if given is None or not self.engine.implements("weights_state"):
            return False
        own = {id(parameter) for parameter in given.parameters()}
        return bool(own) and own <= {id(parameter) for parameter in model.parameters()}

    @property
    def adapters(self) -> dict[str, str]:
        """The version of each adapter that `load_adapter` has loaded, by name."""
        return self.engine.weights.adapters

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
        name = checked_name(name)
        one_of("when", when, WHENS_OF_ADAPTERS)
        why = "it runs its base weights only; its README says which options make it take adapters"
        self.engine.require("adapters", why)
        last = self.engine.weights.state.adapters.get(name)
        source = source_of_adapter(name, weights, config, last.config if last else None)
        update = WeightUpdate(version="", when=when, adapter=name, **source)
        return self._in_turn(partial(self.engine.weights.update, update, version), when)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter that `load_adapter` has loaded.

        Raises:
            InvalidRequestError: no adapter of this name was loaded.
            CapabilityError: the engine takes no adapters.
        """
        name = checked_name(name)
        self.engine.require("adapters", "it has none to unload")
        self._in_turn(partial(self.engine.weights.update, WeightUpdate(version="", adapter=name), None))

    def sleep(self, level: int = 1, when: When = "drain") -> None:
        """Free the memory of the engine's accelerator until `wake`, for example for a step of the optimizer.

        It waits for calls under way. Calls that come later, until the engine is awake, are refused. If this raises
        another error than the first three, part of the engine may sleep: `wake` it, or close it.

        Args:
            level: 1 keeps the weights in the memory of the machine. 2 drops them, for an update that follows anyway:
                the engine answers again after `wake` and `update_weights`.
            when: "drain" lets answers in flight finish first; "abort" ends them with the reason `abort`, in an engine
                that can.

        Raises:
            InvalidRequestError: no such level, or none at which this engine can sleep now.
            CapabilityError: the engine cannot sleep.
            BackendAsleepError: part of it sleeps already.
            EngineError: the engine failed; or a wrapper asks for it in the middle of a call, and nothing has changed.
        """
        engine, levels = self.engine, self.engine.capabilities.sleep_levels
        why = "it cannot sleep as it was opened; its README says how an engine that can is opened"
        engine.require("sleep_levels", why)
        if engine.entered:
            raise EngineError(
                f"backend {engine.name!r}: it cannot sleep in the middle of a call, which would go on without its "
                "memory; call sleep outside other calls",
                usable=True,
            )
        one_of("when", when, WHENS_OF_SLEEP)
        if is_bool(level) or level not in SLEEP_LEVELS:
            what = "expected 1, which keeps the weights outside the accelerator, or 2, which drops them"
            raise invalid("level", f"{what}; got {shown(level)}")
        if level not in levels:
            able = " and ".join(map(str, sorted(levels)))
            raise invalid("level", f"this engine, as it was opened, sleeps at level {able} only")
        self._in_turn(partial(engine.weights.sleep, SleepRequest(level=int(level), when=when)), when)

    def wake(self, tags: str | Iterable[str] | None = None) -> None:
        """Wake what sleeps of the engine; nothing happens to what does not.

        Wake the weights first, update them, and then wake the KV cache, if the trainer's weights, those of the engine
        and the cache do not fit next to one another::

            backend.sleep(level=2)
            ...                                    # the optimizer's step
            backend.wake(["weights"])
            backend.update_weights(model)
            backend.wake(["kv_cache"])

        When all of it is awake and has weights, a listener, such as a canary, looks at it before any other call.

        Args:
            tags: which parts: "weights", "kv_cache" or both; None for all.

        Raises:
            InvalidRequestError: an unknown part.
            StaleWeightsError: the listener objects: the weights came back as others. Rows get a label that no weights
                had before.
            EngineError: the engine failed. It counts as asleep, and `wake` can be called again. If it failed when the
                listener looked, it is awake, and rows get a label as above, until an update succeeds.
        """
        named = SLEEP_TAGS if tags is None else [tags] if isinstance(tags, str) else tags
        named = [*named] if isinstance(named, Iterable) else []
        for tag in named:
            if tag not in SLEEP_TAGS:
                guess = did_you_mean(tag, SLEEP_TAGS)
                raise invalid("tags", f"unknown part {shown(tag)}{guess}; known: {', '.join(SLEEP_TAGS)}")
        if not named:
            raise invalid("tags", f"expected None for all, or a list out of {', '.join(SLEEP_TAGS)}; got {shown(tags)}")
        self.engine.weights.wake(frozenset(named))

    def health(self) -> bool:
        """Return whether the engine can serve. An engine that does not say is healthy while it is open."""
        return self.engine.health()

    def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests. Answers keep the tokens sampled so far and get the finish reason `abort`.

        Raises:
            CapabilityError: the engine cannot abort.
        """
        logger.info("%s: aborting %d requests", self.engine.name, len(request_ids))
        self.engine.abort(request_ids)

    def _require_listener(self, expect: object) -> None:
        if expect is not None and self.engine.listener is None:
            raise invalid("expect", "nothing compares the backend with it; core-fleet does: open it with canary=True")

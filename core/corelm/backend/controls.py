"""`EngineControls`: what a `Backend` does besides answering: weights, sleep, health, and the end of requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from corelm.backend import sleeping
from corelm.backend.call_log import log_abort
from corelm.backend.updates import WeightUpdates
from corelm.spec.records import When


class EngineControls(WeightUpdates):
    """Controls an open engine.

    Attributes:
        engine: the engine.
    """

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
        sleeping.sleep(self.engine, level, when)

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
        sleeping.wake(self.engine, tags)

    def health(self) -> bool:
        """Return whether the engine can serve. An engine that does not say is healthy while it is open."""
        return self.engine.health()

    def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests. Answers keep the tokens sampled so far and get the finish reason `abort`.

        Raises:
            CapabilityError: the engine cannot abort.
        """
        log_abort(self.engine.name, len(request_ids))
        self.engine.abort(request_ids)

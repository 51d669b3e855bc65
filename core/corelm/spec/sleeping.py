"""The records of the hooks `sleep` and `wake`, which give the memory of a GPU to the trainer beside the engine."""

from __future__ import annotations

from dataclasses import dataclass

from corelm.spec.when import When

#: What an engine can be told to wake. vLLM and SGLang use the same names.
SLEEP_TAGS = ("weights", "kv_cache")
#: How deep an engine can sleep.
SLEEP_LEVELS = (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SleepRequest:
    """Free the memory of the accelerator. Core calls the hook while no other call is running.

    Attributes:
        level: 1 keeps the weights, outside the accelerator, and drops the KV cache. 2 drops both: core serves no call
            after the engine was woken until `update_weights` has loaded weights.
        when: `drain`: calls in flight were allowed to finish. `abort`: core has aborted the answers in flight.
    """

    level: int
    when: When = "drain"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WakeRequest:
    """Take the memory again. Core calls the hook while no other call is running.

    Attributes:
        tags: what to wake: `weights`, `kv_cache` or both. All of it sleeps.
        last: whether nothing sleeps any more afterwards, so that the engine serves calls again.
    """

    tags: frozenset[str]
    last: bool

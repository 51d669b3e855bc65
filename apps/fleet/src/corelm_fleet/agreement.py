"""What the engines of a fleet can do together, and which engines do not belong together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from corelm import Backend
from corelm.errors import CoreLMError
from corelm.spec import SLEEP_LEVELS, Capabilities, Range
from corelm.validate import invalid, shown

#: What tokenizers are compared by: words, digits, bytes above 127, spaces and a newline.
_TEXT = "Hello, fleet! 1234 är  naïve 你好\n"


def capabilities_of_all(given: Sequence[Capabilities]) -> Capabilities:
    """Return what every one of these engines can do.

    A fleet serves calls at once although its engines may not. It wants one row for each answer, and calls engines on
    its own threads, where gradients cannot be recorded for the caller.
    """
    first = given[0]
    can: dict[str, Any] = {
        each.name: all(getattr(one, each.name) for one in given)
        for each in fields(Capabilities)
        if isinstance(each.default, bool)
    }
    contexts = [one.max_context for one in given if one.max_context is not None]
    modes = frozenset.intersection(*(one.generation_modes for one in given))
    can |= {
        "gradients": False,
        # Every engine loads the same weights, and one that is opened later as well.
        "weight_stream": False,
        # Its engines load one after another, and an answer may go from one engine to another.
        "updates_in_flight": False,
        "score_top_k": min(one.score_top_k for one in given),
        # Log-probs of sampled tokens that engines do not have in common are returned by none.
        "top_logprobs": min(one.top_logprobs for one in given) if modes else 0,
        "concurrent_calls": True,
        "precision": max((one.precision for one in given if one.precision is not None), default=None),
        "without_weights": can["update_weights"] and any(one.without_weights for one in given),
        "sleep_levels": frozenset.intersection(
            *(one.sleep_levels for one in given), SLEEP_LEVELS if can["update_weights"] else SLEEP_LEVELS[:1]
        ),
        # What one engine does slowly is left out where it can be.
        "seeds_are_costly": can["per_answer_seeds"] and any(one.seeds_are_costly for one in given),
    }
    return Capabilities(
        vocab_size=first.vocab_size,
        max_context=min(contexts, default=None),
        eos_token_ids=first.eos_token_ids,
        sampling=_sampling([one.sampling for one in given]),
        generation_modes=modes,
        **can,
    )


def facts(backend: Backend) -> dict[str, Any]:
    """Return what two engines must have in common to answer alike, by a name for people. None is not known."""
    return {
        "the size of the vocabulary": backend.capabilities.vocab_size,
        "the ids that end an answer": sorted(backend.eos_token_ids),
        "the log-probs of sampled tokens": sorted(backend.capabilities.generation_modes),
        "the ids of a text": _ids(backend),
    }


def require_alike(name: str, one: Mapping[str, Any], other_name: str, other: Mapping[str, Any]) -> None:
    """Refuse engines of which one would answer a request differently from the other.

    Models are not compared: the canary does that.

    Raises:
        InvalidRequestError: their `facts` differ; `field` is ``replicas``.
    """
    for what, here in one.items():
        there = other[what]
        if here != there and here is not None and there is not None:
            raise invalid(
                "replicas",
                f"the engines of a fleet must answer alike, but differ in {what}: {name} has {shown(here)}, "
                f"{other_name} has {shown(there)}",
            )


def _sampling(given: Sequence[Mapping[str, Range | None]]) -> dict[str, Range | None]:
    common: dict[str, Range | None] = {}
    for name in set.intersection(*(set(one) for one in given)):
        spans = [span for one in given if (span := one[name]) is not None]
        low = max((span[0] for span in spans), default=-math.inf)
        high = min((span[1] for span in spans), default=math.inf)
        if low <= high:
            common[name] = (low, high) if spans else None
    if "num_beams" not in common:
        common = {name: span for name, span in common.items() if name not in ("length_penalty", "early_stopping")}
    return common


def _ids(backend: Backend) -> list[int] | None:
    """Return the ids of a text; None if the engine cannot say."""
    try:
        found: list[int] = backend.tokenize(_TEXT, add_special_tokens=False).ids.tolist()[0]
    except CoreLMError:
        return None
    return found

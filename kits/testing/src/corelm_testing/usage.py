"""How the kit uses every sampling parameter. Core's own tests refuse a parameter that is not in `USAGE`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from corelm import Backend
from corelm.spec import FIELDS, SamplingParams
from corelm.spec.sampling import EVERY_ENGINE

#: What a parameter changes. `temperature`, `truncation`, `penalty` and `ban` change the distribution that tokens are
#: drawn from; `end` changes where an answer ends, or how many there are; `search` replaces sampling; `engine` is up to
#: the engine; `nothing` leaves ids and log-probs alone.
Effect = Literal["temperature", "truncation", "penalty", "ban", "end", "search", "engine", "nothing"]


@dataclass(frozen=True, slots=True)
class Usage:
    """How to use one sampling parameter.

    Attributes:
        effect: what it changes.
        values: values other than the default, the preferred ones first.
        given: other parameters without which it has no effect.
    """

    effect: Effect
    values: tuple[Any, ...] = ()
    given: Mapping[str, Any] = field(default_factory=dict)


BEAMS = {"num_beams": 2, "temperature": 0.0}
#: Stands for every second id of the vocabulary: a model hardly ever avoids so many.
HALF = "half of the vocabulary"

USAGE: dict[str, Usage] = {
    "max_new_tokens": Usage("end", (3,)),
    "min_new_tokens": Usage("ban", (4, 2, 1), {"stop_token_ids": HALF}),
    "temperature": Usage("temperature", (1.5, 0.6, 0.8)),
    "top_p": Usage("truncation", (0.9, 0.5)),
    "top_k": Usage("truncation", (20, 5)),
    "min_p": Usage("truncation", (0.01, 0.05)),
    "repetition_penalty": Usage("penalty", (1.3, 1.1, 0.7)),
    "presence_penalty": Usage("penalty", (1.5, 0.5, -0.5)),
    "frequency_penalty": Usage("penalty", (1.5, 0.5, -0.5)),
    "stop": Usage("end", (("e", "a", "\n"),)),
    "stop_token_ids": Usage("end", (HALF,)),
    "ignore_eos": Usage("end", (True,)),
    "num_samples": Usage("end", (2,)),
    "seed": Usage("nothing", (5,)),
    "num_beams": Usage("search", (2, 4), {"temperature": 0.0}),
    "length_penalty": Usage("search", (2.0, 0.5), BEAMS),
    "early_stopping": Usage("search", (True,), BEAMS),
    "do_sample": Usage("nothing"),
    "skip_special_tokens": Usage("nothing", (False,)),
    "reasoning_marks": Usage("nothing", (("<think>", "</think>"),)),
    "engine_kwargs": Usage("engine", ({"an_option_of_another_engine": 1},)),
}

if missing := set(FIELDS) - USAGE.keys():
    raise NotImplementedError(
        f"SamplingParams has the field {min(missing)!r}, of which the conformance kit knows nothing: add what it does "
        "to USAGE in corelm_testing.usage"
    )

#: The parameters that an engine can declare.
DECLARABLE = tuple(name for name in FIELDS if name not in EVERY_ENGINE)
#: The parameters under which sampled tokens can have log-probs.
WITH_LOGPROBS = tuple(name for name in FIELDS if USAGE[name].effect not in ("search", "nothing"))


def honoured(backend: Backend, name: str) -> bool:
    """Return whether the backend honours the sampling parameter `name`: every engine must, or it declares it."""
    return name in EVERY_ENGINE or name in backend.capabilities.sampling


def legal(backend: Backend, name: str, value: Any) -> bool:
    """Return whether the backend honours the sampling parameter `name`, with a range that includes `value`."""
    span = backend.capabilities.sampling.get(name)
    return honoured(backend, name) and (span is None or span[0] <= value <= span[1])


def in_range(backend: Backend, name: str, *preferred: Any) -> list[Any]:
    """Return those of the preferred values that the backend declares; without any, the ends of its range.

    An end is left out if it is infinite, or the default value, which changes nothing. Temperature 0 is left out too: it
    is greedy decoding, which says little about temperatures.
    """
    values = [value for value in preferred if legal(backend, name, value)]
    span = backend.capabilities.sampling.get(name)
    if values or span is None:
        return values
    default = getattr(SamplingParams(), name)
    useless = (default, 0.0) if name == "temperature" else (default,)
    return [end for end in dict.fromkeys(span) if math.isfinite(end) and end not in useless]


def use(backend: Backend, name: str) -> dict[str, Any] | None:
    """Return sampling parameters with `name` in force, with a value that the backend declares; None if it has none."""
    usage = USAGE[name]
    values = in_range(backend, name, *usage.values)
    if not values or not all(legal(backend, *each) for each in usage.given.items()):
        return None
    half = list(range(0, backend.capabilities.vocab_size, 2))
    return {key: half if value is HALF else value for key, value in {**usage.given, name: values[0]}.items()}

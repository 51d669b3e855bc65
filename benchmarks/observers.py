"""What it costs to measure: calls with `Timing` and with `Telemetry`, compared with the same calls without them.

The transformers backend answers with a small model, as in `callers`; the toy backend takes almost no time itself, so
that a call shows what measuring adds at most. The SDK of OpenTelemetry keeps every span in memory and reads no metrics.

    bare                 no wrapper
    Timing               `corelm_interop.Timing`
    Telemetry, no SDK    `corelm_interop.Telemetry` with the API alone, which reports nothing
    Telemetry            the same with an SDK
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import corelm
from benchmarks.callers import small
from benchmarks.measure import Figure, Way, compare
from benchmarks.models import dialogues, tokenizer
from corelm import Backend
from corelm_interop import Telemetry, Timing
from corelm_testing.toy import ToyBackend

#: Goals: measuring a call of a small model costs less than can be seen. A span takes about a tenth of a millisecond.
GOAL, GOAL_TOY = 1.02, 1.3


def figures(quick: bool) -> Iterator[list[Figure]]:
    repeats = 3 if quick else 15
    model, texts = small(), [turn["content"] for chat in dialogues() for turn in chat][:8]
    plain = corelm.get_backend("transformers", model, tokenizer=tokenizer())
    toy = Backend.from_plugin(ToyBackend.open(), "toy")
    # The same engine under each of them.
    for work, backend, new, goal in (("a small model", plain, 32, GOAL), ("toy", toy, 8, GOAL_TOY)):
        prompts = backend.tokenize(texts).ids
        sampling = {"max_new_tokens": new, "ignore_eos": True, "seed": 1}
        for how, ask in {"generate": asked, "stream": streamed}.items():
            ways = {
                name: partial(ask, Backend.from_plugin(backend.engine.plugin, name, wrappers=each), prompts, sampling)
                for name, each in wrappers().items()
            }
            yield measured(f"{work}: {how}, {len(prompts)} prompts, {new} tokens", ways, repeats, goal)
        scored = {
            name: partial(Backend.from_plugin(backend.engine.plugin, name, wrappers=each).score_logprobs, prompts)
            for name, each in wrappers().items()
        }
        yield measured(f"{work}: score, {len(prompts)} sequences", scored, repeats, goal)
    plain.close()
    toy.close()


def measured(work: str, ways: Mapping[str, Way], repeats: int, goal: float) -> list[Figure]:
    return compare(work, ways, baseline="bare", repeats=repeats, goals=dict.fromkeys(("Timing", "Telemetry"), goal))


def wrappers() -> dict[str, list[object]]:
    """Return the wrappers of each way."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(InMemorySpanExporter()))
    return {
        "bare": [],
        "Timing": [Timing()],
        "Telemetry, no SDK": [Telemetry()],
        "Telemetry": [Telemetry(provider, MeterProvider())],
    }


def asked(backend: Backend, prompts: Any, sampling: Mapping[str, Any]) -> None:
    backend.generate(prompts, sampling)


def streamed(backend: Backend, prompts: Any, sampling: Mapping[str, Any]) -> None:
    with backend.stream(prompts, sampling) as stream:
        for _ in stream:
            pass

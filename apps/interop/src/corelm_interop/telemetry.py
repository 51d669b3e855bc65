"""`Telemetry`: spans and metrics of OpenTelemetry for the calls of an engine. Needs the extra `telemetry`.

The names are those of the semantic conventions for generative AI; `corelm.*` names what the conventions lack. Only ids
reach an engine's hooks, and no ids are reported: there is no text of a prompt or an answer in a span.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import Token
from typing import Any

from corelm._version import __version__
from corelm.application import Origin
from corelm.errors import brief, described, how_to_install
from corelm.spec import GenerateRequest
from corelm_interop.observer import ObservedCall, Observer

try:
    from opentelemetry import context, metrics, trace
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span, SpanContext, SpanKind, StatusCode
except ImportError as error:
    raise ImportError(
        f"corelm_interop.Telemetry needs OpenTelemetry: {how_to_install('opentelemetry-api>=1.30')}"
    ) from error

#: What each hook is called in `gen_ai.operation.name`. The others compute nothing that is worth a span.
_OPERATIONS = {
    "generate": "text_completion",
    "score_logprobs": "score_logprobs",
    "update_weights": "update_weights",
    "sleep": "sleep",
    "wake": "wake",
}
#: A span names the finish reason of each row up to this many rows, and of more rows each reason once.
_REASONS = 128

# The boundaries that the conventions name.
_TOKENS = [4**power for power in range(14)]
_SECONDS = [0.01 * 2**power for power in range(14)]
_FIRST_TOKEN = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0]
_NEXT_TOKEN = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5]


class Telemetry(Observer):
    """Reports the calls of an engine to OpenTelemetry.

    ::

        with corelm.get_backend("vllm", model, wrappers=[Telemetry()]) as backend:
            ...

    Each call of `generate`, `score_logprobs`, `update_weights`, `sleep` and `wake` is a span. It is a child of the span
    in which the user made the call, on every thread. A call that the batcher has merged from users' calls in several
    spans is the first span of a new trace and has a link to each of them. While the engine works, the span is the
    current one, so that spans of an instrumented HTTP client are its children.

    The program chooses the SDK, its exporters and its samplers. Without an SDK, nothing is reported. What an exporter
    or a span processor raises changes no call. One that waits, such as a `SimpleSpanProcessor`, makes the call wait:
    use a `BatchSpanProcessor`.

    Args:
        tracer_provider: makes the spans; None for the global one.
        meter_provider: makes the metrics; None for the global one.
    """

    def __init__(
        self,
        tracer_provider: trace.TracerProvider | None = None,
        meter_provider: metrics.MeterProvider | None = None,
    ) -> None:
        self._tracer = trace.get_tracer("corelm", __version__, tracer_provider)
        meter = metrics.get_meter("corelm", __version__, meter_provider)

        def histogram(name: str, unit: str, description: str, boundaries: Sequence[float]) -> metrics.Histogram:
            return meter.create_histogram(
                name, unit=unit, description=description, explicit_bucket_boundaries_advisory=list(boundaries)
            )

        self._usage = histogram("gen_ai.client.token.usage", "{token}", "Tokens of a call.", _TOKENS)
        self._duration = histogram("gen_ai.client.operation.duration", "s", "Duration of a call.", _SECONDS)
        self._first = histogram(
            "gen_ai.server.time_to_first_token", "s", "Time to the first token of an answer.", _FIRST_TOKEN
        )
        self._next = histogram(
            "gen_ai.server.time_per_output_token", "s", "Time per token after the first of an answer.", _NEXT_TOKEN
        )
        self._wait = histogram("corelm.client.wait.duration", "s", "Time before the engine was asked.", _SECONDS)
        self._retries = meter.create_counter("corelm.client.retries", "{call}", "Calls that were made again.")

    def began(self, call: ObservedCall) -> tuple[Span, Token[Context]] | None:
        operation = _OPERATIONS.get(call.hook)
        if operation is None:
            return None
        parent, links = _place(call.origins)
        attributes = {**_named(call, operation), **_asked(call)}
        model = attributes.get("gen_ai.request.model")
        name = operation if model is None else f"{operation} {model}"
        span = self._tracer.start_span(name, parent, SpanKind.CLIENT, attributes, links)
        return span, context.attach(trace.set_span_in_context(span, parent))

    def ended(self, call: ObservedCall) -> None:
        if call.note is None:
            return
        span, token = call.note
        try:
            span.set_attributes(_answered(call))
            if call.error is not None:
                span.set_status(StatusCode.ERROR, brief(described(call.error)))
            self._measure(call)
        finally:
            context.detach(token)
            span.end()

    def _measure(self, call: ObservedCall) -> None:
        named = _named(call, _OPERATIONS[call.hook])
        self._duration.record(call.seconds, {**named, **_error(call)})
        for kind, tokens in (("input", call.given_tokens), ("output", call.sampled_tokens)):
            if tokens and call.error is None:
                self._usage.record(tokens, {**named, "gen_ai.token.type": kind})
        for seconds in call.first_tokens():
            self._first.record(seconds, named)
        for seconds in call.token_intervals():
            self._next.record(seconds, named)
        for seconds in call.waits:
            self._wait.record(seconds, named)
        if call.again:
            self._retries.add(1, named)


def _place(origins: Sequence[Origin]) -> tuple[Context, list[Link]]:
    """Return the context that a call belongs to, and links to the spans of its users if it belongs to none of them."""
    if not origins:
        return context.get_current(), []
    found: dict[tuple[int, int], tuple[SpanContext, Context]] = {}
    for origin in origins:
        users = origin.context.copy().run(context.get_current)
        span = trace.get_current_span(users).get_span_context()
        found.setdefault((span.trace_id, span.span_id), (span, users))
    if len(found) == 1:
        return next(iter(found.values()))[1], []
    return Context(), [Link(span) for span, _ in found.values() if span.is_valid]


def _named(call: ObservedCall, operation: str) -> dict[str, Any]:
    """Return the attributes that the spans and metrics of a call have in common."""
    named = {"gen_ai.operation.name": operation}
    if call.engine is not None:
        named["gen_ai.provider.name"] = call.engine.backend
        if call.engine.model:
            named["gen_ai.request.model"] = call.engine.model
    return named


def _asked(call: ObservedCall) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if call.rows:
        found |= {"corelm.rows": call.rows, "corelm.callers": max(1, len(call.origins))}
    if call.waits:
        found["corelm.wait"] = max(call.waits)
    if call.again and call.engine is not None:
        found["corelm.attempt"] = call.engine.attempt
    if isinstance(call.request, GenerateRequest):
        sampling = call.request.sampling
        values = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": sampling.max_new_tokens,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "seed": sampling.seed,
            "choice.count": sampling.num_samples,
        }
        found |= {f"gen_ai.request.{name}": value for name, value in values.items() if value is not None}
        found["gen_ai.request.stream"] = call.request.on_tokens is not None
    if call.hook == "update_weights":
        found["corelm.weights"] = call.request.version
    return found


def _answered(call: ObservedCall) -> dict[str, Any]:
    if call.error is not None:
        return _error(call)
    found: dict[str, Any] = {}
    if call.given_tokens:
        found["gen_ai.usage.input_tokens"] = call.given_tokens
    if isinstance(call.request, GenerateRequest):
        reasons = call.finish_reasons
        found["gen_ai.usage.output_tokens"] = call.sampled_tokens
        found["gen_ai.response.finish_reasons"] = list(reasons if len(reasons) <= _REASONS else sorted({*reasons}))
        if failed := reasons.count("error"):
            found["corelm.failed_rows"] = failed
    if (cached := call.cached_tokens()) is not None:
        found["gen_ai.usage.cache_read.input_tokens"] = cached[0]
    if firsts := call.first_tokens():
        found["gen_ai.response.time_to_first_chunk"] = min(firsts)
    return found


def _error(call: ObservedCall) -> dict[str, str]:
    if call.error is None:
        return {}
    kind = type(call.error)
    name = kind.__qualname__
    return {"error.type": name if kind.__module__ == "builtins" else f"{kind.__module__}.{name}"}

"""`Telemetry` with exporters that fail, without OpenTelemetry, and behind a server."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from corelm import Backend
from corelm.batching import DynamicBatcher
from corelm.errors import EngineError
from corelm_testing.toy import ToyBackend
from helpers.batching_fakes import GatedEngine, all_capabilities
from helpers.fakes import SHORT, Fake

pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry-sdk")

from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from corelm_interop import Telemetry
from helpers.telemetry import World, open_toy


@pytest.fixture
def world(sound: None) -> World:
    return World()


class Faulty(SpanProcessor):
    """Raises where it is told to."""

    def __init__(self, where: str) -> None:
        self.where = where

    def on_start(self, span: Span, parent_context: Any = None) -> None:
        if self.where == "start":
            raise ConnectionError("no collector")

    def on_end(self, span: ReadableSpan) -> None:
        if self.where == "end":
            raise ConnectionError("no collector")


@pytest.mark.parametrize("where", ["start", "end", "export", "meter"])
def test_a_faulty_exporter_changes_no_answer_and_leaves_no_span_behind(where: str) -> None:
    world = World()
    plain = ToyBackend.open()
    expected = Backend.from_plugin(plain, "toy").generate([[72, 105], [65]], {"max_new_tokens": 6, "seed": 3})
    if where == "export":

        class Lost(InMemorySpanExporter):
            def export(self, spans: Any) -> Any:
                raise ConnectionError("no collector")

        world.provider.add_span_processor(SimpleSpanProcessor(Lost()))
    elif where == "meter":
        # A callback of the SDK's exemplar reservoirs and views runs in `record`.
        class LostMeter(MeterProvider):
            def get_meter(self, *args: Any, **options: Any) -> Any:
                meter = super().get_meter(*args, **options)

                class Broken:
                    def record(self, *args: Any, **options: Any) -> None:
                        raise ConnectionError("no collector")

                    add = record

                meter.create_histogram = lambda *args, **options: Broken()
                return meter

        world.telemetry = Telemetry(world.provider, LostMeter())
    else:
        world.provider.add_span_processor(Faulty(where))
    faulty = where in ("start", "end")  # then the user's own spans fail as well
    user = nullcontext() if faulty else world.tracer.start_as_current_span("user")
    with DynamicBatcher(open_toy(world)) as batcher, user:
        current = trace.get_current_span()
        for _ in range(2):
            found = batcher.generate([[72, 105], [65]], {"max_new_tokens": 6, "seed": 3})
            assert found.ids.tolist() == expected.ids.tolist()
            assert torch.equal(found.logprobs.values, expected.logprobs.values)
        assert trace.get_current_span() is current
        # Nor is a span left on the thread of the batcher.
        batcher.generate([[72]], {"max_new_tokens": 6, "seed": 3})
    assert len(world.spans("text")) == (0 if where == "start" else 3)


def test_a_failing_engine_keeps_its_error_with_a_faulty_exporter() -> None:
    world = World()
    world.provider.add_span_processor(Faulty("end"))
    engine = GatedEngine(**all_capabilities())
    with pytest.raises(EngineError, match="poisoned"):
        Backend.from_plugin(engine, "gated", wrappers=[world.telemetry]).generate([[13]], SHORT)


def test_without_an_sdk_nothing_is_reported_and_nothing_fails() -> None:
    found = Backend.from_plugin(Fake(), "fake", wrappers=[Telemetry()]).generate([[3]], SHORT)
    assert found.ids.tolist() == [[3, 3]]


def test_without_opentelemetry_the_error_says_what_to_type() -> None:
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from corelm_interop import Timing; Timing()\n"
        "try:\n    from corelm_interop import Telemetry\nexcept ImportError as error:\n    print(error)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert 'pip install "opentelemetry-api' in told.stdout


# A server -------------------------------------------------------------------------------------------------------------

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("header", "continued"),
    [(f"00-{TRACE}-{PARENT}-01", True), ("garbage", False), (None, False)],
    ids=["a trace", "garbage", "none"],
)
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_a_request_to_the_server_continues_the_trace_of_its_client(
    world: World, header: str | None, continued: bool, streams: bool
) -> None:
    pytest.importorskip("starlette", reason="needs the extra serve")
    from helpers.serving import http_of, serving

    headers = {} if header is None else {"traceparent": header}
    body = {"model": "toy", "prompt": "Hello", "max_tokens": 4, "stream": streams}
    with open_toy(world) as backend, serving(backend, model_name="toy") as server, http_of(server) as client:
        for _ in range(2):
            reply = client.post("/v1/completions", json=body, headers=headers)
            assert reply.status_code == 200, reply.text
        # Nothing of it is left for the next request of the connection.
        client.post("/v1/completions", json=body)
    first, second, last = world.spans("text")
    for span in (first, second):
        parent = None if span.parent is None else trace.format_span_id(span.parent.span_id)
        assert parent == (PARENT if continued else None)
        assert (trace.format_trace_id(span.context.trace_id) == TRACE) is continued
    assert last.parent is None


def test_a_span_of_an_instrumented_server_remains_the_parent(world: World) -> None:
    from corelm_interop.trace_context import continued_trace

    with world.tracer.start_as_current_span("POST /v1/completions") as request:
        with continued_trace([(b"traceparent", f"00-{TRACE}-{PARENT}-01".encode())]):
            open_toy(world).generate([[72]], SHORT)
        assert trace.get_current_span() is request
    (span,) = world.spans("text")
    assert span.parent.span_id == request.get_span_context().span_id

"""An SDK of OpenTelemetry that keeps what it is given."""

from typing import Any

import pytest

from corelm import Backend
from corelm_testing.toy import ToyBackend

pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry-sdk")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from corelm_interop import Telemetry


class World:
    """An SDK that keeps what it is given.

    Attributes:
        telemetry: reports to it.
        tracer: makes the users' spans.
    """

    def __init__(self) -> None:
        self._exporter, self._reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.telemetry = Telemetry(self.provider, MeterProvider([self._reader]))
        self.tracer = self.provider.get_tracer("user")

    def spans(self, name: str = "") -> list[ReadableSpan]:
        """Return the finished spans whose names begin so."""
        return [span for span in self._exporter.get_finished_spans() if span.name.startswith(name)]

    def metrics(self) -> dict[str, Any]:
        """Return the metrics by name."""
        data = self._reader.get_metrics_data()
        scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics] if data else []
        return {metric.name: metric for scope in scopes for metric in scope.metrics}


def open_toy(world: World, **options: Any) -> Backend:
    return Backend.from_plugin(ToyBackend.open(), "toy", model_name="bigram", wrappers=[world.telemetry], **options)

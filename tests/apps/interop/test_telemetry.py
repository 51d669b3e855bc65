"""`Telemetry` against the SDK of OpenTelemetry: its in-memory exporters, and the names of its own package."""

from __future__ import annotations

import contextvars
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import corelm
from corelm import Backend, hookimpl
from corelm.batching import DynamicBatcher
from corelm_testing.toy import ToyBackend
from helpers.batching_fakes import LONG, SEEDED, GatedEngine
from helpers.fakes import SHORT, Fake
from helpers.streaming_fakes import Dripping

pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry-sdk")

from opentelemetry import baggage, context, trace
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics

from helpers.telemetry import World, open_toy


@pytest.fixture
def world(sound: None) -> World:
    return World()


def test_a_call_is_a_span_with_the_names_of_the_conventions(world: World) -> None:
    result = open_toy(world).generate(
        [[72, 105], [65]], {"max_new_tokens": 6, "temperature": 0.5, "top_k": 9, "seed": 3, "num_samples": 2}
    )
    (span,) = world.spans()
    assert span.name == "text_completion bigram" and span.kind is trace.SpanKind.CLIENT and span.status.is_ok
    found = dict(span.attributes)
    own = {name: found.pop(name) for name in list(found) if name.startswith("corelm.")}
    assert own.pop("corelm.wait") > 0 and own == {"corelm.rows": 4, "corelm.callers": 1}
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    # Older packages lack the newest names.
    assert set(found) <= known or not hasattr(gen_ai_attributes, "GEN_AI_REQUEST_STREAM")
    assert found == {
        "gen_ai.operation.name": gen_ai_attributes.GenAiOperationNameValues.TEXT_COMPLETION.value,
        "gen_ai.provider.name": "toy",
        "gen_ai.request.model": "bigram",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 9,
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.seed": 3,
        "gen_ai.request.stream": False,
        "gen_ai.usage.input_tokens": 2 * (2 + 1),
        "gen_ai.usage.output_tokens": result.ids.values.shape[0],
        "gen_ai.response.finish_reasons": result.finish_reasons,
    }


def test_metrics_have_the_names_units_and_buckets_of_the_conventions(world: World) -> None:
    backend = open_toy(world)
    result = backend.generate([[72, 105], [65]], {"max_new_tokens": 6, "seed": 3})
    list(backend.stream([[72]], {"max_new_tokens": 6, "seed": 3, "ignore_eos": True}))
    backend.score_logprobs([[72, 105, 65]])
    metrics = world.metrics()
    units = {"gen_ai.client.token.usage": "{token}", "corelm.client.retries": "{call}"}
    assert all(metric.unit == units.get(name, "s") for name, metric in metrics.items())
    named = {value for name, value in vars(gen_ai_metrics).items() if name.startswith("GEN_AI_")}
    assert {name for name in metrics if name.startswith("gen_ai.")} <= named
    # From the pages of the conventions.
    seconds = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
    first = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
    each = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
    tokens = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864)
    buckets = {
        gen_ai_metrics.GEN_AI_CLIENT_TOKEN_USAGE: tokens,
        gen_ai_metrics.GEN_AI_CLIENT_OPERATION_DURATION: seconds,
        gen_ai_metrics.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN: first,
        gen_ai_metrics.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN: each,
    }
    for name, boundaries in buckets.items():
        points = metrics[name].data.data_points
        assert all(point.explicit_bounds == pytest.approx(boundaries) for point in points), name
    usage = metrics["gen_ai.client.token.usage"].data.data_points
    of_generate = {
        point.attributes["gen_ai.token.type"]: (point.count, point.sum)
        for point in usage
        if point.attributes["gen_ai.operation.name"] == "text_completion"
    }
    assert of_generate == {"input": (2, 3 + 1), "output": (2, result.ids.values.shape[0] + 6)}
    assert sum(point.count for point in metrics["gen_ai.client.operation.duration"].data.data_points) == 3
    assert sum(point.count for point in metrics["gen_ai.server.time_to_first_token"].data.data_points) == 1
    assert sum(point.count for point in metrics["corelm.client.wait.duration"].data.data_points) == 3


def test_a_stream_says_when_its_first_token_came(world: World) -> None:
    backend = Backend.from_plugin(Dripping(None), "dripping", wrappers=[world.telemetry])
    list(backend.stream([[3], [10]], SHORT))
    (span,) = world.spans()
    assert span.attributes["gen_ai.request.stream"] is True
    asked = span.end_time / 1e9 - span.start_time / 1e9 + span.attributes["corelm.wait"]
    assert 0 < span.attributes["gen_ai.response.time_to_first_chunk"] <= asked + 0.01
    points = world.metrics()["gen_ai.server.time_to_first_token"].data.data_points
    assert sum(point.count for point in points) == 2


def test_weights_are_a_span_and_tokenizing_is_none(world: World) -> None:
    with open_toy(world) as backend:
        backend.tokenize(["Hello"])
        backend.update_weights({"table": backend.engine.plugin.model.table + 1}, version="step-1")
    (span,) = world.spans()
    assert span.name == "update_weights bigram" and span.attributes["corelm.weights"] == "step-1"


@pytest.mark.parametrize("how", ["plain", "timeout", "submit", "batcher", "batcher, stream", "thread with its context"])
def test_a_span_is_a_child_of_the_users_on_every_thread(world: World, how: str) -> None:
    backend = open_toy(world)
    if "batcher" in how:
        backend = DynamicBatcher(backend)
    with backend, world.tracer.start_as_current_span("user") as user:
        calls = {
            "submit": lambda: backend.submit_generate([[72]], SHORT).result(LONG),
            "timeout": lambda: backend.generate([[72]], SHORT, timeout=LONG),
            "batcher, stream": lambda: list(backend.stream([[72]], SHORT)),
        }
        call = calls.get(how, lambda: backend.generate([[72]], SHORT))
        if how.startswith("thread"):
            here = contextvars.copy_context()
            thread = threading.Thread(target=lambda: here.run(call))
            thread.start(), thread.join(LONG)
        else:
            call()
        # The user's span is still the current one.
        assert trace.get_current_span() is user
    (span,) = world.spans("text")
    assert span.parent.span_id == user.get_span_context().span_id
    assert span.context.trace_id == user.get_span_context().trace_id and not span.links


def test_a_call_outside_every_span_begins_a_trace(world: World) -> None:
    with DynamicBatcher(open_toy(world)) as batcher:
        batcher.generate([[72]], SHORT)
    (span,) = world.spans()
    assert span.parent is None and not span.links


def test_a_shared_call_has_links_to_the_spans_of_its_users(world: World) -> None:
    engine = GatedEngine(permits=0)
    users = []
    with DynamicBatcher(Backend.from_plugin(engine, "gated", wrappers=[world.telemetry])) as batcher:
        first = batcher.submit_generate([[3]], SEEDED)
        engine.wait_for_calls(1)
        futures = []
        for n in range(3):
            with world.tracer.start_as_current_span(f"user {n}") as user:
                users.append(user.get_span_context())
                futures.append(batcher.submit_generate([[n + 3]], SEEDED))
        engine.free()
        for future in [first, *futures]:
            future.result(LONG)
    alone, shared = world.spans("text")
    assert alone.parent is None and shared.parent is None
    assert {link.context.span_id for link in shared.links} == {user.span_id for user in users}
    assert shared.context.trace_id not in {user.trace_id for user in users}
    assert shared.attributes["corelm.callers"] == shared.attributes["corelm.rows"] == 3


def test_a_shared_call_of_one_span_is_its_child(world: World) -> None:
    engine = GatedEngine(permits=0)
    backend = Backend.from_plugin(engine, "gated", wrappers=[world.telemetry])
    with DynamicBatcher(backend) as batcher, world.tracer.start_as_current_span("user") as user:
        futures = [batcher.submit_generate([[n]], SEEDED) for n in (3, 4, 5)]
        engine.free()
        for future in futures:
            future.result(LONG)
    spans = world.spans("text")
    assert len(spans) < 3 and sum(span.attributes["corelm.rows"] for span in spans) == 3
    assert all(span.parent.span_id == user.get_span_context().span_id and not span.links for span in spans)


def test_what_the_engine_does_is_below_the_span_with_the_users_baggage(world: World) -> None:
    class Instrumented(Fake):
        """Makes a span of its own, as an instrumented HTTP client does."""

        @hookimpl
        def generate(self, request: Any) -> Any:
            with world.tracer.start_as_current_span(f"POST of {baggage.get_baggage('run')}"):
                return Fake.generate(self, request)

    token = context.attach(baggage.set_baggage("run", "r1"))
    try:
        with DynamicBatcher(Backend.from_plugin(Instrumented(), "fake", wrappers=[world.telemetry])) as batcher:
            batcher.generate([[1]], SHORT)
    finally:
        context.detach(token)
    (outer,) = world.spans("text")
    (inner,) = world.spans("POST of r1")
    assert inner.parent.span_id == outer.context.span_id


def test_a_failure_is_on_the_span_and_in_the_duration_and_a_retry_is_counted(world: World) -> None:
    left = [OSError("lost")]

    def bend(result: Any) -> Any:
        if left:
            raise left.pop()
        return result

    Backend.from_plugin(Fake(bend), "fake", wrappers=[world.telemetry], retry=2).generate([[1]], SHORT)
    failed, made = world.spans()
    assert failed.status.status_code is trace.StatusCode.ERROR and failed.attributes["error.type"] == "OSError"
    assert "lost" in failed.status.description
    assert "gen_ai.usage.output_tokens" not in failed.attributes and made.attributes["corelm.attempt"] == 2
    points = world.metrics()["gen_ai.client.operation.duration"].data.data_points
    assert {point.attributes.get("error.type"): point.count for point in points} == {"OSError": 1, None: 1}
    (retries,) = world.metrics()["corelm.client.retries"].data.data_points
    assert retries.value == 1


def test_rows_that_failed_are_counted(world: World) -> None:
    def bend(batch: Any) -> Any:
        if not hasattr(batch, "finish_reasons"):
            return batch
        none = corelm.Ragged.from_list([[], [3, 3]])
        return replace(
            batch,
            ids=none,
            logprobs=corelm.Ragged(-torch.ones(2), none.lengths),
            finish_reasons=("error", "length"),
            errors=("odd", ""),
        )

    Backend.from_plugin(Fake(bend), "fake", wrappers=[world.telemetry]).generate([[1], [3]], SHORT, on_error="skip")
    (span,) = world.spans()
    assert span.attributes["corelm.failed_rows"] == 1
    assert span.attributes["gen_ai.response.finish_reasons"] == ("error", "length")


def test_many_rows_have_each_reason_once(world: World) -> None:
    backend = Backend.from_plugin(Fake(), "fake", wrappers=[world.telemetry])
    backend.generate([[3]] * 500, SHORT)
    (span,) = world.spans()
    assert span.attributes["gen_ai.response.finish_reasons"] == ("length",)


def test_no_text_and_no_secret_of_a_url_is_reported(world: World) -> None:
    backend = Backend.from_plugin(
        ToyBackend.open(), "toy", model_name="http://me:hunter2@host/v1?key=hunter2", wrappers=[world.telemetry]
    )
    policy = corelm.LLMPolicy(backend, input_mode="text", sampling_params={"max_new_tokens": 30})
    answer = policy(TensorDict(text=["xylophone"]), seed=1)["text"].response[0]
    told = "\n".join(span.to_json() for span in world.spans()) + str(world.metrics())
    assert "host/v1" in told and "hunter2" not in told
    assert "xylophone" not in told and len(answer) > 3 and answer not in told

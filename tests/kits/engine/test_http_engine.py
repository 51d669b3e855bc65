"""`HttpEngine` with a server that spells numbers: rows, failures, streams, aborts and the options of ``open``."""

from __future__ import annotations

import inspect
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from corelm.errors import (
    BackendClosedError,
    BackendTimeoutError,
    EngineError,
    InvalidRequestError,
    StaleWeightsError,
)
from corelm.spec import (
    AbortRequest,
    Capabilities,
    Deadline,
    GenerateRequest,
    HealthRequest,
    RowAnswer,
    RowFailure,
)
from corelm_engine_kit import AccessError, HttpEngine, HttpOptions, ReplyStreams, RowError, SoFar, takes_http_options
from helpers.http_clients import KEY
from helpers.http_server import Reply, Request, event_stream, held, json_reply, raw
from helpers.requests import generation
from helpers.tiny_models import tiny_tokenizer

INFO = SimpleNamespace(capabilities=Capabilities(vocab_size=100, max_context=64), tokenizer=tiny_tokenizer())


class Engine(HttpEngine):
    rows_path, id_field, health_path = "/rows", "id", "/health"

    def is_reply_to(self, payload: Any, reply: Any) -> bool:
        return bool(reply.get("id") == payload["id"])


class Streams(ReplyStreams):
    def joined(self, reply: Any, event: Any) -> Any:
        return event

    def read(self, row: int, reply: Any) -> RowAnswer | SoFar:
        ids = reply["ids"]
        return parse(row, reply, False) if reply["ends"] else SoFar(ids, lambda first, end: [-1.0] * (end - first))


def parse(row: int, reply: Any, aborted: bool) -> RowAnswer:
    if reply["ids"] == [13]:
        raise RowError(f"13 is no answer, says {KEY}")
    return RowAnswer(reply["ids"], [-1.0] * len(reply["ids"]), "length")


def spell(request: Request) -> Reply:
    if request.path == "/health":
        return raw(b"")
    body: Any = request.body
    if body["n"] < 0:
        return json_reply({"error": "negative"}, 400)
    reply = {"id": body["id"], "ids": [body["n"]], "ends": True}
    return (
        event_stream([{**reply, "ends": False}, {**reply, "ids": [body["n"]] * 2}])
        if "stream" in body
        else json_reply(reply)
    )


def request(count: int, **fields: Any) -> GenerateRequest:
    return generation([[5]] * count, max_new_tokens=2, **fields)


def test_rows_keep_their_numbers_and_fail_alone(connect, serve):
    engine = Engine(connect(serve(spell), api_key=KEY), INFO)
    payloads: dict[int, Any] = {0: {"n": 7}, 1: RowFailure("it has no text"), 3: {"n": -1}, 4: {"n": 13}, 5: {"n": 8}}
    asked = request(6)
    found = engine.map_rows(asked, payloads, parse)
    assert [*found] == [*payloads] and found[1] == payloads[1]
    assert (found[0], found[5]) == (RowAnswer([7], [-1.0], "length"), RowAnswer([8], [-1.0], "length"))
    assert isinstance(found[3], RowFailure) and "negative" in found[3].why
    assert isinstance(found[4], RowFailure) and "13 is no answer, says ***" in found[4].why
    assert engine.map_rows(asked, {}, parse) == {}


def test_answers_are_cut_after_the_token_that_ends_them_and_checked_against_the_request(connect, serve):
    engine = Engine(connect(serve(lambda sent: json_reply({**sent.body}))), INFO)
    told = [([5, 9, 6], "length"), ([5, 6], "stop"), ([5, 6], "length"), ([9], "stop"), ([5, 100, 6], "length")]
    payloads = {row: {"ids": ids, "reason": reason} for row, (ids, reason) in enumerate(told)}

    def read(reply: Any) -> RowAnswer:
        return RowAnswer(reply["ids"], [-1.0] * len(reply["ids"]), reply["reason"])

    asked = generation([[5]] * len(told), max_new_tokens=3, stop_ids=frozenset({9}))
    found = engine.answer_rows(asked, payloads, read)
    assert found.ids.tolist() == [[5, 9], [], [], [9], []] and found.logprobs is not None
    assert found.logprobs.lengths.tolist() == found.ids.lengths.tolist()
    assert found.finish_reasons == ("stop", "error", "error", "stop", "error")
    assert found.errors is not None
    for error, said in zip(found.errors, ["", "not a stop id", "but 3 were asked", "", "vocabulary"], strict=True):
        assert said in error and bool(said) == bool(error)
    backwards = engine.answer_rows(asked, dict(reversed(payloads.items())), read)
    assert backwards.ids.tolist() == found.ids.tolist() and backwards.errors == found.errors
    for others in ({row: payloads[row] for row in (0, 1, 2, 3)}, {**payloads, 5: payloads[0]}):
        with pytest.raises(ValueError, match="a payload for each of 5 rows"):
            engine.answer_rows(asked, others, read)
    without = engine.answer_rows(
        generation([[5]], max_new_tokens=1, logprobs="none"),
        {0: {"ids": [5]}},
        lambda reply: RowAnswer(reply["ids"], None, "length"),  # type: ignore[arg-type]
    )
    assert without.ids.tolist() == [[5]] and without.logprobs is None and without.errors is None


@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize(
    "error",
    [
        RowFailure("no answer"),
        RowError("no answer"),
        EngineError("no answer"),
        InvalidRequestError("no answer"),
        ZeroDivisionError("no answer"),
        BackendClosedError("no answer"),
        BackendTimeoutError("no answer"),
        StaleWeightsError("no answer"),
        AccessError("no answer"),
        EngineError("no answer", usable=False),
    ],
    ids=repr,
)
def test_a_reply_that_holds_no_answer_fails_its_row_alone_unless_it_is_about_the_server(connect, serve, error, row):
    engine = Engine(connect(serve(spell)), INFO)

    def read(reply: Any) -> RowAnswer | RowFailure:
        if reply["ids"] != [row]:
            return RowAnswer(reply["ids"], [-1.0], "stop")
        if isinstance(error, RowFailure):
            return error
        raise error

    asked = generation([[5]] * 3, max_new_tokens=2, stop_ids=frozenset(range(3)))
    about_server = isinstance(error, BackendClosedError | BackendTimeoutError | StaleWeightsError | AccessError)
    about_server |= getattr(error, "usable", None) is False
    with pytest.raises(type(error)) if about_server else nullcontext():
        found = engine.answer_rows(asked, {each: {"n": each} for each in range(3)}, read)
        assert found.ids.tolist() == [[each] if each != row else [] for each in range(3)] and found.errors is not None
        assert all(("no answer" in said) == (each == row) for each, said in enumerate(found.errors))


def test_a_server_that_does_not_serve_fails_the_call(connect, serve):
    engine = Engine(connect(serve(lambda request: json_reply({}, 500)), max_retries=0), INFO)
    with pytest.raises(EngineError, match="status 500"):
        engine.map_rows(request(1), {0: {"n": 7}}, parse)
    assert engine.health(HealthRequest()) is False


@pytest.mark.parametrize(("status", "of_its_row"), [(400, True), (500, True), (401, False), (429, False), (503, False)])
def test_what_a_healthy_server_refuses_each_time_is_a_failure_of_the_row_or_of_the_call(
    connect, serve, status, of_its_row
):
    refuse = lambda request: raw(b"") if request.path == "/health" else json_reply({"error": "no"}, status)  # noqa: E731
    engine = Engine(connect(serve(refuse), max_retries=0), INFO)
    for payloads in ({0: {"n": 7}}, {0: {"n": 7}, 1: {"n": 8}}):
        with nullcontext() if of_its_row else pytest.raises(EngineError, match=str(status)):
            found = engine.map_rows(request(2), payloads, parse)
            assert [*found] == [*payloads] and all(isinstance(each, RowFailure) for each in found.values())
    assert engine.health(HealthRequest())


def test_streams_hand_over_what_is_new_of_their_own_row(connect, serve):
    chunks: list[Any] = []
    asked = request(3, on_tokens=chunks.append)
    engine = Engine(connect(serve(spell)), INFO)
    found = engine.map_rows(asked, {2: {"n": 7, "stream": True}}, parse, Streams(asked, tiny_tokenizer()))
    assert found == {2: RowAnswer([7, 7], [-1.0, -1.0], "length")}
    assert [(chunk.row, list(chunk.ids), chunk.finish_reason) for chunk in chunks] == [
        (2, [7], None),
        (2, [7], "length"),
    ]


@pytest.mark.parametrize("told", [False, True])
def test_an_abort_ends_the_requests_of_that_name(connect, serve, told):
    gate = threading.Event()
    arrived = threading.Event()

    def answer(sent: Request) -> Reply:
        arrived.set()
        return held(spell(sent), gate)

    class Told(Engine):
        ends_rows = told

        def end_rows(self, ids: Any) -> None:
            gate.set()

    engine, found = Told(connect(serve(answer)), INFO), {}
    call = threading.Thread(target=lambda: found.update(engine.map_rows(request(1), {0: {"n": 7}}, parse)))
    call.start()
    assert arrived.wait(60)
    engine.abort(AbortRequest(request_ids=("another",)))
    engine.abort(AbortRequest(request_ids=("0",)))
    call.join(60)
    gate.set()
    assert found == {0: parse(0, {"ids": [7]}, True) if told else RowFailure("the request was aborted", aborted=True)}


def test_what_is_tried_out_is_a_reply_or_a_refusal_that_says_something(connect, serve):
    engine, deadline = Engine(connect(serve(spell)), INFO), Deadline(60.0)
    reply, refusal = engine.try_rows([{"n": 7}, {"n": -1}], deadline, lambda error: "negative" in str(error))
    assert reply["ids"] == [7] and isinstance(refusal, InvalidRequestError)
    with pytest.raises(InvalidRequestError):
        engine.try_rows([{"n": -1}], deadline)


# Options --------------------------------------------------------------------------------------------------------------


class Backend:
    @classmethod
    @takes_http_options
    def open(cls, model: Any = None, *, base_url: Any = None, http: HttpOptions, **others: Any) -> Any:
        return model, base_url, http, others


def test_open_lists_the_options_and_gets_them_together():
    assert [*inspect.signature(Backend.open).parameters] == [
        *("model", "base_url", "api_key", "headers", "connect_timeout", "read_timeout", "max_in_flight"),
        *("max_retries", "open_timeout", "others"),
    ]
    found = Backend.open("m", base_url="u", max_retries=2, api_key=KEY, tp_size=3)
    assert found == ("m", "u", HttpOptions(max_retries=2, api_key=KEY), {"tp_size": 3})


def test_the_client_has_the_options_and_no_v1_in_its_url(serve):
    options = HttpOptions(api_key=KEY, max_retries=0)
    client = options.client(f"{serve(lambda request: json_reply({}, 500)).url}/v1/", "NO_SUCH_KEY")
    try:
        assert not client.base_url.rstrip("/").endswith("v1")
        with pytest.raises(EngineError, match="500"), options.opening(client):
            client.get("/")
        with pytest.raises(RuntimeError, match="closed"):
            client.get("/")
    finally:
        client.close()
    with pytest.raises(InvalidRequestError) as caught:
        HttpOptions(read_timeout=0).client("http://127.0.0.1:1", "NO_SUCH_KEY")
    assert caught.value.field == "read_timeout"

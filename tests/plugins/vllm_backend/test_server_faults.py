"""The server mode against a server that misbehaves: nothing is reported that was not got. No vLLM is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import corelm
from corelm import Backend
from corelm.errors import BackendClosedError, BackendTimeoutError, CapabilityError, EngineError, InvalidRequestError
from helpers.http_server import FaultServer, Reply, Request, hang, json_reply, raw, reset
from helpers.tiny_models import tiny_model, tiny_tokenizer

Connect = Callable[..., Backend]

PROMPTS = [[5, 17, 300], [8], [40, 41]]
SAMPLING = {"max_new_tokens": 4, "seed": 1, "ignore_eos": True}


def fails(count: int, reply: Reply, row: int = 1) -> Callable[[Request], Reply | None]:
    """The first `count` requests for the prompt of that row get `reply`."""
    left = [count]

    def fault(request: Request) -> Reply | None:
        if request.method == "POST" and request.body.get("prompt") == PROMPTS[row] and left[0] > 0:
            left[0] -= 1
            return reply
        return None

    return fault


# What a server that behaves gives ------------------------------------------------------------------------------------


def test_answers_and_scores_are_the_models(connect: Connect, fake: Any) -> None:
    backend = connect()
    batch = backend.generate(PROMPTS, SAMPLING)
    assert batch.finish_reasons == ("length",) * 3 and batch.logprobs is not None
    rows = [prompt + answer for prompt, answer in zip(PROMPTS, batch.ids.tolist(), strict=True)]
    whole = backend.score_logprobs(rows).logprobs.split()
    answers = backend.score_logprobs(rows, score_from=[len(prompt) for prompt in PROMPTS]).logprobs.split()
    for number, (prompt, row) in enumerate(zip(PROMPTS, rows, strict=True)):
        expected = torch.tensor([0.0, *(fake.logprobs(row[:t])[row[t]] for t in range(1, len(row)))])
        assert torch.equal(whole[number], expected)
        assert torch.equal(batch.logprobs.split()[number], expected[len(prompt) :])
        assert torch.equal(answers[number][len(prompt) :], expected[len(prompt) :])
        assert not answers[number][: len(prompt)].any()


def test_a_row_as_long_as_the_context_is_scored(connect: Connect) -> None:
    backend = connect()
    limit = backend.capabilities.max_context
    assert limit is not None
    assert backend.score_logprobs([[7] * limit]).scored.tolist() == [[False] + [True] * (limit - 1)]


def test_what_nothing_is_asked_of_is_not_sent(connect: Connect, server: FaultServer) -> None:
    backend = connect()
    before = len(server.requests)
    assert backend.score_logprobs([[7]]).scored.tolist() == [[False]]
    assert len(server.requests) == before


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_the_mode_of_log_probs_is_found_out(connect: Connect, fake: Any, mode: str) -> None:
    fake.mode = mode
    assert connect().capabilities.generation_modes == {mode}


def test_greedy_is_certain_where_log_probs_are_processed(connect: Connect, fake: Any) -> None:
    fake.mode = "processed"
    batch = connect().generate(PROMPTS, {"max_new_tokens": 2, "temperature": 0.0}, logprobs="processed")
    assert batch.logprobs is not None and batch.logprobs.values.tolist() == [0.0] * 6


def test_a_mode_that_cannot_be_told_has_to_be_said(connect: Connect, fake: Any) -> None:
    def blur(choice: dict[str, Any]) -> None:
        for top in (choice["logprobs"] or {}).get("top_logprobs", ()):
            top.update(dict.fromkeys(top, max(top.values())))

    fake.spoil = blur
    with pytest.raises(EngineError, match="logprobs_mode='raw'"):
        connect()
    fake.fault = lambda request: (
        json_reply({"error": {"message": "too many logprobs"}}, 400) if (request.body or {}).get("logprobs") else None
    )
    with pytest.raises(EngineError, match="too many logprobs"):
        connect()
    assert connect(logprobs_mode="processed").capabilities.generation_modes == {"processed"}


def test_logits_are_not_taken_for_log_probs(connect: Connect, fake: Any) -> None:
    def shift(choice: dict[str, Any]) -> None:
        for top in (choice["logprobs"] or {}).get("top_logprobs", ()):
            top.update({token: value + 7 for token, value in top.items()})

    fake.spoil = shift
    with pytest.raises(EngineError, match="cannot be told"):
        connect()


def test_seeds_that_are_ignored_are_not_declared(connect: Connect, fake: Any) -> None:
    assert connect().capabilities.per_answer_seeds
    fake.unknown = {"seed"}
    backend = connect()
    assert not backend.capabilities.per_answer_seeds
    with pytest.raises(CapabilityError):
        backend.generate(PROMPTS, SAMPLING)


def test_parameters_that_the_server_does_not_know_are_refused(connect: Connect, fake: Any) -> None:
    fields = fake.pages["/openapi.json"]["components"]["schemas"]["CompletionRequest"]["properties"]
    del fields["min_p"], fields["min_tokens"], fields["prompt_logprobs"]
    backend = connect()
    assert not {"min_p", "min_new_tokens"} & backend.capabilities.sampling.keys() and not backend.capabilities.score
    for engine_kwargs in ({"bad_words": ["a"]}, {"echo": True}):
        with pytest.raises(InvalidRequestError) as caught:
            backend.generate(PROMPTS, SAMPLING | {"engine_kwargs": engine_kwargs})
        assert caught.value.field == "engine_kwargs"


# What is not known from the server -----------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["tokenizer", "vocab_size"])
def test_what_cannot_be_read_has_to_be_given(connect: Connect, missing: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"pass {missing}=") as caught:
        connect(**{missing: None})
    assert caught.value.field == missing


def test_a_context_that_is_not_said_has_to_be_given(connect: Connect, fake: Any) -> None:
    del fake.pages["/v1/models"]["data"][0]["max_model_len"]
    with pytest.raises(InvalidRequestError, match="pass max_context="):
        connect()
    assert connect(max_context=32).capabilities.max_context == 32


def test_a_context_longer_than_the_servers_is_refused(connect: Connect) -> None:
    with pytest.raises(InvalidRequestError, match="64"):
        connect(max_context=65)


def test_what_can_be_read_is(connect: Connect, fake: Any, tmp_path: Path) -> None:
    tiny_model(hidden_size=128, eos_token_id=[2, 9]).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    fake.pages["/v1/models"]["data"][0]["root"] = str(tmp_path)
    backend = connect(vocab_size=None, tokenizer=None)
    assert backend.capabilities.vocab_size == 512 and backend.eos_token_ids == {2, 9}
    assert backend.tokenize("Hello").ids.tolist() == [tiny_tokenizer()("Hello")["input_ids"]]


def test_one_of_several_models_has_to_be_named(connect: Connect, server: FaultServer, fake: Any) -> None:
    cards = fake.pages["/v1/models"]["data"]
    cards.append({"id": "adapter", "root": "/x", "parent": "fake"})
    connect()
    cards.append({"id": "second", "root": "/x", "max_model_len": 16})
    with pytest.raises(InvalidRequestError, match="'fake', 'adapter', 'second'"):
        connect()
    with pytest.raises(InvalidRequestError, match="'second'"):
        connect(model="third")
    backend = connect(model="second")
    assert backend.capabilities.max_context == 16
    backend.generate(PROMPTS, SAMPLING)
    assert server.requests[-1].body["model"] == "second"


def test_another_server_is_told_from_vllm(connect: Connect, fake: Any) -> None:
    fields = fake.pages["/openapi.json"]["components"]["schemas"]["CompletionRequest"]["properties"]
    del fields["return_token_ids"]
    with pytest.raises(EngineError, match="no vLLM server, or too old"):
        connect()
    fake.pages["/openapi.json"] = {"paths": {}}
    with pytest.raises(EngineError, match="no vLLM server"):
        connect()


@pytest.mark.parametrize("ignored", ["return_token_ids", "logprobs", "prompt_logprobs"])
def test_a_server_that_ignores_fields_is_told_by_what_it_answers(connect: Connect, fake: Any, ignored: str) -> None:
    # It does not describe itself either.
    del fake.pages["/openapi.json"]
    fake.unknown = {ignored}
    with pytest.raises(EngineError, match="no vLLM server, or too old"):
        connect()


def test_no_server_at_all_is_an_engine_error(connect: Connect) -> None:
    with FaultServer(lambda request: raw(b"")) as gone:
        url = gone.url
    with pytest.raises(EngineError, match=url):
        corelm.get_backend("vllm", base_url=url, max_retries=0)


def test_opening_in_vain_leaves_no_thread(connect: Connect, fake: Any) -> None:
    before = set(threading.enumerate())
    fake.pages["/openapi.json"] = {"paths": {}}
    with pytest.raises(EngineError):
        connect()
    assert not {thread for thread in set(threading.enumerate()) - before if thread.name.startswith("corelm")}


# Answers that are not ones to what was asked -------------------------------------------------------------------------


def drop(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda choice: choice.pop(name)


def put(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda choice: choice.update(values)


def in_logprobs(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda choice: change(choice["logprobs"])


WRONG_ANSWERS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no-ids": (drop("token_ids"), "no token_ids"),
    "ids-are-texts": (put(token_ids=["a"]), "no token_ids"),
    "another-prompt": (put(prompt_token_ids=[1, 2]), "another prompt"),
    "too-many": (put(token_ids=[7] * 5), "at most 4"),
    "capped": (lambda choice: choice["token_ids"].pop(), "after 3 tokens"),
    "stops-at-nothing": (put(finish_reason="stop"), "no stop id"),
    "unknown-reason": (put(finish_reason=None), "finish reason"),
    "no-log-probs": (put(logprobs=None), "no log-probs"),
    "log-probs-of-others": (in_logprobs(lambda found: found["tokens"].reverse()), "not labelled"),
    "too-few-log-probs": (in_logprobs(lambda found: found["token_logprobs"].pop()), "not as many"),
    "null": (in_logprobs(lambda found: found.update(token_logprobs=[None] * 4)), "log-prob is None"),
    "infinite": (in_logprobs(lambda found: found.update(token_logprobs=[-9999.0] * 4)), "-9999"),
}


@pytest.mark.parametrize("fault", WRONG_ANSWERS)
def test_a_wrong_answer_is_not_reported(connect: Connect, fake: Any, fault: str) -> None:
    backend = connect()
    fake.spoil, message = WRONG_ANSWERS[fault]
    with pytest.raises(EngineError, match=message):
        backend.generate(PROMPTS, SAMPLING)
    fake.spoil = put()
    assert backend.generate(PROMPTS, SAMPLING).ids.lengths.tolist() == [4, 4, 4]


def wrong_id(choice: dict[str, Any]) -> None:
    choice["prompt_logprobs"][-1] = {"3": {"logprob": -1.0}}


WRONG_SCORES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "none": (drop("prompt_logprobs"), "prompt_logprobs"),
    "too-few": (lambda choice: choice["prompt_logprobs"].pop(), "one for every token"),
    "of-another-id": (wrong_id, "do not name id"),
    "without-the-last": (in_logprobs(lambda found: found.update(top_logprobs=[{}])), "logprob_token_ids"),
    "another-prompt": (put(prompt_token_ids=[1, 2]), "another prompt"),
}


@pytest.mark.parametrize("fault", WRONG_SCORES)
def test_a_wrong_score_is_not_reported(connect: Connect, fake: Any, fault: str) -> None:
    backend = connect()
    fake.spoil, message = WRONG_SCORES[fault]
    with pytest.raises(EngineError, match=message):
        backend.score_logprobs([[5, 17, 300, 2]])


def test_stop_ids_and_stop_strings_that_are_ignored_are_noticed(connect: Connect, fake: Any) -> None:
    backend = connect()
    (free,) = backend.generate(PROMPTS[:1], SAMPLING).ids.tolist()
    fake.unknown = {"stop_token_ids", "stop"}
    with pytest.raises(EngineError, match=f"stop id {free[1]}"):
        backend.generate(PROMPTS[:1], SAMPLING | {"stop_token_ids": [free[1]]})
    text = backend.detokenize([free[:2]])[0]
    with pytest.raises(EngineError, match="stop string"):
        backend.generate(PROMPTS[:1], SAMPLING | {"stop": [text]})
    fake.unknown = set()
    assert backend.generate(PROMPTS[:1], SAMPLING | {"stop": [text]}).finish_reasons == ("stop",)
    assert backend.generate(PROMPTS[:1], SAMPLING | {"stop_token_ids": [free[1]]}).ids.tolist() == [free[:2]]


def test_an_end_before_the_least_length_is_noticed(connect: Connect, fake: Any) -> None:
    backend = connect()
    (free,) = backend.generate(PROMPTS[:1], SAMPLING).ids.tolist()
    fake.unknown = {"min_tokens"}
    sampling = {"max_new_tokens": 4, "seed": 1, "min_new_tokens": 3, "stop_token_ids": [free[1]]}
    with pytest.raises(EngineError, match="at least 3"):
        backend.generate(PROMPTS[:1], sampling, logprobs="none")


def test_eos_cannot_be_free_while_other_ends_are_forbidden(connect: Connect, server: FaultServer) -> None:
    backend = connect()
    with pytest.raises(CapabilityError, match="ignore_eos"):
        backend.generate(PROMPTS, SAMPLING | {"min_new_tokens": 2, "stop_token_ids": [9]}, logprobs="none")
    backend.generate(PROMPTS[:1], SAMPLING | {"min_new_tokens": 2}, logprobs="none")
    assert server.requests[-1].body["min_tokens"] == 0


@pytest.mark.parametrize("reply", [[], {"choices": []}, {"choices": [1]}, {"object": "error"}, "text", 7])
def test_json_that_is_no_completion_is_an_engine_error(connect: Connect, fake: Any, reply: Any) -> None:
    backend = connect()
    fake.fault = fails(1, json_reply(reply))
    with pytest.raises(EngineError, match="no completion"):
        backend.generate(PROMPTS, SAMPLING)


# Faults of a row, and of all of them ---------------------------------------------------------------------------------

PASSING = {
    "429": json_reply({"error": {"message": "busy"}}, 429, {"Retry-After": "0"}),
    "500": json_reply({"error": {"message": "step failed"}}, 500),
    "503": raw(b"", 503),
    "garbage": raw(b"<html>\xff"),
    "half": raw(b'{"choices": [{"token_ids": [1,'),
    "reset": reset(),
}


@pytest.mark.parametrize("fault", PASSING)
def test_what_passes_is_not_noticed(connect: Connect, fake: Any, fault: str) -> None:
    backend = connect(max_retries=2)
    expected = backend.generate(PROMPTS, SAMPLING)
    fake.fault = fails(1, PASSING[fault])
    found = backend.generate(PROMPTS, SAMPLING)
    assert found.ids.tolist() == expected.ids.tolist() and found.finish_reasons == expected.finish_reasons


@pytest.mark.parametrize("fault", ["400", "500"])
def test_a_row_fails_alone(connect: Connect, fake: Any, fault: str) -> None:
    backend = connect(max_retries=0)
    expected = backend.generate(PROMPTS, SAMPLING)
    reply = json_reply({"error": {"message": "this one row"}}, int(fault))
    fake.fault = fails(1, reply)
    batch = backend.generate(PROMPTS, SAMPLING, on_error="skip")
    assert batch.finish_reasons == ("length", "error", "length") and batch.errors is not None
    assert "this one row" in batch.errors[1] and batch.errors[0] == batch.errors[2] == ""
    assert [batch.ids.tolist()[row] for row in (0, 2)] == [expected.ids.tolist()[row] for row in (0, 2)]
    fake.fault = fails(1, reply)
    with pytest.raises(EngineError, match="this one row") as caught:
        backend.generate(PROMPTS, SAMPLING)
    assert caught.value.rows == (1,)


def test_a_sequence_fails_alone(connect: Connect, fake: Any) -> None:
    backend = connect()
    fake.fault = fails(1, json_reply({"error": {"message": "this one row"}}, 400))
    rows = [[*prompt, 3] for prompt in PROMPTS]
    batch = backend.score_logprobs(rows, on_error="skip")
    assert batch.errors is not None and [bool(text) for text in batch.errors] == [False, True, False]
    assert [any(row) for row in batch.scored.tolist()] == [True, False, True]


def test_if_no_row_is_served_the_call_fails(connect: Connect, server: FaultServer, fake: Any) -> None:
    backend = connect(max_retries=0)
    fake.fault = lambda request: json_reply({"error": {"message": "engine is dead"}}, 500)
    with pytest.raises(EngineError, match="engine is dead"):
        backend.generate(PROMPTS, SAMPLING, on_error="skip")
    assert not backend.health()


def test_a_server_that_hangs_ends_in_time_and_leaves_nothing(connect: Connect, server: FaultServer, fake: Any) -> None:
    backend = connect()
    fake.fault = lambda request: hang() if request.path == "/v1/completions" else None
    for call in (
        lambda: backend.generate(PROMPTS, SAMPLING, timeout=0.3),
        lambda: backend.score_logprobs([[*prompt, 3] for prompt in PROMPTS], timeout=0.3),
    ):
        with pytest.raises(BackendTimeoutError):
            call()
    server.wait_for(lambda: server.in_flight == 0)
    fake.fault = lambda request: None
    assert backend.generate(PROMPTS, SAMPLING).finish_reasons == ("length",) * 3


def test_closing_ends_a_call_with_a_typed_error(connect: Connect, server: FaultServer, fake: Any) -> None:
    backend = connect()
    fake.fault = lambda request: hang() if request.path == "/v1/completions" else None
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(backend.generate, PROMPTS, SAMPLING)
        server.wait_for(lambda: server.in_flight == 3)
        backend.close()
        with pytest.raises(BackendClosedError):
            future.result(30)
    server.wait_for(lambda: server.in_flight == 0)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("corelm-http")]


def test_abort_ends_what_it_names_without_a_route_for_it(connect: Connect, server: FaultServer, fake: Any) -> None:
    backend = connect()
    fake.fault = fails(1, hang())
    before = len(server.requests)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(backend.generate, PROMPTS, SAMPLING, request_ids=["a", "b", "c"])
        # All three came, and two are done.
        server.wait_for(lambda: len(server.requests) == before + 3 and server.in_flight == 1)
        backend.abort(["b"])
        batch = future.result(30)
    assert batch.finish_reasons == ("length", "abort", "length") and batch.ids.lengths.tolist() == [4, 0, 4]
    server.wait_for(lambda: server.given_up == 1)


# The key -------------------------------------------------------------------------------------------------------------


def test_the_key_comes_from_the_environment_and_is_never_told(
    connect: Connect, server: FaultServer, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "a-secret-of-this-test")
    backend = connect(max_retries=0)
    assert server.requests[-1].headers["Authorization"] == "Bearer a-secret-of-this-test"
    fake.fault = lambda request: json_reply({"error": f"bad key {request.headers['Authorization']}"}, 401)
    with pytest.raises(EngineError, match="401") as caught:
        backend.generate(PROMPTS, SAMPLING)
    assert "a-secret" not in str(caught.value) + repr(backend) + repr(backend.provenance)


# Weights -------------------------------------------------------------------------------------------------------------


class WithWeights:
    """The routes of vLLM's development mode, for a `FakeVLLM`."""

    def __init__(self, fake: Any) -> None:
        self.version, self.cache_kept, self.calls = "default", False, list[str]()
        routes = ("/collective_rpc", "/pause", "/reset_prefix_cache", "/resume", "/update_weight_version")
        fake.pages["/openapi.json"]["paths"] |= {route: {} for route in (*routes, "/weight_info")}
        self._routes = routes
        fake.fault = self

    def __call__(self, request: Request) -> Reply | None:
        path = request.path.partition("?")[0]
        if path == "/weight_info":
            return json_reply({"weight_version": self.version})
        if path not in self._routes:
            return None
        self.calls.append(request.path)
        if path == "/update_weight_version":
            self.version = request.body["new_version"]
        if path == "/collective_rpc" and self.version == "break":
            return json_reply({"error": "cannot"}, 500)
        return json_reply({"success": not self.cache_kept} if path == "/reset_prefix_cache" else {})


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tiny_model(hidden_size=128).save_pretrained(tmp_path)
    return tmp_path


def test_without_the_routes_weights_cannot_be_changed(connect: Connect, checkpoint: Path) -> None:
    backend = connect()
    assert not backend.capabilities.update_weights
    with pytest.raises(CapabilityError):
        backend.update_weights(checkpoint)


def test_weights_are_loaded_while_nothing_runs_and_the_cache_is_emptied(
    connect: Connect, fake: Any, checkpoint: Path
) -> None:
    weights = WithWeights(fake)
    backend = connect()
    assert backend.generate(PROMPTS, SAMPLING).weight_versions == ("0",) * 3
    assert backend.update_weights(checkpoint, version="tuned") == "tuned"
    assert weights.calls == [
        "/pause?mode=wait",
        "/update_weight_version",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/update_weight_version",
        "/resume",
    ]
    assert backend.generate(PROMPTS, SAMPLING).weight_versions == ("tuned",) * 3


def test_a_server_that_lost_the_weights_is_not_labelled_with_them(
    connect: Connect, fake: Any, checkpoint: Path
) -> None:
    weights = WithWeights(fake)
    backend = connect()
    backend.update_weights(checkpoint, version="tuned")
    # As after a restart.
    weights.version = "default"
    for call in (
        lambda: backend.generate(PROMPTS, SAMPLING),
        lambda: backend.generate(PROMPTS, SAMPLING),
        lambda: backend.score_logprobs([[5, 6, 7]]),
    ):
        with pytest.raises(EngineError, match="update_weights again"):
            call()
    backend.update_weights(checkpoint, version="again")
    assert backend.generate(PROMPTS, SAMPLING).weight_versions == ("again",) * 3


def test_weights_that_somebody_else_loads_give_rows_their_name(connect: Connect, fake: Any) -> None:
    weights = WithWeights(fake)
    backend = connect()
    weights.version = "theirs"
    assert backend.generate(PROMPTS, SAMPLING).weight_versions == ("theirs",) * 3

    def meanwhile(choice: dict[str, Any]) -> None:
        weights.version = "later"

    fake.spoil = meanwhile
    with pytest.raises(EngineError, match="meanwhile"):
        backend.generate(PROMPTS, SAMPLING)
    assert backend.score_logprobs([[5, 6, 7]]).weight_versions == ("later",)


def test_weights_that_were_not_loaded_are_not_in_force(connect: Connect, fake: Any, checkpoint: Path) -> None:
    weights = WithWeights(fake)
    backend = connect(max_retries=0)
    weights.cache_kept = True
    with pytest.raises(EngineError, match="prefix cache"):
        backend.update_weights(checkpoint, version="tuned")
    assert weights.calls[-1] == "/resume" and backend.weight_version == "0"
    with pytest.raises(EngineError, match="update_weights again"):
        backend.generate(PROMPTS, SAMPLING)


def test_weights_that_no_server_could_read_are_refused(connect: Connect, fake: Any, tmp_path: Path) -> None:
    weights = WithWeights(fake)
    backend = connect()
    with pytest.raises(InvalidRequestError, match="safetensors"):
        backend.update_weights(tmp_path / "nothing")
    with pytest.raises(CapabilityError, match="path"):
        backend.update_weights({})
    assert weights.calls == [] and backend.generate(PROMPTS, SAMPLING).weight_versions == ("0",) * 3

"""Requests to a fake server, replies that are rejected, and failures of the server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from corelm.errors import EngineError, InvalidRequestError
from helpers.each import case
from helpers.http_server import FaultServer, hang, held, json_reply, reset
from helpers.tiny_models import VOCAB, tiny_tokenizer, tokenizer_that_names_only_eos

Spoil = Callable[[dict[str, Any]], Any]


# Requests -------------------------------------------------------------------------------------------------------------


def test_every_row_is_one_request_with_a_unique_id(backend, fake):
    batch = backend.generate([[5, 6], [7]], {"max_new_tokens": 3, "num_samples": 2, "ignore_eos": True})
    assert sorted(body["input_ids"] for body in fake.requests) == [[5, 6], [5, 6], [7], [7]]
    assert {len(body["rid"]) for body in fake.requests} == {32} and len({body["rid"] for body in fake.requests}) == 4
    assert batch.ids.lengths.tolist() == [3] * 4


def test_sampled_tokens_come_with_their_log_probs(backend, fake):
    batch = backend.generate([[5], [7]], {"max_new_tokens": 4, "temperature": 0.5}, logprobs="processed")
    assert (batch.mode, batch.temperature) == ("processed", 0.5)
    for prompt, ids, found in zip([5, 7], batch.ids.tolist(), batch.logprobs.split(), strict=True):
        expected = [fake.logprobs(a, 0.5)[b] for a, b in zip([prompt, *ids], ids, strict=False)]
        torch.testing.assert_close(found, torch.stack(expected))


def test_without_a_limit_the_answer_may_fill_the_context(backend, fake):
    backend.generate([[5] * 60], {"max_new_tokens": None, "ignore_eos": True})
    assert fake.requests[0]["sampling_params"]["max_new_tokens"] == backend.capabilities.max_context - 60


def test_scoring_samples_nothing(backend, fake):
    rows = [[5, 9, 300], [7], [VOCAB - 1, 0, VOCAB - 1]]
    batch = backend.score_logprobs(rows)
    assert [body["sampling_params"]["max_new_tokens"] for body in fake.requests] == [0, 0, 0]
    for row, found, scored in zip(rows, batch.logprobs.split(), batch.scored.split(), strict=True):
        assert scored.tolist() == [False] + [True] * (len(row) - 1)
        expected = [fake.logprobs(a)[b] for a, b in pairwise(row)]
        torch.testing.assert_close(found[1:], torch.tensor(expected))


def test_the_most_probable_ids_come_with_the_scores(backend, fake):
    fake.logits[9, VOCAB - 1] = 99.0  # SGLang writes this id as 0 in a prompt, but not as the most probable one
    rows, starts = [[5, 9, 300], [7], [VOCAB - 1, 0, VOCAB - 1], [4, 4, 4]], [1, 1, 2, 3]
    batch = backend.score_logprobs(rows, score_from=starts, return_argmax=True)
    assert [body["top_logprobs_num"] for body in fake.requests] == [1] * len(fake.requests)
    for row, start, found in zip(rows, starts, batch.argmax.tolist(), strict=True):
        assert found == [-1] * min(start, len(row)) + fake.logits[row[start - 1 : -1]].argmax(-1).tolist()
    assert batch.argmax.tolist()[0][2] == VOCAB - 1


def test_scores_are_requested_from_one_position_earlier(backend, fake):
    batch = backend.score_logprobs([[5, 9, 300, 4], [5, 6]], score_from=[3, 2])
    assert {len(body["input_ids"]): body["logprob_start_len"] for body in fake.requests} == {4: 2, 2: 1}
    assert batch.scored.tolist() == [[False] * 3 + [True], [False, False]]
    assert batch.logprobs.tolist()[0][3] == pytest.approx(float(fake.logprobs(300)[4]))


def test_an_answer_is_cut_at_a_stop_id_that_the_server_ignored(backend, fake):
    free = backend.generate([[5]], {"max_new_tokens": 9, "temperature": 0, "ignore_eos": True}).ids.tolist()[0]
    stop = free[4]
    first = free.index(stop) + 1
    batch = backend.generate(
        [[5]], {"max_new_tokens": 9, "temperature": 0, "ignore_eos": True, "stop_token_ids": [stop]}
    )
    # The server would have stopped at EOS too, so it was told to go on.
    assert fake.requests[-1]["sampling_params"]["ignore_eos"] is True
    assert batch.ids.tolist() == [free[:first]] and batch.finish_reasons == ("stop",)
    assert batch.logprobs.lengths.tolist() == [first]


# Implausible replies --------------------------------------------------------------------------------------------------


def meta(**changes: Any) -> Spoil:
    return lambda reply: reply["meta_info"].update(changes)


def logprob_entry(field: str, position: int, index: int, value: Any) -> Spoil:
    """Replace one item of an entry ``[logprob, id, text]``."""
    return lambda reply: reply["meta_info"][field][position].__setitem__(index, value)


SPOILT_ANSWERS: dict[str, tuple[Spoil, str]] = {
    "too-few-log-probs": (
        lambda reply: reply["meta_info"]["output_token_logprobs"].pop(),
        "has 1 entries for 2 tokens",
    ),
    "log-probs-of-other-ids": (lambda reply: reply["output_ids"].reverse(), "is about id"),
    "no-log-probs": (meta(output_token_logprobs=None), "has 0 entries"),
    "log-prob-is-none": (logprob_entry("output_token_logprobs", 1, 0, None), "log-prob at position 1 is None"),
    "nan-logits": (meta(finish_reason={"type": "stop", "matched": "NaN happened"}), "NaN happened"),
    "unknown-finish-reason": (meta(finish_reason={"type": "tired"}), "'tired'"),
    "no-meta-info": (lambda reply: reply.pop("meta_info"), "not built as expected.*meta_info"),
    "other-weights": (meta(weight_version="another"), "'another'"),
    "mixed-weights": (meta(weight_versions=[{"version": "a"}, {"version": "default"}]), "'a'"),
    "no-weight-version": (lambda reply: reply["meta_info"].pop("weight_version"), "weights"),
}


def test_an_implausible_answer_is_an_error(backend, fake):
    for defect in SPOILT_ANSWERS:
        with case(defect):
            fake.spoil, message = SPOILT_ANSWERS[defect]
            fake.logits[5, 6] = fake.logits[6, 7] = 99.0
            with pytest.raises(EngineError, match=message):
                backend.generate([[5]], {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True})


SPOILT_SCORES: dict[str, tuple[Spoil, str]] = {
    "too-few-log-probs": (lambda reply: reply["meta_info"]["input_token_logprobs"].pop(), "has 2 entries for 3 tokens"),
    "log-probs-of-other-ids": (logprob_entry("input_token_logprobs", 1, 1, 77), "about id 77 at position 1"),
    "first-is-a-number": (logprob_entry("input_token_logprobs", 0, 0, -1.0), "starts with a number"),
    "log-prob-is-none": (logprob_entry("input_token_logprobs", 1, 0, None), "log-prob at position 0 is None"),
    "no-log-probs": (lambda reply: reply["meta_info"].pop("input_token_logprobs"), "not built as expected"),
    "aborted": (meta(finish_reason={"type": "abort"}), "row 0: the request was aborted"),
    "other-weights": (meta(weight_version="another"), "'another'"),
}


def test_implausible_scores_are_an_error(backend, fake):
    for defect in SPOILT_SCORES:
        with case(defect):
            fake.spoil, message = SPOILT_SCORES[defect]
            with pytest.raises(EngineError, match=message):
                backend.score_logprobs([[5, 6, 7]])


def top_entry(position: int, value: Any) -> Spoil:
    return lambda reply: reply["meta_info"]["input_top_logprobs"].__setitem__(position, value)


SPOILT_ARGMAX: dict[str, tuple[Spoil, str]] = {
    "none": (lambda reply: reply["meta_info"].pop("input_top_logprobs"), "leave out return_argmax=True"),
    "too-few": (lambda reply: reply["meta_info"]["input_top_logprobs"].pop(), "leave out return_argmax=True"),
    "no-candidate": (top_entry(1, []), "leave out return_argmax=True"),
    "not-an-id": (top_entry(1, [[-0.5, "6", None]]), "not a list of integers"),
    "outside-the-vocabulary": (top_entry(1, [[-0.5, VOCAB, None]]), "outside the vocabulary"),
    "log-prob-is-none": (top_entry(1, [[None, 3, None]]), "log-prob at position 0 is None"),
    "less-probable": (top_entry(2, [[-50.0, 3, None]]), "names id 3 .* at position 1, but id 7 has"),
    "two-log-probs-of-one-id": (top_entry(2, [[-0.001, 7, None]]), "names id 7 .* at position 1, but id 7 has"),
}


def test_an_id_that_is_not_the_most_probable_one_is_an_error(backend, fake):
    for defect in SPOILT_ARGMAX:
        with case(defect):
            fake.spoil, message = SPOILT_ARGMAX[defect]
            with pytest.raises(EngineError, match=message):
                backend.score_logprobs([[5, 6, 7]], return_argmax=True)


def test_a_stop_string_that_is_a_piece_of_a_special_token_does_not_stop_the_server(backend, fake):
    """SGLang looks for stop strings in a text that shows special tokens; the text of the answer does not."""
    (special,) = tiny_tokenizer().encode("<|im_start|>", add_special_tokens=False)
    fake.logits[5, special] = fake.logits[special, 6] = 99.0
    batch = backend.generate([[5]], {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True, "stop": ["im_start"]})
    assert batch.finish_reasons == ("length",) and batch.ids.tolist()[0][:2] == [special, 6]


def test_a_stop_string_with_a_special_token_is_refused_even_if_the_token_has_no_name(connect):
    backend = connect(tokenizer=tokenizer_that_names_only_eos())
    with pytest.raises(InvalidRequestError, match=r"<\|im_start\|>.* special token.*stop_token_ids") as caught:
        backend.generate([[5]], {"max_new_tokens": 3, "stop": ["<|im_start|>"]})
    assert caught.value.field == "stop"


def test_no_message_repeats_a_key_that_a_reply_holds(connect, fake, other_folder):
    key = "a-secret-of-this-test"
    backend = connect(api_key=key)
    fake.fault = lambda request: json_reply({"message": key}) if request.path.startswith("/update") else None
    with pytest.raises(EngineError, match=r"did not load the weights: \{'message': '\*\*\*'\}"):
        backend.update_weights(other_folder)
    fake.weight_label = key
    result = backend.generate([[5]], {"max_new_tokens": 2}, on_error="skip")
    assert "answers with weights '***'" in result.errors[0]


# Failures of the server -----------------------------------------------------------------------------------------------


def test_a_request_refused_as_duplicate_is_sent_under_a_new_id(server: FaultServer, connect, fake):
    backend = connect()
    running: set[str] = set()

    def fault(request):
        if request.path != "/generate":
            return None
        rid = request.body["rid"]
        if rid in running:
            return json_reply({"error": {"message": f"Duplicate request ID detected: {rid}"}}, 400)
        running.add(rid)
        return reset() if len(running) == 1 else None

    fake.fault = fault
    batch = backend.generate([[5], [6]], {"max_new_tokens": 2, "ignore_eos": True}, timeout=30.0)
    assert batch.finish_reasons == ("length", "length") and len(running) == 3


def test_a_server_that_is_gone_raises_and_is_not_healthy(fake, connect):
    backend = connect(max_retries=0)
    assert backend.health()
    fake.fault = lambda request: reset()
    with pytest.raises(EngineError) as caught:
        backend.generate([[5]], {"max_new_tokens": 2})
    assert caught.value.usable is False and not backend.health()


def test_a_hung_scheduler_fails_the_call_although_the_server_answers(fake, connect, monkeypatch):
    monkeypatch.setattr("corelm_engine_kit.http_engine.HEALTH_TIMEOUT", 0.2)
    backend = connect(max_retries=0)
    faults = {"/generate": json_reply({"error": "the scheduler hangs"}, 500), "/health_generate": hang()}
    fake.fault = lambda request: faults.get(request.path)
    with pytest.raises(EngineError):
        backend.generate([[5], [6]], {"max_new_tokens": 2}, on_error="skip")
    assert backend.health()


def test_the_answer_to_another_request_is_never_reported(connect, fake):
    backend = connect(max_retries=1)
    fake.spoil = meta(id="another")
    with pytest.raises(EngineError, match="does not name this request"):
        backend.generate([[5]], {"max_new_tokens": 2})
    with pytest.raises(EngineError, match="does not name this request"):
        backend.score_logprobs([[5, 6]])


def test_abort_uses_the_servers_ids_and_keeps_the_partial_answer(server: FaultServer, connect, fake):
    backend, gate, aborted = connect(), threading.Event(), []

    def fault(request):
        if request.path == "/abort_request":
            aborted.append(request.body["rid"])
            gate.set()
        elif request.path == "/generate" and request.body["input_ids"] == [5]:
            partial = {
                "output_ids": [8],
                "meta_info": {
                    "id": request.body["rid"],
                    "weight_version": "default",
                    "finish_reason": {"type": "abort"},
                },
            }
            partial["meta_info"]["output_token_logprobs"] = [[-1.5, 8, None]]
            fake.requests.append(request.body)
            return held(json_reply(partial), gate)
        return None

    fake.fault, batches = fault, []
    fake.requests.clear()
    sampling = {"max_new_tokens": 9, "ignore_eos": True}
    before = len(server.requests)
    thread = threading.Thread(
        target=lambda: batches.append(backend.generate([[5], [6]], sampling, request_ids=["one", "one more"]))
    )
    thread.start()
    # Not `fake.requests`: the server appends to it after its last notification.
    server.wait_for(lambda: server.paths()[before:] == ["/generate"] * 2)
    backend.abort(["one"])
    thread.join()
    assert batches[0].finish_reasons == ("abort", "length")
    assert batches[0].ids.tolist()[0] == [8] and batches[0].logprobs.tolist()[0] == [-1.5]
    # A reminder may be on its way when the answer arrives.
    assert set(aborted) == {body["rid"] for body in fake.requests if body["input_ids"] == [5]}

"""A server that returns the ids that tokens were drawn from: what it is asked for, and what is made of its replies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from corelm import Backend
from corelm.errors import CapabilityError, EngineError
from corelm.spec import Ragged, RowAnswer, ScoreResult
from helpers.each import case
from helpers.fake_vllm import PROMPTS, SAMPLING, VOCAB, Connect, next_logprobs
from helpers.http_server import Reply, Request, json_reply
from helpers.masking_vllm import ROUTE, MaskingVLLM, kept
from vllm_backend.sampling_masks import with_masses

CUT = {**SAMPLING, "top_k": 9, "top_p": 0.7}
ASKED: dict[str, Any] = {"logprobs": "processed", "return_support": True}


@pytest.fixture
def fake() -> MaskingVLLM:
    return MaskingVLLM()


def remember(fake: MaskingVLLM) -> list[Request]:
    """Return a list that grows by each request to the server."""
    seen: list[Request] = []

    def note(request: Request) -> Reply | None:
        seen.append(request)
        return None

    fake.fault = note
    return seen


def test_the_kept_ids_their_mass_and_the_log_probs_among_them(connect: Connect) -> None:
    batch = connect().generate(PROMPTS, {**CUT, "num_samples": 2}, **ASKED)
    assert batch.kept_ids is not None and batch.kept_log_mass is not None and batch.logprobs is not None
    assert (batch.mode, batch.temperature, batch.support) == ("processed", 1.0, "truncated")
    found = zip(batch.kept_ids.tolist(), batch.kept_log_mass.tolist(), batch.logprobs.tolist(), strict=True)
    for row, (sets, masses, logprobs) in enumerate(found):
        prompt, answer = PROMPTS[row // 2], batch.ids.tolist()[row]
        for step, token in enumerate(answer):
            expected, mass = kept([*prompt, *answer[:step]], 9, 0.7)
            assert sets[step] == expected and masses[step] == pytest.approx(mass, abs=1e-5)
            own = next_logprobs([*prompt, *answer[:step]])[token]
            assert logprobs[step] == pytest.approx(own - mass, abs=1e-5)
    assert {len(ids) for row in batch.kept_ids.tolist() for ids in row} != {9}, "top-p cuts nothing here"


def test_the_other_log_probs_have_the_same_sets(connect: Connect) -> None:
    backend = connect()
    expected, top = backend.generate(PROMPTS, CUT, **ASKED), backend.generate(PROMPTS, CUT, **ASKED, top_logprobs=3)
    none = backend.generate(PROMPTS, CUT, logprobs="none", return_support=True)
    for batch in (none, top):
        assert batch.ids.tolist() == expected.ids.tolist()
        assert batch.kept_ids is not None and expected.kept_ids is not None and batch.kept_log_mass is not None
        assert batch.kept_ids.tolist() == expected.kept_ids.tolist()
        assert expected.kept_log_mass is not None
        assert batch.kept_log_mass.tolist() == expected.kept_log_mass.tolist()
    assert none.logprobs is None and top.top_ids is not None
    best = max(kept(PROMPTS[0], 9, 0.7)[0], key=next_logprobs(PROMPTS[0]).__getitem__)
    assert top.top_ids.tolist()[0][0][0] == best


def test_the_second_route_is_asked_for_sets_only(connect: Connect, fake: MaskingVLLM) -> None:
    backend = connect()
    seen = remember(fake)
    backend.generate(PROMPTS, {**SAMPLING, "top_p": 0.7}, logprobs="processed")
    assert {request.path for request in seen if request.method == "POST"} == {"/v1/completions"}
    assert {request.body["top_k"] for request in seen if request.method == "POST"} == {VOCAB}
    seen.clear()
    backend.generate(PROMPTS, {**SAMPLING, "top_p": 0.7}, **ASKED)
    asked = [request.body for request in seen if request.path == ROUTE]
    assert len(asked) == 3 and {each["sampling_params"]["top_k"] for each in asked} == {VOCAB}
    assert "prompt" not in asked[0]["sampling_params"] and asked[0]["model"] == "fake"


def test_scores_are_those_of_the_model(connect: Connect) -> None:
    backend = connect()
    assert backend.capabilities.argmax and backend.capabilities.generation_modes == {"processed"}
    rows = [[5, 17, 300, 2], [8, 9]]
    result = backend.score_logprobs(rows, return_argmax=True)
    assert result.argmax is not None
    for row, found, argmax in zip(rows, result.logprobs.tolist(), result.argmax.tolist(), strict=True):
        logprobs = [next_logprobs(row[:at]) for at in range(1, len(row))]
        assert found == pytest.approx([0.0, *(each[at] for each, at in zip(logprobs, row[1:], strict=True))], abs=1e-5)
        assert argmax == [-1, *(each.index(max(each)) for each in logprobs)]


def test_a_stream_hands_whole_answers_over_and_has_the_sets(connect: Connect) -> None:
    backend = connect()
    with backend.stream(PROMPTS, CUT, **ASKED) as stream:
        chunks = [(chunk.row, len(chunk.ids)) for chunk in stream]
    assert sorted(chunks) == [(0, 4), (1, 4), (2, 4)]
    assert stream.result.kept_ids is not None
    expected = backend.generate(PROMPTS, CUT, **ASKED).kept_ids
    assert expected is not None and stream.result.kept_ids.tolist() == expected.tolist()


def change_row(row: int, change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], None]:
    """Return a spoil for the answer to one prompt. Which that is follows from the seed and the first kept ids."""
    first = kept(PROMPTS[row], 9, 0.7)[0]
    return lambda choice: change(choice) if (choice.get("sampling_mask") or [None])[0] == first else None


def test_a_bad_reply_fails_its_row_alone(connect: Connect, fake: MaskingVLLM) -> None:
    backend = connect(max_retries=0)
    expected = backend.generate(PROMPTS, CUT, **ASKED).kept_ids
    assert expected is not None
    for change, told in [
        (lambda choice: choice.update(sampling_mask=None), "does not have the ids that every token was drawn from"),
        (lambda choice: choice["sampling_mask"].pop(), "does not have the ids that every token was drawn from"),
        (lambda choice: choice["sampling_mask"].__setitem__(2, []), "sampling_mask of token 2 lacks the id"),
        (lambda choice: choice["sampling_mask"].__setitem__(1, ["5"]), "sampling_mask of token 1 lacks the id"),
        (
            lambda choice: choice["sampling_mask"][0].extend(choice["sampling_mask"][0][:1]),
            "of token 0 has an id twice",
        ),
        (lambda choice: choice["logprobs"].update(content=None), "log-probs"),
        (lambda choice: choice["logprobs"]["content"].pop(), "not labelled with the ids of its tokens"),
        (lambda choice: choice.update(token_ids=[5.0]), "not a list of integers"),
    ]:
        with case(change, told):
            fake.spoil = change_row(1, change)
            batch = backend.generate(PROMPTS, CUT, **ASKED, on_error="skip")
            assert batch.finish_reasons == ("length", "error", "length") and batch.errors is not None
            assert told in batch.errors[1]
            assert batch.kept_ids is not None
            assert [batch.kept_ids.tolist()[row] for row in (0, 2)] == [expected.tolist()[row] for row in (0, 2)]


def test_a_row_that_cannot_be_scored_has_no_mass_and_fails_alone(connect: Connect, fake: MaskingVLLM) -> None:
    backend = connect(max_retries=0)
    refused = json_reply({"error": {"message": "this one row"}}, 400)
    fake.fault = lambda request: (
        refused if request.path == "/v1/completions" and request.body["prompt"][:1] == PROMPTS[1][:1] else None
    )
    batch = backend.generate(PROMPTS, CUT, **ASKED, on_error="skip")
    assert batch.finish_reasons == ("length", "error", "length") and batch.errors is not None
    assert "could not be scored" in batch.errors[1] and "this one row" in batch.errors[1]


def test_sets_whose_mass_would_not_be_known_are_refused(connect: Connect) -> None:
    backend = connect()
    for sampling, capability in [
        ({"temperature": 0.7}, "temperature"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"min_new_tokens": 2}, "min_new_tokens"),
    ]:
        with case(sampling, capability):
            with pytest.raises(CapabilityError, match=f"{capability}=.* leave this or return_support out") as caught:
                backend.generate(PROMPTS, {**CUT, **sampling}, **ASKED)
            assert caught.value.capability == capability
            if capability == "temperature":
                assert backend.generate(PROMPTS, {**CUT, **sampling}, logprobs="processed").ids.lengths.tolist() == [
                    4,
                    4,
                    4,
                ]


def test_greedy_decoding_is_not_declared(connect: Connect) -> None:
    backend = connect()
    assert backend.capabilities.return_support and backend.capabilities.sampling["temperature"] == (0.01, 2.0)


def test_only_a_server_that_returns_them_declares_them(connect: Connect, fake: MaskingVLLM) -> None:
    fake.masks = False
    backend: Backend = connect()
    assert not backend.capabilities.return_support and backend.capabilities.argmax
    assert backend.capabilities.sampling["temperature"] == (0.0, 2.0)
    with pytest.raises(CapabilityError):
        backend.generate(PROMPTS, CUT, **ASKED)


def test_scores_of_other_weights_are_no_mass_of_these_answers() -> None:
    one = Ragged.from_list([[0.0, -1.0]], torch.float32)
    scores = ScoreResult(logprobs=one, scored=one.with_values(one.values != 0), weight_versions=("new",))
    answers = {0: RowAnswer([7], [-0.25], "length", [[7, 8]], [-0.25])}
    with pytest.raises(EngineError, match="'old' → 'new'"):
        with_masses(answers, scores, "old")
    (found,) = with_masses(answers, scores, "new").values()
    assert isinstance(found, RowAnswer) and found.kept_log_mass == [-0.75] and found.kept_ids == [[7, 8]]


def test_a_server_that_lacks_the_route_is_refused_with_what_to_type(connect: Connect, fake: MaskingVLLM) -> None:
    del fake.pages["/openapi.json"]["paths"][ROUTE]
    with pytest.raises(EngineError, match="start it with --enable-scale-out as well"):
        connect(max_retries=0)
    fake.masks = False
    connect(max_retries=0)

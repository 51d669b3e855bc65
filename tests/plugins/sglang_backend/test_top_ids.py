"""The most probable ids with their log-probs and the mass of the others: of answers, of streams and of scores."""

from __future__ import annotations

import base64
from typing import Any

import pytest
import torch

from corelm.spec import Deadline, GenerateResult, Ragged, ScoreResult
from corelm_engine_kit import HttpClient, ModelHints
from helpers.each import case
from helpers.requests import generation, scoring
from helpers.tiny_models import VOCAB
from sglang_backend.capabilities import read_server

PROMPTS = [[5], [9, 300, VOCAB - 1]]


def generated(backend: Any, k: int, logprobs: str = "raw", **given: Any) -> GenerateResult:
    asked = {"max_new_tokens": 4, "ignore_eos": True, "top_logprobs": k, **given}
    return backend.engine.plugin.generate(generation(PROMPTS, logprobs, **asked))


def scored(backend: Any, k: int, rows: list[list[int]], starts: list[int], **fields: Any) -> ScoreResult:
    return backend.engine.plugin.score_logprobs(scoring(rows, starts, top_k=k, **fields))


def check(found: Any, before: list[int], fake: Any, k: int, temperature: float = 1.0) -> None:
    """Check the positions that follow the ids `before`: the fake's model looks at the last id only."""
    table = torch.stack([fake.logprobs(token, temperature) for token in before])
    values, ids = table.topk(k)
    assert torch.equal(found.top_ids.values, ids)
    torch.testing.assert_close(found.top_logprobs.values, values, rtol=0, atol=1e-6)
    tail = (1 - table.double().exp().gather(-1, ids).sum(-1)).log().float()
    torch.testing.assert_close(found.tail_log_mass.values, tail, rtol=1e-4, atol=1e-4)


def previous(prompts: list[list[int]], answers: list[list[int]]) -> list[int]:
    return [token for prompt, ids in zip(prompts, answers, strict=True) for token in [prompt[-1], *ids][:-1]]


@pytest.mark.parametrize(
    ("mode", "vocab_size", "most"), [("null", 5000, 1024), ("null", 30, 30), ("prefill", 5000, 128), (None, 5000, 1024)]
)
def test_there_are_at_most_1024_ids_and_no_more_than_the_vocabulary_has(fake, server, mode, vocab_size, most):
    fake.server_info["disaggregation_mode"] = mode
    client = HttpClient(server.url)
    try:
        hints = ModelHints(vocab_size=vocab_size, eos_token_ids=[2])
        assert read_server(client, hints, Deadline(60.0)).capabilities.score_top_k == most
    finally:
        client.close()


def test_a_server_without_log_probs_of_answers_has_no_most_probable_ids_of_them(fake, connect):
    fake.logits = torch.zeros(VOCAB, VOCAB)
    found = connect().capabilities
    assert found.top_logprobs == 0 and found.score_top_k == VOCAB


def test_answers_have_the_most_probable_ids_of_the_distribution_of_their_log_probs(backend, fake):
    for logprobs, temperature in [("raw", 1.0), ("processed", 0.5), ("raw", 0.0)]:
        with case(logprobs, temperature):
            found = generated(backend, 3, logprobs, temperature=temperature)
            check(found, previous(PROMPTS, found.ids.tolist()), fake, 3, temperature or 1.0)
            assert found.top_ids.lengths.tolist() == found.ids.lengths.tolist() == [4, 4]


def test_a_stream_has_the_most_probable_ids_as_well(backend, fake):
    chunks: list[Any] = []
    found = generated(backend, 3, "processed", temperature=0.5, ignore_eos=False, on_tokens=chunks.append)
    check(found, previous(PROMPTS, found.ids.tolist()), fake, 3, 0.5)
    assert [token for chunk in chunks if chunk.row == 1 for token in chunk.ids] == found.ids.tolist()[1]
    # The server refuses arrays in a stream.
    assert not any("flat" in name for body in fake.requests if body.get("stream") for name in body)


def test_scores_have_the_most_probable_ids_from_score_from_on(backend, fake):
    rows = [[5, 17, VOCAB - 1, 2], [9], [4, 8]]
    found = scored(backend, 3, rows, [2, 1, 1], return_argmax=True)
    assert found.errors is None
    counted = found.scored.values
    where = type(found)(
        logprobs=found.logprobs,
        scored=found.scored,
        top_ids=Ragged(found.top_ids.values[counted], torch.tensor([3])),
        top_logprobs=Ragged(found.top_logprobs.values[counted], torch.tensor([3])),
        tail_log_mass=Ragged(found.tail_log_mass.values[counted], torch.tensor([3])),
    )
    check(where, [17, VOCAB - 1, 4], fake, 3)
    assert torch.equal(found.argmax.values[counted], found.top_ids.values[counted, 0])
    assert bool((found.top_ids.values[~counted] == -1).all()) and not found.top_logprobs.values[~counted].any()


def test_ids_without_a_probability_are_left_out(backend, fake):
    def forbid(reply):
        for each in reply["meta_info"].get("output_top_logprobs", ()):
            each[2][0] = -3.4028234663852886e38

    fake.spoil = forbid
    found = generated(backend, 3)
    assert bool((found.top_ids.values[:, 2] == -1).all() and (found.top_ids.values[:, :2] >= 0).all())
    assert bool((found.top_logprobs.values[:, 2] == -torch.inf).all())
    # The two that are left do not add up to 1 here, which is to stand for rounding: nothing is left to others.
    assert bool((found.tail_log_mass.values == -torch.inf).all())


def _set(row: int, column: int, part: int, value: Any) -> Any:
    def spoil(reply: Any) -> None:
        top = reply["meta_info"]["output_top_logprobs"]
        top[row][column][part] = value

    return spoil


SPOILT: dict[str, tuple[Any, str]] = {
    "missing": (lambda reply: reply["meta_info"].pop("output_top_logprobs"), "leave out top_logprobs"),
    "too-few-positions": (lambda reply: reply["meta_info"]["output_top_logprobs"].pop(), "leave out top_logprobs"),
    "too-few-ids": (lambda reply: reply["meta_info"]["output_top_logprobs"][1].pop(), "leave out top_logprobs"),
    "an-empty-position": (lambda reply: reply["meta_info"]["output_top_logprobs"].__setitem__(1, None), "leave out"),
    "another-order": (_set(1, 2, 0, -0.0), "at position 1 are not in descending order"),
    "above-zero": (_set(0, 0, 0, 0.5), "at position 0 have a log-prob that is not a number of at most 0"),
    "none": (_set(2, 1, 0, None), "the log-prob at position 2 is None"),
    "nan": (_set(2, 2, 0, "nan"), "not built as expected"),
    "outside": (_set(3, 0, 1, VOCAB), f"at position 3 have an id outside the vocabulary of {VOCAB}"),
    "no-id": (_set(3, 0, 1, 1.5), "not a list of integers"),
}


def test_most_probable_ids_that_do_not_fit_are_an_error(backend, fake):
    for defect in SPOILT:
        with case(defect):
            fake.spoil, message = SPOILT[defect]
            found = generated(backend, 3)
            assert found.finish_reasons == ("error", "error") and all(message in error for error in found.errors)


def test_an_id_that_is_there_twice_is_an_error(backend, fake):
    def repeat(reply):
        top = reply["meta_info"]["output_top_logprobs"]
        top[2][1][1] = top[2][0][1]

    fake.spoil = repeat
    assert all("at position 2 have an id twice" in error for error in generated(backend, 3).errors)


def _as_arrays(fields: dict[str, Any], side: str, skipped: int, in_base64: bool) -> None:
    """Replace lists by what a server that knows ``return_flat_raw_top_logprobs`` sends."""
    lists = fields.pop(f"{side}_top_logprobs")[skipped:]
    k = len(lists[0]) if lists else 0
    columns = {
        "val": torch.tensor([each[0] for row in lists for each in row], dtype=torch.float32),
        "idx": torch.tensor([each[1] for row in lists for each in row], dtype=torch.int32),
    }
    fields |= {f"{side}_top_logprobs_shape": [len(lists), k], f"{side}_top_logprobs_null_prefix": skipped}
    for part, found in columns.items():
        name = f"{side}_top_logprobs_{part}_flat"
        if in_base64:
            fields[f"{name}_b64"] = base64.b64encode(found.numpy().tobytes()).decode()
            fields[f"{name}_b64_dtype"] = str(found.dtype).removeprefix("torch.")
        else:
            fields[name] = found.tolist()


@pytest.mark.parametrize("in_base64", [True, False])
def test_arrays_say_the_same_as_lists(backend, fake, in_base64):
    def arrays(reply):
        for side, skipped in (("input", 1), ("output", 0)):
            _as_arrays(reply["meta_info"], side, skipped, in_base64)

    fake.spoil = arrays
    found = generated(backend, 3, "processed", temperature=0.5)
    check(found, previous(PROMPTS, found.ids.tolist()), fake, 3, 0.5)
    scores = scored(backend, 3, [[5, 17, 8]], [1])
    assert scores.errors is None and scores.top_ids.tolist()[0][1:] == [
        fake.logprobs(token).topk(3).indices.tolist() for token in (5, 17)
    ]

"""The ids that truncation had left at each sampled token, their mass, and the log-probs among them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from corelm.errors import CapabilityError
from corelm.spec import GenerateRequest, GenerateResult
from corelm_engine_kit import ABORTED
from helpers.canned_replies import CannedClient
from helpers.each import case
from helpers.requests import generation
from helpers.tiny_models import VOCAB
from sglang_backend import SGLangBackend

PROMPTS = [[5], [9, 300, VOCAB - 1]]
TRUNCATIONS: list[dict[str, Any]] = [
    {"top_k": 3},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"top_p": 0.9, "min_p": 0.05, "temperature": 1.5},
    {"top_k": 8, "min_p": 0.3, "temperature": 0.5},
]


def request(sampling: dict[str, Any], logprobs: str = "processed", **fields: Any) -> GenerateRequest:
    known = {"max_new_tokens": 4, "temperature": 0.7, "return_support": True}
    return generation(PROMPTS, logprobs, **{**known, **sampling, **fields})


def generated(backend: Any, sampling: dict[str, Any], **fields: Any) -> GenerateResult:
    return backend.engine.plugin.generate(request(sampling, **fields))


def check(found: GenerateResult, fake: Any, sampling: dict[str, Any]) -> None:
    """Check what was kept at each token, computed from all probabilities."""
    assert found.errors is None
    known = {"top_k": -1, "top_p": 1.0, "min_p": 0.0, "temperature": 0.7} | sampling
    for row, prompt in enumerate(PROMPTS):
        ids, sets = found.ids.tolist()[row], found.kept_ids.tolist()[row]
        for position, last in enumerate([prompt[-1], *ids][:-1]):
            kept, token = fake.kept(last, known), ids[position]
            assert sets[position] == sorted(kept)
            full = fake.logprobs(last, known["temperature"])
            mass = float(full[sets[position]].logsumexp(0))
            assert math.isclose(found.kept_log_mass.tolist()[row][position], mass, abs_tol=1e-5)
            expected = {"processed": kept[token], "raw": float(full[token])}[found.mode]
            if found.logprobs is not None:
                assert math.isclose(found.logprobs.tolist()[row][position], expected, abs_tol=1e-5)


def test_the_kept_ids_their_mass_and_the_log_probs_among_them(backend, fake):
    for sampling in TRUNCATIONS:
        with case(sampling):
            found = generated(backend, sampling)
            check(found, fake, sampling)
            assert (found.mode, found.temperature, found.support) == (
                "processed",
                sampling.get("temperature", 0.7),
                "truncated",
            )


def test_other_log_probs_have_the_same_sets(backend, fake):
    check(
        generated(backend, {"top_p": 0.6, "temperature": 1.0}, logprobs="raw"), fake, {"top_p": 0.6, "temperature": 1.0}
    )
    silent = generated(backend, {"top_p": 0.6}, logprobs="none")
    assert silent.logprobs is None
    check(silent, fake, {"top_p": 0.6})


def test_nothing_is_asked_for_without_return_support(backend, fake):
    found = generated(backend, {"top_p": 0.6, "temperature": 1.0}, logprobs="raw", return_support=False)
    assert found.kept_ids is None and found.kept_log_mass is None
    assert not any("mask" in name for body in fake.requests for name in body)


def test_the_most_probable_ids_are_those_that_were_kept(backend, fake):
    for k in [1, 2, 30]:
        with case(k):
            found = generated(backend, {"top_k": 3}, top_logprobs=k)
            check(found, fake, {"top_k": 3})
            before = [token for p, ids in zip(PROMPTS, found.ids.tolist(), strict=True) for token in [p[-1], *ids][:-1]]
            for position, last in enumerate(before):
                kept = fake.kept(last, {"top_k": 3, "top_p": 1.0, "min_p": 0.0, "temperature": 0.7})
                best, rest = [*kept][:k], [*kept.values()][k:]
                assert found.top_ids.values[position].tolist() == best + [-1] * (k - len(best))
                values = torch.tensor([*kept.values()][:k] + [-torch.inf] * (k - len(best)))
                torch.testing.assert_close(found.top_logprobs.values[position], values, rtol=0, atol=1e-6)
                tail = torch.tensor(rest).logsumexp(0)
                torch.testing.assert_close(found.tail_log_mass.values[position], tail, rtol=0, atol=1e-6)


def test_the_full_distribution_may_be_asked_for_next_to_the_sets(backend, fake):
    sampling = {"top_k": 2, "temperature": 1.0}
    found = generated(backend, sampling, logprobs="raw", top_logprobs=4)
    check(found, fake, sampling)
    assert found.top_ids.values[0].tolist() == fake.logprobs(5).topk(4).indices.tolist()


def test_an_answer_that_is_cut_has_no_sets_and_no_most_probable_ids_behind_its_end(backend, fake):
    whole = generated(backend, {"top_k": 2})
    stop = whole.ids.tolist()[0][1]
    found = generated(backend, {"top_k": 2}, stop_ids=frozenset({stop, 2}), top_logprobs=2)
    for each in (found.kept_ids, found.kept_log_mass, found.top_ids, found.top_logprobs):
        assert each.lengths.tolist() == found.ids.lengths.tolist()


def test_a_stream_has_the_sets_and_the_log_probs_of_the_answer(backend, fake):
    chunks: list[Any] = []
    found = generated(backend, {"top_p": 0.6}, on_tokens=chunks.append, top_logprobs=2)
    check(found, fake, {"top_p": 0.6})
    for row in range(2):
        told = [value for chunk in chunks if chunk.row == row for value in chunk.logprobs]
        assert told == found.logprobs.tolist()[row] and len([c for c in chunks if c.row == row]) > 1


@pytest.mark.parametrize("logprobs", ["none", "processed"])
def test_a_stream_that_is_aborted_keeps_what_was_streamed(backend, fake, logprobs):
    asked = request({"top_k": 3}, on_tokens=lambda chunk: None, logprobs=logprobs, top_logprobs=2)
    body = {"input_ids": PROMPTS[1], "rid": "r", **fake_fields(asked)}
    reply = fake.reply_to(body)
    event = next(fake.growing(reply))
    # One more token than log-probs: the server may send one before the other.
    early = event | {"output_ids": reply["output_ids"][:2]}
    client: Any = CannedClient([ABORTED, ABORTED], lambda streamed: streamed.tell(1, early))
    found = SGLangBackend(client, backend.engine.plugin.info).generate(asked)
    assert found.finish_reasons == ("abort", "abort") and found.errors is None
    assert found.ids.tolist() == [[], reply["output_ids"][:1]]
    assert found.kept_ids.tolist()[1] == [sorted(fake.kept(VOCAB - 1, body["sampling_params"]))]
    assert found.top_ids.lengths.tolist() == [0, 1] and (found.logprobs is None) == (logprobs == "none")


def fake_fields(asked: GenerateRequest) -> dict[str, Any]:
    every = {"sampling_logprobs_mode": "support"} if asked.logprobs == "processed" else {"top_logprobs_num": 2}
    known = {"top_k": 3, "top_p": 1.0, "min_p": 0.0, "temperature": 0.7, "max_new_tokens": 4, "ignore_eos": True}
    return {"sampling_params": known, "return_sampling_mask": True, **every}


def test_core_takes_the_sets_for_processed_log_probs(backend, fake):
    sampling = {"top_p": 0.6, "temperature": 0.7, "max_new_tokens": 4, "ignore_eos": True}
    with pytest.raises(CapabilityError):
        backend.generate(PROMPTS, sampling, logprobs="processed")
    with pytest.raises(CapabilityError):
        backend.generate(PROMPTS, sampling, logprobs="raw", return_support=True)
    found = backend.generate(PROMPTS, sampling, logprobs="processed", return_support=True, top_logprobs=2)
    check(found, fake, {"top_p": 0.6})
    greedy = backend.generate(PROMPTS, {"temperature": 0.0, "max_new_tokens": 2}, return_support=True)
    assert greedy.kept_ids.ids.tolist() == [[token] for token in greedy.ids.values.tolist()]


# What the server returns of large sets --------------------------------------------------------------------------------


def limited(fake: Any, connect: Any, limit: int) -> Any:
    fake.server_info["sampling_mask_max_tokens"] = limit
    backend = connect()
    assert backend.capabilities.return_support
    fake.requests.clear()
    return backend


def test_top_k_is_sent_because_the_server_needs_one(backend, fake, connect):
    generated(backend, {"top_p": 0.6})
    assert {body["sampling_params"]["top_k"] for body in fake.requests} == {VOCAB}
    small = limited(fake, connect, 30)
    check(generated(small, {"top_p": 0.2}), fake, {"top_p": 0.2})
    assert {body["sampling_params"]["top_k"] for body in fake.requests} == {30}


def test_a_set_that_the_server_cuts_off_is_an_error(fake, connect):
    small = limited(fake, connect, 30)
    found = generated(small, {"top_p": 0.99, "temperature": 2.0})
    assert all("kept at least 30 ids" in error and "sampling_mask_max_tokens" in error for error in found.errors)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"top_k": 31}, "at most 30 kept ids a token, but top_k is 31"),
        ({"top_p": 0.5, "min_p": 0.1}, "apply top_p to these alone"),
        ({"top_k": 1}, "decodes greedily with top_k=1"),
    ],
)
def test_what_the_server_cannot_return_exactly_is_refused(fake, connect, sampling, message):
    small = limited(fake, connect, 30)
    with pytest.raises(CapabilityError, match=message) as caught:
        generated(small, sampling)
    assert caught.value.capability == "return_support" and not fake.requests
    if sampling.get("top_k") == 1:
        check(generated(small, {"top_k": 1, "temperature": 1.0}), fake, {"top_k": 1, "temperature": 1.0})


# Which servers return sets --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"sampling_mask_max_tokens": None},
        {"sampling_backend": "ascend"},
        {"speculative_algorithm": "EAGLE"},
        {"sampling_mask_max_tokens": 3},
    ],
    ids=str,
)
def test_a_server_whose_settings_rule_them_out_returns_none(fake, connect, settings):
    fake.server_info |= settings
    assert not connect().capabilities.return_support
    assert not any("return_sampling_mask" in body for body in fake.requests)


def test_a_server_that_does_not_know_the_field_returns_none(fake, connect):
    fake.knows_masks = False
    assert not connect().capabilities.return_support


def test_a_server_with_raw_log_probs_returns_none(fake, connect):
    fake.scaled = False
    found = connect().capabilities
    assert not found.return_support and found.top_logprobs


def test_a_server_whose_sets_have_another_mass_returns_none(fake, connect, caplog):
    def shifted(reply):
        found = reply["meta_info"].get("output_token_sampling_logprobs", [])
        found[:] = [value / 2 for value in found]

    fake.spoil = shifted
    assert not connect().capabilities.return_support and "not the most probable ones" in caplog.text


# Replies that do not fit ----------------------------------------------------------------------------------------------


def change(name: str, position: int, value: Any) -> Any:
    def spoil(reply: Any) -> None:
        reply["meta_info"][f"output_token_sampling_{name}"][position] = value

    return spoil


SPOILT: dict[str, tuple[Any, str]] = {
    "no-sets": (lambda reply: reply["meta_info"].pop("output_token_sampling_mask"), "leave out return_support=True"),
    "too-few-sets": (
        lambda reply: reply["meta_info"]["output_token_sampling_mask"].pop(),
        "leave out return_support=True",
    ),
    "no-log-probs": (
        lambda reply: reply["meta_info"].pop("output_token_sampling_logprobs"),
        "leave out return_support=True",
    ),
    "an-empty-set": (change("mask", 1, []), "kept at position 1 have one twice, or lack the sampled"),
    "no-set": (change("mask", 1, None), "not built as expected"),
    "outside": (
        lambda reply: reply["meta_info"]["output_token_sampling_mask"][2].append(VOCAB),
        f"id {VOCAB}, which is outside the vocabulary",
    ),
    "twice": (
        lambda reply: reply["meta_info"]["output_token_sampling_mask"][2].append(
            reply["meta_info"]["output_token_sampling_mask"][2][0]
        ),
        "kept at position 2 have one twice",
    ),
    "nan": (change("logprobs", 0, math.nan), "log-prob at position 0 is nan"),
    "lower-than-before": (change("logprobs", 3, -50.0), "but truncation cannot lower it"),
    "too-little-mass": (change("logprobs", 3, 0.0), "had a probability of only"),
}


@pytest.mark.parametrize("defect", SPOILT)
def test_sets_that_do_not_fit_are_an_error_of_their_row(backend, fake, defect):
    fake.logits = fake.logits / 4
    fake.spoil, message = SPOILT[defect]
    found = generated(backend, {"top_p": 0.6})
    assert found.finish_reasons == ("error", "error") and all(message in error for error in found.errors)


def test_log_probs_that_do_not_belong_to_the_set_are_an_error(backend, fake):
    fake.spoil = lambda reply: reply["meta_info"]["output_token_sampling_logprobs"][1].pop()
    found = generated(backend, {"top_k": 3}, top_logprobs=2)
    assert all("does not have one log-prob for each" in error for error in found.errors)

"""SGLang and transformers agree on the same model, token by token, for 64 prompts of very different lengths."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

import corelm
from corelm import Backend
from corelm_engine_kit import HttpClient
from helpers.tiny_models import VOCAB, random_rows, tiny_tokenizer

LENGTHS = [1, 2, 3, *range(5, 65, 2), *range(70, 460, 12)]
NEW = 32


@pytest.fixture(scope="module")
def reference(model: PreTrainedModel) -> Iterator[Backend]:
    with corelm.get_backend("transformers", model, tokenizer=tiny_tokenizer()) as backend:
        yield backend


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_rows(*LENGTHS[:64])


def test_greedy_answers_are_identical_and_their_log_probs_agree(shared, reference, prompts, record_property):
    assert len(prompts) == 64
    sampling = {"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True}
    sglang, transformers = (backend.generate(prompts, sampling, logprobs="raw") for backend in (shared, reference))
    assert sglang.ids.tolist() == transformers.ids.tolist()
    difference = float((sglang.logprobs.values - transformers.logprobs.values).abs().max())
    record_property("largest difference", difference)
    assert difference < 1e-4


def test_scores_agree(shared, reference, prompts, record_property):
    sglang, transformers = (backend.score_logprobs(prompts) for backend in (shared, reference))
    assert sglang.scored.tolist() == transformers.scored.tolist()
    difference = float((sglang.logprobs.values - transformers.logprobs.values).abs().max())
    record_property("largest difference", difference)
    assert difference < 1e-4


def test_the_most_probable_ids_are_those_of_the_plain_logits(shared, reference):
    last = VOCAB - 1
    prompts = [*random_rows(*LENGTHS[:64]), [last], [last, last], [5, last, 7, last]]
    starts = [max(1, len(row) // 2) for row in prompts]
    found = shared.score_logprobs(prompts, score_from=starts, return_argmax=True)
    expected = reference.score_logprobs(prompts, score_from=starts, return_logits=True)
    argmax, logits, scored = found.argmax.values, expected.logits.values, expected.scored.values
    assert torch.equal(found.scored.values, scored) and bool((argmax[~scored] == -1).all())
    # SGLang writes the last id of the vocabulary as 0 where a prompt has it, but not as the most probable one.
    assert bool((argmax == last).any())
    chosen = logits[scored].gather(-1, argmax[scored].unsqueeze(-1)).squeeze(-1)
    # Equal up to rounding: of two ids that differ by less, either may be named.
    torch.testing.assert_close(chosen, logits[scored].amax(-1), rtol=0, atol=1e-4)


def test_arrays_of_the_most_probable_ids_say_what_lists_say(shared):
    launched, rows = shared.engine.plugin.launched, [[5, 17, 300, 2, 8], [9, 4]]
    client = HttpClient(launched.base_url, launched.api_key)
    try:
        for ids in rows:
            plain = {
                "input_ids": ids,
                "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
                "return_logprob": True,
                "logprob_start_len": 0,
                "top_logprobs_num": 1,
            }
            flat = {"return_flat_raw_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True}
            lists, arrays = (client.post("/generate", payload)["meta_info"] for payload in (plain, plain | flat))
            assert lists["input_token_logprobs"] == arrays["input_token_logprobs"]
            assert "input_top_logprobs" not in arrays and arrays["input_top_logprobs_shape"] == [len(ids) - 1, 1]
            # float32 and int32 in little-endian order.
            values, best = (
                struct.unpack(f"<{len(ids) - 1}{code}", base64.b64decode(arrays[f"input_top_logprobs_{part}_flat_b64"]))
                for part, code in (("val", "f"), ("idx", "i"))
            )
            assert lists["input_top_logprobs"][0] is None
            assert [[value, token] for value, token in zip(values, best, strict=True)] == [
                each[0][:2] for each in lists["input_top_logprobs"][1:]
            ]
    finally:
        client.close()

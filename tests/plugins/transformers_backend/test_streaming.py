"""Answers that are streamed step by step: the same tokens and log-probs as without streaming."""

from __future__ import annotations

import pytest
import torch

from corelm import DynamicBatcher
from corelm.batching import Limits
from corelm.errors import EngineError
from helpers.plain_forward import Open, spoil_cache_after
from helpers.tiny_models import DEVICE, random_rows, tiny_model

PROMPTS = random_rows(5, 33, 5, 12)


def test_a_row_of_a_batch_ends_before_the_others(open_model: Open) -> None:
    backend = open_model(tiny_model())
    free = backend.generate(PROMPTS, {"max_new_tokens": 12, "seed": 3, "ignore_eos": True}).ids.tolist()
    sampling = {"max_new_tokens": 12, "seed": 3, "ignore_eos": True, "stop_token_ids": [free[1][2]]}
    chunks = list(backend.stream(PROMPTS, sampling))
    ends = {chunk.row: at for at, chunk in enumerate(chunks) if chunk.finish_reason}
    assert ends[1] < ends[0] and chunks[ends[1]].finish_reason == "stop"


def test_beams_come_in_one_piece(open_model: Open) -> None:
    stream = open_model(tiny_model()).stream(PROMPTS[:2], {"max_new_tokens": 4, "num_beams": 2}, logprobs="none")
    assert [chunk.row for chunk in stream] == [0, 1]
    assert stream.result.ids.lengths.max() <= 4


def test_streams_share_a_batch(open_model: Open) -> None:
    backend = open_model(tiny_model())
    sampling = {"max_new_tokens": 8, "seed": 5}
    alone = [backend.generate([prompt], sampling).ids.tolist()[0] for prompt in PROMPTS]
    # The first call waits until all requests are queued.
    with DynamicBatcher(backend, Limits(min_batch_size=len(PROMPTS), batching_timeout=60.0)) as batcher:
        streams = [batcher.stream([prompt], sampling) for prompt in PROMPTS]
        assert [[i for chunk in stream for i in chunk.ids] for stream in streams] == alone
        assert batcher.state().batches == 1


def test_a_batcher_that_does_not_merge_passes_each_request_on(open_model: Open) -> None:
    backend = open_model(tiny_model())
    sampling = {"max_new_tokens": 8, "seed": 5}
    alone = [backend.generate([prompt], sampling).ids.tolist()[0] for prompt in PROMPTS]
    with DynamicBatcher(backend, merge=False) as batcher:
        streams = [batcher.stream([prompt], sampling) for prompt in PROMPTS]
        assert [[i for chunk in stream for i in chunk.ids] for stream in streams] == alone
        assert batcher.state().batches == len(PROMPTS)


def test_streamed_log_probs_under_autocast_are_those_of_generate(open_model: Open) -> None:
    backend, sampling = open_model(tiny_model()), {"max_new_tokens": 4, "seed": 5, "ignore_eos": True}
    plain = backend.generate(PROMPTS[:1], sampling)
    with torch.autocast(DEVICE, dtype=torch.bfloat16), DynamicBatcher(backend) as batcher:
        expected = backend.generate(PROMPTS[:1], sampling)
        assert expected.logprobs is not None and plain.logprobs is not None
        assert not torch.equal(expected.logprobs.values[:1], plain.logprobs.values[:1]), "autocast changes nothing"
        for each in (backend, batcher):
            stream = each.stream(PROMPTS[:1], sampling)
            list(stream)
            for found in (stream.result, each.submit_generate(PROMPTS[:1], sampling).result(60)):
                assert found.logprobs is not None and found.ids.tolist() == expected.ids.tolist()
                torch.testing.assert_close(found.logprobs.values, expected.logprobs.values, rtol=0, atol=1e-5)


def test_wrong_tokens_that_were_streamed_fail_the_call_and_the_next_one_is_right(open_model: Open) -> None:
    model = tiny_model()
    # Cached steps are wrong beyond 24 tokens, which only the caller's own rows show.
    spoil_cache_after(model, 24)
    backend, sampling = open_model(model), {"max_new_tokens": 40, "seed": 5, "ignore_eos": True}
    expected = open_model(tiny_model()).generate(PROMPTS[:1], sampling).ids.tolist()
    with pytest.raises(EngineError, match="the next call decodes in a slower way") as caught:
        list(backend.stream(PROMPTS[:1], sampling))
    assert caught.value.usable
    assert [i for chunk in backend.stream(PROMPTS[:1], sampling) for i in chunk.ids] == expected[0]

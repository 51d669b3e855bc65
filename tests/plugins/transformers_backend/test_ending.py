"""When an answer of the transformers backend ends: at the limit, at a stop id, or at a stop string."""

from __future__ import annotations

from functools import partial

import pytest

from corelm.backend.arguments import answer_seeds
from corelm.errors import InvalidRequestError
from helpers.oracle import close, first_greedy_id
from helpers.plain_forward import Open, assert_answers
from helpers.tiny_models import random_rows, tiny_model, tiny_tokenizer

PAD, EOS = 0, 2


@pytest.mark.parametrize("family", ["gpt2", pytest.param("opt", marks=pytest.mark.nightly), "gemma2"])
def test_without_a_limit_every_row_fills_the_context(open_model: Open, family: str) -> None:
    model = tiny_model(family, max_position_embeddings=32)
    prompts = random_rows(30, 1, 31, 12)
    out = open_model(model).generate(prompts, {"max_new_tokens": None, "ignore_eos": True, "seed": 0})
    assert out.ids.lengths.tolist() == [2, 31, 1, 20] and set(out.finish_reasons) == {"length"}
    assert_answers(out, model, prompts)


def test_a_model_without_a_context_needs_a_limit(open_model: Open) -> None:
    backend = open_model(tiny_model("bloom"))
    assert backend.capabilities.max_context is None
    with pytest.raises(InvalidRequestError, match="max_new_tokens"):
        backend.generate([[5]], {"max_new_tokens": None})


def test_no_stop_id_before_min_new_tokens(open_model: Open) -> None:
    model, prompts = tiny_model(), random_rows(7, 20)
    stop = first_greedy_id(model, prompts)
    sampling = {"max_new_tokens": 8, "temperature": 0, "stop_token_ids": [stop], "min_new_tokens": 3}
    out = open_model(model).generate(prompts, sampling, logprobs="processed")
    for answer in out.ids.tolist():
        assert not {stop, EOS} & set(answer[:3]) and len(answer) > 3
    assert out.support == "truncated"


def test_a_row_stops_at_its_stop_string_and_keeps_the_token_that_completes_it(open_model: Open) -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    prompts, seeds = random_rows(6, 25, 3), answer_seeds(2, range(3))
    backend = open_model(model)
    sampling = {"max_new_tokens": 30, "ignore_eos": True}
    free = backend.generate(prompts, sampling, seeds=seeds)
    answers = free.ids.tolist()
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    for first in range(3):
        # One row ends at its tenth token, while the stop strings of the others have begun and are not complete.
        spans = [slice(6, 10) if row == first else slice(8, 13) for row in range(3)]
        stop = [decode(ids[span]) for ids, span in zip(answers, spans, strict=True)]
        out = backend.generate(prompts, sampling | {"stop": ["@@@@", *stop]}, seeds=seeds)
        for row, (whole, cut, reason) in enumerate(zip(answers, out.ids.tolist(), out.finish_reasons, strict=True)):
            beginnings = [decode(whole[:end]) for end in range(1, 31)]
            end = next(n for n, text in enumerate(beginnings, 1) if any(each in text for each in stop))
            assert (cut, reason) == (whole[:end], "stop"), (first, row)
            close(out.logprobs.split()[row], free.logprobs.split()[row][:end])
        assert len(set(out.ids.lengths.tolist())) > 1

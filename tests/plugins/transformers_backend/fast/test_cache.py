"""The roomy cache holds what transformers' own cache would hold while rows end one by one."""

from __future__ import annotations

import pytest
import torch

from helpers import oracle
from helpers.plain_forward import Open, cache_in
from helpers.tiny_models import random_rows, tiny_model


@pytest.mark.parametrize("family", ["qwen2", "gemma2", pytest.param("bloom", marks=pytest.mark.nightly)])
def test_rows_that_end_one_by_one_over_a_long_answer(
    family: str, open_model: Open, caplog: pytest.LogCaptureFixture
) -> None:
    model, prompts = tiny_model(family), random_rows(20, 3, 7)
    sampling = {"max_new_tokens": 120, "num_samples": 4, "seed": 2, "stop_token_ids": range(10, 14)}
    out = open_model(model).generate(prompts, sampling)
    found = out.ids.tolist()
    assert len({len(answer) for answer in found}) > 4 and max(map(len, found)) > 80
    for row, (answer, logprobs) in enumerate(zip(found, out.logprobs.split(), strict=True)):
        expected = oracle.answer_logprobs(model, prompts[row // 4], answer)
        torch.testing.assert_close(logprobs, expected, rtol=1e-6, atol=1e-5)
    # Numbers that differ are not returned, but the rows are decoded again without a cache.
    assert "get other numbers" not in caplog.text


def test_a_new_token_does_not_move_the_others(open_model: Open) -> None:
    model, places = tiny_model(), []
    backend = open_model(model)

    def look(module: object, args: object, kwargs: dict, out: object) -> None:
        if cache_in(kwargs) is not None:
            places.append(cache_in(kwargs).layers[0].keys.data_ptr())

    model.model.register_forward_hook(look, with_kwargs=True)
    sampling = {"max_new_tokens": 40, "ignore_eos": True}
    backend.generate(random_rows(9, 9), sampling)
    places.clear()
    backend.generate(random_rows(9, 9), sampling)
    # The prompt, and a place with room for the answers.
    assert len(places) == 40 and len(set(places)) <= 2


def test_once_the_padded_rows_have_ended_there_is_no_mask(open_model: Open) -> None:
    """Attention is faster without a mask."""
    model, prompts, unmasked = tiny_model(), random_rows(20, 3), []

    def look(module: object, args: object, kwargs: dict[str, object]) -> None:
        unmasked.append(kwargs.get("attention_mask") is None)

    model.model.register_forward_pre_hook(look, with_kwargs=True)
    backend, sampling = open_model(model), {"max_new_tokens": 16, "seed": 1, "ignore_eos": True}
    long, short = backend.generate(prompts, sampling).ids.tolist()
    place = next(at for at in range(2, 12) if short[at] not in [*long, *short[:at]])
    sampling["stop_token_ids"] = [short[place]]
    backend.generate(prompts, sampling)
    unmasked.clear()
    assert backend.generate(prompts, sampling).ids.lengths.tolist() == [16, place + 1]
    assert unmasked == [False] * (place + 1) + [True] * (15 - place)

"""The roomy cache holds what transformers' own cache would hold, for any sequence of reads and reorderings."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from corelm import Backend
from helpers import oracle
from helpers.tiny_models import random_rows, tiny_model
from transformers_backend.fast.cache import RoomyLayer, roomy_cache

Open = Callable[..., Backend]


@pytest.mark.parametrize(
    "steps",
    [
        [1] * 200,
        [5, [0, 0, 1, 1, 1], 1, 1, [0, 4, 2], 1, [2], 70, 1],
        [3, 1, [1, 0], 1, [1, 1], 1, [0, 1, 0, 1, 1], 2, 1, [3, 4, 2, 0], 1],
        [90, 1, [1], 1, 1],
    ],
    ids=["one by one", "expand and drop", "swap", "long"],
)
def test_it_holds_the_same_as_a_layer_of_transformers(steps: list[int | list[int]]) -> None:
    """A number reads so many tokens; a list reorders the rows."""
    ours, theirs, rows = RoomyLayer(), DynamicLayer(), 2
    generator = torch.Generator().manual_seed(0)
    for step in steps:
        if isinstance(step, int):
            # Keys and values have different sizes, as in latent attention.
            new = [torch.randn(rows, 3, step, size, generator=generator) for size in (4, 6)]
            for found, expected in zip(ours.update(*new), theirs.update(*new), strict=True):
                assert torch.equal(found, expected)
        else:
            rows = len(step)
            ours.reorder_cache(torch.tensor(step))
            theirs.reorder_cache(torch.tensor(step))
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
        assert ours.get_seq_length() == theirs.get_seq_length() and ours.get_mask_sizes(1) == theirs.get_mask_sizes(1)


def test_a_new_token_does_not_move_the_others() -> None:
    layer, new = RoomyLayer(), torch.ones(4, 2, 1, 3)
    layer.update(new, new)
    places = {layer.update(new, new)[0].data_ptr() for _ in range(60)}
    layer.reorder_cache(torch.tensor([0, 3, 2]))
    places.add(layer.update(new[:3], new[:3])[0].data_ptr())
    assert len(places) == 1


def test_an_empty_layer_has_no_rows_to_reorder() -> None:
    layer = RoomyLayer()
    layer.reorder_cache(torch.tensor([0]))
    assert layer.get_seq_length() == 0


@pytest.mark.parametrize(
    ("family", "kinds"),
    [("qwen2", {RoomyLayer}), ("gemma2", {DynamicSlidingWindowLayer, RoomyLayer})],
)
def test_other_attention_layers_stay_those_of_transformers(family: str, kinds: set[type]) -> None:
    assert {type(layer) for layer in roomy_cache(tiny_model(family).config).layers} == kinds


def test_recurrent_layers_stay_those_of_transformers() -> None:
    assert RoomyLayer not in {type(layer) for layer in roomy_cache(tiny_model("mamba").config).layers}


@pytest.mark.parametrize("family", ["qwen2", "bloom", "gemma2"])
@pytest.mark.parametrize("lengths", [(20, 20), (20, 3, 7)], ids=str)
def test_rows_that_end_one_by_one_over_a_long_answer(family: str, lengths: tuple[int, ...], open_model: Open) -> None:
    model, prompts = tiny_model(family), random_rows(*lengths)
    sampling = {"max_new_tokens": 150, "num_samples": 4, "seed": 2, "stop_token_ids": range(10, 14)}
    out = open_model(model).generate(prompts, sampling)
    found = out.ids.tolist()
    assert len({len(answer) for answer in found}) > 4 and max(map(len, found)) > 80
    for row, (answer, logprobs) in enumerate(zip(found, out.logprobs.split(), strict=True)):
        expected = oracle.answer_logprobs(model, prompts[row // 4], answer)
        torch.testing.assert_close(logprobs, expected, rtol=1e-6, atol=1e-5)

"""No sound engine is accused: pairs that differ in nothing, or in how they round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from corelm import Backend
from corelm_compare import SideSpec, compare
from helpers.planted_defects import PROMPTS, loaded, opened, sound
from helpers.tiny_models import random_rows
from transformers_backend import TransformersBackend

FAMILIES = ["qwen2", "llama", "gpt2", "opt", "gemma2", "granite", "cohere", "phi-biased", "mixtral", "bloom", "mamba"]
#: The families that every change is tried with.
FEW = ("qwen2", "gemma2")


def in_families(*families: str, few: tuple[str, ...] = FEW) -> list[Any]:
    return [pytest.param(each, marks=[] if each in few else [pytest.mark.nightly]) for each in families]


@pytest.mark.parametrize("family", in_families(*FAMILIES))
@pytest.mark.parametrize("with_oracle", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_the_same_engine_twice_agrees(family, with_oracle, folder_of):
    folder = folder_of(family, FAMILIES.index(family))
    with sound(folder) as one, sound(folder, max_batch_tokens=64) as other:
        found = compare([one, other], PROMPTS, oracle=folder if with_oracle else None)
    print(found)
    assert (found.verdict, found.causes, found.exit_code) == ("agree", (), 0)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))])
def test_plain_and_accelerated_code_agree(seed, folder_of):
    folder, rows = folder_of("qwen2", seed), random_rows(3, 40, 17, 90, seed=seed)
    with sound(folder) as one, sound(folder, fast=False) as other:
        found = compare([one, other], rows, rows[::-1], oracle=folder, seed=seed)
    assert (found.verdict, found.causes) == ("agree", ())


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.nightly)], ids=str)
@pytest.mark.parametrize("family", in_families("qwen2", "llama", "gpt2", "gemma2", few=("qwen2",)))
def test_two_engines_of_one_low_precision_are_within_their_own_distance(family, dtype, folder_of):
    folder = folder_of(family, 2)

    def half(**options: int) -> Backend:
        model, tokenizer = loaded(folder).to(dtype), AutoTokenizer.from_pretrained(folder)
        return Backend.from_plugin(TransformersBackend.open(model, tokenizer=tokenizer, **options), "half")

    with half() as one, half(max_batch_tokens=64) as other:
        found = compare([one, other], PROMPTS, oracle=folder)
    print(found)
    assert (found.verdict, found.causes) == ("agree", ())


@pytest.mark.parametrize("family", in_families("qwen2", "llama"))
def test_without_an_oracle_low_precision_is_rounding(family, folder_of):
    folder = folder_of(family, 2)
    model = loaded(folder).to(torch.bfloat16)
    with sound(folder) as one, opened(TransformersBackend, model, AutoTokenizer.from_pretrained(folder)) as other:
        found = compare([one, other], PROMPTS, oracle=None)
    assert found.verdict == "rounding" and [cause.side for cause in found.causes] == ["planted"]


def test_three_sides_of_which_one_is_opened_here(folder_of):
    folder = folder_of("qwen2", 1)
    with sound(folder) as one, sound(folder) as other:
        found = compare([one, other, SideSpec(backend="transformers", model=folder, name="third")], PROMPTS)
        assert not one.closed and not other.closed
    assert [side.name for side in found.sides] == ["transformers 1", "transformers 2", "third"]
    assert found.verdict == "agree" and len([gap for gap in found.gaps if gap.kind == "sides"]) == 3

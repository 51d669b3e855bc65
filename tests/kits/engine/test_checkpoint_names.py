"""The names and shapes that a model's weights have in its checkpoint, known without any weights."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from corelm.spec import saved_shapes
from corelm_engine_kit import tensor_shapes
from helpers.tiny_models import tiny_model


@pytest.mark.parametrize("family", ["qwen2", "qwen2-tied", "mixtral", "qwen3-moe"])
def test_a_model_on_the_meta_device_has_the_names_and_shapes_of_its_checkpoint(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = type(model)(copy.deepcopy(model.config))
    assert saved_shapes(empty) == tensor_shapes(tmp_path)


def test_another_module_has_its_own_names() -> None:
    assert saved_shapes(nn.Linear(2, 3)) == {"weight": (3, 2), "bias": (3,)}

"""Compiled models are used, models wrapped or sharded for several ranks are refused, and DTensors are gathered."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from corelm.errors import CapabilityError
from helpers import oracle, sharded
from helpers.plain_forward import Open
from helpers.ranks import on_two_ranks
from helpers.tiny_models import random_rows, tiny_model

(IDS,) = random_rows(20)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return what each of two ranks has found, by the function of `helpers.sharded`."""
    return on_two_ranks(sharded.everything, tmp_path_factory.mktemp("ranks"))


def test_a_compiled_model_is_used_without_being_compiled(open_model: Open) -> None:
    model = tiny_model()
    compiled = torch.compile(model)
    backend = open_model(compiled, dtype="float32", device="cpu")
    assert backend.engine.plugin.engine.module is model
    found = backend.score_logprobs([IDS], grad=True)
    torch.testing.assert_close(found.logprobs.values.detach(), oracle.logprobs(model, IDS), rtol=0, atol=1e-5)
    found.logprobs.values.sum().backward()
    assert all(parameter.grad is not None for parameter in compiled.parameters())
    with torch.no_grad():
        next(compiled.parameters()).mul_(2)
    assert backend.score_logprobs([IDS]).weight_versions == ("1",)


def test_data_parallel_is_refused(open_model: Open) -> None:
    with pytest.raises(CapabilityError, match=r"DataParallel .*; give model\.module") as caught:
        open_model(torch.nn.DataParallel(tiny_model()))
    assert caught.value.capability == "model"


def emptied(*, by_deepspeed: bool) -> torch.nn.Module:
    """Return a model like those of ZeRO-3, which empties every parameter and keeps its shape in an attribute."""
    model = tiny_model()
    for number, parameter in enumerate(model.parameters()):
        if by_deepspeed:
            parameter.ds_id, parameter.ds_shape = number, parameter.shape
        parameter.data = torch.empty(0)
    return model


def test_zero_3_is_refused(open_model: Open) -> None:
    with pytest.raises(CapabilityError, match=r"ZeRO-3 .*unsharded copy.*engine\.save_16bit_model\(FOLDER\)"):
        open_model(emptied(by_deepspeed=True))


def test_emptied_parameters_are_refused(open_model: Open) -> None:
    with pytest.raises(CapabilityError, match=r"first parameter is empty.*update_weights with a full state dict"):
        open_model(emptied(by_deepspeed=False))


@pytest.mark.process
def test_wrappers_of_several_ranks_are_refused_on_every_rank(ranks: list[Any]) -> None:
    first, second = (rank["refusals"] for rank in ranks)
    assert first == second
    assert first["fully_shard"].startswith("fully_shard shards the model") and first["layers"] == first["fully_shard"]
    assert "call update_weights(model.state_dict()) on all ranks" in first["fully_shard"]
    assert "give model.module" in first["DistributedDataParallel"]
    assert "call update_weights with a full state dict" in first["FullyShardedDataParallel"]


@pytest.mark.process
def test_a_model_sharded_after_it_was_opened_is_refused_on_every_rank(ranks: list[Any]) -> None:
    first, second = (rank["refusals_after_opening"] for rank in ranks)
    assert first == second and first.keys() == {"generate", "score", "update"}
    assert all(message.startswith("fully_shard shards the model") for message in first.values())


@pytest.mark.process
def test_the_weights_of_a_sharded_model_are_gathered(ranks: list[Any]) -> None:
    for rank in ranks:
        for family, scores in [*rank["updated"].items(), *rank["streamed"].items()]:
            expected = oracle.logprobs(tiny_model(family, seed=1), IDS)
            torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)


@pytest.mark.process
def test_other_processes_get_gathered_weights(ranks: list[Any]) -> None:
    expected = tiny_model("qwen2-tied", seed=1).state_dict()
    for rank in ranks:
        found = rank["gathered"]
        assert found["fleet"].keys() == found["process"].keys() == expected.keys()
        assert found["collected"].keys() == expected.keys()
        assert found["stream"].keys() == found["folder"].keys() == expected.keys() - {"lm_head.weight"}
        for weights in found.values():
            assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())

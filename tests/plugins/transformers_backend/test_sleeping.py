"""A model that sleeps: its memory is free, and it wakes with its own weights or with those of an update."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import corelm
from corelm import Backend
from corelm.errors import CapabilityError
from helpers import oracle
from helpers.plain_forward import Open
from helpers.tiny_models import random_rows, tiny_model, tiny_tokenizer

(IDS,) = random_rows(20)


@pytest.fixture(params=["qwen2-tied", pytest.param("mixtral", marks=pytest.mark.nightly)])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(family: str, tmp_path: Path) -> Path:
    tiny_model(family).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def agrees(backend: Backend, model: torch.nn.Module) -> bool:
    found = backend.score_logprobs([IDS]).logprobs.values
    return torch.allclose(found, oracle.logprobs(model, IDS), rtol=0, atol=1e-5)


def weights_of(backend: Backend) -> list[torch.nn.Parameter]:
    return list(backend.engine.plugin.engine.module.parameters())


def test_level_2_frees_them_and_an_update_brings_others(folder: Path, family: str) -> None:
    with corelm.get_backend("transformers", folder) as backend:
        agrees(backend, tiny_model(family))
        shapes = [weight.shape for weight in weights_of(backend)]
        backend.sleep(level=2)
        assert all(weight.untyped_storage().nbytes() == weight.element_size() for weight in weights_of(backend))
        backend.wake(["weights"])
        assert [weight.shape for weight in weights_of(backend)] == shapes
        assert all(weight.isnan().all() and weight.is_contiguous() for weight in weights_of(backend))
        backend.update_weights(tiny_model(family, seed=1))
        backend.wake()
        assert agrees(backend, tiny_model(family, seed=1)) and backend.weight_version == "1"
        with torch.no_grad():
            weights_of(backend)[0].mul_(2)
        assert backend.weight_version == "2"


@pytest.mark.parametrize("family", ["qwen2"], indirect=True)
def test_buffers_stay_views(folder: Path) -> None:
    with corelm.get_backend("transformers", folder) as backend:
        module = backend.engine.plugin.engine.module
        module.register_buffer("one", torch.ones(1).expand(4, 4), persistent=False)
        backend.sleep()
        backend.wake()
        assert module.one.untyped_storage().nbytes() == module.one.element_size()


def test_the_model_of_the_program_does_not_sleep(open_model: Open) -> None:
    model = tiny_model()
    backend = open_model(model)
    with pytest.raises(CapabilityError, match="lacks sleep_levels"):
        backend.sleep()
    assert agrees(backend, model)


@pytest.mark.process
@pytest.mark.parametrize("family", ["qwen2"], indirect=True)
def test_a_model_in_another_process_sleeps(folder: Path, family: str) -> None:
    with corelm.get_backend("transformers", folder, python=sys.executable) as backend:
        backend.sleep()
        backend.wake()
        assert agrees(backend, tiny_model(family))
        backend.sleep(level=2)
        backend.wake("weights")
        backend.update_weights(tiny_model(family, seed=1))
        backend.wake()
        assert agrees(backend, tiny_model(family, seed=1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", ["qwen2"], indirect=True)
@pytest.mark.parametrize("level", [1, 2])
def test_the_memory_of_the_gpu_is_free_while_it_sleeps(folder: Path, level: int) -> None:
    with corelm.get_backend("transformers", folder, device="cuda") as backend:
        backend.score_logprobs([IDS])
        backend.sleep(level)
        assert torch.cuda.memory_reserved() == 0
        backend.wake()

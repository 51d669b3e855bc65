"""The canary raises no alarm while the weights are right."""

from __future__ import annotations

import pytest
import torch

import corelm
from apps.fleet.conftest import looks, table
from corelm import Backend
from corelm.errors import StaleWeightsError
from corelm_fleet import probe_scores
from corelm_fleet.canary import watch
from corelm_testing.toy import Bigram
from helpers.planted_engines import Coarse, SaysItIsCoarse
from helpers.tiny_models import tiny_model, tiny_tokenizer


# Fifteen updates have each of five steps with and without expect.
@pytest.mark.parametrize("updates", [15, pytest.param(200, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clean_updates_raise_no_alarm(dtype: torch.dtype, updates: int) -> None:
    """Large and small steps, no step at all, with and without expect; a trainer in float32 in every case."""
    small = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32}
    trained = tiny_model(seed=1, **small)
    generator = torch.Generator().manual_seed(0)
    engine = tiny_model(**small).to(dtype)
    with corelm.get_backend("transformers", engine, tokenizer=tiny_tokenizer(), fast=False, canary=True) as backend:
        for number in range(1, updates + 1):
            step = (0.0, 1e-6, 1e-4, 1e-2, 0.1)[number % 5]
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.mul_(1 - step).add_(step * 0.2 * torch.randn(parameter.shape, generator=generator))
            expect = probe_scores(trained) if number % 3 else None
            assert backend.update_weights(trained.state_dict(), expect=expect) == str(number)
            if number % 10 == 0:
                looks(backend).look()


def test_an_engine_of_a_declared_precision_raises_no_alarm() -> None:
    model = tiny_model(seed=1)
    with pytest.raises(StaleWeightsError):
        watch(Backend.from_plugin(Coarse.open(model, tokenizer=tiny_tokenizer()), "coarse"))
    with Backend.from_plugin(SaysItIsCoarse.open(tiny_model(), tokenizer=tiny_tokenizer()), "coarse") as backend:
        watch(backend).look()
        backend.update_weights(model.state_dict(), expect=probe_scores(model))
        with pytest.raises(StaleWeightsError):
            backend.update_weights(model.state_dict(), expect=probe_scores(tiny_model(seed=2)))


def test_new_rows_for_a_few_tokens_raise_no_alarm(toy: Backend) -> None:
    """No probe has these tokens, so its scores stay the same."""
    first, second = table(0)["table"], table(0)["table"]
    second[:50] = 0.0
    toy.update_weights({"table": first})
    toy.update_weights({"table": second})


def test_a_model_that_says_the_same_of_every_token_raises_no_alarm() -> None:
    with corelm.get_backend("toy", Bigram(torch.zeros(260, 260)), canary=True) as backend:
        backend.update_weights(table(0))
        backend.update_weights({"table": torch.zeros(260, 260)})
        looks(backend).look()


def test_a_model_that_its_owner_trains_in_place_raises_no_alarm() -> None:
    model = tiny_model()
    with corelm.get_backend("transformers", model, tokenizer=tiny_tokenizer(), canary=True) as backend:
        for step in range(1, 3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter *= 1.1
            looks(backend).look()
            assert backend.weight_version == str(step)
        assert backend.update_weights(tiny_model(seed=1).state_dict()) == "3"
        with torch.no_grad():
            model.get_input_embeddings().weight *= 1.1
        assert backend.weights_changed(expect=probe_scores(model)) == "4"


def test_the_callers_torch_modes_change_nothing() -> None:
    other = tiny_model(seed=1)
    with corelm.get_backend("transformers", tiny_model(), tokenizer=tiny_tokenizer(), canary=True) as backend:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
            expect = probe_scores(other)
            backend.update_weights(other.state_dict(), expect=expect)
            looks(backend).look()
        looks(backend).look(probe_scores(other))

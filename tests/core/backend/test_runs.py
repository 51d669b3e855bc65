"""`backend.runs(model)`: whether training a model object in place changes an engine's weights."""

import peft
import pytest
import torch
from torch import nn

import corelm
from corelm_testing.toy import Bigram
from helpers.tiny_models import tiny_model, tiny_tokenizer


@pytest.fixture
def model():
    return tiny_model()


@pytest.fixture
def backend(model):
    with corelm.get_backend("transformers", model, tokenizer=tiny_tokenizer()) as opened:
        yield opened


class Wrapper(nn.Module):
    """A wrapper as those of trainers."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def test_the_object_that_it_was_opened_with(backend, model):
    assert backend.runs(model) and backend.weight_version == "0"
    # What it is for: the engine notices the trainer's step.
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    assert backend.weight_version == "1"


def test_wrappers_of_that_object(backend, model):
    assert backend.runs(Wrapper(model))
    assert backend.runs(peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])))


def test_no_other_model(backend):
    assert not backend.runs(tiny_model()) and not backend.runs(nn.Linear(2, 2)) and not backend.runs(nn.Identity())


def test_any_engine_that_tells_the_state_of_its_weights():
    model = Bigram.of_talk()
    with corelm.get_backend("toy", model) as toy:
        assert toy.runs(model) and not toy.runs(Bigram.of_talk())

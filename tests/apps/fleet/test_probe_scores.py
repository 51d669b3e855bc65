"""`probe_scores`: a trainer's numbers, with which a canary compares an engine."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from torch import nn

import corelm
from apps.fleet.conftest import looks, table
from corelm import Backend
from corelm.errors import InvalidRequestError, StaleWeightsError
from corelm_fleet import ProbeScores, probe_scores
from helpers.tiny_models import tiny_model, tiny_tokenizer


def test_scores_of_a_module_a_callable_and_a_backend_are_the_same_numbers() -> None:
    model = tiny_model().train()
    found = probe_scores(model)
    assert all(part.training for part in model.modules()), "every part is in training mode again"
    assert found.dtype == "float32" and probe_scores(model.bfloat16()).dtype == "bfloat16"
    model = tiny_model()
    called = probe_scores(lambda ids: model(ids).logits, vocab_size=512, max_context=512)
    with corelm.get_backend("transformers", model, tokenizer=tiny_tokenizer()) as backend:
        engine = probe_scores(backend)
    assert called.probes == engine.probes == found.probes and called.dtype is None and engine.dtype == "float32"
    for one, other, third in zip(found.logprobs, called.logprobs, engine.logprobs, strict=True):
        assert torch.allclose(torch.tensor(one), torch.tensor(other), atol=1e-4)
        assert torch.allclose(torch.tensor(one), torch.tensor(third), atol=1e-4)


def test_probes_are_long_enough_for_a_prefix_cache_and_the_same_in_every_process() -> None:
    found = probe_scores(tiny_model())
    first, second = found.probes[-2:]
    assert first != second and first[:136] == second[:136] and len(first) == len(second) == 144
    assert found.probes[0] == (300, 149, 186)
    assert len({*found.probes}) == len(found.probes) == 4


def test_scores_travel_as_a_pickle_and_as_json(toy: Backend) -> None:
    found = probe_scores(toy)
    assert pickle.loads(pickle.dumps(found)) == found
    sent = json.loads(json.dumps(found.to_dict()))
    assert ProbeScores.make(sent) == found
    looks(toy).look(sent)


def test_one_engine_is_compared_with_what_another_one_says(toy: Backend) -> None:
    with corelm.get_backend("toy", canary=True) as other:
        found = looks(other).scores
        assert found is not None and found.dtype == "float32"
        looks(toy).look(found)
        other.update_weights(table(0))
        with pytest.raises(StaleWeightsError):
            looks(toy).look(looks(other).scores)
        assert toy.weight_version == "1"


def test_what_gives_no_logits_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="pass vocab_size="):
        probe_scores(lambda ids: ids)
    with pytest.raises(InvalidRequestError):
        probe_scores(lambda ids: ids, vocab_size=16)
    with pytest.raises(InvalidRequestError):
        probe_scores(3)  # type: ignore[arg-type]
    broken = tiny_model()
    nn.init.constant_(next(broken.parameters()), torch.nan)
    with pytest.raises(InvalidRequestError):
        probe_scores(broken)

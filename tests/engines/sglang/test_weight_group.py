"""Tensors sent to a real server behind a URL, which joins this process with gloo, as it would from another machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import corelm
from corelm import Backend
from corelm.errors import InvalidRequestError
from corelm.spec import WeightUpdate
from corelm_engine_kit import WeightGroup
from engines.sglang.restartable import KEY, RestartableServer
from helpers import oracle
from helpers.tiny_models import random_rows, tiny_model

#: Its server starts several times. test_weights.py shows the other ways to send weights.
pytestmark = pytest.mark.nightly

ROWS = random_rows(5, 120)


@pytest.fixture(scope="module")
def server(folder: Path, cpu: tuple[dict[str, str], dict[str, object]]) -> Iterator[RestartableServer]:
    with RestartableServer(folder, *cpu) as server:
        yield server


@pytest.fixture
def backend(server: RestartableServer) -> Iterator[Backend]:
    options = {"base_url": server.url, "api_key": KEY, "weight_group": WeightGroup("127.0.0.1"), "max_retries": 20}
    with corelm.get_backend("sglang", **options) as backend:
        yield backend


def agrees(backend: Backend, model: PreTrainedModel) -> bool:
    """Return whether scored log-probs are those of `model`."""
    scores = backend.score_logprobs(ROWS).logprobs.split()
    return all(
        torch.allclose(found, oracle.logprobs(model, row), atol=1e-4, rtol=0)
        for found, row in zip(scores, ROWS, strict=True)
    )


def test_a_state_dict_a_model_and_an_iterator_are_sent(backend: Backend, model, other_model):
    assert agrees(backend, model) and not agrees(backend, other_model)
    assert backend.update_weights(other_model.state_dict(), version="other") == "other"
    assert agrees(backend, other_model) and backend.score_logprobs(ROWS).weight_versions == ("other", "other")
    backend.update_weights(model)
    assert agrees(backend, model)
    backend.update_weights((name, tensor.bfloat16()) for name, tensor in other_model.state_dict().items())
    rounded = tiny_model(seed=1)
    rounded.load_state_dict({name: tensor.bfloat16() for name, tensor in other_model.state_dict().items()})
    assert agrees(backend, rounded)
    engine = backend.engine.plugin.weights
    update = WeightUpdate(version="buckets", when="drain")
    engine.broadcast(model.state_dict().items(), update, bucket_size=20_000)
    assert agrees(backend, model)


def test_weights_that_do_not_fit_change_nothing(backend: Backend, model):
    backend.update_weights(model.state_dict(), version="fits")
    with pytest.raises(InvalidRequestError) as caught:
        backend.update_weights({**tiny_model(seed=1).state_dict(), "model.norm.weight": torch.zeros(3)})
    assert caught.value.field == "state_dict" and backend.weight_version == "fits" and agrees(backend, model)


def test_a_server_that_was_restarted_joins_again(server: RestartableServer, backend: Backend, model, other_model):
    backend.update_weights(other_model)
    server.kill()
    server.start()
    server.wait_until_ready()
    backend.update_weights(other_model, version="again")
    assert agrees(backend, other_model) and backend.score_logprobs(ROWS).weight_versions == ("again", "again")

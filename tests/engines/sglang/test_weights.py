"""New weights on a real server: all or none are loaded, no cache of the old ones is used, every row is labelled."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import corelm
from corelm import Backend
from corelm.errors import BackendAsleepError, CapabilityError, EngineError, InvalidRequestError, StaleWeightsError
from helpers import oracle
from helpers.http_server import Request
from helpers.tampering import tampered
from helpers.tiny_models import random_rows, tiny_model, tiny_tokenizer

ROWS = random_rows(5, 120)


@pytest.fixture(scope="module")
def own(launch: Callable[[], Backend]) -> Iterator[Backend]:
    """A server for this file only. Every test ends with the weights of `model` loaded."""
    with launch() as backend:
        yield backend


def agrees(backend: Backend, model: PreTrainedModel) -> bool:
    """Return whether generated and scored log-probs are those of `model`."""
    scores = backend.score_logprobs(ROWS).logprobs.split()
    answers = backend.generate(ROWS, {"max_new_tokens": 4, "ignore_eos": True})
    sampled = [oracle.answer_logprobs(model, row, ids) for row, ids in zip(ROWS, answers.ids.tolist(), strict=True)]
    pairs = [*zip(scores, (oracle.logprobs(model, row) for row in ROWS), strict=True)]
    pairs += zip(answers.logprobs.split(), sampled, strict=True)
    return all(torch.allclose(found, expected, atol=1e-4, rtol=0) for found, expected in pairs)


def test_weights_load_from_a_path_and_from_a_state_dict(own, model, other_model, other_folder):
    assert agrees(own, model) and not agrees(own, other_model)
    assert own.update_weights(other_folder, version="other") == "other"
    assert agrees(own, other_model)
    assert own.score_logprobs(ROWS).weight_versions == ("other", "other")
    own.update_weights(model.state_dict())
    assert agrees(own, model) and own.weight_version == "other+1"


def test_a_state_dict_is_handed_over_without_a_file(own, model, other_model, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "absent"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    own.update_weights({name: tensor.bfloat16() for name, tensor in other_model.state_dict().items()})
    rounded = tiny_model(seed=1)
    rounded.load_state_dict({name: tensor.bfloat16() for name, tensor in other_model.state_dict().items()})
    assert agrees(own, rounded)
    own.update_weights(model.state_dict(), version="again")
    assert agrees(own, model) and own.score_logprobs(ROWS).weight_versions == ("again", "again")


def test_an_iterator_is_loaded_if_it_is_complete(own, model, other_model):
    pairs = [(name, tensor) for name, tensor in other_model.state_dict().items()]
    before = own.weight_version
    with pytest.raises(InvalidRequestError, match="missing"):
        own.update_weights(iter(pairs[:9]))
    assert own.weight_version == before and agrees(own, model)
    own.update_weights(iter(pairs))
    assert agrees(own, other_model)
    own.update_weights(model.state_dict())
    assert agrees(own, model)


def test_weights_that_do_not_fit_change_nothing(own, model, tmp_path):
    before = own.weight_version
    state = tiny_model(seed=1).state_dict()
    missing = {name: tensor for name, tensor in state.items() if name != "model.norm.weight"}
    reshaped = {**state, "model.norm.weight": torch.zeros(3)}
    for wrong in (missing, reshaped, {**state, "no.such.name": torch.zeros(3)}, {}):
        with pytest.raises(InvalidRequestError) as caught:
            own.update_weights(wrong)
        assert caught.value.field == "state_dict"
    tiny_model(hidden_size=32).save_pretrained(tmp_path / "narrow")
    for path in (tmp_path / "narrow", tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InvalidRequestError) as caught:
            own.update_weights(path)
        assert caught.value.field == "path"
    assert own.weight_version == before and agrees(own, model) and own.health()


def test_rows_of_weights_that_another_client_loaded_are_errors(
    own: Backend, connect: Callable[[Backend], Backend], model: PreTrainedModel, folder: Path, other_folder: Path
):
    other_client = connect(own)
    with pytest.raises(CapabilityError):
        other_client.update_weights(model.state_dict())
    other_client.update_weights(other_folder, version="the other client's")
    with pytest.raises(EngineError, match="the other client's"):
        own.generate(ROWS, {"max_new_tokens": 2})
    batch = own.score_logprobs(ROWS, on_error="skip")
    assert all("the other client's" in error for error in batch.errors) and not batch.scored.values.any()
    own.update_weights(folder)
    assert agrees(own, model)


def test_a_prefix_cache_that_is_not_emptied_is_found(own: Backend, model: PreTrainedModel, other_folder: Path):
    server = own.engine.plugin.launched

    def keep(request: Request) -> Request:
        loads = request.path == "/update_weights_from_disk"
        return replace(request, body=request.body | {"flush_cache": False}) if loads else request

    with (
        tampered(server.base_url, keep) as url,
        corelm.get_backend("sglang", base_url=url, api_key=server.api_key, canary=True) as backend,
        pytest.raises(StaleWeightsError),
    ):
        backend.update_weights(other_folder)
    own.update_weights(model.state_dict())
    assert agrees(own, model)


@pytest.mark.nightly
@pytest.mark.parametrize("original", ["0", "1"])
def test_a_server_without_weights_answers_once_it_was_given_some(
    cpu: tuple[dict[str, str], dict[str, object]], model: PreTrainedModel, tmp_path: Path, original: str
):
    model.config.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    env = cpu[0] | {"SGLANG_RETURN_ORIGINAL_LOGPROB": original}
    options = cpu[1] | {"progress": False, "load_format": "dummy"}
    with corelm.get_backend("sglang", tmp_path, env=env, **options) as backend:
        for call in (lambda: backend.generate(ROWS, {"max_new_tokens": 2}), lambda: backend.score_logprobs(ROWS)):
            with pytest.raises(BackendAsleepError, match="has no weights yet"):
                call()
        with pytest.raises(InvalidRequestError, match=r"model\.norm\.weight"):
            backend.update_weights({**model.state_dict(), "model.norm.weight": torch.zeros(3)})
        backend.update_weights(model.state_dict())
        assert backend.capabilities.generation_modes == {"raw" if original == "1" else "scaled"}
        assert agrees(backend, model)


@pytest.mark.parametrize("by_path", [False, True])
def test_answers_go_on_with_new_weights_and_say_from_which_token(own, model, other_model, other_folder, by_path):
    sampling = {"max_new_tokens": 350, "temperature": 0.8, "top_p": 0.9, "ignore_eos": True}
    stream = own.stream(ROWS, sampling, logprobs="processed", return_support=True)
    told: dict[int, list[float]] = {0: [], 1: []}
    before = own.weight_version
    for chunk in stream:
        told[chunk.row] += chunk.logprobs
        if min(map(len, told.values())) > 20:
            break
    version = f"in flight {by_path}"
    own.update_weights(other_folder if by_path else other_model.state_dict(), version=version, when="now")
    for chunk in stream:
        told[chunk.row] += chunk.logprobs
    found = stream.result
    assert [*told.values()] == found.logprobs.tolist() and found.finish_reasons == ("length", "length")
    for row, (prompt, runs) in enumerate(zip(ROWS, found.version_runs, strict=True)):
        assert [name for name, _ in runs] == [before, version]
        first, ids = runs[1][1], found.ids.tolist()[row]
        assert 20 < first < len(ids)
        # Each token is of the weights that its run names, after all tokens before it.
        kept, numbers = found.kept_ids.tolist()[row], found.logprobs.values.split(len(ids))[row]
        for weights, part in ((model, slice(0, first)), (other_model, slice(first, None))):
            table = (oracle.next_logits(weights, [*prompt, *ids])[len(prompt) - 1 : -1] / 0.8).log_softmax(-1)
            expected = [
                line[token] - line[left].logsumexp(0) for line, token, left in zip(table, ids, kept, strict=True)
            ]
            assert torch.allclose(numbers[part], torch.stack(expected)[part], atol=1e-4, rtol=0)
    assert agrees(own, other_model)
    own.update_weights(model.state_dict())
    assert agrees(own, model)

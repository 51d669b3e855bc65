"""New weights on a fake server."""

from __future__ import annotations

import pytest

from corelm import Backend
from corelm.errors import CapabilityError, CoreLMError, EngineError, InvalidRequestError
from helpers.http_server import json_reply, raw
from helpers.tiny_models import VOCAB, tiny_model


def test_new_weights_get_a_label_that_the_server_never_had(backend: Backend, fake, other_folder):
    assert backend.update_weights(other_folder, version="7") == "7"
    assert fake.weight_updates == [{"model_path": str(other_folder), "weight_version": "7", "flush_cache": True}]
    assert backend.score_logprobs([[5, 6]]).weight_versions == ("7",)
    # The server started with weights of this name, so the label must differ; the caller sees the version.
    backend.update_weights(other_folder, version="default")
    assert fake.weight_label == "default'" and backend.score_logprobs([[5, 6]]).weight_versions == ("default",)


def test_rows_from_a_restarted_server_are_errors_until_the_weights_are_loaded_again(
    backend: Backend, fake, other_folder
):
    backend.update_weights(other_folder, version="7")
    fake.weight_label = "default"
    with pytest.raises(EngineError, match="'default', but '7' are in force"):
        backend.generate([[5]], {"max_new_tokens": 2})
    with pytest.raises(EngineError):
        backend.score_logprobs([[5, 6]])
    backend.update_weights(other_folder, version="7")
    assert backend.score_logprobs([[5, 6]]).weight_versions == ("7",)


def test_weights_that_failed_to_load_get_neither_the_old_label_nor_the_callers(backend: Backend, fake, other_folder):
    fake.fault = lambda request: (
        json_reply({"success": False, "message": "no"}) if request.path.startswith("/update") else None
    )
    with pytest.raises(EngineError):
        backend.update_weights(other_folder, version="7")
    assert backend.weight_version == "1"
    assert backend.score_logprobs([[5, 6]]).weight_versions == ("1",)


def test_weights_that_do_not_fit_are_not_sent(backend: Backend, fake, tmp_path):
    tiny_model(intermediate_size=64).save_pretrained(tmp_path / "wide")
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path / "short")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"no tensors")
    messages = {
        "wide": r"mlp.*is \(64, 64\), expected \(96, 64\)",
        "short": "missing 'model.layers.1",
        "broken": "no readable safetensors",
        "nowhere": "no folder",
    }
    for name, message in messages.items():
        with pytest.raises(InvalidRequestError, match=message) as caught:
            backend.update_weights(tmp_path / name)
        assert caught.value.field == "path"
    assert fake.weight_updates == [] and backend.weight_version == "0"


def test_weights_that_cannot_be_compared_are_not_sent(fake, connect, other_folder):
    fake.model_info["model_path"] = fake.server_info["model_path"] = "/nowhere/at-all"
    backend = connect(vocab_size=VOCAB)
    with pytest.raises(InvalidRequestError, match="'/nowhere/at-all' is not on this machine") as caught:
        backend.update_weights(other_folder)
    assert caught.value.field == "path" and fake.weight_updates == []


def test_the_cache_is_emptied_when_the_owner_has_changed_the_weights(backend: Backend, fake):
    posted = []

    def routes(request):
        posted.append(request.path)
        if request.path == "/flush_cache":
            return raw(b"Cache flushed.\n")
        if request.path == "/update_weight_version":
            assert request.body == {"new_version": "trained", "abort_all_requests": False}
            fake.weight_label = "trained"
            return json_reply({"success": True, "message": "", "new_version": "trained"})
        return None

    fake.fault = routes
    assert backend.weights_changed("trained") == "trained"
    assert posted == ["/flush_cache", "/update_weight_version"]
    assert backend.score_logprobs([[5, 6]]).weight_versions == ("trained",)


def test_weights_whose_cache_is_kept_do_not_have_the_old_version(backend: Backend, fake):
    fake.fault = lambda request: raw(b"Flush cache failed.\n", 400) if request.path == "/flush_cache" else None
    with pytest.raises(CoreLMError):
        backend.weights_changed("trained")
    assert backend.weight_version == "1"


def test_a_request_names_an_adapter_that_the_server_was_started_with(connect, fake):
    fake.server_info |= {"enable_lora": True, "lora_paths": [{"lora_name": "sql", "lora_path": "/x"}]}
    backend = connect()
    for adapter, field in (("sql", "sql"), (False, None), (None, None)):
        backend.score_logprobs([[5, 6]], adapter=adapter)
        assert fake.requests[-1].get("lora_path") == field
        backend.generate([[5]], {"max_new_tokens": 2}, adapter=adapter)
        assert fake.requests[-1].get("lora_path") == field
    with pytest.raises(InvalidRequestError, match="there is no 'other'; there are 'sql'"):
        backend.generate([[5]], {"max_new_tokens": 2}, adapter="other")


def test_a_server_without_adapters_is_not_asked_for_one(backend: Backend, fake):
    before = len(fake.requests)
    with pytest.raises(CapabilityError):
        backend.generate([[5]], {"max_new_tokens": 2}, adapter="sql")
    with pytest.raises(CapabilityError):
        backend.load_adapter("sql", "/x")
    assert len(fake.requests) == before

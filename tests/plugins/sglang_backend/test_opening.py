"""Opening a backend: capabilities are read and probed, hints replace what cannot be read, options are checked."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import corelm
from corelm.errors import BackendTimeoutError, CapabilityError, EngineError, InvalidRequestError
from helpers.each import case
from helpers.http_server import drip, json_reply
from helpers.tiny_models import VOCAB, tiny_tokenizer
from sglang_backend.launch import command_line

RESHAPING = {"presence_penalty", "frequency_penalty", "min_new_tokens", "engine_kwargs"}


def test_capabilities_are_read_from_the_server_and_the_models_files(backend):
    found = backend.capabilities
    assert (found.vocab_size, found.max_context, found.eos_token_ids) == (VOCAB, 64, {2})
    assert (found.generation_modes, found.per_answer_seeds) == ({"scaled"}, False)
    assert found.score and found.concurrent_calls and found.abort and found.update_weights
    assert not (found.score_temperature or found.logits or found.gradients or found.empty_prompt)
    assert "repetition_penalty" not in found.sampling and found.sampling["presence_penalty"] == (-2.0, 2.0)
    assert backend.tokenizer.get_vocab() == tiny_tokenizer().get_vocab()


def test_probing_recognises_raw_log_probs(fake, connect):
    fake.scaled = False
    found = connect().capabilities
    assert found.generation_modes == {"raw"}
    # Such a server applies these before it takes log-probs, so what it calls raw would not be.
    assert not RESHAPING & set(found.sampling) and {"temperature", "top_p", "min_p", "stop"} <= set(found.sampling)


def test_log_probs_that_are_neither_raw_nor_scaled_are_not_offered(fake, connect, caplog):
    def treble(reply):
        for entry in reply["meta_info"]["output_token_logprobs"]:
            entry[0] *= 3

    fake.spoil = treble
    backend = connect()
    assert backend.capabilities.generation_modes == frozenset() and "not clearly raw or scaled" in caplog.text
    with pytest.raises(CapabilityError):
        backend.generate([[5]], {"max_new_tokens": 1})
    assert backend.generate([[5]], {"max_new_tokens": 1}, logprobs="none").logprobs is None


def test_probing_tolerates_16_bit_log_probs(fake, connect):
    def to_bfloat16(reply):
        for entry in reply["meta_info"]["output_token_logprobs"]:
            entry[0] = float(torch.tensor(entry[0]).bfloat16())

    fake.spoil = to_bfloat16
    assert connect().capabilities.generation_modes == {"scaled"}


def test_probing_recognises_seeds(fake, connect):
    fake.honours_seeds = True
    backend = connect()
    assert backend.capabilities.per_answer_seeds
    # The sampler asserts that min_p is not used with a seed.
    assert "min_p" not in backend.capabilities.sampling
    sampling = {"max_new_tokens": 8, "seed": 3}
    first, repeated = (backend.generate([[5], [5]], sampling).ids.tolist() for _ in range(2))
    assert first == repeated and first[0] != first[1]


def test_a_server_without_a_tokenizer_offers_no_stop_strings(fake, connect):
    fake.server_info["skip_tokenizer_init"] = True
    assert not {"stop", "min_new_tokens"} & set(connect().capabilities.sampling)


def test_hints_replace_what_would_be_read(fake, connect):
    fake.model_info |= {"tokenizer_path": "/nowhere/at-all", "model_path": "/nowhere/at-all"}
    fake.server_info = {"model_path": "/nowhere/at-all"}
    backend = connect(tokenizer=tiny_tokenizer(), vocab_size=VOCAB, max_context=32, eos_token_ids=[2, 7])
    found = backend.capabilities
    assert (found.vocab_size, found.max_context, found.eos_token_ids) == (VOCAB, 32, {2, 7})


@pytest.mark.parametrize("missing", ["tokenizer", "vocab_size", "max_context"])
def test_the_error_names_the_hint_that_is_missing(fake, connect, missing):
    fake.model_info |= {"tokenizer_path": "/nowhere/at-all", "model_path": "/nowhere/at-all"}
    fake.server_info = {"model_path": "/nowhere/at-all"}
    options = {"tokenizer": tiny_tokenizer(), "vocab_size": VOCAB, "max_context": 32}
    del options[missing]
    with pytest.raises(InvalidRequestError, match=f"pass {missing}=") as caught:
        connect(**options)
    assert caught.value.field == missing


def test_eos_ids_of_all_files_are_joined(fake, connect, folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copy / "generation_config.json").read_text())
    (copy / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": [2, 9]}))
    fake.model_info["model_path"] = fake.server_info["model_path"] = str(copy)
    assert connect().capabilities.eos_token_ids == {2, 9}


@pytest.mark.parametrize("wrong", [2, ["</s>"], [2, VOCAB]])
def test_eos_ids_that_are_not_ids_of_the_vocabulary_are_refused(connect, wrong):
    with pytest.raises(InvalidRequestError) as caught:
        connect(eos_token_ids=wrong)
    assert caught.value.field == "eos_token_ids"


def test_other_kinds_of_servers_are_refused(fake, connect):
    fake.model_info["is_generation"] = False
    with pytest.raises(EngineError, match="not an SGLang server"):
        connect()
    fake.fault = lambda request: json_reply(["not an object"])
    with pytest.raises(EngineError):
        connect()


# Options --------------------------------------------------------------------------------------------------------------


def test_options_that_contradict_each_other_are_refused():
    for options, field in [
        ({}, "model"),
        ({"model": object()}, "model"),
        ({"model": "m", "base_url": "http://127.0.0.1:1"}, "model"),
        ({"base_url": "http://127.0.0.1:1", "tp_size": 2}, "tp_size"),
        ({"base_url": "http://127.0.0.1:1", "env": {}}, "env"),
        ({"base_url": "http://127.0.0.1:1", "startup_timeout": 5.0}, "startup_timeout"),
        ({"base_url": "http://127.0.0.1:1", "progress": False}, "progress"),
        ({"model": "m", "api_key": "k"}, "api_key"),
        ({"model": "m", "headers": {}}, "headers"),
        ({"model": "m", "port": 5}, "port"),
        ({"model": "m", "config": "file.yaml"}, "config"),
        ({"tp_size": 2}, "tp_size"),
    ]:
        with case(options, field):
            with pytest.raises(InvalidRequestError) as caught:
                corelm.get_backend("sglang", **options)
            assert caught.value.field == field


def test_arguments_become_command_line_options():
    given = {"mem_fraction_static": 0.3, "disable_radix_cache": True, "enable_x": False, "revision": None}
    assert command_line(given) == ["--mem-fraction-static=0.3", "--disable-radix-cache"]
    assert command_line({"sizes": [1, 2]}) == ["--sizes", "1", "2"]
    assert command_line({"override": {"a": 1}}) == ['--override={"a": 1}']


# A server that is slow ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["/model_info", "/server_info", "/generate"])
def test_opening_ends_at_its_timeout_even_if_the_server_sends_a_byte_now_and_then(fake, connect, page):
    fake.fault = lambda request: drip() if request.path == page else None
    with pytest.raises(BackendTimeoutError):
        connect(open_timeout=0.5)

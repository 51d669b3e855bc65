"""Opening: which options are refused, what is read from a server, and what the caller has to pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from corelm.errors import BackendTimeoutError, CapabilityError, EngineError, InvalidRequestError
from helpers.each import case
from helpers.fake_vllm import PROMPTS, SAMPLING, Connect, FakeVLLM
from helpers.http_server import FaultServer, drip, json_reply
from helpers.tiny_models import tiny_model, tiny_tokenizer, tokenizer_that_names_only_eos
from vllm_backend import VLLMBackend


def test_engine_options_are_refused_with_base_url() -> None:
    for options, hint in [
        ({"dtype": "float32"}, "where the server is started"),
        ({"engine": "sync"}, "where the server is started"),
        ({"max_retrys": 3}, "did you mean 'max_retries'"),
    ]:
        with case(options, hint):
            with pytest.raises(InvalidRequestError, match=hint) as caught:
                VLLMBackend.open(base_url="http://127.0.0.1:1", **options)
            assert caught.value.field in options


# Reading the server ---------------------------------------------------------------------------------------------------


def test_what_cannot_be_read_must_be_passed(connect: Connect) -> None:
    for missing in ["tokenizer", "vocab_size"]:
        with case(missing):
            with pytest.raises(InvalidRequestError, match=f"pass {missing}=") as caught:
                connect(**{missing: None})
            assert caught.value.field == missing


def test_a_context_length_that_the_server_does_not_say_must_be_passed(connect: Connect, fake: FakeVLLM) -> None:
    del fake.pages["/v1/models"]["data"][0]["max_model_len"]
    with pytest.raises(InvalidRequestError, match="pass max_context="):
        connect()
    assert connect(max_context=32).capabilities.max_context == 32


def test_a_context_longer_than_the_servers_is_refused(connect: Connect) -> None:
    with pytest.raises(InvalidRequestError):
        connect(max_context=65)


def test_tokenizer_vocabulary_and_eos_are_read_from_the_models_files(
    connect: Connect, fake: FakeVLLM, tmp_path: Path
) -> None:
    tiny_model(hidden_size=128, eos_token_id=[2, 9]).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    fake.pages["/v1/models"]["data"][0]["root"] = str(tmp_path)
    backend = connect(vocab_size=None, tokenizer=None)
    assert backend.capabilities.vocab_size == 512 and backend.eos_token_ids == {2, 9}
    assert backend.tokenize("Hello").ids.tolist() == [tiny_tokenizer()("Hello")["input_ids"]]


def test_an_adapter_has_the_configuration_and_tokenizer_of_its_parent(
    connect: Connect, server: FaultServer, fake: FakeVLLM, tmp_path: Path
) -> None:
    tiny_model(hidden_size=128, eos_token_id=[2, 9]).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "adapter").mkdir()
    cards = fake.pages["/v1/models"]["data"]
    cards[0]["root"] = str(tmp_path / "base")
    cards.append({"id": "adapter", "root": str(tmp_path / "adapter"), "parent": "fake", "max_model_len": None})
    backend = connect(model="adapter", vocab_size=None, tokenizer=None)
    assert backend.capabilities.vocab_size == 512 and backend.eos_token_ids == {2, 9}
    assert backend.capabilities.max_context == 64
    assert backend.tokenize("Hello").ids.tolist() == [tiny_tokenizer()("Hello")["input_ids"]]
    backend.generate(PROMPTS, SAMPLING)
    assert server.requests[-1].body["model"] == "adapter"
    backend.generate(PROMPTS, SAMPLING, adapter=False)
    assert server.requests[-1].body["model"] == "fake"
    base = connect(vocab_size=None, tokenizer=None)
    for adapter, model in (("adapter", "adapter"), (False, "fake"), (None, "fake")):
        base.score_logprobs(PROMPTS, adapter=adapter)
        assert server.requests[-1].body["model"] == model
    with pytest.raises(InvalidRequestError):
        base.generate(PROMPTS, SAMPLING, adapter="other")
    with pytest.raises(CapabilityError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        base.load_adapter("other", tmp_path)
    cards[1]["parent"] = "unknown"
    with pytest.raises(InvalidRequestError, match="pass vocab_size="):
        connect(model="adapter", vocab_size=None, max_context=64)


def test_one_of_several_models_must_be_named(connect: Connect, server: FaultServer, fake: FakeVLLM) -> None:
    cards = fake.pages["/v1/models"]["data"]
    cards.append({"id": "adapter", "root": "/x", "parent": "fake"})
    connect()
    cards.append({"id": "second", "root": "/x", "max_model_len": 16})
    with pytest.raises(InvalidRequestError):
        connect()
    with pytest.raises(InvalidRequestError):
        connect(model="third")
    backend = connect(model="second")
    assert backend.capabilities.max_context == 16
    backend.generate(PROMPTS, SAMPLING)
    assert server.requests[-1].body["model"] == "second"


def test_a_stop_string_with_a_special_token_is_refused_even_if_the_token_has_no_name(connect: Connect) -> None:
    backend = connect(tokenizer=tokenizer_that_names_only_eos())
    with pytest.raises(InvalidRequestError, match=r"'<\|im_start\|>' contains a special token.*stop_token_ids"):
        backend.generate(PROMPTS, SAMPLING | {"stop": ["<|im_start|>"]})


def test_parameters_that_the_server_has_no_field_for_are_refused(connect: Connect, fake: FakeVLLM) -> None:
    for name in ("min_p", "min_tokens", "prompt_logprobs"):
        del fake.fields[name]
    backend = connect()
    assert not {"min_p", "min_new_tokens"} & backend.capabilities.sampling.keys() and not backend.capabilities.score
    for engine_kwargs in ({"bad_words": ["a"]}, {"echo": True}):
        with pytest.raises(InvalidRequestError) as caught:
            backend.generate(PROMPTS, SAMPLING | {"engine_kwargs": engine_kwargs})
        assert caught.value.field == "engine_kwargs"


# Not a usable server --------------------------------------------------------------------------------------------------


def test_a_server_whose_description_is_not_vllms_is_refused(connect: Connect, fake: FakeVLLM) -> None:
    del fake.fields["return_token_ids"]
    with pytest.raises(EngineError, match="not a vLLM server, or too old"):
        connect()
    fake.pages["/openapi.json"] = {"paths": {}}
    with pytest.raises(EngineError):
        connect()


@pytest.mark.parametrize("ignored", ["return_token_ids", "logprobs", "prompt_logprobs"])
def test_a_server_without_a_description_that_ignores_fields_is_refused(
    connect: Connect, fake: FakeVLLM, ignored: str
) -> None:
    del fake.pages["/openapi.json"]
    fake.ignored = {ignored}
    with pytest.raises(EngineError, match="not a vLLM server, or too old"):
        connect()


# The key --------------------------------------------------------------------------------------------------------------


def test_the_key_is_read_from_the_environment_and_never_shown(
    connect: Connect, server: FaultServer, fake: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "a-secret-of-this-test")
    backend = connect(max_retries=0)
    assert server.requests[-1].headers["Authorization"] == "Bearer a-secret-of-this-test"
    fake.fault = lambda request: json_reply({"error": f"bad key {request.headers['Authorization']}"}, 401)
    with pytest.raises(EngineError, match="401") as caught:
        backend.generate(PROMPTS, SAMPLING)
    assert "a-secret" not in str(caught.value) + repr(backend) + repr(backend.provenance)


def test_a_key_that_equals_the_name_of_the_model_changes_no_request(connect: Connect, server: FaultServer) -> None:
    connect(api_key="fake").generate(PROMPTS, SAMPLING)
    assert server.requests[-1].body["model"] == "fake"


# Code that comes with a model -----------------------------------------------------------------------------------------


@pytest.fixture
def model_with_code(tmp_path: Path) -> Path:
    """A model whose configuration and tokenizer run code, which leaves a file named ``ran``."""
    folder = tmp_path / "with-code"
    tiny_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "odd", "auto_map": {"AutoConfig": "odd.Odd"}}))
    (folder / "odd.py").write_text(
        "import pathlib\nfrom transformers import PretrainedConfig\n\n"
        f"pathlib.Path({str(tmp_path / 'ran')!r}).touch()\n\n\n"
        "class Odd(PretrainedConfig):\n    model_type = 'odd'\n    vocab_size = 512\n"
    )
    return folder


def test_the_server_does_not_choose_which_code_runs(
    connect: Connect, fake: FakeVLLM, model_with_code: Path, tmp_path: Path
) -> None:
    fake.pages["/v1/models"]["data"][0]["root"] = str(model_with_code)
    for options in ({}, {"model": "fake"}, {"tokenizer": None}):
        with pytest.raises(InvalidRequestError, match="that you name") as caught:
            connect(trust_remote_code=True, **options)
        assert caught.value.field == "trust_remote_code"
    # A tokenizer that the caller names may run its code; the server's model still may not.
    own = tmp_path / "own"
    tiny_tokenizer().save_pretrained(own)
    connect(trust_remote_code=True, tokenizer=str(own))
    with pytest.raises(InvalidRequestError):
        connect(trust_remote_code=True, tokenizer=str(own), vocab_size=None)
    assert not (tmp_path / "ran").exists()


def test_the_error_says_that_a_configuration_with_code_is_not_trusted(
    connect: Connect, fake: FakeVLLM, model_with_code: Path
) -> None:
    fake.pages["/v1/models"]["data"][0]["root"] = str(model_with_code)
    with pytest.raises(InvalidRequestError, match="comes with Python code that is not trusted; pass vocab_size="):
        connect(vocab_size=None)
    fake.pages["/v1/models"]["data"][0]["root"] = "/nowhere/to-be/read"
    with pytest.raises(InvalidRequestError, match="cannot be read on this machine; pass vocab_size="):
        connect(vocab_size=None)


def test_code_of_a_model_that_the_caller_names_runs(
    connect: Connect, fake: FakeVLLM, model_with_code: Path, tmp_path: Path
) -> None:
    fake.pages["/v1/models"]["data"][0] |= {"id": str(model_with_code), "root": str(model_with_code)}
    backend = connect(trust_remote_code=True, model=str(model_with_code), vocab_size=None)
    assert backend.capabilities.vocab_size == 512 and (tmp_path / "ran").exists()


# A server that is slow ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["/openapi.json", "/v1/models", "/v1/completions"])
def test_opening_ends_at_its_timeout_even_if_the_server_sends_a_byte_now_and_then(
    connect: Connect, fake: FakeVLLM, page: str
) -> None:
    fake.fault = lambda request: drip() if request.path == page else None
    with pytest.raises(BackendTimeoutError):
        connect(open_timeout=0.5)

"""What people type as the name of a backend, and what the message tells them to type."""

from pathlib import Path

import pytest
from torch import nn

import corelm
from corelm import LLMPolicy
from corelm.errors import BackendNotFoundError, EngineError, InvalidRequestError
from helpers.each import each
from helpers.processes import free_port
from helpers.refusals import refused


@each("opening", [corelm.get_backend, LLMPolicy])
@each(
    "name, said",
    [
        ("tiny-model", r"name the backend first: get_backend\('transformers', 'tiny-model'\)"),
        ("Qwen/Qwen2.5-0.5B", r"get_backend\('transformers', 'Qwen/Qwen2.5-0.5B'\)"),
        ("hf", "Did you mean 'transformers'"),
        ("HuggingFace", "Did you mean 'transformers'"),
        ("http://localhost:8000", r"get_backend\('vllm', base_url='http://localhost:8000'\)"),
    ],
)
def test_a_name_that_is_no_backend_is_answered_with_the_call_that_was_meant(opening, name, said):
    with pytest.raises(BackendNotFoundError, match=said) as error:
        opening(name)
    assert "toy" in str(error.value).partition("Installed:")[2]


class Model(nn.Module):
    """A model whose repr is long."""

    def __repr__(self):
        return "Model(\n" + "  (layer): Linear()\n" * 100 + ")"


@each(
    "given, said",
    [
        (Model(), "got a Model; call get_backend('transformers', model, tokenizer=tokenizer)"),
        (Path("tiny-model"), "got a PosixPath; call get_backend('transformers', 'tiny-model')"),
        (None, "got None; call get_backend('transformers', 'PATH')"),
        ([Model()] * 9, "got a list; call get_backend('transformers', 'PATH')"),
    ],
)
def test_what_is_not_a_name_is_answered_in_one_line_with_the_call_to_make(given, said):
    with pytest.raises(InvalidRequestError) as error:
        corelm.get_backend(given)
    assert str(error.value) == f"name: expected the name of a backend, {said}"


def test_an_open_backend_needs_no_name():
    with corelm.get_backend("toy") as backend, refused(InvalidRequestError, field="name"):
        corelm.get_backend(backend)


@pytest.mark.parametrize("name", ["vllm", "sglang"])
@pytest.mark.parametrize("path", ["", "/v1", "/v1/"])
def test_a_server_that_is_not_there_is_one_error_that_asks_whether_it_runs(name, path, caplog):
    pytest.importorskip(f"{name}_backend", reason="make check installs the plugins of servers")
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EngineError, match=f"at {url}.*is the server running") as error:
        corelm.get_backend(name, base_url=url + path)
    assert type(error.value) is EngineError and "/v1" not in str(error.value)
    # It is not waited for either.
    assert not [record for record in caplog.records if "trying again" in record.getMessage()]


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_path_that_is_not_there_starts_no_engine(name):
    pytest.importorskip(f"{name}_backend", reason="make check installs the plugins of servers")
    with refused(InvalidRequestError, field="model"):
        corelm.get_backend(name, "./absent")

"""What people type as the name of a backend, and what the message tells them to type."""

import pytest

import corelm
from corelm import LLMPolicy
from corelm.errors import BackendNotFoundError, EngineError, InvalidRequestError


@pytest.mark.parametrize("opening", [corelm.get_backend, LLMPolicy])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tiny-model", r"name the backend first: get_backend\('transformers', 'tiny-model'\)"),
        ("Qwen/Qwen2.5-0.5B", r"get_backend\('transformers', 'Qwen/Qwen2.5-0.5B'\)"),
        ("hf", "Did you mean 'transformers'"),
        ("HuggingFace", "Did you mean 'transformers'"),
        ("http://localhost:8000", r"get_backend\('vllm', base_url=…\)"),
    ],
)
def test_a_name_that_is_no_backend_is_answered_with_the_call_that_was_meant(opening, name, said):
    with pytest.raises(BackendNotFoundError, match=said) as error:
        opening(name)
    assert "toy" in str(error.value).partition("Installed:")[2]


@pytest.mark.parametrize("name", ["vllm", "sglang"])
@pytest.mark.parametrize("path", ["", "/v1", "/v1/"])
def test_a_server_that_is_not_there_is_one_error_that_asks_whether_it_runs(name, path):
    with pytest.raises(EngineError, match=r"at http://127.0.0.1:9.*is the server running") as error:
        corelm.get_backend(name, base_url=f"http://127.0.0.1:9{path}", max_retries=0)
    assert "/v1" not in str(error.value)


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_path_that_is_not_there_starts_no_engine(name):
    with pytest.raises(InvalidRequestError, match=r"model: there is no file or folder '\./absent'"):
        corelm.get_backend(name, "./absent")

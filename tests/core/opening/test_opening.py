"""`get_backend`: what people type as a name and the answer they get, and the options that belong to openers."""

from pathlib import Path

import pytest
from torch import nn

import corelm
from corelm import LLMPolicy
from corelm.errors import BackendNotFoundError, BackendNotInstalledError, EngineError, InvalidRequestError
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


# Options that belong to openers: entry points of other distributions --------------------------------------------------


#: An opener of a stranger. It opens the engine twice, and names the backend that it is shown.
OPENER = """
SEEN = []

class Twice:
    def __init__(self, *, twice, loudly=None):
        SEEN.append(("made", twice, loudly))

    def open(self, open_one, name, model, options):
        open_one(options)
        SEEN.append(("open", name, dict(options)))
        return open_one(options)

    def opened(self, backend):
        SEEN.append(("opened", backend.name))
        if backend.name == "toy" and SEEN[0][2] == "fail":
            raise ValueError("not this one")
"""
GROUPS = {"corelm.openers": {"twice": "strange_opener:Twice", "loudly": "strange_opener:Twice"}}


@pytest.fixture
def seen(fabricate, monkeypatch):
    import sys

    fabricate("strange-opener", "1.0", {}, {"strange_opener": OPENER}, groups=GROUPS)
    yield lambda: sys.modules["strange_opener"].SEEN
    sys.modules.pop("strange_opener", None)


def test_a_strangers_opener_takes_its_options_and_opens(seen):
    with corelm.get_backend("toy", twice=True, loudly="very", max_context=50) as backend:
        assert backend.capabilities.max_context == 50
    assert seen() == [("made", True, "very"), ("open", "toy", {"max_context": 50}), ("opened", "toy")]


def test_what_an_opener_raises_closes_the_engine(seen):
    with pytest.raises(ValueError, match="not this one"):
        corelm.get_backend("toy", twice=True, loudly="fail")


@pytest.mark.parametrize("option", [{"twice": None}, {"twice": False}, {}])
def test_an_opener_is_not_imported_for_an_option_that_is_not_given(seen, option):
    corelm.get_backend("toy", **option).close()
    with pytest.raises(KeyError):
        seen()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"replicas": 2}, "replicas= needs core-fleet"),
        ({"python": "python3"}, "python= needs core-fleet"),
        ({"canary": True}, "canary= needs core-fleet"),
        ({"base_url": ["http://a", "http://b"]}, "a list as base_url= needs core-fleet"),
    ],
)
def test_an_option_without_its_opener_names_the_distribution_before_anything_is_opened(
    uninstalled, monkeypatch, options, said
):
    uninstalled("core-fleet")
    monkeypatch.setattr("corelm_testing.toy.ToyBackend.open", lambda *_, **__: pytest.fail("it was opened"))
    with pytest.raises(BackendNotInstalledError, match=said) as error:
        corelm.get_backend("toy", **options)
    assert "apps/fleet" in str(error.value)

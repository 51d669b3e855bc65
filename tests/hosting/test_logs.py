"""The output of a host: an error names it if it says more, and otherwise nothing is left of it."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import corelm
from corelm import Backend
from corelm.errors import BackendIncompatibleError, BackendNotFoundError, EngineError, InvalidRequestError

Open = Callable[..., Backend]


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder in which hosts write."""
    folder = tmp_path / "logs"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def ignored_children() -> Iterator[None]:
    """The system waits for children by itself, as in a program that ignores SIGCHLD."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


def test_the_log_of_a_host_that_crashed_stays_where_the_error_says(obedient: Open, logs: Path) -> None:
    backend = obedient()
    with pytest.raises(EngineError, match="SIGKILL") as failure:
        backend.generate([[4]], {"max_new_tokens": 2})
    backend.close()
    (log,) = logs.iterdir()
    assert str(log) in str(failure.value) and "about to die" in log.read_text()


def test_the_log_of_an_engine_that_did_not_open_stays_where_the_error_says(obedient: Open, logs: Path) -> None:
    with pytest.raises(EngineError, match="this and that") as failure:
        obedient("fails")
    (log,) = logs.iterdir()
    assert str(log) in str(failure.value) and str(failure.value).endswith("opening")


def test_nothing_is_left_of_a_host_that_is_dropped_or_was_refused(obedient: Open, logs: Path) -> None:
    with pytest.raises(BackendNotFoundError):
        corelm.get_backend("tye", python=sys.executable)
    assert not [*logs.iterdir()]
    backend = corelm.get_backend("toy", python=sys.executable)
    tokenizer = backend.tokenizer
    assert [*logs.iterdir()]
    backend.engine.plugin.host.kill()
    assert not [*logs.iterdir()]
    backend.close()
    with pytest.raises(EngineError, match=r"killed|closed"):
        len(tokenizer)


def test_a_closed_backend_says_so_for_its_tokenizer(logs: Path) -> None:
    with corelm.get_backend("toy", python=sys.executable) as backend:
        tokenizer = backend.tokenizer
    with pytest.raises(EngineError, match="the backend is closed"):
        len(tokenizer)
    assert not [*logs.iterdir()]


def test_a_program_that_ignores_its_children_gets_its_answers(obedient: Open, ignored_children: None) -> None:
    backend = obedient("concurrent")
    waiting = backend.submit_generate([[5]], {"max_new_tokens": 2})
    dying = backend.submit_generate([[4]], {"max_new_tokens": 2})
    for future in (waiting, dying):
        with pytest.raises(EngineError, match="the process"):
            future.result(10)
    backend.close()


def test_what_an_interpreter_prints_when_it_starts_hides_no_reason(tmp_path: Path) -> None:
    (tmp_path / "corelm").mkdir()
    (tmp_path / "corelm" / "__init__.py").write_text("")
    (tmp_path / "corelm" / "_version.py").write_text("__version__ = '0.0.7'\n")
    (tmp_path / "sitecustomize.py").write_text("print('welcome to corelm')\n")
    with pytest.raises(BackendIncompatibleError, match=r"has core 0\.0\.7"):
        corelm.get_backend("toy", python=sys.executable, env={"PYTHONPATH": str(tmp_path)})


def test_an_option_of_a_class_that_the_host_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("only_here")
    monkeypatch.setitem(sys.modules, "only_here", module)
    module.Size = type("Size", (), {"__module__": "only_here"})  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequestError, match=r"No module named 'only_here'.*importable there"):
        corelm.get_backend("toy", python=sys.executable, max_context=module.Size())


def test_a_request_that_cannot_be_sent_names_its_field(obedient: Open) -> None:
    backend = obedient()
    with pytest.raises(InvalidRequestError, match="cannot be sent") as refusal:
        backend.update_weights({"table": torch.eye(3).to_sparse()})
    assert refusal.value.field == "weights" and "'table'" in str(refusal.value)
    assert backend.weight_version == "0"
    assert len(backend.generate([[20]], {"max_new_tokens": 2}).ids) == 1

"""Opening an engine in another process: each thing that can be wrong is said before anything hangs."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import corelm
from corelm import Backend
from corelm.errors import (
    BackendImportError,
    BackendIncompatibleError,
    BackendNotFoundError,
    EngineError,
    InvalidRequestError,
)
from corelm.hosting import process

Open = Callable[..., Backend]


def test_an_interpreter_that_is_not_there() -> None:
    with pytest.raises(InvalidRequestError, match="no such file") as refusal:
        corelm.get_backend("toy", python="/nowhere/bin/python")
    assert refusal.value.field == "python"


def test_a_file_that_is_not_executable(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("")
    with pytest.raises(InvalidRequestError, match="not executable"):
        corelm.get_backend("toy", python=tmp_path / "python")


def test_a_folder_is_an_environment(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="bin/python"):
        corelm.get_backend("toy", python=tmp_path)
    with corelm.get_backend("toy", python=Path(sys.executable).parent.parent) as backend:
        assert backend.health()


def test_a_program_that_is_not_python(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho I am a shell >&2\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(InvalidRequestError, match=r"not a Python interpreter that works: .*I am a shell"):
        corelm.get_backend("toy", python=program)


def test_an_interpreter_without_core() -> None:
    # -S and a clean path: the standard library alone.
    bare = os.path.realpath(sys.executable)
    with pytest.raises(BackendImportError, match="core is not installed") as refusal:
        corelm.get_backend("toy", python=bare, env={"PYTHONPATH": None, "PYTHONNOUSERSITE": "1"})
    assert f"{bare} -m pip install" in str(refusal.value)


def test_another_version_of_core(tmp_path: Path) -> None:
    # An older core, which cannot hold engines.
    (tmp_path / "corelm").mkdir()
    (tmp_path / "corelm" / "__init__.py").write_text("")
    (tmp_path / "corelm" / "_version.py").write_text("__version__ = '0.0.7'\n")
    with pytest.raises(BackendIncompatibleError, match=r"0\.0\.7") as refusal:
        corelm.get_backend("toy", python=sys.executable, env={"PYTHONPATH": str(tmp_path)})
    assert corelm.__version__ in str(refusal.value)


def test_another_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "WIRE_VERSION", 99)
    with pytest.raises(BackendIncompatibleError, match=f"core {corelm.__version__}"):
        corelm.get_backend("toy", python=sys.executable)


def test_a_plugin_that_is_not_installed_there() -> None:
    with pytest.raises(
        BackendNotFoundError, match=f"in the environment of {sys.executable}: no backend is named 'tye'"
    ):
        corelm.get_backend("tye", python=sys.executable)


def test_an_option_that_the_plugin_does_not_know() -> None:
    with pytest.raises(InvalidRequestError, match="max_contxt") as refusal:
        corelm.get_backend("toy", python=sys.executable, max_contxt=3)
    assert refusal.value.field == "max_contxt"


def test_what_cannot_leave_this_process() -> None:
    with pytest.raises(InvalidRequestError, match=r"save_pretrained\(PATH\)") as refusal:
        corelm.get_backend("transformers", nn.Linear(1, 1), python=sys.executable)
    assert refusal.value.field == "model"
    with pytest.raises(InvalidRequestError, match="cannot leave this process") as refusal:
        corelm.get_backend("toy", python=sys.executable, tokenizer=object())
    assert refusal.value.field == "tokenizer"
    with pytest.raises(InvalidRequestError, match="cannot be sent") as refusal:
        corelm.get_backend("toy", python=sys.executable, max_context=lambda: 3)
    assert refusal.value.field == "max_context"
    with pytest.raises(InvalidRequestError, match="expected texts") as refusal:
        corelm.get_backend("toy", python=sys.executable, env={"A": 1})
    assert refusal.value.field == "env"


def test_an_engine_that_does_not_open(obedient: Open) -> None:
    with pytest.raises(EngineError, match="OwnError: this and that") as failure:
        obedient("fails")
    assert failure.value.usable is False and "obedient_plugin" in str(failure.value.__cause__)
    with pytest.raises(EngineError, match="SystemExit: an engine gave up"):
        obedient("interrupts")
    with pytest.raises(EngineError, match="exit status 5") as failure:
        obedient("exits")
    assert "opening" in str(failure.value), "the end of the log is missing"


def test_a_variable_of_the_environment_reaches_the_engine(obedient: Open, environment: dict[str, str]) -> None:
    obedient().close()
    assert Path(environment["CLOSED"]).exists()


def test_without_python_env_is_an_option_of_the_plugin() -> None:
    with pytest.raises(InvalidRequestError, match="env") as refusal:
        corelm.get_backend("toy", env={"A": "b"})
    assert refusal.value.field == "env"


def test_nothing_is_left_of_a_host_that_was_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started = time.monotonic()
    with pytest.raises(BackendNotFoundError):
        corelm.get_backend("tye", python=sys.executable)
    assert time.monotonic() - started < 60
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    logs = [path.name for path in tmp_path.iterdir()]
    assert not [pid for pid in children if "corelm.hosting" in Path(f"/proc/{pid}/cmdline").read_text()], logs


def test_modules_in_the_current_folder_do_not_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a checkout of an engine, whose folder has the name of its package.
    (tmp_path / "toy_backend").mkdir()
    (tmp_path / "toy_backend" / "__init__.py").write_text("raise RuntimeError('the wrong one')")
    monkeypatch.chdir(tmp_path)
    with corelm.get_backend("toy", python=sys.executable) as backend:
        assert backend.health()

"""Opening an engine in another process: each thing that can be wrong is said before anything hangs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from corelm_fleet.hosting import process
from helpers.processes import children

Open = Callable[..., Backend]


def test_what_is_no_interpreter(tmp_path: Path) -> None:
    for name, mode in (("plain", 0o644), ("shell", 0o755)):
        (tmp_path / name).write_text("#!/bin/sh\necho I am a shell >&2\nexit 3\n")
        (tmp_path / name).chmod(mode)
    for name, says in (
        ("absent", "no such file"),
        ("plain", "executable"),
        (".", "bin/python"),
        ("shell", r"not a Python interpreter that works: .*I am a shell"),
    ):
        with pytest.raises(InvalidRequestError, match=says) as refusal:
            corelm.get_backend("toy", python=tmp_path / name)
        assert refusal.value.field == "python", name


def test_an_interpreter_without_core() -> None:
    # -S and a clean path: the standard library alone.
    bare = os.path.realpath(sys.executable)
    with pytest.raises(BackendImportError, match="core is not installed") as refusal:
        corelm.get_backend("toy", python=bare, env={"PYTHONPATH": None, "PYTHONNOUSERSITE": "1"})
    assert f"{bare} -m pip install" in str(refusal.value) and "apps/fleet" in str(refusal.value)


def test_another_version_of_core(tmp_path: Path) -> None:
    # An older core, which cannot hold engines, and an interpreter that prints something when it starts.
    (tmp_path / "sitecustomize.py").write_text("print('welcome to corelm')\n")
    (tmp_path / "corelm").mkdir()
    (tmp_path / "corelm" / "__init__.py").write_text("")
    (tmp_path / "corelm" / "_version.py").write_text("__version__ = '0.0.7'\n")
    with pytest.raises(BackendIncompatibleError, match=r"has core 0\.0\.7") as refusal:
        corelm.get_backend("toy", python=sys.executable, env={"PYTHONPATH": str(tmp_path)})
    assert corelm.__version__ in str(refusal.value)


def test_another_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "WIRE_VERSION", 99)
    with pytest.raises(BackendIncompatibleError, match=f"core {corelm.__version__}"):
        corelm.get_backend("toy", python=sys.executable)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("max_contxt", {"max_contxt": 3}),
        ("model", {"model": nn.Linear(1, 1)}),
        ("tokenizer", {"tokenizer": object()}),
        ("max_context", {"max_context": lambda: 3}),
        ("env", {"env": {"A": 1}}),
        ("env", {"env": {"A": "b"}, "python": None}),
    ],
)
def test_what_the_plugin_does_not_know_or_cannot_leave_this_process(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        corelm.get_backend("toy", **{"python": sys.executable, **options})
    assert refusal.value.field == field


def test_an_engine_that_does_not_open(obedient: Open) -> None:
    with pytest.raises(EngineError, match="SystemExit: an engine gave up"):
        obedient("interrupts")
    with pytest.raises(EngineError, match="exit status 5") as failure:
        obedient("exits")
    assert "opening" in str(failure.value), "the end of the log is missing"


def test_nothing_is_left_of_a_host_whose_plugin_is_not_installed(logs: Path) -> None:
    before = children(os.getpid())
    with pytest.raises(BackendNotFoundError, match=f"environment of {sys.executable}: no backend is named 'tye'"):
        corelm.get_backend("tye", python=sys.executable)
    assert not children(os.getpid()) - before and not [*logs.iterdir()]


def test_modules_in_the_current_folder_do_not_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a checkout of an engine, whose folder has the name of its package.
    (tmp_path / "corelm_testing").mkdir()
    (tmp_path / "corelm_testing" / "__init__.py").write_text("raise RuntimeError('the wrong one')")
    monkeypatch.chdir(tmp_path)
    # The folder of an environment stands for its interpreter.
    with corelm.get_backend("toy", python=Path(sys.executable).parent.parent) as backend:
        assert backend.health()

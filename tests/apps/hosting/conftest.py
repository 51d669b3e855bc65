"""Hosts for tests: one with the toy engine, and one whose plugin does what the prompt says."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import corelm
from corelm import Backend
from helpers.processes import wait_until

#: A plugin that the parent does not have. The first id of the first prompt says what it does.
PLUGIN = """
import ctypes, os, subprocess, sys, threading, time
from dataclasses import replace
from corelm import hookimpl
from corelm.errors import CapabilityError, InvalidRequestError
from corelm_testing.toy import ToyBackend


class OwnError(ValueError):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class Obedient(ToyBackend):
    @classmethod
    def open(cls, model=None, *, behaviour="", **options):
        print("opening", flush=True)
        if behaviour == "fails":
            raise OwnError("this", "that")
        if behaviour == "fails far above":
            print("(EngineCore) ERROR ValueError: no room for the cache", *["  File"] * 60, sep="\\n", flush=True)
            raise RuntimeError("Engine core initialization failed. See root cause above.")
        if behaviour == "exits":
            os._exit(5)
        if behaviour == "waits":
            time.sleep(1000)
        if behaviour == "parent":
            subprocess.Popen(["sleep", "100"])
        if behaviour == "interrupts":
            raise SystemExit("an engine gave up")
        engine = super().open()
        engine.aborted = threading.Event()
        engine.entered = 0
        engine.reasons = {"adapters": "it is a toy; buy a bigger one"}
        engine.capabilities = replace(
            engine.capabilities, abort=True, update_weights=True, concurrent_calls=behaviour == "concurrent",
            stops_at_timeout=behaviour == "concurrent",
        )
        return engine

    @hookimpl
    def generate(self, request):
        order = request.prompts.tolist()[0][0]
        assert not self.entered or self.capabilities.concurrent_calls, "two calls at once"
        self.entered += 1
        try:
            if order == 1:
                raise ValueError("no such luck")
            if order == 2:
                raise InvalidRequestError("row 0: odd", field="prompts", problems={0: "odd"})
            if order == 3:
                raise OwnError("one", "two")
            if order == 4:
                print("about to die", flush=True)
                os.kill(os.getpid(), 9)
            if order == 5:
                self.aborted.clear()
                print("in a call", flush=True)
                self.aborted.wait(60)
            if order == 6:
                time.sleep(request.timeout)
                raise TimeoutError("too slow")
            if order == 7:
                raise SystemExit("an engine gave up")
            if order == 8:
                os.kill(os.getpid(), 19)  # SIGSTOP
                # This thread runs on until the kernel has stopped it.
                self.aborted.wait(60)
            if order == 9:
                time.sleep(0.5)
            if order == 10:
                ctypes.string_at(0)
            return ToyBackend.generate(self, request)
        finally:
            self.entered -= 1

    @hookimpl
    def abort(self, request):
        self.aborted.set()
        return True

    @hookimpl
    def update_weights(self, request):
        if request.path is not None:
            raise CapabilityError("no paths", capability="update_weights")
        return ToyBackend.update_weights(self, request)

    @hookimpl
    def health(self, request):
        print("asked for its health", flush=True)
        return True

    @hookimpl
    def close(self, request):
        with open(os.environ["CLOSED"], "a") as file:
            file.write("closed ")
        return True
"""


@pytest.fixture(scope="session")
def toy_host() -> Iterator[Backend]:
    """The toy engine in another process of this interpreter, for tests that do not change it."""
    with corelm.get_backend("toy", python=sys.executable) as backend:
        yield backend


@pytest.fixture(scope="session")
def plugin_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the distribution of the plugin `obedient`, for ``PYTHONPATH``."""
    root = tmp_path_factory.mktemp("obedient")
    info = root / "obedient_backend-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: obedient-backend\nVersion: 1.0\n\n")
    (info / "entry_points.txt").write_text("[corelm.backends]\nobedient = obedient_plugin:Obedient\n")
    (root / "obedient_plugin.py").write_text(PLUGIN)
    return root


def variables(plugin_path: Path, closed: Path) -> dict[str, str]:
    """Return the variables that the plugin `obedient` needs. It writes to the file `closed` when it is closed."""
    path = os.pathsep.join(filter(None, [str(plugin_path), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "CLOSED": str(closed)}


@pytest.fixture
def environment(plugin_path: Path, tmp_path: Path) -> dict[str, str]:
    """`variables` for this test."""
    return variables(plugin_path, tmp_path / "closed")


@pytest.fixture(scope="session")
def steady(plugin_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    """The plugin `obedient` in a host that several tests use: none of them ends it."""
    env = variables(plugin_path, tmp_path_factory.mktemp("steady") / "closed")
    with corelm.get_backend("obedient", python=sys.executable, env=env) as backend:
        yield backend


@pytest.fixture(scope="session")
def model_host(tiny_model: Path) -> Iterator[Backend]:
    """The tiny model in a host. A test that changes it changes it back."""
    options = {"dtype": "float32", "recompute_kv_on_update": True}
    with corelm.get_backend("transformers", tiny_model, python=sys.executable, **options) as backend:
        yield backend


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder in which hosts that a test opens write their logs."""
    folder = tmp_path / "logs"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


Open = Callable[..., Backend]


def wait_for_calls(log: Path, count: int = 1) -> None:
    """Wait until the plugin `obedient` has begun so many calls that only an abort ends."""
    assert wait_until(lambda: log.read_text().count("in a call") >= count)


@pytest.fixture
def obedient(environment: dict[str, str]) -> Iterator[Open]:
    """``obedient(behaviour="", **options)`` opens the plugin `obedient` in a host; it is closed after the test."""
    opened: list[Backend] = []

    def open_it(behaviour: str = "", **options: Any) -> Backend:
        opened.append(
            corelm.get_backend("obedient", python=sys.executable, env=environment, behaviour=behaviour, **options)
        )
        return opened[-1]

    yield open_it
    for backend in opened:
        backend.close()

"""The output of a host: an error names it if it says more, and otherwise nothing is left of it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import corelm
from corelm import Backend
from corelm.errors import EngineError, InvalidRequestError

Open = Callable[..., Backend]


@pytest.fixture
def ignored_children() -> Iterator[None]:
    """The system waits for children by itself, as in a program that ignores SIGCHLD."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


def test_the_log_of_an_engine_that_did_not_open_stays_where_the_error_says(obedient: Open, logs: Path) -> None:
    with pytest.raises(EngineError, match="this and that") as failure:
        obedient("fails")
    (log,) = logs.iterdir()
    assert str(log) in str(failure.value) and str(failure.value).endswith("opening")
    assert failure.value.usable is False and "obedient_plugin" in str(failure.value.__cause__)


def test_an_engine_that_failed_in_a_process_of_its_own_says_why(obedient: Open, logs: Path) -> None:
    with pytest.raises(EngineError, match="See root cause above") as failure:
        obedient("fails far above")
    assert str(failure.value).endswith(
        "errors further up in the log:\n(EngineCore) ERROR ValueError: no room for the cache"
    )


def test_nothing_is_left_of_a_host_that_was_ended(logs: Path) -> None:
    backend = corelm.get_backend("toy", python=sys.executable)
    tokenizer = backend.tokenizer
    assert [*logs.iterdir()]
    backend.engine.plugin.host.kill()
    assert not [*logs.iterdir()]
    backend.close()
    with pytest.raises(EngineError, match=r"killed|closed"):
        len(tokenizer)


def test_a_program_that_ignores_its_children_gets_its_answers(obedient: Open, ignored_children: None) -> None:
    backend = obedient("concurrent")
    waiting = backend.submit_generate([[5]], {"max_new_tokens": 2})
    dying = backend.submit_generate([[4]], {"max_new_tokens": 2})
    for future in (waiting, dying):
        with pytest.raises(EngineError, match="the process"):
            future.result(10)
    backend.close()


def test_an_option_of_a_class_that_the_host_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("only_here")
    monkeypatch.setitem(sys.modules, "only_here", module)
    module.Size = type("Size", (), {"__module__": "only_here"})  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequestError, match=r"No module named 'only_here'.*importable there"):
        corelm.get_backend("toy", python=sys.executable, max_context=module.Size())

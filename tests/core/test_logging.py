"""What core logs: who opened what, new weights, batches, retries, aborts and timeouts; and what it never logs."""

import logging
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import tenacity

import corelm
from corelm.backend.call_log import place
from corelm.batching import DynamicBatcher
from corelm.errors import BackendTimeoutError


def logged(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


@pytest.fixture(autouse=True)
def everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="corelm")


def test_opening_new_weights_and_closing_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with corelm.get_backend("toy") as backend:
        weights = {"table": backend.engine.plugin.model.table + 1}
        backend.update_weights(weights, version="step-1")
        backend.close()
    opened, updated, closed = logged(caplog, logging.INFO)
    assert re.fullmatch(
        r"toy: opened .+ in [\d.e-]+ s with core-testing 0\.1\.0, core \S+: vocabulary \d+, context .*; "
        r"log-probs raw and processed; score, .*update_weights",
        opened,
    ), opened
    assert updated == "toy: weights 'step-1' are in force, after '0'"
    assert closed == "toy: closed"


def test_calls_and_batches_are_told_at_debug_without_their_texts(caplog: pytest.LogCaptureFixture) -> None:
    with DynamicBatcher(corelm.get_backend("toy")) as batcher:
        batcher.generate([[1, 2, 3]], {"max_new_tokens": 2})
    told = logged(caplog, logging.DEBUG)
    assert "toy: a batch of 1 requests for generate, 1 rows" in told
    assert any(re.fullmatch(r"toy: generate of 1 rows took [\d.e-]+ s", line) for line in told), told


class Failing:
    """A wrapper whose engine fails so many times, with an error of megabytes over several lines."""

    def __init__(self, times: int) -> None:
        self.times = times

    @corelm.hookimpl(wrapper=True)
    def generate(self, request: Any) -> Any:
        result = yield
        self.times -= 1
        if self.times >= 0:
            raise RuntimeError("boom\n" + "x" * 2_000_000)
        return result


def test_retries_are_told_in_one_short_line(caplog: pytest.LogCaptureFixture) -> None:
    retry = tenacity.Retrying(stop=tenacity.stop_after_attempt(2))
    for given in (retry, 2):
        caplog.clear()
        with corelm.get_backend("toy", wrappers=[Failing(1)], retry=given) as backend:
            backend.generate([[1]], {"max_new_tokens": 1})
        (told,) = logged(caplog, logging.WARNING)
        assert re.fullmatch(
            r"attempt 1 failed with EngineError: backend 'toy', hook generate: .*trying again in .* s", told
        )
        assert "boom" in told and "\n" not in told and len(told) < 500


class Slow:
    def __init__(self) -> None:
        self.go_on = threading.Event()

    @corelm.hookimpl(wrapper=True)
    def generate(self, request: Any) -> Any:
        self.go_on.wait(30)
        return (yield)


@pytest.mark.parametrize("batching", [False, True])
def test_a_timeout_is_told(batching: bool, caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow()
    backend = corelm.get_backend("toy", wrappers=[slow])
    backend = DynamicBatcher(backend) if batching else backend
    with backend:
        with pytest.raises(BackendTimeoutError):
            backend.generate([[1]], {"max_new_tokens": 1}, timeout=0.2)
        slow.go_on.set()
    # On a busy machine, or if the batcher's clock comes second, the seconds are others.
    assert any(re.match(r"toy: .* timed out after ", line) for line in logged(caplog, logging.INFO)), caplog.text


def test_secrets_in_a_url_are_left_out() -> None:
    assert place("https://me:pass@host:1/v1?key=abc#frag") == "https://host:1/v1"
    assert place("org/model?not-a-url") == "org/model?not-a-url"


@pytest.mark.process
def test_a_program_that_sets_no_logging_up_sees_nothing_and_keeps_its_handlers(tmp_path: Path) -> None:
    code = (
        "import logging, corelm\n"
        "with corelm.get_backend('toy') as backend: backend.generate([[1]], {'max_new_tokens': 1})\n"
        "known = [name for name in logging.root.manager.loggerDict if name.startswith('corelm')]\n"
        "assert 'corelm.opening' in known, known\n"
        "print(logging.root.handlers, logging.getLogger('corelm').handlers, logging.getLogger('corelm').level)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, "[] [] 0\n", "")

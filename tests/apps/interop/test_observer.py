"""`Observer`: what raises in it reaches no caller, and what wraps a hook changes nothing about it."""

from __future__ import annotations

import logging
import pickle
import threading
from typing import Any

import pytest
import torch

from corelm import Backend, hookimpl
from corelm.batching import DynamicBatcher
from corelm.errors import EngineError
from corelm_interop import ObservedCall, Observer, Timing, current_call
from corelm_testing.toy import ToyBackend
from helpers.fakes import SHORT, Fake, Gate

PARAMS = {"max_new_tokens": 8, "seed": 3}
PROMPTS = [[72, 105], [65]]


class Raising(Observer):
    """Raises wherever it can."""

    def __init__(self, where: str) -> None:
        self.where, self.calls = where, 0

    def began(self, call: ObservedCall) -> None:
        if "began" in self.where:
            raise RuntimeError("the exporter is gone")

    def ended(self, call: ObservedCall) -> None:
        self.calls += 1
        if "ended" in self.where:
            raise SystemExit("so is the disk")


def answers(*wrappers: object) -> Any:
    return Backend.from_plugin(ToyBackend.open(), "toy", wrappers=wrappers).generate(PROMPTS, PARAMS)


def test_an_observer_that_raises_loses_no_answer_and_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    observer, plain = Raising("began and ended"), answers()
    with caplog.at_level(logging.WARNING, logger="corelm_interop"):
        backend = Backend.from_plugin(ToyBackend.open(), "toy", wrappers=[observer])
        for _ in range(3):
            found = backend.generate(PROMPTS, PARAMS)
            assert found.ids.tolist() == plain.ids.tolist()
            assert torch.equal(found.logprobs.values, plain.logprobs.values)
        scores = backend.score_logprobs(PROMPTS)
    assert scores.logprobs.lengths.tolist() == [2, 1] and observer.calls == 4
    (record,) = caplog.records
    assert "Raising: " in record.getMessage() and record.exc_info


def test_an_observer_that_raises_does_not_hide_the_error_of_the_engine() -> None:
    def bend(result: Any) -> Any:
        raise OSError("the engine is lost")

    with pytest.raises(EngineError, match="the engine is lost") as caught:
        Backend.from_plugin(Fake(bend), "fake", wrappers=[Raising("began and ended")]).generate([[1]], SHORT)
    assert isinstance(caught.value.__cause__, OSError)


def test_ctrl_c_in_an_observer_is_not_swallowed() -> None:
    class Interrupted(Observer):
        def ended(self, call: ObservedCall) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answers(Interrupted())


def test_what_only_wraps_a_hook_does_not_implement_it() -> None:
    class Everywhere:
        @hookimpl(wrapper=True)
        def health(self, request: Any) -> Any:
            return (yield)

        @hookimpl(wrapper=True)
        def weights_state(self, request: Any) -> Any:
            return (yield)

        @hookimpl(wrapper=True)
        def close(self, request: Any) -> Any:
            return (yield)

    with Backend.from_plugin(Fake(), "fake", wrappers=[Everywhere(), Timing()]) as backend:
        assert backend.health()
        assert not any(backend.engine.implements(hook) for hook in ("health", "weights_state", "close", "sleep"))
        backend.generate([[1]], SHORT)


def test_tokenizing_does_not_wait_for_the_engine_because_it_is_observed() -> None:
    gate = Gate()
    backend = Backend.from_plugin(Fake(gate), "fake", wrappers=[Timing()])
    call = backend.submit_generate([[1]], SHORT)
    gate.wait_for_call()
    assert backend.tokenize(["3a"]).ids.tolist() == [[3, 10]]
    gate.opened.set()
    call.result(10)


def test_a_call_knows_its_backend_its_users_and_its_attempt_and_the_request_does_not() -> None:
    seen: list[Any] = []

    class Looking(Observer):
        def began(self, call: ObservedCall) -> int:
            seen.append((call.engine, call.request, threading.current_thread()))
            return len(seen)

        def ended(self, call: ObservedCall) -> None:
            assert call.note == 1

    # Another test may have interrupted a call where Python could not put an end to it.
    outside = current_call()
    backend = Backend.from_plugin(
        ToyBackend.open(), "toy", model_name="http://me:secret@host/v1?key=secret", wrappers=[Looking()]
    )
    with DynamicBatcher(backend) as batcher:
        batcher.generate(PROMPTS, PARAMS)
    ((call, request, thread),) = seen
    assert (call.backend, call.model, call.attempt) == ("toy", "http://host/v1", 1)
    assert [origin.rows for origin in call.origins] == [2]
    assert thread is not threading.current_thread() and current_call() is outside
    # A plugin may send a request to another process.
    assert pickle.loads(pickle.dumps(request.request_ids)) == request.request_ids
    assert "EngineCall" not in repr(request)


def test_a_call_in_a_call_is_seen_as_its_own() -> None:
    seen: list[tuple[str, Any, Any]] = []

    class Nesting(Observer):
        def ended(self, call: ObservedCall) -> None:
            seen.append((call.hook, call.engine, current_call()))

        @hookimpl(wrapper=True)
        def generate(self, request: Any) -> Any:
            outer = current_call()
            backend.score_logprobs([[1, 2]])
            assert current_call() is outer
            return (yield)

    backend = Backend.from_plugin(Fake(), "fake", wrappers=[Nesting()])
    backend.generate([[1]], SHORT)
    ((hook, call, current),) = seen
    assert hook == "score_logprobs" and call is current and call.origins[0].rows == 1

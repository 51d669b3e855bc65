"""The host's side: forgotten calls, slow calls and odd tokenizers leave the other calls alone."""

from __future__ import annotations

import threading
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest

from corelm import hookimpl
from corelm.spec import GenerateRequest, GenerateResult, HealthRequest, TokenizeRequest, TokenizeResult
from corelm.spec.records import AbortRequest
from corelm.tensors.ragged import Ragged
from corelm_fleet.hosting.channel import Call
from corelm_fleet.hosting.server import EngineServer
from corelm_fleet.hosting.tokenizer import HostedTokenizer, TokenizerServer
from corelm_testing.toy import ToyBackend
from helpers.processes import wait_until
from helpers.requests import generation


class Stuck(ToyBackend):
    """An engine whose calls go on until `go_on` is set, although they are aborted."""

    def __init__(self, concurrent: bool = True) -> None:
        engine = ToyBackend.open()
        vars(self).update(vars(engine))
        self.capabilities = replace(engine.capabilities, abort=True, concurrent_calls=concurrent)
        self.go_on, self.aborted = threading.Event(), set[str]()
        self.inside = 0

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        self.inside += 1
        self.go_on.wait(30)
        self.inside -= 1
        return ToyBackend.generate(self, request)

    @hookimpl
    def abort(self, request: AbortRequest) -> bool:
        self.aborted.update(request.request_ids)
        return True

    @hookimpl
    def health(self, request: HealthRequest) -> bool:
        return True


class Encoding(Stuck):
    """An engine that encodes texts by itself, and takes one call at a time."""

    @hookimpl
    def tokenize(self, request: TokenizeRequest) -> TokenizeResult:
        assert not self.inside, "two calls at once"
        return TokenizeResult(ids=Ragged.from_list([[1] for _ in request.texts]))


def rows_of(name: str) -> Call:
    request = generation([[72]], "none", max_new_tokens=1, seeds=(0,), request_ids=(name,))
    return Call("hook", "generate", (request,))


def start(server: EngineServer, number: int, call: Call) -> SimpleQueue[Any]:
    answers = SimpleQueue[Any]()
    server.start(number, call, answers.put, lambda *_: None)
    return answers


def test_forgotten_calls_do_not_hold_up_a_health_check() -> None:
    engine = Stuck()
    server = EngineServer(engine, "stuck")
    answers = [start(server, number, rows_of(str(number))) for number in range(40)]
    for number in range(40):
        server.forget(number)
    assert start(server, 99, Call("hook", "health", (HealthRequest(),))).get(timeout=5) is True
    # Another thread aborts them, which may come late on a busy machine.
    assert wait_until(lambda: bool(engine.aborted))
    engine.go_on.set()
    for each in answers:
        each.get(timeout=10)


def test_a_call_is_aborted_until_it_ends() -> None:
    engine = Stuck()
    server = EngineServer(engine, "stuck")
    answers = start(server, 1, rows_of("a"))
    server.forget(1)
    server.forget(5)  # it has ended long ago
    assert wait_until(lambda: "a" in engine.aborted)
    engine.go_on.set()
    answers.get(timeout=10)


class Unsteady(Stuck):
    """An engine that cannot be told to abort a request at first."""

    failed = False

    @hookimpl
    def abort(self, request: AbortRequest) -> bool:
        if not self.failed:
            self.failed = True
            raise ConnectionError("no answer from the server")
        return bool(Stuck.abort(self, request))


def test_an_abort_that_fails_is_repeated() -> None:
    engine = Unsteady()
    server = EngineServer(engine, "stuck")
    answers = start(server, 1, rows_of("a"))
    server.forget(1)
    assert wait_until(lambda: "a" in engine.aborted)
    engine.go_on.set()
    answers.get(timeout=10)


@pytest.fixture
def quick() -> list[Call]:
    """Return calls that do not wait for those that an engine computes in."""
    return [
        Call("hook", "health", (HealthRequest(),)),
        Call("hook", "abort", (AbortRequest(request_ids=("x",)),)),
        Call("tokenizer", "decode_rows", ([[72]], {})),
    ]


def test_computing_calls_hold_up_no_quick_ones(monkeypatch: pytest.MonkeyPatch, quick: list[Call]) -> None:
    monkeypatch.setattr("corelm_fleet.hosting.server._MOST_CALLS", 2)
    engine = Stuck()
    server = EngineServer(engine, "stuck")
    answers = [start(server, number, rows_of(str(number))) for number in range(3)]
    for number, call in enumerate(quick, 10):
        assert start(server, number, call).get(timeout=5)
    engine.go_on.set()
    for each in answers:
        each.get(timeout=10)


def test_quick_calls_need_no_room_for_another_thread(monkeypatch: pytest.MonkeyPatch, quick: list[Call]) -> None:
    engine = Stuck()
    server = EngineServer(engine, "stuck")
    for number, call in enumerate(quick, 10):
        assert start(server, number, call).get(timeout=5)
    # More than the threads that those calls have left.
    answers = [start(server, number, rows_of(str(number))) for number in range(4)]

    def no_room(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_room)

    def answered(call: Call) -> bool:
        try:
            return bool(start(server, 20, call).get(timeout=5))
        except RuntimeError:
            # The thread of the call before has sent its answer, and ends it.
            return False

    assert all(wait_until(lambda call=call: answered(call), 10) for call in quick)
    engine.go_on.set()
    for each in answers:
        each.get(timeout=10)


def test_a_slow_chat_template_holds_up_no_other_text(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, go_on = Stuck(), threading.Event()
    server = EngineServer(engine, "stuck")
    monkeypatch.setattr("corelm_fleet.hosting.tokenizer.segments_of", lambda *_, **__: go_on.wait(20))
    slow = [start(server, number, Call("tokenizer", "render_segments", ([], {}))) for number in range(8)]
    rows = start(server, 20, Call("tokenizer", "decode_rows", ([[72]], {})))
    assert rows.get(timeout=5) == [engine.tokenizer.decode([72])]
    assert start(server, 21, Call("tokenizer", "encode", ((["H"],), {"add_special_tokens": False}))).get(timeout=5)
    go_on.set()
    for each in slow:
        each.get(timeout=10)


def test_an_engine_that_encodes_by_itself_is_entered_by_one_call_at_a_time() -> None:
    engine = Encoding(concurrent=False)
    server = EngineServer(engine, "stuck")
    call = start(server, 1, rows_of("a"))
    assert wait_until(lambda: bool(engine.inside))
    texts = start(server, 2, Call("tokenizer", "encode", ((["H", "i"],), {"add_special_tokens": False})))
    engine.go_on.set()
    assert texts.get(timeout=10) == {"input_ids": [[1], [1]]}
    call.get(timeout=10)


class Odd:
    """A tokenizer whose attributes raise, or are objects that stay in the host."""

    eos_token_id = 3
    chat_template = object()
    engine = object()

    @property
    def vocab_size(self) -> int:
        raise NotImplementedError("slow tokenizers count nothing")


def test_attributes_that_cannot_be_copied_are_left_out() -> None:
    server = TokenizerServer(Odd(), lambda request: pytest.fail("not asked"))
    copied = server("copied_attributes")
    assert copied == {"eos_token_id": 3}
    tokenizer = HostedTokenizer(server, copied)
    assert not hasattr(tokenizer, "vocab_size") and not hasattr(tokenizer, "engine")
    assert getattr(tokenizer, "engine", None) is None

"""`progress=True`: a bar that shows what happens, and changes nothing."""

from __future__ import annotations

import asyncio
import builtins
import io
import sys

import pytest
from tensordict import TensorDict

import corelm
from corelm import Backend, History, LLMPolicy
from corelm.backend.arguments import prepare_generation
from corelm.batching.merging import ask_together
from corelm.errors import InvalidRequestError
from corelm.policy.progress import answer_bar
from corelm_testing.toy import ToyBackend
from helpers.refusals import refused
from helpers.streaming_fakes import Terminal
from helpers.toy_prompts import QUESTIONS, chat

SAMPLING = {"max_new_tokens": 24, "temperature": 0.8}


def conversations() -> TensorDict:
    return TensorDict(history=History.from_chats([chat(question) for question in QUESTIONS[:3]]))


def records(td: TensorDict) -> list[dict]:
    return corelm.to_records(td.reshape(-1))


def terminal(monkeypatch):
    # Not a fixture: pytest sets `sys.stderr` again when the test begins.
    monkeypatch.setattr(sys, "stderr", Terminal())
    return sys.stderr


def test_progress_counts_answers_and_leaves_no_thread(backend, monkeypatch):
    import threading

    before = set(threading.enumerate())
    terminal(monkeypatch)
    policy = LLMPolicy(backend, sampling_params=SAMPLING, num_samples=2)
    result = policy(conversations(), seed=7, progress=True)
    shown = sys.stderr.getvalue()
    assert "6/6" in shown and "answer" in shown
    assert records(result) == records(policy(conversations(), seed=7))
    asyncio.run(policy.aforward(conversations(), seed=7, progress=True))
    assert {each for each in threading.enumerate() if "tqdm" in each.name} <= before


def test_progress_writes_nothing_where_stderr_is_no_terminal(backend, capsys):
    LLMPolicy(backend, sampling_params=SAMPLING)(conversations(), progress=True)
    assert capsys.readouterr().err == ""


def test_progress_says_what_to_install_and_refuses_scoring(backend, monkeypatch):
    imported = builtins.__import__

    def without_tqdm(name, *args, **kwargs):
        if name == "tqdm":
            raise ImportError(name)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_tqdm)
    terminal(monkeypatch)
    with pytest.raises(InvalidRequestError, match="pip install tqdm"):
        LLMPolicy(backend, sampling_params=SAMPLING)(conversations(), progress=True)
    with refused(InvalidRequestError, field="progress"):
        LLMPolicy(backend, input_mode="text", generate=False)(TensorDict(text=["a"]), progress=True)


class FailsOnce:
    """A wrapper that loses the first answers of the engine."""

    def __init__(self):
        self.calls = 0

    @corelm.hookimpl(wrapper=True)
    def generate(self, request):
        result = yield
        self.calls += 1
        if self.calls == 1:
            raise ConnectionError("lost")
        return result


@pytest.mark.parametrize("batching", [False, True])
@pytest.mark.parametrize("progress", [False, True])
def test_a_call_is_tried_again(monkeypatch, progress, batching):
    stderr = terminal(monkeypatch)
    with corelm.get_backend("toy", wrappers=[FailsOnce()], retry=2) as backend:
        policy = LLMPolicy(backend, sampling_params=SAMPLING, batching=batching)
        with policy:
            result = policy(conversations(), seed=7, progress=progress)
    assert len(result["text"].response) == 3
    assert ("3/3" in stderr.getvalue()) == progress


class Watched(ToyBackend):
    """Keeps the requests."""

    @corelm.hookimpl
    def generate(self, request):
        self.requests = [*getattr(self, "requests", []), request]
        return ToyBackend.generate(self, request)


def test_the_engine_is_not_asked_to_stream(monkeypatch):
    terminal(monkeypatch)
    plugin = Watched.open()
    with Backend.from_plugin(plugin, "toy") as backend:
        LLMPolicy(backend, sampling_params=SAMPLING)(conversations(), seed=7, progress=True)
    (request,) = plugin.requests
    assert request.on_tokens is None and request.on_answer is not None


def test_callers_that_share_a_call_count_their_own_answers(backend):
    counted = [{}, {}]
    prompts = [[[5], [6]], [[7]], [[8], [9]]]
    calls = [
        prepare_generation(backend.engine, rows, {"max_new_tokens": 3, "ignore_eos": True}, on_answer=on_answer)
        for rows, on_answer in zip(prompts, [None, counted[0].__setitem__, counted[1].__setitem__], strict=True)
    ]
    results = ask_together(calls, None)
    assert [len(result.finish_reasons) for result in results] == [2, 1, 2]
    assert counted == [{0: 3}, {0: 3, 1: 3}]


class Odd(ToyBackend):
    """Reports rows that do not exist, counts that are none, and rows after the end."""

    @corelm.hookimpl
    def generate(self, request):
        self.on_answer = request.on_answer
        for row, tokens in ((-1, 2), (99, 2), (0, None), (0, "x"), ([], 1)):
            request.on_answer(row, tokens)
        return ToyBackend.generate(self, request)


def test_wrong_reports_of_an_engine_lose_nothing(backend, monkeypatch):
    stderr = terminal(monkeypatch)
    monkeypatch.setattr("corelm.policy.progress._REDRAW", 0.0)
    plugin = Odd.open()
    with Backend.from_plugin(plugin, "toy") as odd:
        result = LLMPolicy(odd, sampling_params=SAMPLING)(conversations(), seed=7, progress=True)
    shown = stderr.getvalue()
    plugin.on_answer(0, 24)
    assert stderr.getvalue() == shown and "3/3" in shown
    assert records(result) == records(LLMPolicy(backend, sampling_params=SAMPLING)(conversations(), seed=7))


class Gone(Terminal):
    """A terminal that goes away after so many writes."""

    def __init__(self, writes):
        super().__init__()
        self.writes = writes

    def write(self, text):
        self.writes -= 1
        if self.writes < 0:
            raise OSError(5, "Input/output error")
        return super().write(text)


@pytest.mark.parametrize("writes", [0, 1, 2, 3, 5, 8])
def test_a_terminal_that_goes_away_loses_nothing(backend, monkeypatch, writes):
    monkeypatch.setattr("corelm.policy.progress._REDRAW", 0.0)
    policy = LLMPolicy(backend, sampling_params=SAMPLING)
    expected = records(policy(conversations(), seed=7))
    monkeypatch.setattr(sys, "stderr", Gone(writes))
    assert records(policy(conversations(), seed=7, progress=True)) == expected


def test_no_stderr_at_all_shows_nothing(backend, monkeypatch):
    closed = io.StringIO()
    closed.close()
    for stderr in (None, closed):
        monkeypatch.setattr(sys, "stderr", stderr)
        assert answer_bar(True) is None

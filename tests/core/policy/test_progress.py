"""`progress=True`: a bar that shows what happens, and changes nothing."""

import asyncio
import builtins
import sys

import pytest
from tensordict import TensorDict

import corelm
from corelm import History, LLMPolicy
from corelm.backend.arguments import prepare_generation
from corelm.batching.merging import ask_together
from corelm.errors import InvalidRequestError
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

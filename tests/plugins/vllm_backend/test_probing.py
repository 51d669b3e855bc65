"""Probing: which log-probs a server returns and whether it honours seeds is found out with a few requests."""

from __future__ import annotations

from typing import Any

import pytest

from corelm.errors import CapabilityError, EngineError
from helpers.each import case
from helpers.fake_vllm import PROMPTS, SAMPLING, Connect, FakeVLLM
from helpers.http_server import json_reply


def test_the_mode_of_log_probs_is_found_out(connect: Connect, fake: FakeVLLM) -> None:
    for mode in ["raw", "processed"]:
        with case(mode):
            fake.mode = mode
            assert connect().capabilities.generation_modes == {mode}


def test_a_mode_that_cannot_be_found_out_must_be_passed(connect: Connect, fake: FakeVLLM) -> None:
    def equalise(choice: dict[str, Any]) -> None:
        for top in (choice["logprobs"] or {}).get("top_logprobs", ()):
            top.update(dict.fromkeys(top, max(top.values())))

    fake.spoil = equalise
    with pytest.raises(EngineError, match="logprobs_mode='raw'"):
        connect()
    fake.fault = lambda request: (
        json_reply({"error": {"message": "too many logprobs"}}, 400) if (request.body or {}).get("logprobs") else None
    )
    with pytest.raises(EngineError):
        connect()
    assert connect(logprobs_mode="processed").capabilities.generation_modes == {"processed"}


def test_logits_are_not_mistaken_for_log_probs(connect: Connect, fake: FakeVLLM) -> None:
    def shift(choice: dict[str, Any]) -> None:
        for top in (choice["logprobs"] or {}).get("top_logprobs", ()):
            top.update({token: value + 7 for token, value in top.items()})

    fake.spoil = shift
    with pytest.raises(EngineError):
        connect()


def test_seeds_that_the_server_ignores_are_not_declared(connect: Connect, fake: FakeVLLM) -> None:
    assert connect().capabilities.per_answer_seeds
    fake.ignored = {"seed"}
    backend = connect()
    assert not backend.capabilities.per_answer_seeds
    with pytest.raises(CapabilityError):
        backend.generate(PROMPTS, SAMPLING)

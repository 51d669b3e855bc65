"""An engine in another process behind the server: its tokenizer is there, too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import corelm
from helpers.serving import CHAT, client_of, serving


@pytest.mark.process
def test_an_engine_of_another_process_is_served(tiny_model: Path) -> None:
    asked = {"model": "m", "messages": CHAT, "max_tokens": 8, "temperature": 0.0, "logprobs": True, "top_logprobs": 2}
    found = []
    for python in (None, sys.executable):
        with (
            corelm.get_backend("transformers", str(tiny_model), dtype="float32", python=python) as backend,
            serving(backend, model_name="m") as server,
            client_of(server) as client,
        ):
            choice = client.chat.completions.create(**asked).choices[0]
            echo = client.completions.create(model="m", prompt="Où est", max_tokens=0, echo=True, logprobs=1)
            tokens = [(each.token, each.bytes) for each in choice.logprobs.content]
            found.append((choice.message.content, tokens, echo.choices[0].logprobs.tokens))
    assert found[0] == found[1]

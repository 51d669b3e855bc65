"""A real vLLM behind the server."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("openai", reason="the official client is not installed")

from corelm import Backend
from helpers.serving_checks import check_answers, check_hanging_up


def test_the_official_client_chats_streams_and_scores(shared: Backend, tiny_folder: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    check_answers(shared, model, temperature=0.7, seed=3)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_aborts_its_request(shared: Backend, stream: bool) -> None:
    check_hanging_up(shared, stream=stream)

"""``corelm generate`` against a server, over real HTTP, that fails for certain prompts or goes away."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.command_line import generate, rows, write_rows
from helpers.fake_vllm import VOCAB, FakeVLLM
from helpers.http_server import FaultServer, Reply, Request, hang, json_reply, reset, truncated
from helpers.tiny_models import tiny_tokenizer

pytest.importorskip("vllm_backend")

TEXTS = ["one", "the poison", "three", "four", "poison again", "six"]
REPLIES = {
    "500": lambda: json_reply({"error": {"message": "internal error"}}, 500),
    "400": lambda: json_reply({"error": {"message": "refused"}}, 400),
    "reset": reset,
    "cut off": lambda: truncated({"choices": []}),
    "garbage": lambda: json_reply(["no", "choices"]),
}


@pytest.fixture
def fake() -> FakeVLLM:
    return FakeVLLM()


@pytest.fixture
def server(fake: FakeVLLM) -> Iterator[FaultServer]:
    with FaultServer(fake) as server:
        yield server


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    write_rows(tmp_path / "prompts.jsonl", [{"id": text, "prompt": text} for text in TEXTS])
    return tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"


def ask(files: tuple[Path, Path], server: FaultServer, *more: object) -> Any:
    options = {"tokenizer": files[0].parent / "tokenizer", "vocab_size": VOCAB, "max_retries": 0}
    words = [word for name, value in options.items() for word in ("--option", f"{name}={value}")]
    return generate(files, "--base-url", server.url, "--seed", 5, *words, *more, backend="vllm")


def fails_for_poison(reply: Callable[[], Reply]) -> Callable[[Request], Reply | None]:
    def fault(request: Request) -> Reply | None:
        asked = request.method == "POST" and tiny_tokenizer().decode(request.body["prompt"])
        return reply() if asked and "poison" in asked else None

    return fault


@pytest.mark.parametrize("size", [1, 16])
def test_a_prompt_that_the_server_always_fails_fails_alone(files, fake, server, size):
    for name, reply in REPLIES.items():
        target = files[1].with_name(f"{name}.jsonl")
        fake.fault = fails_for_poison(reply)
        result = ask((files[0], target), server, "--batch-size", size)
        assert result.exit_code == 1, result.output
        assert [row["id"] for row in rows(target)] == ["one", "three", "four", "six"], name
        assert [row["id"] for row in rows(target.with_name(f"{name}.errors.jsonl"))] == ["the poison", "poison again"]


@pytest.mark.nightly
def test_a_prompt_that_the_server_never_answers_fails_alone(files, fake, server):
    # The timeout is for all lines, so it leaves the other one time enough on a busy machine.
    write_rows(files[0], [{"id": text, "prompt": text} for text in ("the poison", "two")])
    fake.fault = fails_for_poison(hang)
    result = ask(files, server, "--timeout", 10)
    assert result.exit_code == 1, result.output
    assert [row["id"] for row in rows(files[1])] == ["two"]
    assert [row["id"] for row in rows(files[1].with_name("answers.errors.jsonl"))] == ["the poison"]


def test_a_run_goes_on_with_a_server_that_was_away(files, fake, server):
    away = threading.Event()

    def fault(request: Request) -> Reply | None:
        # The prompts of a batch are sent side by side, in any order.
        if request.method == "POST" and tiny_tokenizer().decode(request.body["prompt"]) in ("three", "four"):
            away.set()
        return reset() if away.is_set() else None

    fake.fault = fault
    result = ask(files, server, "--batch-size", 2)
    assert result.exit_code == 3 and "tries them last: 3, 4" in result.stderr
    assert [row["id"] for row in rows(files[1])] == TEXTS[:2]
    fake.fault = lambda request: None
    assert ask(files, server, "--batch-size", 2).exit_code == 0
    assert [row["id"] for row in rows(files[1])] == ["one", "the poison", "poison again", "six", "three", "four"]

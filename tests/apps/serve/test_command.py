"""``corelm serve`` in a process: how it starts, what it prints, and how it ends."""

from __future__ import annotations

import os
import signal
import socket

import httpx2
import openai
import pytest

from corelm.errors import InvalidRequestError
from corelm_cli.engine import EngineChoice
from helpers.command_line import corelm_command
from helpers.processes import PATIENCE, children, runs
from helpers.serving import CHAT, served


@pytest.mark.process
def test_the_official_client_chats_with_a_server_process_that_ctrl_c_ends() -> None:
    with (
        served("--backend", "toy") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0) as client,
    ):
        assert [each.id for each in client.models.list()] == ["toy"]
        answer = client.chat.completions.create(model="toy", messages=CHAT, max_tokens=9, seed=1)
        assert answer.usage.completion_tokens
        stream = client.chat.completions.create(
            model="toy", messages=CHAT, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        assert server.end(signal.SIGINT) == (130, "interrupted\n")


@pytest.mark.process
def test_sigterm_ends_a_server_with_a_key_of_the_environment_and_nothing_is_left() -> None:
    with served(
        "--backend", "toy", "--model-name", "pip", env={"CORELM_API_KEY": "sk-of-this-test"}, key=False
    ) as server:
        headers = {"authorization": "Bearer sk-of-this-test"}
        with httpx2.Client(base_url=server.url, headers=headers, timeout=PATIENCE, trust_env=False) as client:
            asked = {"model": "pip", "messages": CHAT, "max_tokens": 5, "logprobs": True}
            answer = client.post("/v1/chat/completions", json=asked, headers={"x-session-id": "mine"})
            assert answer.status_code == 200 and answer.headers["x-session-id"] == "mine"
            assert client.get("/sessions").json()["data"] == ["mine"]
            assert client.get("/sessions/mine").json()["nodes"][-1]["kind"] == "answer"
        others = children(server.process.pid)
        assert server.end(signal.SIGTERM) == (143, "")
        assert not any(runs(each) for each in others)


@pytest.mark.process
def test_everyone_is_answered_if_that_is_asked_for() -> None:
    with served("--backend", "toy", "--no-api-key", "--no-sessions", key=False) as server:
        with httpx2.Client(base_url=server.url, timeout=PATIENCE, trust_env=False) as client:
            assert client.get("/v1/models").status_code == 200
            assert client.get("/v1/models", headers={"host": "another.example"}).status_code == 400
            assert client.get("/sessions").json()["error"]["code"] == "no_sessions"
        assert server.end(signal.SIGINT)[0] == 130


def test_a_port_in_use_is_refused_before_the_engine_is_opened() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = corelm_command("serve", "--backend", "no-such-engine", "--port", port)
    assert result.exit_code == 2
    assert f"cannot listen at 127.0.0.1, port {port}: Address already in use" in result.stderr
    assert "give another --host or --port; --port 0 takes a free one" in result.stderr


def test_wrong_flags_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CORELM_API_KEY", raising=False)
    for flags, said in (
        (["--backend", "transformers"], "give --model PATH"),
        (["--host", "example.com"], "expected an IP address such as 127.0.0.1"),
        (["--api-key", "a", "--no-api-key"], "leave one of them out"),
        (["--response-parser", "hermse"], "did you mean 'hermes'?"),
        (["--api-key", " a"], "printable ASCII characters"),
        (["--api-key", ""], "at least one character"),
        (["--chat-template", "./none.jinja"], "No such file or directory"),
        (["--prot", "8001"], "there is no flag --prot; did you mean --port?"),
        (["MODEL", "--model", "OTHER"], "the model is given twice"),
        (["MODEL", "--max-contxt", "8"], "did you mean 'max_context'"),
        (["MODEL", "stray"], "expected a flag of the engine"),
    ):
        result = corelm_command("serve", "--backend", "toy", "--port", 0, *flags)
        assert result.exit_code == 2 and said in result.stderr, flags


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (["M", "--max-model-len", "4096", "--enforce-eager"], {"max_model_len": 4096, "enforce_eager": True}),
        (["M", "--", "--dtype=bfloat16", "--no-fast"], {"dtype": "bfloat16", "fast": False}),
        (["--max-num-seqs", "8", "--model", "M"], {"max_num_seqs": 8}),
        (["--option", "fast=false", "--model", "M"], {"fast": False}),
    ],
)
def test_flags_of_the_engine_are_typed_by_their_names(
    monkeypatch: pytest.MonkeyPatch, given: list[str], options: dict[str, object]
) -> None:
    opened: list[EngineChoice] = []

    def refuse(choice: EngineChoice, wrappers: object) -> None:
        opened.append(choice)
        raise InvalidRequestError("enough")

    monkeypatch.setattr(EngineChoice, "open", refuse)
    assert corelm_command("serve", "--port", 0, *given).exit_code == 2
    (choice,) = opened
    assert (choice.backend, choice.model, choice.options) == ("transformers", "M", options)


def test_the_key_does_not_reach_the_processes_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORELM_API_KEY", "sk-secret")
    result = corelm_command("serve", "--backend", "no-such-engine", "--port", 0)
    assert result.exit_code == 2 and "CORELM_API_KEY" not in os.environ and "sk-secret" not in result.output

"""Whole programs, recorded and replayed: GRPO, KL, a server with sessions, and the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM

import corelm
import grpo_tiny
from corelm import Backend, LLMPolicy
from corelm.kl import KLRewardTransform
from corelm_serve import ServerThread
from corelm_testing.cassette import CassetteRecorder, NotRecordedError
from corelm_testing.tiny import build_tiny
from helpers.cassettes import calls_of, recorded
from helpers.command_line import corelm_command
from helpers.serving import client_of, serving

QUESTIONS = list(grpo_tiny.QUESTIONS)[:4]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's tiny model, fully trained, so that some answers get a reward."""
    return build_tiny(tmp_path_factory.mktemp("grpo") / "tiny-model", steps=120, progress=False)


def grpo_run(path: Path, sampler: Backend, reference: Backend, lr: float = 2e-3) -> tuple[dict[str, Any], list[Any]]:
    """Return the trained weights, and what two steps and an examination of the sampler reported."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    options = grpo_tiny.Options(steps=2, group=6, prompts=4, lr=lr)
    with sampler, reference, corelm.get_backend("transformers", model, tokenizer=path) as trainer:
        grpo = grpo_tiny.GRPO(sampler, trainer, reference, model, options)
        reported: list[Any] = [grpo.step(QUESTIONS, seed=seed) for seed in range(2)]
        reported.append(grpo.examine())
    return model.state_dict(), reported


@pytest.mark.nightly
def test_a_grpo_run_replays_to_identical_weights(demo_model: Path, tmp_path: Path) -> None:
    def engine(name: str) -> Backend:
        return recorded(tmp_path / name, "transformers", demo_model, dtype="float32")

    def replay(name: str) -> Backend:
        return corelm.get_backend("cassette", tmp_path / name)

    weights, reported = grpo_run(demo_model, engine("sampler"), engine("reference"))
    assert 0 < reported[0]["reward"] < 1 and reported[-2]["weights"] == "2"
    assert [call["hook"] for call in calls_of(tmp_path / "sampler")].count("update_weights") == 2
    again, reported_again = grpo_run(demo_model, replay("sampler"), replay("reference"))
    assert reported_again == reported
    assert all(torch.equal(again[name].view(torch.int32), weights[name].view(torch.int32)) for name in weights)
    # A run that learns otherwise is found out at its first update.
    with pytest.raises(NotRecordedError, match=r"update_weights .*other weights than the recorded one"):
        grpo_run(demo_model, replay("sampler"), replay("reference"), lr=1e-3)


def test_kl_to_a_reference_replays(tiny_model: Path, tmp_path: Path) -> None:
    def run(policy: Backend, reference: Backend) -> Any:
        with policy, reference:
            sampler = LLMPolicy(policy, input_mode="text", sampling_params={"max_new_tokens": 8})
            rollout = sampler(TensorDict(text=["Who are", "What is your"]), seed=7)
            rollout["reward"] = torch.ones(2)
            KLRewardTransform(LLMPolicy(reference), coeff=0.05)(rollout)
        return rollout["reward"].tolist(), rollout["text"].full

    names = ("policy", "reference")
    one = run(*(recorded(tmp_path / name, "transformers", tiny_model, dtype="float32") for name in names))
    assert run(*(corelm.get_backend("cassette", tmp_path / name) for name in names)) == one


def test_sessions_of_a_server_replay(tiny_model: Path, tmp_path: Path) -> None:
    def run(server: ServerThread) -> list[Any]:
        client, messages, said = client_of(server), [{"role": "user", "content": "What does a cow say?"}], []
        for _ in range(3):
            reply = client.chat.completions.create(
                model="m", messages=messages, max_tokens=8, seed=5, logprobs=True, extra_headers={"x-session-id": "one"}
            )
            choice = reply.choices[0]
            said.append([choice.message.content, [each.logprob for each in choice.logprobs.content]])
            messages += [{"role": "assistant", "content": choice.message.content}, {"role": "user", "content": "And?"}]
        streamed = client.chat.completions.create(model="m", messages=messages, max_tokens=8, seed=6, stream=True)
        said.append([chunk.choices[0].delta.content for chunk in streamed if chunk.choices])
        client.close()
        return said

    engine = recorded(tmp_path / "c", "transformers", tiny_model, dtype="float32")
    with engine, serving(engine, model_name="m") as server:
        one = run(server)
    replay = corelm.get_backend("cassette", tmp_path / "c")
    with replay, serving(replay, model_name="m") as server:
        assert run(server) == one


def test_the_command_line_replays(tiny_model: Path, tmp_path: Path) -> None:
    prompts = [{"prompt": "Who are you?"}, {"prompt": "What does a cow say?"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    greedy = {"max_new_tokens": 6, "temperature": 0.0}
    with corelm.get_backend("transformers", tiny_model, wrappers=[CassetteRecorder(tmp_path / "c")]) as backend:
        out = LLMPolicy(backend, input_mode="text", sampling_params=greedy)(
            TensorDict(text=[each["prompt"] for each in prompts])
        )
    given = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    ran = corelm_command(
        *("generate", "--backend", "cassette", "--model", str(tmp_path / "c")),
        *(*given, "--max-tokens", "6", "--temperature", "0", "--log-probs", "raw"),
    )
    assert ran.exit_code == 0, ran.output
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [each["response"] for each in answers] == out["text"].response

"""An `LLMPolicy` for TorchRL's collectors of several environments: on one thread, on several, and in processes."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import corelm
from corelm import LLMPolicy
from helpers import oracle
from helpers.tiny_models import tiny_model, tiny_tokenizer
from helpers.torchrl import skip_without_torchrl

skip_without_torchrl()

from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import AsyncEnvPool, ParallelEnv, SerialEnv

from corelm_interop.torchrl import EnvPolicy
from helpers.torchrl_envs import chat_env

pytestmark = pytest.mark.filterwarnings("ignore:The env passed to LLMCollector is missing transforms:FutureWarning")

SAMPLING = {"max_new_tokens": 6}
QUESTIONS = [("Hello there, who are you?", "Hi"), ("What?", "Who is there?")]
MAKERS = [partial(chat_env, questions) for questions in QUESTIONS]

#: Environments, and what the collector needs to be told about them.
SEVERAL = {
    "one after the other": (lambda: SerialEnv(2, MAKERS), {}),
    "in processes": (lambda: ParallelEnv(2, MAKERS, consolidate=False), {}),
    "on threads": (
        lambda: AsyncEnvPool(MAKERS, backend="threading", stack="lazy"),
        {"yield_completed_trajectories": True},
    ),
}


def check_conversations(rows, model):
    """Check rows of one turn each, in which the turns of a conversation follow each other: ids, log-probs, order."""
    tokenizer = tiny_tokenizer()
    asked = "\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"
    before: list[int] | None = None
    for row in rows:
        prompt, answer = (row["tokens"].get(part).tolist() for part in ("prompt", "response"))
        expected = oracle.answer_logprobs(model, prompt, answer)
        torch.testing.assert_close(row["log_probs"].response, expected, atol=1e-4, rtol=1e-4)
        if before is not None:
            assert prompt[: len(before)] == before, "id for id"
            assert tokenizer.decode(prompt[len(before) - 1 :]).endswith(asked)
        before = None if row["next", "done"].all() else prompt + answer
    assert before is None, "whole conversations"


@pytest.mark.parametrize(
    "several", [pytest.param(each, marks=[pytest.mark.nightly] if each == "in processes" else []) for each in SEVERAL]
)
def test_several_environments(backend, model, several):
    make, options = SEVERAL[several]
    policy = EnvPolicy(LLMPolicy(backend, sampling_params=SAMPLING))
    collector = LLMCollector(make(), policy=policy, dialog_turns_per_batch=4, total_dialog_turns=8, **options)
    try:
        rows = [td for batch in collector for td in batch.reshape(-1).unbind(0)]
    finally:
        collector.shutdown()
    assert len(rows) == 8
    check_conversations(rows, model)
    asked = {row["text"].prompt.removeprefix("<|im_start|>user\n").split("<|im_end|>")[0] for row in rows}
    known = {question for questions in QUESTIONS for question in questions}
    # On threads, whichever environment is ready first is asked.
    assert asked == known if several != "on threads" else asked <= known


def test_a_collector_that_fills_a_replay_buffer(backend, model):
    buffer = ReplayBuffer(storage=LazyStackStorage(8), sampler=SamplerWithoutReplacement(), batch_size=4)
    collector = LLMCollector(
        SerialEnv(2, MAKERS),
        policy=EnvPolicy(LLMPolicy(backend, sampling_params=SAMPLING)),
        dialog_turns_per_batch=4,
        total_dialog_turns=8,
        replay_buffer=buffer,
    )
    for _ in collector:
        pass
    collector.shutdown()
    assert len(buffer) == 8
    seen = []
    for _ in range(2):
        td = buffer.sample()
        for row in td.unbind(0):
            prompt, answer = (row["tokens"].get(part).tolist() for part in ("prompt", "response"))
            expected = oracle.answer_logprobs(model, prompt, answer)
            torch.testing.assert_close(row["log_probs"].response, expected, atol=1e-4, rtol=1e-4)
            seen.append((*prompt, *answer))
    assert len({*seen}) == 8, "without replacement"


def test_weights_that_change_between_two_batches():
    model, new = tiny_model(), tiny_model(seed=5)
    with corelm.get_backend("transformers", tiny_model(), tokenizer=tiny_tokenizer()) as backend:
        policy = EnvPolicy(LLMPolicy(backend, sampling_params=SAMPLING))
        collector = LLMCollector(SerialEnv(2, MAKERS), policy=policy, dialog_turns_per_batch=4, total_dialog_turns=8)
        for number, batch in enumerate(collector):
            rows = batch.reshape(-1).unbind(0)
            check_conversations(rows, (model, new)[number])
            assert {row["log_probs"].provenance.weight_version for row in rows} == {str(number)}
            if number == 0:
                backend.update_weights(new)
        collector.shutdown()
    assert number == 1

"""Environments of TorchRL for the tests of collectors. Its processes import this module, which needs TorchRL."""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader
from torchrl.data.llm import History
from torchrl.envs.llm import ChatEnv
from torchrl.envs.transforms import StepCounter, Transform, TransformedEnv

from corelm import LLMPolicy
from corelm_interop.torchrl import EnvPolicy
from helpers.tiny_models import tiny_tokenizer

QUESTIONS = ["Hello there, who are you?", "Hi"]


class Unchanged(Transform):
    """A transform that leaves resets as they are."""

    def _reset(self, tensordict: Any, tensordict_reset: Any) -> Any:
        return tensordict_reset


class Ask(Unchanged):
    """Appends the user's next turn, with TorchRL's own classes."""

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        prompt = next_tensordict["history"].prompt
        count = len(prompt)
        question = History(role=["user"] * count, content=["And then?"] * count, batch_size=[count])
        next_tensordict["history"].prompt = prompt.append(question, inplace=False)
        return next_tensordict


class Reward(Unchanged):
    """Gives the same reward at every step, which is 1 by default."""

    def __init__(self, reward: Any = None) -> None:
        super().__init__()
        self.reward = reward

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        ones = torch.ones(*next_tensordict.batch_size, 1, 1)
        return next_tensordict.set("reward", ones if self.reward is None else self.reward.clone())


def env(*transforms: Transform, **options: Any) -> TransformedEnv:
    """Return an environment of two conversations at a time, with these transforms."""
    made = TransformedEnv(ChatEnv(batch_size=(2,), tokenizer=tiny_tokenizer(), **options))
    for transform in transforms:
        made.append_transform(transform)
    return made


def rollout(env: TransformedEnv, policy: LLMPolicy, turns: int = 2) -> Any:
    """Return two conversations of so many turns, which begin with `QUESTIONS`."""
    torch.manual_seed(0)
    start = env.reset(TensorDict(query=QUESTIONS, batch_size=[2]))
    return env.rollout(turns, EnvPolicy(policy), auto_reset=False, tensordict=start)


def chat_env(questions: Sequence[str]) -> Any:
    """Return an environment with one conversation at a time, of two turns, that begins with each question in turn."""
    queries = DataLoader([{"query": question} for question in questions], batch_size=1)
    env = ChatEnv.from_dataloader(queries, repeats=1, batch_size=(1,), tokenizer=tiny_tokenizer())
    for transform in (Reward(), Ask(), StepCounter(max_steps=2)):
        env = env.append_transform(transform)
    return env

"""A `GRPOTrainer` of a tiny model, for the tests that are about TRL."""

import json
from pathlib import Path
from typing import Any

import trl
from datasets import Dataset

from corelm import LLMPolicy, ragged
from helpers import oracle
from helpers.tiny_models import tiny_tokenizer

QUESTIONS = [[{"role": "user", "content": text}] for text in ("Hi", "Hello there, who are you?")]
TEMPERATURE = 0.7
DIFFERENCE = "sampling/sampling_logp_difference/max"


def lengths(completions: list[Any], **_: Any) -> list[float]:
    """Return a reward that differs within a group, so that the weights change."""
    return [float(len(json.dumps(said))) for said in completions]


def make_trainer(
    model: Any,
    rollout: Any,
    folder: Path,
    *,
    prompts: list[Any] = QUESTIONS,
    reward: Any = lengths,
    tokenizer: Any = None,
    more: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """Return a trainer of `model` on a CPU, with `changes` of its `GRPOConfig` and `more` arguments of its own."""
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "temperature": TEMPERATURE,
        "num_generations": 2,
        "per_device_train_batch_size": 4,
        "max_completion_length": 6,
        "max_steps": 1,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return trl.GRPOTrainer(
        model,
        reward_funcs=reward,
        args=trl.GRPOConfig(**(options | changes)),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer or tiny_tokenizer(),
        rollout_func=rollout,
        **(more or {}),
    )


def logged(trainer: Any, name: str) -> list[float]:
    """Return the values of a metric, step by step."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


class Watched:
    """A `conversation` of one turn that compares every rollout with the model as it is then trained.

    Attributes:
        versions: the weights that sampled each rollout.
        differences: how far its log-probs are from those of a plain float32 forward of the trained model.
    """

    def __init__(self, model: Any, temperature: float = TEMPERATURE) -> None:
        self.model, self.temperature = model, temperature
        self.versions: list[str] = []
        self.differences: list[float] = []

    def __call__(self, policy: LLMPolicy, td: Any) -> Any:
        out = policy(td)
        found = out["log_probs"].provenance
        found = found if isinstance(found, tuple) else (found,)
        (version,) = {one.weight_version for one in found}
        self.versions.append(version)
        rows = [ragged(out, key) for key in (("tokens", "prompt"), ("tokens", "response"), ("log_probs", "response"))]
        worst = 0.0
        for prompt, answer, numbers in zip(rows[0].tolist(), rows[1].tolist(), rows[2].split(), strict=True):
            expected = oracle.answer_logprobs(self.model, prompt, answer, self.temperature)
            worst = max(worst, float((numbers - expected).abs().max()))
        self.differences.append(worst)
        return out

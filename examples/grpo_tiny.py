"""GRPO from start to end, on a CPU: a tiny model learns to answer questions in a wording that it has not seen.

    python examples/grpo_tiny.py [--output grpo-output] [--steps 60] [--seed 0]

The demo's model was trained on "What does a cow say?" followed by "And a duck?", but never on "What does a duck say?",
and answers few such questions correctly. Here it is not trained on answers: it samples several answers to a question, a
program checks whether the last word is right, and answers with a higher reward than the others of their group become
more likely. The model learns only what is rewarded: "After one comes three." gets the reward for what comes after two.
`GRPO.step` is one step of Shao et al., DeepSeekMath, arXiv:2402.03300, section 4.1:

    sample    sample a group of answers to each of a few questions, with the sampling engine
    reward    give 1 to an answer that ends with the right word, else 0
    compare   compute the advantage of an answer within its group: (reward − mean) / deviation
    score     score the same tokens with the trained model and with the reference, whose weights do not change
    learn     minimise the clipped ratio loss plus the KL to the reference, through log-probs with gradients
    push      push the new weights to the sampling engine; later samples report the new weight version

The sampling engine and the trained model are two models with the same weights, as in a setup in which a fast engine
samples and a training framework trains. Their log-probs of a token differ slightly; the example measures that mismatch
and corrects the loss for it. Any backend that samples and accepts new weights works. vLLM on a CPU:

    VLLM_CPU_OMP_THREADS_BIND=nobind TORCH_COMPILE_DISABLE=1 python examples/grpo_tiny.py --rollouts vllm \\
        --engine-arg enforce_eager=True --engine-arg kv_cache_memory_bytes=67108864
"""

from __future__ import annotations

import argparse
import ast
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

import corelm
from corelm import Backend, History, LLMPolicy, LogProbs
from corelm.kl import ImportanceCorrection, KLComputation, RetrieveLogProb, aggregate, k1, mismatch_report
from corelm_testing.tiny import build_tiny
from grpo_report import Report

#: The questions, and the word that a right answer ends with.
QUESTIONS = {
    "What does a dog say?": "woof",
    "What does a duck say?": "quack",
    "What does an owl say?": "hoot",
    "What does a cow say?": "moo",
    "What colour is the sky?": "blue",
    "What colour is the grass?": "green",
    "What colour is coal?": "black",
    "What colour is a cherry?": "red",
    "What comes after two?": "three",
    "What comes after four?": "five",
    "What comes after six?": "seven",
    "What comes after eight?": "nine",
    "What day comes after Tuesday?": "Wednesday",
    "What day comes after Thursday?": "Friday",
    "What day comes after Saturday?": "Sunday",
    "What is the opposite of big?": "small",
    "What is the opposite of wet?": "dry",
    "What is the opposite of left?": "right",
    "What is the opposite of cold?": "hot",
    "What is the capital of Spain?": "Madrid",
    "What is the capital of Norway?": "Oslo",
    "Where does a fox live?": "den",
    "Where does a bee live?": "hive",
    "What do you do with a book?": "read",
}

LONGEST = 16  # tokens per answer
PASSES = 2  # over the answers of a step; in the first pass every ratio is 1, so only a second one clips any
CLIP = 0.2
#: The mask of the tokens to learn from: the sampled ones.
SAMPLED = ("masks", "all_response_mask")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command line."""

    steps: int = 60
    group: int = 12
    prompts: int = 12
    lr: float = 1e-3
    kl_coef: float = 0.04
    seed: int = 0
    rollouts: str = "transformers"
    engine_args: dict[str, Any] = field(default_factory=dict)
    output: Path = Path("grpo-output")
    plot: bool = True


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    # Matrices this small are computed faster by a single thread.
    torch.set_num_threads(1)
    report = train(options)
    print(report.summary())
    if options.plot:
        report.draw()
    print(f"In {options.output.resolve()}: {', '.join(sorted(file.name for file in options.output.iterdir()))}.")


def train(options: Options) -> Report:
    """Open the engines, run the steps and save the model in ``options.output``."""
    path = options.output / "tiny-model"
    if not (path / "config.json").exists():
        build_tiny(path, seed=options.seed)
    draw = random.Random(options.seed)
    with open_engines(path, options) as grpo, Report(options.output) as report:
        report.before = grpo.examine()
        for step in (bar := tqdm(range(options.steps), desc="GRPO")):
            questions = draw.sample(list(QUESTIONS), options.prompts)
            numbers = grpo.step(questions, seed=draw.getrandbits(62))
            bar.set_postfix(reward=f"{numbers['reward']:.2f}", weights=numbers["weights"], refresh=False)
            report.add({"step": step, **numbers}, last=step == options.steps - 1)
        report.after = grpo.examine()
        grpo.model.save_pretrained(options.output / "trained-model")
        grpo.sampler.backend.tokenizer.save_pretrained(options.output / "trained-model")
    return report


@contextmanager
def open_engines(path: Path, options: Options) -> Iterator[GRPO]:
    """Open the model at `path` three times: to sample from, to train, and as the unchanged reference."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with (
        corelm.get_backend(options.rollouts, path, **{"dtype": "float32", **options.engine_args}) as sampler,
        corelm.get_backend("transformers", model, tokenizer=path) as trainer,
        corelm.get_backend("transformers", path, dtype="float32") as reference,
    ):
        yield GRPO(sampler, trainer, reference, model, options)


class GRPO:
    """Three policies, and a training step with them.

    Args:
        sampler: samples, and accepts new weights.
        trainer: scores with `model`, with gradients.
        reference: scores with weights that do not change.
        model: the model to train. `sampler` and `reference` start with the same weights.
        options: the options of the command line.
    """

    def __init__(
        self, sampler: Backend, trainer: Backend, reference: Backend, model: PreTrainedModel, options: Options
    ) -> None:
        self.options = options
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)
        # The learning rate falls to 0, so that the last steps do not undo what was learned.
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.0, total_iters=options.steps)
        # Dense tensors make losses easy to write. All log-probs are raw, of temperature 1; the modules below refuse to
        # compare log-probs of different distributions.
        self.sampler = LLMPolicy(sampler, sampling_params={"max_new_tokens": LONGEST}, pad_output=True)
        self.trainer = LLMPolicy(trainer, input_mode="tokens", generate=False, pad_output=True)
        self.score_before = RetrieveLogProb(self.trainer, log_probs_key="train_log_probs")
        self.score_reference = RetrieveLogProb(LLMPolicy(reference), log_probs_key="ref_log_probs")
        self.correct = ImportanceCorrection(level="token", how="truncate", high=2.0, mask_key=SAMPLED)
        self.kl = KLComputation(
            "k3",
            detach=False,
            add_to_reward=False,
            gen_log_probs_key=("current_log_probs", "full"),
            mask_key=SAMPLED,
            kl_key="kl",
        )

    def step(self, questions: Sequence[str], seed: int) -> dict[str, Any]:
        """Sample, learn and push the weights; return the numbers to log."""
        rollout = self.sample(questions, seed)
        rollout["advantage"] = advantages(rollout["reward"])
        self.score_before(rollout)
        self.score_reference(rollout)
        self.correct(rollout)
        mismatch = mismatch_report(rollout, mask_key=SAMPLED)
        learned = [self.learn(rollout) for _ in range(PASSES)]
        self.schedule.step()
        return {
            "sampled_with": rollout["log_probs"].provenance.weight_version,
            "reward": rollout["reward"].mean().item(),
            "mismatch": mismatch.to_dict(),
            # Numbers of the first pass, in which the model still has the weights of sampling; `clipped` of the last.
            **learned[0],
            "clipped": learned[-1]["clipped"],
            "weights": self.sampler.backend.update_weights(self.model.state_dict()),
        }

    def sample(self, questions: Sequence[str], seed: int) -> TensorDictBase:
        """Return a group of answers to each question, with their rewards: batch ``[prompts, group]``."""
        rollout = self.sampler.replace(num_samples=self.options.group)(conversations(questions), seed=seed)
        rollout["reward"] = rewards(questions, rollout)
        return rollout

    def learn(self, rollout: TensorDictBase) -> dict[str, float]:
        """Take one optimizer step on all answers."""
        loss, numbers = self.loss(rollout)
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return {"loss": loss.item(), "gradient": norm.item(), **numbers}

    def loss(self, rollout: TensorDictBase) -> tuple[Tensor, dict[str, float]]:
        """Return the paper's equation 3, negated, with the mean KL per token in nats and the share clipped."""
        current = self.trainer.log_prob(rollout)
        rollout["current_log_probs"] = LogProbs(full=current, batch_size=rollout.batch_size)
        kl = self.kl(rollout)["kl"]
        ratio = (current - rollout["train_log_probs"].full).exp()
        advantage = rollout["advantage"].unsqueeze(-1)
        gain, clipped_gain = ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage
        # The ratio compares the trained model now and at sampling; the weight, trainer and sampler at sampling.
        objective = rollout["importance_weights"] * torch.minimum(gain, clipped_gain) - self.options.kl_coef * kl
        mask = rollout[SAMPLED]
        numbers = {
            # Log k1, not k3: one token that the reference finds very unlikely would dominate the mean of k3.
            "kl": aggregate(k1(current.detach(), rollout["ref_log_probs"].full, mask), mask),
            "clipped": aggregate((clipped_gain < gain).float(), mask),
        }
        loss = -aggregate(objective, mask, how="seq-mean-token-mean")
        return loss, {name: number.item() for name, number in numbers.items()}

    def examine(self) -> list[tuple[str, str, bool]]:
        """Return every question, its greedy answer, and whether the answer is right."""
        questions = list(QUESTIONS)
        greedy = self.sampler.replace(sampling_params={"max_new_tokens": LONGEST, "temperature": 0.0})
        result = greedy(conversations(questions))
        answers = zip(questions, result["text"].response, result["finish_reason"], strict=True)
        return [(question, answer, is_right(question, answer, reason)) for question, answer, reason in answers]


def conversations(questions: Sequence[str]) -> TensorDict:
    return TensorDict(history=History.from_chats([[{"role": "user", "content": question}] for question in questions]))


def rewards(questions: Sequence[str], rollout: TensorDictBase) -> Tensor:
    """Return float32[prompts, group]: 1 for a right answer, else 0."""
    groups = zip(questions, rollout["text"].response, rollout["finish_reason"], strict=True)
    right = [[is_right(question, *one) for one in zip(*group, strict=True)] for question, *group in groups]
    return torch.tensor(right, dtype=torch.float32)


def is_right(question: str, answer: str, finish_reason: str) -> bool:
    """Return whether the answer is complete and its last word is right, so that listing many words does not help."""
    return finish_reason == "stop" and re.findall(r"\w+", answer)[-1:] == [QUESTIONS[question]]


def advantages(reward: Tensor) -> Tensor:
    """Return float32[prompts, group]. If all answers of a group have one reward, their advantages are 0."""
    return (reward - reward.mean(-1, keepdim=True)) / (reward.std(-1, keepdim=True) + 1e-4)


def parse(arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=Options.steps)
    parser.add_argument("--group", type=int, default=Options.group, help="answers per question, at least 2")
    parser.add_argument("--prompts", type=int, default=Options.prompts, help="questions per step")
    parser.add_argument("--lr", type=float, default=Options.lr, help="learning rate of the first step")
    parser.add_argument("--kl-coef", type=float, default=Options.kl_coef, help="weight of the KL in the loss")
    parser.add_argument("--seed", type=int, default=Options.seed)
    parser.add_argument("--rollouts", choices=("transformers", "vllm"), default=Options.rollouts)
    parser.add_argument(
        "--engine-arg",
        dest="engine_args",
        action="append",
        type=engine_arg,
        metavar="NAME=VALUE",
        default=[],
        help="option of the sampling engine; can be given more than once",
    )
    parser.add_argument("--output", type=Path, default=Options.output, help="folder for the results")
    parser.add_argument("--no-plot", dest="plot", action="store_false", help="do not draw the curves")
    given = vars(parser.parse_args(arguments))
    options = Options(**{**given, "engine_args": dict(given["engine_args"])})
    if options.steps < 1 or options.group < 2 or not 1 <= options.prompts <= len(QUESTIONS):
        parser.error(f"expected steps of at least 1, a group of at least 2 and 1 to {len(QUESTIONS)} prompts")
    if options.plot and find_spec("matplotlib") is None:
        parser.error("drawing the curves needs matplotlib: pip install matplotlib, or pass --no-plot")
    return options


def engine_arg(text: str) -> tuple[str, Any]:
    """Parse ``NAME=VALUE``; the value is a Python literal if it can be read as one, else a string."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


if __name__ == "__main__":
    main()

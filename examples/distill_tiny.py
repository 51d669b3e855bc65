"""On-policy distillation from start to end, on a CPU: a tiny model learns to answer as a bigger one does.

    python examples/distill_tiny.py [--output distill-output] [--steps 60] [--seed 0]

The student is the demo's model, trained for a short time, so that it answers hardly any question. The teacher is wider,
deeper and fully trained. The student learns from its own answers: at each of their tokens the teacher says which ids
are most probable, and the student's probabilities are drawn to the teacher's. `Distillation.step` is one step of
Agarwal et al., On-Policy Distillation of Language Models (GKD), arXiv:2306.13649, algorithm 1, in which all answers are
the student's own:

    sample    sample answers of the student to a few questions
    ask       score them with the teacher: the k most probable ids at each token, and the mass of all others
    learn     score the same ids with the student, and minimise the divergence of the two
    push      nothing: the student's engine holds the model that is trained, and notices that its weights have changed

The teacher may be any engine that returns the most probable ids, such as a large model behind a URL.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

import corelm
from corelm import Backend, History, LLMPolicy
from corelm.kl import DIVERGENCES, DistillationLoss, Divergence
from corelm_testing.tiny import build_tiny, read_chats

LONGEST = 24  # tokens per answer
EVERY = 5  # steps in a line of the table


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command line."""

    steps: int = 60
    questions: int = 24
    top_k: int = 32
    kind: Divergence = "forward_kl"
    lr: float = 6e-3
    seed: int = 0
    student_steps: int = 40
    teacher_steps: int = 200
    output: Path = Path("distill-output")
    plot: bool = True


@dataclass
class Report:
    """What a run has found.

    Attributes:
        losses: the loss of each step, in nats a token.
        before: every question, the student's likeliest answer before training, and whether it is the teacher's.
        after: the same after training.
    """

    losses: list[float] = field(default_factory=list)
    before: list[tuple[str, str, bool]] = field(default_factory=list)
    after: list[tuple[str, str, bool]] = field(default_factory=list)

    def summary(self) -> str:
        width = max(len(answer) for _, answer, _ in self.before)
        lines = [
            f"{question:34}{'✓' if was else '·'} {old:{width}}  {'✓' if now else '·'} {new}"
            for (question, old, was), (_, new, now) in zip(self.before, self.after, strict=True)
        ]
        same = [sum(ok for *_, ok in answers) for answers in (self.before, self.after)]
        lines.append(f"Likeliest answers that are the teacher's: {same[0]} of {len(lines)} before, {same[1]} after.")
        return "\n".join(["", *lines, ""])

    def draw(self, path: Path, kind: str) -> None:
        """Draw the loss of every step."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 3.6), layout="constrained")
        axes = figure.subplots()
        axes.plot(range(1, len(self.losses) + 1), self.losses, ".-")
        axes.set(title=f"{kind} of teacher and student, nats a token", xlabel="step", ylim=(0, None))
        axes.grid(alpha=0.3)
        figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    # Matrices this small are computed faster by a single thread.
    torch.set_num_threads(1)
    report = train(options)
    print(report.summary())
    if options.plot:
        report.draw(options.output / "loss.png", options.kind)
    print(f"In {options.output.resolve()}: {', '.join(sorted(file.name for file in options.output.iterdir()))}.")


def train(options: Options) -> Report:
    """Open the engines, run the steps and save the student in ``options.output``."""
    models = {
        "student": {"steps": options.student_steps},
        "teacher": {"steps": options.teacher_steps, "heads": 6, "layers": 3},
    }
    for name, size in models.items():
        if not (options.output / name / "config.json").exists():
            build_tiny(options.output / name, seed=options.seed, **size)
    draw = random.Random(options.seed)
    asked, report = questions(), Report()
    with open_engines(options) as distillation, (options.output / "steps.jsonl").open("w", encoding="utf-8") as file:
        report.before = distillation.examine(asked)
        for step in (bar := tqdm(range(options.steps), desc="distilling")):
            numbers = distillation.step(draw.sample(asked, options.questions), seed=draw.getrandbits(62))
            report.losses.append(numbers["loss"])
            bar.set_postfix(loss=f"{numbers['loss']:.3f}", refresh=False)
            file.write(json.dumps({"step": step, **numbers}) + "\n")
            if (step + 1) % EVERY == 0 or step + 1 == options.steps:
                some = report.losses[step // EVERY * EVERY :]
                tqdm.write(f"steps to {step + 1:>3}: loss {sum(some) / len(some):.3f} nats a token")
        report.after = distillation.examine(asked)
        distillation.model.save_pretrained(options.output / "trained-student")
        distillation.student.backend.tokenizer.save_pretrained(options.output / "trained-student")
    return report


@contextmanager
def open_engines(options: Options) -> Iterator[Distillation]:
    model = AutoModelForCausalLM.from_pretrained(options.output / "student", dtype=torch.float32)
    with (
        corelm.get_backend("transformers", model, tokenizer=options.output / "student") as student,
        corelm.get_backend("transformers", options.output / "teacher", dtype="float32") as teacher,
    ):
        yield Distillation(student, teacher, model, options)


class Distillation:
    """A student, a teacher, and a training step with them.

    Args:
        student: samples from `model`, and scores with it, with gradients.
        teacher: scores, and returns the most probable ids.
        model: the model to train.
        options: the options of the command line.
    """

    def __init__(self, student: Backend, teacher: Backend, model: PreTrainedModel, options: Options) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, total_iters=options.steps)
        self.student = LLMPolicy(student, sampling_params={"max_new_tokens": LONGEST})
        self.greedy = {"max_new_tokens": LONGEST, "temperature": 0.0}
        self.teacher = LLMPolicy(teacher, sampling_params=self.greedy)
        self.ask = LLMPolicy(
            teacher, input_mode="tokens", generate=False, top_k=options.top_k, log_probs_key="teacher_log_probs"
        )
        scorer = self.student.replace(generate=False, input_mode="tokens")
        self.loss = DistillationLoss(scorer, options.kind, mask_key=("masks", "all_response_mask"))

    def step(self, asked: Sequence[str], seed: int) -> dict[str, Any]:
        """Sample, ask the teacher and learn; return the numbers to log."""
        rollout = self.student(conversations(asked), seed=seed)
        self.ask(rollout)
        loss = self.loss.mean(rollout)
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return {
            "loss": loss.item(),
            "gradient": norm.item(),
            "sampled_with": rollout["log_probs"].provenance.weight_version,
        }

    def examine(self, asked: Sequence[str]) -> list[tuple[str, str, bool]]:
        """Return every question, the student's likeliest answer, and whether it is the teacher's."""
        found = [
            policy(conversations(asked))["text"].response
            for policy in (self.student.replace(sampling_params=self.greedy), self.teacher)
        ]
        return [(question, ours, ours == theirs) for question, ours, theirs in zip(asked, *found, strict=True)]


def questions() -> list[str]:
    """Return the first question of each dialogue that the tiny models are trained on."""
    return list(dict.fromkeys(chat[0]["content"] for chat in read_chats()))


def conversations(asked: Sequence[str]) -> TensorDict:
    return TensorDict(history=History.from_chats([[{"role": "user", "content": question}] for question in asked]))


def parse(arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=Options.steps)
    parser.add_argument("--questions", type=int, default=Options.questions, help="answers per step")
    parser.add_argument("--top-k", type=int, default=Options.top_k, help="ids that the teacher returns at each token")
    parser.add_argument("--kind", choices=DIVERGENCES, default=Options.kind, help="which divergence to minimise")
    parser.add_argument("--lr", type=float, default=Options.lr, help="learning rate of the first step")
    parser.add_argument("--seed", type=int, default=Options.seed)
    parser.add_argument("--student-steps", type=int, default=Options.student_steps, help="training of the student")
    parser.add_argument("--teacher-steps", type=int, default=Options.teacher_steps, help="training of the teacher")
    parser.add_argument("--output", type=Path, default=Options.output, help="folder for the results")
    parser.add_argument("--no-plot", dest="plot", action="store_false", help="do not draw the loss")
    options = Options(**vars(parser.parse_args(arguments)))
    if options.steps < 1 or not 1 <= options.questions <= len(questions()) or options.top_k < 1:
        parser.error(f"expected steps and top-k of at least 1, and 1 to {len(questions())} questions")
    if options.plot and find_spec("matplotlib") is None:
        parser.error("drawing the loss needs matplotlib: pip install matplotlib, or pass --no-plot")
    return options


if __name__ == "__main__":
    main()

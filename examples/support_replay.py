"""Sample with top-p, then score the same tokens with the same weights: with and without the ids that top-p had left.

    python examples/support_replay.py [--output support-output] [--top-p 0.8] [--top-k 1024] [--steps 80] [--seed 0]

A sampler with top-p draws from what truncation has left, so its log-probs are normalised over these ids. A trainer that
scores the tokens over the whole vocabulary gets smaller probabilities: the ratio exp(trainer − sampler) is the mass
that was left, and importance weights or a PPO ratio made of the two are biased, although nothing was trained. With
``return_support=True`` the sampler says which ids were left, and with ``support_key`` the trainer normalises over them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from tensordict import TensorDict, TensorDictBase
from transformers.utils.logging import disable_progress_bar

import corelm
from corelm import History, LLMPolicy
from corelm_testing.tiny import build_tiny, read_chats

#: A ratio outside these limits counts as far off.
NEAR = (0.9, 1.1)
TEMPERATURE = 1.0


@dataclass(frozen=True)
class Ratios:
    """exp(trainer − sampler) over the sampled tokens.

    Attributes:
        mean: its mean.
        outside: the share of tokens that is outside `NEAR`.
        farthest: the largest distance from 1.
    """

    mean: float
    outside: float
    farthest: float

    @classmethod
    def of(cls, rollout: TensorDictBase, key: str) -> Ratios:
        """Compare the scores under `key` with the sampler's numbers."""
        scores, sampled = (corelm.ragged(rollout, (name, "response")).values for name in (key, "log_probs"))
        ratio = (scores - sampled).double().exp()
        outside = (ratio < NEAR[0]) | (ratio > NEAR[1])
        return cls(float(ratio.mean()), float(outside.double().mean()), float((ratio - 1).abs().max()))


@dataclass(frozen=True)
class Outcome:
    """What `replay` found.

    Attributes:
        tokens: number of sampled tokens.
        kept_ids: how many ids were left, on average over the tokens.
        kept_mass: the probability that these had together before truncation, on average over the tokens.
        without, with_support: the ratios of scores over the whole vocabulary, and over the ids that were left.
    """

    tokens: int
    kept_ids: float
    kept_mass: float
    without: Ratios
    with_support: Ratios


def replay(model: Path, *, top_p: float, top_k: int, seed: int, samples: int = 4) -> Outcome:
    """Sample answers to the questions of the tiny model, and score them twice."""
    sampling = {"max_new_tokens": 24, "temperature": TEMPERATURE, "top_p": top_p, "top_k": top_k}
    questions = [chat[:1] for chat in read_chats() for _ in range(samples)]
    with corelm.get_backend("transformers", model, dtype="float32") as backend:
        sampler = LLMPolicy(
            backend, sampling_params=sampling, log_probs_mode="processed", return_support=True, inplace=True
        )
        rollout = sampler(TensorDict(history=History.from_chats(questions)), seed=seed)
        # The trainer has the same weights: this backend serves as both.
        trainer = LLMPolicy(
            backend,
            generate=False,
            sampling_params={"temperature": TEMPERATURE},
            log_probs_mode="processed",
            log_probs_key="train_log_probs",
        )
        trainer(rollout)
        trainer.replace(log_probs_key="train_log_probs_with_support", support_key="log_probs")(rollout)
    counts, masses = (corelm.ragged(rollout, ("log_probs", name)).values for name in ("kept_counts", "kept_log_mass"))
    answered = corelm.ragged(rollout, ("log_probs", "scored_mask")).values
    return Outcome(
        tokens=int(answered.sum()),
        kept_ids=float(counts[answered].double().mean()),
        kept_mass=float(masses[answered].double().exp().mean()),
        without=Ratios.of(rollout, "train_log_probs"),
        with_support=Ratios.of(rollout, "train_log_probs_with_support"),
    )


def table(outcome: Outcome) -> Table:
    """Return a table of the ratios. It fits 80 columns."""
    out = Table(box=SIMPLE_HEAD)
    out.add_column("scored over")
    for name in ("mean ratio", f"outside [{NEAR[0]}, {NEAR[1]}]", "farthest from 1"):
        out.add_column(name, justify="right", no_wrap=True)
    for name, ratios in (("the whole vocabulary", outcome.without), ("the ids that were left", outcome.with_support)):
        out.add_row(name, f"{ratios.mean:.3f}", f"{ratios.outside:.1%}", f"{ratios.farthest:.1e}")
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("support-output"))
    parser.add_argument("--top-p", type=float, default=0.8)
    parser.add_argument("--top-k", type=int, default=1024)
    parser.add_argument(
        "--steps", type=int, default=80, help="training steps of the tiny model; it is unsure after few"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console = Console(highlight=False)
    if not (terminal := sys.stderr.isatty()):
        # A log cannot show the bars that transformers draws while it loads and saves a model.
        disable_progress_bar()
    path = options.output / "tiny-model"
    if not (path / "config.json").exists():
        build_tiny(path, steps=options.steps, seed=options.seed, progress=terminal)
    outcome = replay(path, top_p=options.top_p, top_k=options.top_k, seed=options.seed)
    console.print(
        f"{outcome.tokens} tokens sampled with top_p={options.top_p}, top_k={options.top_k}, each from "
        f"{outcome.kept_ids:.1f} ids with {outcome.kept_mass:.3f} of the mass on average."
    )
    console.print(table(outcome))


if __name__ == "__main__":
    main()

"""Chat for two turns with a tiny model that is trained on the spot, then score the chat again.

python examples/demo.py [--output demo-output] [--steps 200] [--seed 0]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tensordict import TensorDict, TensorDictBase
from transformers.utils.logging import disable_progress_bar

import corelm
from corelm import History, LLMPolicy
from corelm_testing.tiny import build_tiny

FIRST = ["Hello!", "Good morning!", "What is your name?", "How are you?"]
SECOND = ["What is your name?", "Who are you?", "How big are you?", "I am well too."]

#: Accepted difference, in nats, between float32 log-probs computed in batches of different shapes.
TOLERANCE = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    parser.add_argument("--steps", type=int, default=200, help="training steps of the tiny model")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    console = Console(highlight=False)
    terminal = sys.stderr.isatty()
    if not terminal:
        # A log cannot show the bars that transformers draws while it loads and saves a model.
        disable_progress_bar()

    path = options.output / "tiny-model"
    if (path / "config.json").exists():
        console.print(f"Using the model in {path}.")
    else:
        build_tiny(path, steps=options.steps, seed=options.seed, progress=terminal)

    with corelm.get_backend("transformers", path, dtype="float32") as backend:
        policy = LLMPolicy(backend, sampling_params={"max_new_tokens": 32, "temperature": 0.7}, inplace=False)
        history = History.from_chats([[{"role": "user", "content": question}] for question in FIRST])
        first = policy(TensorDict(history=history), seed=options.seed)
        history = first["history"].full.append([{"role": "user", "content": question} for question in SECOND])
        second = policy(TensorDict(history=history), seed=options.seed + 1)
        for turn, questions, result in ((1, FIRST, first), (2, SECOND, second)):
            console.print(table(f"turn {turn}", questions, result))
            console.print(masks(result, row=0), soft_wrap=False)
        console.print(f"These log-probs are {second['log_probs'].provenance}\n")

        scored = policy.replace(generate=False)(TensorDict(history=second["history"].full))
        compare(console, second, scored)
    console.print(f"The model is in {path.resolve()}. Open it with corelm.get_backend('transformers', {str(path)!r}).")


def table(title: str, questions: list[str], result: TensorDictBase) -> Table:
    """Return a table of the result, one row per conversation. It fits 80 columns."""
    out = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    out.add_column("question")
    out.add_column("answer")
    for name in ("tokens", "mean log-prob", "finish"):
        out.add_column(name, justify="right", no_wrap=True)
    tokens = result["tokens"]
    for row, question in enumerate(questions):
        out.add_row(
            Text(question),
            Text(result["text"].response[row]),
            f"{len(tokens.prompt[row])} + {len(tokens.response[row])}",
            f"{result['log_probs'].response[row].mean():.3f}",
            result["finish_reason"][row],
        )
    return out


def masks(result: TensorDictBase, row: int) -> Text:
    """Return the masks of one conversation, one character per token."""
    found = result["masks"]
    marks = zip(found.all_assistant_mask[row].tolist(), found.all_response_mask[row].tolist(), strict=True)
    drawn = "".join("R" if response else "a" if assistant else "·" for assistant, response in marks)
    return Text(f"  masks of row {row} (· prompt, a the assistant's, R sampled now):\n  {drawn}\n", overflow="fold")


def compare(console: Console, sampled: TensorDictBase, scored: TensorDictBase) -> None:
    """Print both sets of log-probs of the sampled tokens, and fail if they differ by more than `TOLERANCE`."""
    same = corelm.ragged(sampled, ("tokens", "full")).tolist() == corelm.ragged(scored, ("tokens", "full")).tolist()
    mask = corelm.ragged(sampled, ("log_probs", "scored_mask")).values
    while_sampling = corelm.ragged(sampled, ("log_probs", "full")).values[mask]
    afterwards = corelm.ragged(scored, ("log_probs", "full")).values[mask]
    largest = float((while_sampling - afterwards).abs().max())
    out = Table(title="scored again", title_justify="left", box=SIMPLE_HEAD)
    for name in ("", "while sampling", "scored afterwards"):
        out.add_column(name, justify="right")
    for at in torch.linspace(0, len(while_sampling) - 1, 5).long().tolist():
        out.add_row(f"token {at + 1}", f"{while_sampling[at]:.6f}", f"{afterwards[at]:.6f}")
    console.print(out)
    console.print(
        f"{int(mask.sum())} sampled tokens; ids {'identical' if same else 'DIFFER'}; largest difference {largest:.1e}\n"
    )
    if not same or largest > TOLERANCE:
        raise SystemExit("The log-probs of sampling and of scoring do not agree.")


if __name__ == "__main__":
    main()

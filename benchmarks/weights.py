"""How long new weights of 1 GB take to get into a model, in this process and in a host, compared with the plain ways.

In this process, from the tensors of a trainer:

    load_state_dict     ``model.load_state_dict(trainer.state_dict())``
    a state dict        ``backend.update_weights(trainer.state_dict())``
    a model             ``backend.update_weights(trainer)``

A trainer in this process hands its tensors to an engine in a process that `get_backend(python=…)` opens:

    a saved checkpoint  ``trainer.save_pretrained(folder)``, then ``from_pretrained(folder)``: what a program without
                        corelm does, except that the second half would run in the other process
    a state dict        ``backend.update_weights(trainer.state_dict())``
    a saved path        ``trainer.save_pretrained(folder)``, then ``backend.update_weights(folder)``

The model is random, with 254 million parameters in float32. Wall-clock time is measured, because a host is another
process. The checkpoint usually stays in the cache of the file system; on a slow or a shared disk it takes longer.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import corelm
from benchmarks.hosting import ONE_CORE
from benchmarks.measure import LONGER, Figure, compare
from benchmarks.models import Shape, random_model, tokenizer

#: 1.02 GB, and 30 MB.
LARGE: Shape = (32_000, 1024, 16)
SMALL: Shape = (8_000, 256, 4)
#: Goals: as fast as PyTorch in this process, and no slower than a file for another one.
GOAL_HERE, GOAL_HOSTED = 1.1, 1.0


def figures(quick: bool) -> Iterator[list[Figure]]:
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    shape, repeats = (SMALL, 3) if quick else (LARGE, 9)
    with tempfile.TemporaryDirectory() as folder:
        opened, saved = Path(folder, "opened"), Path(folder, "saved")
        trainer = untied(shape)
        trainer.save_pretrained(opened)
        tokenizer().save_pretrained(opened)
        # Goals apply to the large model only: loading a small one is mostly the fixed cost of a call.
        yield in_process(trainer, shape, repeats, {} if quick else {"a state dict": GOAL_HERE})
        yield hosted(trainer, opened, saved, repeats, {} if quick else {"a state dict": GOAL_HOSTED})


def in_process(trainer: Any, shape: Shape, repeats: int, goals: dict[str, float]) -> list[Figure]:
    rollout = untied(shape)
    with corelm.get_backend("transformers", rollout, tokenizer=tokenizer()) as backend:
        return compare(
            f"new weights in this process, {gigabytes(trainer)}",
            {
                "load_state_dict": lambda: rollout.load_state_dict(trainer.state_dict()),
                "a state dict": lambda: backend.update_weights(trainer.state_dict()),
                "a model": lambda: backend.update_weights(trainer),
            },
            baseline="load_state_dict",
            repeats=repeats,
            goals=goals,
            clock=time.perf_counter,
            longest=LONGER,
        )


def hosted(trainer: Any, opened: Path, saved: Path, repeats: int, goals: dict[str, float]) -> list[Figure]:
    def through_a_file() -> None:
        trainer.save_pretrained(saved)
        type(trainer).from_pretrained(saved)

    def by_path() -> None:
        trainer.save_pretrained(saved)
        backend.update_weights(saved)

    with corelm.get_backend("transformers", opened, python=sys.executable, env=ONE_CORE) as backend:
        return compare(
            f"new weights in a host, {gigabytes(trainer)}",
            {
                "a saved checkpoint": through_a_file,
                "a state dict": lambda: backend.update_weights(trainer.state_dict()),
                "a saved path": by_path,
            },
            baseline="a saved checkpoint",
            repeats=repeats,
            goals=goals,
            clock=time.perf_counter,
            longest=LONGER,
        )


def untied(shape: Shape) -> Any:
    """Return a random model whose head has weights of its own."""
    return random_model(shape, tie_word_embeddings=False)


def gigabytes(model: Any) -> str:
    total = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    return f"{total / 1e9:.2f} GB of {next(model.parameters()).dtype}".replace("torch.", "")

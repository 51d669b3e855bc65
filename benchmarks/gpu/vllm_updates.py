"""New weights for vLLM: how long they take, and whether they are in force."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

import corelm
from benchmarks.gpu.device import Size, gpu, once, random_ids, random_model, save, value
from benchmarks.gpu.scoring import padded
from benchmarks.gpu.vllm import engine_options
from benchmarks.measure import Figure


def figures(size: Size) -> Iterator[list[Figure]]:
    if gpu() is None:
        os.environ |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    # vLLM on a CPU cannot replace the weights of a tied head.
    for tied in (False, True) if gpu() else (False,):
        yield updates(size, tied)


def updates(size: Size, tied: bool) -> list[Figure]:
    """Update an engine from a trainer on the same GPU, then compare its scores with the trainer's."""
    named = "tied head" if tied else "untied head"
    rows = random_ids(size, [256 if gpu() else 32] * 8)
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        save(random_model(size, tied=tied), Path(first))
        trainer = random_model(size, seed=1, tied=tied)
        save(trainer, Path(second))
        gc.collect()
        torch.cuda.empty_cache()
        wanted = torch.cat(padded(trainer, rows))
        with corelm.get_backend("vllm", first, **engine_options(size) | _beside_a_trainer()) as backend:
            taken = [
                once(
                    f"weights for vLLM, {named}",
                    "state dict",
                    lambda: backend.update_weights(trainer.state_dict()),
                    1.0,
                ),
                once(f"weights for vLLM, {named}", "path", lambda: backend.update_weights(second)),
            ]
            scores = backend.score_logprobs(rows)
    found = scores.logprobs.values[scores.scored.values]
    apart = float((found - wanted.to(found)).abs().mean())
    # A head of the old weights gives more than 1.
    return [*taken, value(f"vLLM's scores to the trainer's, {named}", "mean", apart, 0.02)]


def _beside_a_trainer() -> dict[str, float]:
    return {} if gpu() is None else {"gpu_memory_utilization": 0.4}

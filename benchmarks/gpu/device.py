"""What the parts share: the sizes of models and batches, a clock and a memory meter for the GPU."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Figure, Way
from benchmarks.models import tokenizer


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large everything is.

    Attributes:
        config: fields of the model's configuration.
        dtype: of the model's weights.
        rows: number of ragged rows, whose lengths are drawn from `shortest` to `longest`.
        shortest, longest: in tokens.
        prompts: how many prompts are answered at a time, in turn.
        new: new tokens an answer.
        head_rows: hidden states of the head alone.
        repeats: the number of turns of a comparison.
        checkpoint: folder of a real model, for the part `real`.
    """

    config: Mapping[str, Any]
    dtype: torch.dtype
    rows: int
    shortest: int
    longest: int
    prompts: tuple[int, ...]
    new: int
    head_rows: int
    repeats: int
    checkpoint: Path | None = None


SIZES = {
    # Qwen2.5-1.5B with an untied head.
    "full": Size(
        config={
            "vocab_size": 151_936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32_768,
            "rope_theta": 1e6,
        },
        dtype=torch.bfloat16,
        rows=64,
        shortest=128,
        longest=2048,
        prompts=(64, 256, 1024),
        new=256,
        head_rows=16_384,
        repeats=5,
    ),
    "tiny": Size(
        config={
            "vocab_size": 2048,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
        },
        dtype=torch.float32,
        rows=8,
        shortest=16,
        longest=64,
        prompts=(2, 8),
        new=8,
        head_rows=256,
        repeats=1,
    ),
}
# As full, for a GPU that is lent for minutes.
SIZES["short"] = replace(SIZES["full"], prompts=(256, 1024), new=128, repeats=3)


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def gpu() -> str | None:
    """Return the name of the first GPU; None without one."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def clock() -> float:
    """Return seconds, after everything that was given to the GPU is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def random_model(size: Size, *, seed: int = 0, tied: bool = False) -> Any:
    """Return a random Qwen2 on the device, made there, because copying its weights would take longer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    with torch.device(device()):
        config = Qwen2Config(**size.config, tie_word_embeddings=tied, eos_token_id=tokenizer().eos_token_id)
        model: Any = Qwen2ForCausalLM(config).eval()
        model.to(size.dtype)
        # With the usual spread of 0.02 all log-probs are about -log V, and an error would not show.
        model.get_output_embeddings().weight.data.mul_(4.0)
    return model


def save(model: Any, folder: Path) -> Path:
    """Save the model and its tokenizer; return the folder."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def random_ids(size: Size, lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Return rows of random ids, of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    vocab = size.config["vocab_size"]
    return [torch.randint(10, vocab, (length,), generator=generator).tolist() for length in lengths]


def ragged_lengths(size: Size) -> list[int]:
    drawn = torch.randint(
        size.shortest, size.longest + 1, (size.rows,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    return [int(length) for length in drawn]


def memory(work: str, ways: Mapping[str, Way], goals: Mapping[str, float]) -> list[Figure]:
    """Measure how much GPU memory each way adds to what is held before it. Without a GPU, return no figures.

    Args:
        work: names the work.
        ways: the ways by name.
        goals: for some ways, the upper limit in MiB.
    """
    figures = []
    for name, way in ways.items():
        mib = peak(way)
        if mib is not None:
            figures.append(Figure(work=work, way=name, mib=mib, goal=goals.get(name)))
    return figures


def peak(way: Way) -> float | None:
    """Return how many MiB `way` allocates at its peak, in addition to those held before; None without a GPU."""
    way()
    if not torch.cuda.is_available():
        return None
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    way()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def value(work: str, way: str, found: float, goal: float | None = None) -> Figure:
    """Return a figure of something else than time. Its goal is an upper limit."""
    return Figure(work=work, way=way, ratio=found, spread=(found, found), goal=goal)


def once(work: str, way: str, run: Callable[[], object], goal_seconds: float | None = None) -> Figure:
    """Return the seconds that `run` takes once."""
    began = clock()
    run()
    return Figure(work=work, way=way, seconds=clock() - began, goal_seconds=goal_seconds)

"""Generation with the transformers plugin, with its own defaults, compared with ``model.generate``."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

import corelm
from benchmarks.gpu.device import Size, clock, random_ids, random_model, save, value
from benchmarks.measure import Figure, compare
from benchmarks.models import tokenizer


def figures(size: Size) -> Iterator[list[Figure]]:
    yield against_generate(size)
    yield closing(size)


def against_generate(size: Size) -> list[Figure]:
    model = random_model(size)
    count = size.prompts[-2]
    prompts = random_ids(size, [32] * count)
    with corelm.get_backend("transformers", model, tokenizer=tokenizer()) as backend:
        ways = {
            "model.generate": lambda: plain(model, prompts, size.new),
            "backend": lambda: backend.generate(prompts, {"max_new_tokens": size.new, "ignore_eos": True}),
        }
        return compare(
            f"{count} answers of {size.new} tokens",
            ways,
            baseline="model.generate",
            repeats=min(2, size.repeats),
            clock=clock,
            goals={"backend": 1.05},
        )


def plain(model: Any, prompts: list[list[int]], new: int, **options: Any) -> Any:
    """Return what ``model.generate`` makes of prompts that are padded on the left; `options` are passed to it."""
    rows = [torch.tensor(prompt) for prompt in prompts]
    ids, mask = (
        pad_sequence(each, batch_first=True, padding_side="left").to(model.device)
        for each in (rows, [torch.ones_like(row) for row in rows])
    )
    return model.generate(
        ids,
        attention_mask=mask,
        do_sample=True,
        top_k=0,
        max_new_tokens=new,
        min_new_tokens=new,
        pad_token_id=0,
        eos_token_id=None,
        **options,
    )


def closing(size: Size) -> list[Figure]:
    """Open a model from a folder, close it, and look at what PyTorch has kept."""
    if not torch.cuda.is_available():
        return []
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with tempfile.TemporaryDirectory() as folder:
        path = save(random_model(size), Path(folder))
        with corelm.get_backend("transformers", path) as backend:
            backend.score_logprobs(random_ids(size, [32]))
    kept = (torch.cuda.memory_reserved() - before) / 2**20
    return [value("MiB that stay reserved after close", "backend", kept, 64)]

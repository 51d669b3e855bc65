"""The cost of calling vLLM through corelm, compared with calling it directly.

One engine gives the same answers of 64 tokens, with their log-probs, in several ways:

    vllm             AsyncLLM itself, one request per prompt, with its fastest options (no text, flat log-probs)
    vllm, as usual   the same with vLLM's defaults, which also make the text and an object for every token
    backend          `Backend.generate`: records of ids
    policy           `LLMPolicy` on tokens: TensorDicts

Wall-clock time is measured, because the engine is another process.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# vLLM reads these when it is imported: run on a CPU, do not compile, do not log.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
from tensordict import TensorDict

import corelm
from benchmarks.measure import LONGER, LONGEST, Figure, Way, compare
from benchmarks.models import random_model, tokenizer
from corelm import Backend, LLMPolicy

NEW = 64
#: Numbers of prompts.
GOALS = {8: 1.05, 64: 1.05}


def figures(quick: bool) -> Iterator[list[Figure]]:
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28}
        with corelm.get_backend("vllm", small(Path(folder)), **options) as backend:
            for count in (8,) if quick else (1, 8, 32, 64, 128):
                yield compare(
                    f"vLLM: {count} prompt{'s' if count > 1 else ''}, {NEW} new tokens with log-probs",
                    ways(backend, count, NEW),
                    baseline="vllm",
                    repeats=3 if quick else 15,
                    longest=LONGER if count in GOALS else LONGEST,
                    goals={"policy": GOALS[count]} if count in GOALS else {},
                    clock=time.perf_counter,
                )


def small(folder: Path) -> Path:
    """Save a random model of 18 million parameters and its tokenizer; return the folder."""
    tokenizer().save_pretrained(folder)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer().eos_token_id, "pad_token_id": tokenizer().pad_token_id}
    random_model((len(tokenizer()), 512, 6), max_position_embeddings=1024, **ids).save_pretrained(folder)
    return folder


def ways(backend: Backend, count: int, new: int) -> dict[str, Way]:
    """Return the ways: each answers `count` prompts, with other ids in every call."""
    fresh = itertools.count()
    vocab = len(backend.tokenizer)

    def prompts() -> torch.Tensor:
        # New ids in every call, so that no way profits from the cache of another.
        return torch.randint(3, vocab, (count, 32), generator=torch.Generator().manual_seed(next(fresh)))

    sampling = {"max_new_tokens": new, "ignore_eos": True}
    policy = LLMPolicy(backend, input_mode="tokens", sampling_params=sampling, return_text=False)
    return {
        "vllm": lambda: directly(backend, prompts().tolist(), new, detokenize=False, flat_logprobs=True),
        "vllm, as usual": lambda: directly(backend, prompts().tolist(), new),
        "backend": lambda: backend.generate(prompts(), sampling),
        "policy": lambda: policy(TensorDict(tokens=prompts(), batch_size=[count])),
    }


def directly(backend: Backend, prompts: list[list[int]], new: int, **options: Any) -> list[Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = backend.engine.plugin.engine

    async def one(row: int, prompt: list[int]) -> Any:
        params = SamplingParams(
            max_tokens=new, ignore_eos=True, seed=row, logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY, **options
        )
        final = None
        async for output in engine.llm.generate({"prompt_token_ids": prompt}, params, f"direct-{time.monotonic_ns()}"):
            final = output
        return final

    async def together() -> list[Any]:
        return await asyncio.gather(*(one(row, prompt) for row, prompt in enumerate(prompts)))

    found: list[Any] = engine.loop.run(together())
    return found

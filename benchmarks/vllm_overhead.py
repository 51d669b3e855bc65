"""vLLM through corelm, compared with ``vllm.LLM``, the class that a user of vLLM would call.

Two engines of the same model answer with 64 tokens and their log-probs, in several ways:

    LLM              ``vllm.LLM(...).generate`` with its own defaults and its fastest options (no text, flat log-probs)
    LLM, as usual    the same, but it also makes the text and an object for every token, as vLLM's examples do
    AsyncLLM         corelm's engine itself, one request per prompt: what is left of the ratio is the cost of corelm
    backend          `Backend.generate`: records of ids
    policy           `LLMPolicy` on tokens: TensorDicts

Both engines are processes that only work when they are asked, so the ways can take turns. Wall-clock time is measured,
because the work is done in other processes.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
#: The engine arguments of both. Everything else is left to vLLM and to corelm.
ENGINE: dict[str, Any] = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28}


def figures(quick: bool) -> Iterator[list[Figure]]:
    with (
        tempfile.TemporaryDirectory() as folder,
        opened_llm(small(Path(folder))) as llm,
        corelm.get_backend("vllm", folder, **ENGINE) as backend,
    ):
        for count in (8,) if quick else (1, 8, 32, 64, 128):
            yield compare(
                f"vLLM: {count} prompt{'s' if count > 1 else ''}, {NEW} new tokens with log-probs",
                ways(llm, backend, count, NEW),
                baseline="LLM",
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


@contextmanager
def opened_llm(model: Path) -> Iterator[Any]:
    """Yield a ``vllm.LLM`` for this model. Its engine runs in a process of its own, like that of corelm."""
    from vllm import LLM

    llm = LLM(str(model), **ENGINE)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def ways(llm: Any, backend: Backend, count: int, new: int) -> dict[str, Way]:
    """Return the ways: each answers `count` prompts, with other ids in every call."""
    fresh = itertools.count()
    vocab = len(backend.tokenizer)

    def prompts() -> torch.Tensor:
        # New ids in every call, so that no way profits from the cache of another.
        return torch.randint(3, vocab, (count, 32), generator=torch.Generator().manual_seed(next(fresh)))

    sampling = {"max_new_tokens": new, "ignore_eos": True}
    policy = LLMPolicy(backend, input_mode="tokens", sampling_params=sampling, return_text=False)
    return {
        "LLM": lambda: offline(llm, prompts().tolist(), new, detokenize=False, flat_logprobs=True),
        "LLM, as usual": lambda: offline(llm, prompts().tolist(), new),
        "AsyncLLM": lambda: directly(backend, prompts().tolist(), new),
        "backend": lambda: backend.generate(prompts(), sampling),
        "policy": lambda: policy(TensorDict(tokens=prompts(), batch_size=[count])),
    }


def offline(llm: Any, prompts: list[list[int]], new: int, **options: Any) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=new, ignore_eos=True, logprobs=0, **options)
    found: list[Any] = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return found


def directly(backend: Backend, prompts: list[list[int]], new: int) -> list[Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = backend.engine.plugin
    params = SamplingParams(
        max_tokens=new,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )

    async def one(row: int, prompt: list[int]) -> Any:
        final = None
        request_id = f"direct-{row}-{time.monotonic_ns()}"
        async for output in engine.llm.generate({"prompt_token_ids": prompt}, params, request_id):
            final = output
        return final

    async def together() -> list[Any]:
        return await asyncio.gather(*(one(row, prompt) for row, prompt in enumerate(prompts)))

    found: list[Any] = engine.loop.run(together())
    return found

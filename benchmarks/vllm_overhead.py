"""What does going through corelm cost, over calling vLLM directly?

    python benchmarks/vllm_overhead.py [--model FOLDER] [--prompts 8 64]

One engine, asked in turn for the same answers of 64 tokens with their log-probs:

    vllm             AsyncLLM itself, one request a prompt, with what makes it quickest (no text, flat log-probs)
    vllm, as usual   the same with vLLM's own defaults: it makes the text, and an object for every token
    backend          `Backend.generate`: records of ids
    policy           `LLMPolicy` on tokens: TensorDicts

Printed are the medians of wall-clock time, and each as a multiple of the first.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import corelm
from corelm import Backend, LLMPolicy
from tiny import build_tokenizer, read_chats

Way = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a folder or hub name; by default a tiny one is made")
    parser.add_argument("--prompts", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--new", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or small(Path(folder))
        options: dict[str, Any] = {} if given.model else {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28}
        with corelm.get_backend("vllm", model, **options) as backend:
            columns = {count: measure(ways(backend, count, given.new), given.repeats) for count in given.prompts}
    for count, times in columns.items():
        print(f"\n{count} prompts, {given.new} new tokens with log-probs, medians of {given.repeats}")
        for name, seconds in times.items():
            print(f"  {name:16} {seconds * 1e3:8.1f} ms  {seconds / times['vllm']:6.3f}")


def small(folder: Path) -> Path:
    """A random model of 20 million parameters, whose heads are wide enough for vLLM on a CPU, and a tokenizer."""
    tokenizer = build_tokenizer("\n".join(turn["content"] for chat in read_chats() for turn in chat), 1024)
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def ways(backend: Backend, count: int, new: int) -> dict[str, Way]:
    """Each a call that has all of `count` prompts answered, by ids that differ from call to call."""
    fresh = itertools.count()
    vocab = len(backend.tokenizer)

    def prompts() -> torch.Tensor:
        # Never the same twice, so that no way profits from what another has cached.
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

    engine = backend._engine.engine

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

    found: list[Any] = engine._loop.run(together())
    return found


def measure(ways: dict[str, Way], repeats: int) -> dict[str, float]:
    """The median seconds of each way. They take turns, so that what else the machine does falls on all alike."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in tqdm(range(repeats + 1), desc="repeats", leave=False):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if repeat:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


if __name__ == "__main__":
    main()

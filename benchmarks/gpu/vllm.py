"""vLLM through corelm, compared with ``vllm.LLM`` of the same model and options, each in a separate process.

LLM       ``vllm.LLM(...).generate`` with its own limits and its fastest options: no text, flat log-probs
backend   ``backend.generate`` and ``backend.score_logprobs``
policy    `LLMPolicy` on tokens
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

import corelm
from benchmarks.gpu.device import SIZES, Size, clock, gpu, random_ids, random_model, save, value
from benchmarks.measure import Figure
from corelm import LLMPolicy

#: Both engines are measured this often for each work; the median counts.
_TIMES = 3


def figures(size: Size) -> Iterator[list[Figure]]:
    with tempfile.TemporaryDirectory() as folder:
        path = save(random_model(size), Path(folder))
        torch.cuda.empty_cache()
        found = {way: _in_process(way, size, path) for way in ("LLM", "backend")}
    plain, ours = found["LLM"], found["backend"]
    limits = ("max_num_seqs", "max_num_batched_tokens")
    yield [value(f"vLLM's {name}", way, found[way][name]) for name in limits for way in ("LLM", "backend")]
    for work in (name for name in plain if name not in limits):
        figures = [Figure(work=work, way="LLM", seconds=plain[work], baseline="LLM")]
        for way in ("backend", "policy"):
            seconds = ours.get(work if way == "backend" else f"{work}, policy")
            if seconds is not None:
                ratio = seconds / plain[work]
                figures.append(
                    Figure(
                        work=work,
                        way=way,
                        seconds=seconds,
                        baseline="LLM",
                        ratio=ratio,
                        spread=(ratio, ratio),
                        turns=_TIMES,
                        goal=1.05 if "answers" in work else 1.11,
                    )
                )
        yield figures


def engine_options(size: Size) -> dict[str, Any]:
    """Return the engine arguments that both get."""
    options: dict[str, Any] = {"max_model_len": 2 * size.longest, "dtype": str(size.dtype).removeprefix("torch.")}
    if gpu() is None:
        return {**options, "enforce_eager": True, "kv_cache_memory_bytes": 1 << 28}
    return {**options, "gpu_memory_utilization": 0.6}


def _in_process(way: str, size: Size, model: Path) -> dict[str, float]:
    (name,) = (name for name, each in SIZES.items() if each is size)
    with tempfile.NamedTemporaryFile("r") as result:
        subprocess.run([sys.executable, "-m", "benchmarks.gpu.vllm", way, name, model, result.name], check=True)
        found: dict[str, float] = json.loads(result.read())
    return found


def _seconds(run: Callable[[], object]) -> float:
    run()
    taken = []
    for _ in range(_TIMES):
        began = clock()
        run()
        taken.append(clock() - began)
    return statistics.median(taken)


def _works(size: Size) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield the name of a work of generation, its number of prompts and its further sampling parameters."""
    for count in size.prompts:
        yield f"{count} answers of {size.new} tokens", count, {}
        yield f"{count} answers of {size.new} tokens, top_p", count, {"top_p": 0.95}


def _scored(size: Size) -> tuple[str, list[list[int]]]:
    rows = random_ids(size, [size.longest] * 2 * size.rows)
    return f"scores of {len(rows)} rows of {size.longest}", rows


def measure_llm(size: Size, model: Path) -> dict[str, float]:
    from vllm import LLM, SamplingParams

    llm = LLM(str(model), **engine_options(size))
    scheduler = llm.llm_engine.vllm_config.scheduler_config
    found = {name: getattr(scheduler, name) for name in ("max_num_seqs", "max_num_batched_tokens")}
    for work, count, more in _works(size):
        prompts = [{"prompt_token_ids": ids} for ids in random_ids(size, [size.shortest] * count)]
        wanted = SamplingParams(
            max_tokens=size.new, ignore_eos=True, logprobs=0, detokenize=False, flat_logprobs=True, **more
        )
        found[work] = _seconds(partial(llm.generate, prompts, wanted, use_tqdm=False))
    work, rows = _scored(size)
    wanted = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False, flat_logprobs=True)
    found[work] = _seconds(lambda: llm.generate([{"prompt_token_ids": row} for row in rows], wanted, use_tqdm=False))
    return found


def measure_backend(size: Size, model: Path) -> dict[str, float]:
    with corelm.get_backend("vllm", model, **engine_options(size)) as backend:
        scheduler = backend.engine.plugin.llm.vllm_config.scheduler_config
        found = {name: getattr(scheduler, name) for name in ("max_num_seqs", "max_num_batched_tokens")}
        for work, count, more in _works(size):
            prompts = random_ids(size, [size.shortest] * count)
            sampling = {"max_new_tokens": size.new, "ignore_eos": True, **more}
            found[work] = _seconds(partial(backend.generate, prompts, sampling))
            if not more:
                policy = LLMPolicy(backend, input_mode="tokens", sampling_params=sampling, return_text=False)
                found[f"{work}, policy"] = _seconds(partial(_ask_policy, policy, torch.tensor(prompts)))
        work, rows = _scored(size)
        found[work] = _seconds(lambda: backend.score_logprobs(rows))
    return found


def _ask_policy(policy: LLMPolicy, tokens: Tensor) -> None:
    # A new TensorDict in every call, because the answers are written into it.
    policy(TensorDict(tokens=tokens, batch_size=[len(tokens)]))


if __name__ == "__main__":
    way, name, model, result = sys.argv[1:]
    if gpu() is None:
        os.environ |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    measured = {"LLM": measure_llm, "backend": measure_backend}[way](SIZES[name], Path(model))
    Path(result).write_text(json.dumps(measured))

"""Many callers with one prompt each, against one batch of all their prompts: what does sharing cost?

    python benchmarks/callers.py [--model small] [--callers 1 8 16 32]

The transformers backend answers every prompt with 32 tokens and their log-probs, in several ways that take turns:

    serial          one caller, one prompt after another
    one batch       one caller, all prompts in one call
    callers         a thread for every prompt, through a `DynamicBatcher` with its defaults
    callers, min    the same with min_batch_size as large as the number of callers
    torchrl batch   TorchRL's TransformersWrapper, all prompts in one call
    torchrl         a thread for every prompt, TransformersWrapper(batching=True); both only where torchrl is installed

`backend` rows take and give records of ids, `policy` rows TensorDicts of texts. Each caller asks several times in a
row, as an agent does. Printed is the median of the repeats, in answers per second: of wall-clock time, and of processor
time, which says the same on a machine that is busy otherwise.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import corelm
from corelm.batching import DynamicBatcher
from tiny import build_tiny, read_chats

#: Answers some prompts, in one call.
Ask = Callable[[Sequence[str]], object]
#: Has the prompts answered, each so many times if it shares calls; returns how many answers that made.
Way = Callable[[Sequence[str], int], int]


#: What is set against which call of one batch.
SHARES = {
    "backend: callers": "backend: one batch",
    "backend: callers, min": "backend: one batch",
    "policy: callers": "policy: one batch",
    "policy: callers, min": "policy: one batch",
    "torchrl": "torchrl batch",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=["tiny", "small"], default="tiny", help="2 layers of 128, or 6 of 384")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=8, help="calls that each caller makes in a row")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new", type=int, default=32, help="tokens of each answer")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = load(given.model, folder)
    asked = [turn["content"] for chat in read_chats() for turn in chat if turn["role"] == "user"]
    columns = []
    with corelm.get_backend("transformers", model, tokenizer=tokenizer) as backend:
        for count in tqdm(given.callers, desc="callers"):
            ways = {**ours(backend, given.new, count), **torchrls(model, tokenizer, given.new)}
            prompts = [asked[i % len(asked)] for i in range(count)]
            columns.append(measure(ways, prompts, given.rounds, given.repeats))
    if "torchrl" not in ways:
        print("torchrl is not installed: its rows are left out")
    print(f"{given.model} model, {given.new} new tokens, {given.rounds} calls a caller, median of {given.repeats}")
    for clock, what in enumerate(("wall-clock", "processor")):
        print(f"\n{'answers per second of ' + what + ' time':44}" + "".join(f"{count:>8}" for count in given.callers))
        for name in ways:
            print(f"{name:44}" + "".join(f"{column[name][clock]:8.1f}" for column in columns))
        for many, one in SHARES.items():
            if many in ways:
                shares = [f"{column[many][clock] / column[one][clock]:8.0%}" for column in columns]
                print(f"{many + ' / one batch':44}" + "".join(shares))


def load(name: str, folder: str) -> tuple[Any, Any]:
    """The demo's tiny model, or a larger one with random weights and the same tokenizer."""
    path = build_tiny(folder, steps=60, progress=False)
    tokenizer = AutoTokenizer.from_pretrained(path)
    if name == "tiny":
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), tokenizer
    torch.manual_seed(0)
    size: dict[str, Any] = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6}
    size["num_attention_heads"] = 6
    config = Qwen2Config(vocab_size=1024, num_key_value_heads=2, eos_token_id=2, pad_token_id=0, **size)
    return AutoModelForCausalLM.from_config(config).eval(), tokenizer


def ours(backend: corelm.Backend, new: int, count: int) -> dict[str, Way]:
    batcher = DynamicBatcher(backend)
    patient = DynamicBatcher(backend, min_batch_size=count)
    sampling = {"max_new_tokens": new, "ignore_eos": True}
    policies = (
        corelm.LLMPolicy(each, input_mode="text", sampling_params=sampling, inplace=False)
        for each in (backend, batcher, patient)
    )

    def by_record(asked: corelm.Backend) -> Ask:
        return lambda prompts: asked.generate(asked.tokenize(prompts).ids, sampling)

    def by_policy(policy: corelm.LLMPolicy) -> Ask:
        return lambda prompts: policy(TensorDict(text=list(prompts), batch_size=[len(prompts)]))

    ways: dict[str, Way] = {}
    for name, asks in (
        ("backend", [by_record(each) for each in (backend, batcher, patient)]),
        ("policy", [by_policy(each) for each in policies]),
    ):
        alone, shared, waiting = asks
        ways |= {
            f"{name}: serial": serial(alone),
            f"{name}: one batch": one_batch(alone),
            f"{name}: callers": threads(shared),
            f"{name}: callers, min": threads(waiting),
        }
    return ways


def torchrls(model: Any, tokenizer: Any, new: int) -> dict[str, Way]:
    try:
        from torchrl.modules.llm import Text, TransformersWrapper
    except ImportError:
        return {}
    # There an answer's end cannot be ignored, but it can be forbidden.
    options: dict[str, Any] = {
        "input_mode": "text",
        "return_log_probs": True,
        "pad_output": False,
        "generate_kwargs": {"max_new_tokens": new, "min_new_tokens": new, "do_sample": True},
    }
    alone = TransformersWrapper(model, tokenizer=tokenizer, **options)
    shared = TransformersWrapper(model, tokenizer=tokenizer, batching=True, **options)

    def by_wrapper(wrapper: Any) -> Ask:
        def ask(prompts: Sequence[str]) -> None:
            size = [len(prompts)]
            wrapper(TensorDict(text=Text(prompt=list(prompts), batch_size=size), batch_size=size))

        return ask

    return {"torchrl batch": one_batch(by_wrapper(alone)), "torchrl": threads(by_wrapper(shared))}


# How prompts are asked -----------------------------------------------------------------------------------------------


def serial(ask: Ask) -> Way:
    def way(prompts: Sequence[str], rounds: int) -> int:
        # Once is enough: nothing is shared that could vary.
        for prompt in prompts:
            ask([prompt])
        return len(prompts)

    return way


def one_batch(ask: Ask) -> Way:
    def way(prompts: Sequence[str], rounds: int) -> int:
        for _ in range(rounds):
            ask(prompts)
        return rounds * len(prompts)

    return way


def threads(ask: Ask) -> Way:
    def caller(prompt: str, rounds: int) -> None:
        for _ in range(rounds):
            ask([prompt])

    def way(prompts: Sequence[str], rounds: int) -> int:
        with ThreadPoolExecutor(len(prompts)) as pool:
            for done in [pool.submit(caller, prompt, rounds) for prompt in prompts]:
                done.result()
        return rounds * len(prompts)

    return way


def measure(ways: Mapping[str, Way], prompts: Sequence[str], rounds: int, repeats: int) -> dict[str, list[float]]:
    """Answers per second of each way by both clocks, the medians of `repeats` in which the ways take turns."""
    clocks = (time.perf_counter, time.process_time)
    taken: dict[str, list[list[float]]] = {name: [[], []] for name in ways}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            starts = [clock() for clock in clocks]
            answers = way(prompts, rounds)
            # The first time warms up.
            if repeat:
                for rates, clock, start in zip(taken[name], clocks, starts, strict=True):
                    rates.append(answers / (clock() - start))
    return {name: [statistics.median(rates) for rates in both] for name, both in taken.items()}


if __name__ == "__main__":
    main()

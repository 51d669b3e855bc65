"""A stress test of `DynamicBatcher`: every request must get its own answer, and memory must be released.

    python benchmarks/soak.py [--quick]

64 threads send 20,000 requests with mixed parameters through a `DynamicBatcher` to the toy backend of the tests. One
in a hundred requests makes its whole call fail. Every answer is compared with the backend's answer to a direct call.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

import corelm
from corelm import hookimpl
from corelm.batching import DynamicBatcher, Limits
from corelm.errors import EngineError
from corelm.spec.records import GenerateRequest

#: A prompt that starts with this id makes its call fail.
POISON = 255
FAILING = 0.01
PARAMETERS = (
    {"max_new_tokens": 4},
    {"max_new_tokens": 4, "temperature": 0.7},
    {"max_new_tokens": 7, "top_k": 5},
    {"max_new_tokens": 3, "temperature": 0.0},
    {"max_new_tokens": 4, "num_samples": 2},
    {"max_new_tokens": 6, "stop": "a"},
)


@dataclass(frozen=True)
class Request:
    prompts: list[list[int]]
    sampling: dict[str, Any]

    @property
    def poisoned(self) -> bool:
        return self.prompts[0][0] == POISON


class Poison:
    """A hook wrapper that makes calls fail; the backend for direct calls does not have it."""

    def __init__(self) -> None:
        self.calls = self.rows = 0

    @hookimpl(wrapper=True)
    def generate(self, request: GenerateRequest) -> Any:
        self.calls += 1
        self.rows += len(request.prompts)
        starts = request.prompts.offsets[:-1]
        if bool((request.prompts.values[starts] == POISON).any()):
            raise ValueError("poisoned")
        return (yield)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="send 2,000 requests only")
    parser.add_argument("--requests", type=int, default=None)
    parser.add_argument("--threads", type=int, default=64)
    parser.add_argument(
        "--switch-interval",
        type=float,
        default=None,
        help="interpreter switch interval in seconds; 1e-6 preempts constantly",
    )
    given = parser.parse_args()
    count = given.requests or (2_000 if given.quick else 20_000)
    if given.switch_interval:
        sys.setswitchinterval(given.switch_interval)
    torch.set_num_threads(1)
    requests = make(count)
    with corelm.get_backend("toy") as direct:
        expected = [
            None if each.poisoned else direct.generate(each.prompts, each.sampling).ids.tolist()
            for each in tqdm(requests, desc="directly")
        ]
    poison = Poison()
    outcomes: Counter[str] = Counter()
    memory = [resident()]
    threads_before = threading.active_count()
    lock = threading.Lock()
    with (
        DynamicBatcher(corelm.get_backend("toy", wrappers=[poison]), Limits(max_batch_size=32)) as batcher,
        tqdm(total=count, desc="together") as bar,
        ThreadPoolExecutor(given.threads) as pool,
    ):

        def ask(number: int) -> None:
            outcome = compare(batcher, requests[number], expected[number])
            with lock:
                outcomes[outcome] += 1
                bar.update()
                if sum(outcomes.values()) % (count // 10) == 0:
                    gc.collect()
                    memory.append(resident())

        start = time.perf_counter()
        for done in [pool.submit(ask, number) for number in range(count)]:
            done.result()
        took = time.perf_counter() - start
        state = batcher.state()
    print(f"{count} requests from {given.threads} threads in {took:.1f} s: {count / took:.0f} a second")
    print(f"calls to the engine: {poison.calls}, {poison.rows / poison.calls:.1f} rows each")
    print("outcomes: " + ", ".join(f"{outcomes[name]} {name}" for name in sorted(outcomes)))
    print("memory, MiB, every tenth: " + " ".join(f"{size:.0f}" for size in memory))
    threads = threading.active_count() - threads_before
    print(f"left: {state.queued} queued, {state.in_flight} in flight, {threads} threads")
    failing = sum(each.poisoned for each in requests)
    lost = outcomes != Counter({"answered as directly": count - failing, "failed alone": failing})
    left = state.queued or state.in_flight or threads
    print("requests were lost, mixed up or left over" if lost or left else "no request lost or mixed up")
    return bool(lost or left)


def make(count: int) -> list[Request]:
    rng = random.Random(0)
    requests = []
    for number in range(count):
        prompts = [[rng.randrange(1, 200) for _ in range(rng.randint(1, 12))] for _ in range(rng.randint(1, 3))]
        if rng.random() < FAILING:
            prompts[0][0] = POISON
        requests.append(Request(prompts, {**rng.choice(PARAMETERS), "seed": number}))
    return requests


def compare(batcher: DynamicBatcher, request: Request, expected: list[list[int]] | None) -> str:
    try:
        answers = batcher.generate(request.prompts, request.sampling).ids.tolist()
    except EngineError as error:
        return "failed alone" if request.poisoned and "poisoned" in str(error) else f"failed: {error}"
    if request.poisoned:
        return "answered, but should have failed"
    return "answered as directly" if answers == expected else "answered otherwise"


def resident() -> float:
    """Return the memory of this process in MiB, or its peak if the system does not report the current value."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    sys.exit(main())

"""Many callers with one prompt each, compared with one batch of all prompts.

The transformers backend answers every prompt with 32 tokens and their log-probs. Each caller sends several requests
in a row, as an agent does. Wall-clock time is measured, because waiting callers use no processor time.

    one batch       one caller, all prompts in one call
    callers         one thread per prompt, through a `DynamicBatcher` with its defaults
    callers, min    the same with min_batch_size as large as the number of callers; with 8 and 32 of them
    one by one      one caller, one prompt after another; with 8 prompts

`backend` reads and returns records of ids, `policy` TensorDicts of texts; `torchrl` is TransformersWrapper, with
batching=True for its callers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tensordict import TensorDict

import corelm
from benchmarks.measure import LONGER, LONGEST, Figure, Way, compare
from benchmarks.models import dialogues, random_model, tokenizer
from corelm import Backend, DynamicBatcher, LLMPolicy
from corelm.batching import Limits

NEW = 32
SAMPLING = {"max_new_tokens": NEW, "ignore_eos": True}
#: Goal: so many callers reach 90 % of the throughput of one batch.
GOAL = dict.fromkeys((16, 32, 64), 1 / 0.9)

#: With more callers than this TorchRL's wrapper is left out: they take 20 s for what one batch does in 4.
MOST_FOR_TORCHRL = 32

#: Answers prompts in one call.
Ask = Callable[[Sequence[str]], object]


def figures(quick: bool) -> Iterator[list[Figure]]:
    model = small()
    asked = [turn["content"] for chat in dialogues() for turn in chat if turn["role"] == "user"]
    rounds, repeats = (2, 1) if quick else (4, 15)
    with corelm.get_backend("transformers", model, tokenizer=tokenizer()) as backend:
        for count in (8,) if quick else (1, 8, 16, 32, 64):
            prompts = [asked[i % len(asked)] for i in range(count)]
            for name, alone, shared in kinds(backend, model, count):
                ways = {"one batch": one_batch(alone, prompts, rounds)}
                # To wait for all callers is tried with two counts only.
                some = shared if count in (8, 32) else {"callers": shared["callers"]}
                ways |= {way: threads(ask, prompts, rounds) for way, ask in some.items()}
                if count == 8 and name == "backend" and not quick:
                    ways["one by one"] = one_by_one(alone, prompts, rounds)
                yield compare(
                    f"{name}: {count} caller{'s' if count > 1 else ''}",
                    ways,
                    baseline="one batch",
                    repeats=repeats,
                    goals={"callers": GOAL[count]} if count in GOAL and name != "torchrl" else {},
                    clock=time.perf_counter,
                    longest=LONGER if count in GOAL else LONGEST,
                )


def small() -> Any:
    """Return a random model large enough that most of the time is spent in the engine."""
    ids = {"eos_token_id": tokenizer().eos_token_id, "pad_token_id": tokenizer().pad_token_id}
    model = random_model((len(tokenizer()), 384, 6), **ids)
    # TorchRL's wrapper cannot ignore EOS and does not pass `min_new_tokens` on.
    model.generation_config.update(eos_token_id=None, pad_token_id=tokenizer().pad_token_id)
    return model


def kinds(backend: Backend, model: Any, count: int) -> Iterator[tuple[str, Ask, dict[str, Ask]]]:
    """Yield each kind of request: its name, the way for one caller, and the ways for many callers."""
    batchers = {
        "callers": DynamicBatcher(backend),
        "callers, min": DynamicBatcher(backend, Limits(min_batch_size=count)),
    }
    try:
        yield "backend", by_record(backend), {way: by_record(each) for way, each in batchers.items()}
        yield "policy", by_policy(backend), {way: by_policy(each) for way, each in batchers.items()}
    finally:
        for each in batchers.values():
            each.cleanup()
    if count <= MOST_FOR_TORCHRL and (found := torchrl_ways(model)):
        yield "torchrl", found[0], {"callers": found[1]}


def by_record(backend: Backend) -> Ask:
    return lambda prompts: backend.generate(backend.tokenize(prompts).ids, SAMPLING)


def by_policy(backend: Backend) -> Ask:
    policy = LLMPolicy(backend, input_mode="text", sampling_params=SAMPLING, inplace=False)
    return lambda prompts: policy(TensorDict(text=list(prompts), batch_size=[len(prompts)]))


def torchrl_ways(model: Any) -> tuple[Ask, Ask] | None:
    """Return the ways for one caller and for many; None if TorchRL is not installed."""
    try:
        from torchrl.modules.llm import Text, TransformersWrapper
    except ImportError:
        return None

    def by_wrapper(**options: Any) -> Ask:
        wrapper = TransformersWrapper(
            model,
            tokenizer=tokenizer(),
            input_mode="text",
            return_log_probs=True,
            pad_output=False,
            generate_kwargs={"max_new_tokens": NEW, "do_sample": True},
            **options,
        )

        def ask(prompts: Sequence[str]) -> None:
            size = [len(prompts)]
            wrapper(TensorDict(text=Text(prompt=list(prompts), batch_size=size), batch_size=size))

        return ask

    return by_wrapper(), by_wrapper(batching=True)


def one_batch(ask: Ask, prompts: Sequence[str], rounds: int) -> Way:
    return lambda: [ask(prompts) for _ in range(rounds)]


def one_by_one(ask: Ask, prompts: Sequence[str], rounds: int) -> Way:
    return lambda: [ask([prompt]) for _ in range(rounds) for prompt in prompts]


def threads(ask: Ask, prompts: Sequence[str], rounds: int) -> Way:
    def caller(prompt: str) -> None:
        for _ in range(rounds):
            ask([prompt])

    def way() -> None:
        with ThreadPoolExecutor(len(prompts)) as pool:
            for done in [pool.submit(caller, prompt) for prompt in prompts]:
                done.result()

    return way

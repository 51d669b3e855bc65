"""What the host does around an engine: checks, records and containers, in Python.

The engine is the toy, whose own work is a table look-up for each token.

    five containers   Text, Tokens, Masks, LogProbs and ChatHistory of one row, and their TensorDict, made by hand from
                      ready tensors
    hook              `generate` of the toy, called directly with a ready request
    Backend.generate  the same through `Backend`; what it takes more than the hook is compared with the containers
    policy            the same from a conversation, to the containers

With a tiny model of transformers, the policy is also compared with TorchRL's wrapper of the same model.
`benchmarks.callers` shows what many callers cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tensordict import TensorDict

import corelm
from benchmarks.callers import torchrl_ways
from benchmarks.measure import Figure, Way, compare
from benchmarks.models import random_model, tokenizer
from corelm import Backend, ChatHistory, History, LLMPolicy, LogProbs, Masks, Text, Tokens

SAMPLING = {"max_new_tokens": 4, "ignore_eos": True}
CHAT = [{"role": "user", "content": "Who are you?"}]
#: Goals: the policy over the containers, and what `Backend.generate` takes more than the hook over the containers.
POLICY, BACKEND = 2.5, 1.0


def figures(quick: bool) -> Iterator[list[Figure]]:
    repeats = 11 if quick else 51
    with corelm.get_backend("toy") as backend:
        yield one_row(backend, repeats)
        yield many_rows(backend, 512, repeats // 5)
    ids = {"eos_token_id": tokenizer().eos_token_id, "pad_token_id": tokenizer().pad_token_id}
    model = random_model((len(tokenizer()), 128, 2), **ids)
    model.generation_config.update(eos_token_id=None, pad_token_id=tokenizer().pad_token_id)
    if wrapper := torchrl_ways(model):
        with corelm.get_backend("transformers", model, tokenizer=tokenizer()) as backend:
            policy = asked(LLMPolicy(backend, input_mode="text", sampling_params=SAMPLING, inplace=False))
            ways = {"torchrl": lambda: wrapper[0](["Who are you?"]), "policy": lambda: policy(text=["Who are you?"])}
            yield compare("one text, 2 layers of 128", ways, baseline="torchrl", repeats=repeats)


def one_row(backend: Backend, repeats: int) -> list[Figure]:
    policy = asked(LLMPolicy(backend, sampling_params=SAMPLING, inplace=False))
    made = policy(history=History.from_chats([CHAT]))
    prompts = [made["tokens"].prompt[0].tolist()]
    hook = hook_of(backend, prompts)
    ways: dict[str, Way] = {
        "five containers": by_hand(made),
        "hook": hook,
        "Backend.generate": lambda: backend.generate(prompts, SAMPLING),
        "policy": lambda: policy(history=History.from_chats([CHAT])),
    }
    work = "one row of four tokens"
    found = compare(work, ways, baseline="five containers", repeats=repeats, goals={"policy": POLICY})
    seconds = {figure.way: figure.seconds or 0.0 for figure in found}
    more = seconds["Backend.generate"] - seconds["hook"]
    return [
        *found,
        Figure(
            work=work,
            way="Backend.generate without the hook",
            seconds=more,
            baseline="five containers",
            ratio=more / seconds["five containers"],
            goal=BACKEND,
        ),
    ]


def many_rows(backend: Backend, count: int, repeats: int) -> list[Figure]:
    policy = asked(LLMPolicy(backend, sampling_params=SAMPLING, inplace=False))
    history = History.from_chats([CHAT] * count)
    prompts = policy(history=history)["tokens"].prompt
    ways: dict[str, Way] = {
        "hook": hook_of(backend, prompts),
        "Backend.generate": lambda: backend.generate(prompts, SAMPLING),
        "policy": lambda: policy(history=history),
    }
    return compare(f"{count} rows of four tokens", ways, baseline="hook", repeats=repeats, rows=count)


def asked(policy: LLMPolicy) -> Callable[..., Any]:
    return lambda **given: policy(TensorDict(given, batch_size=[len(next(iter(given.values())))]))


def hook_of(backend: Backend, prompts: Any) -> Way:
    """Return a call of the toy's own hook with the request that `Backend.generate` makes."""
    requests = []

    class Watch:
        @corelm.hookimpl(wrapper=True)
        def generate(self, request: Any) -> Any:
            requests.append(request)
            return (yield)

    with corelm.get_backend("toy", wrappers=[Watch()]) as watched:
        watched.generate(prompts, SAMPLING)
    plugin, request = backend.engine.plugin, requests[0]
    return lambda: plugin.generate(request)


def by_hand(made: TensorDict) -> Way:
    """Return what makes the containers in `made`, of one row, again from their tensors, texts and conversations."""
    text, tokens, masks, logprobs, history = (
        made[name] for name in ("text", "tokens", "masks", "log_probs", "history")
    )
    parts = ("prompt", "response", "full")
    ids = {name: list(getattr(tokens, name)) for name in parts}
    values: dict[str, Any] = {name: list(getattr(logprobs, name)) for name in (*parts, "scored_mask")}
    names = ("all_attention_mask", "all_assistant_mask", "all_response_mask")
    shown = {name: list(getattr(masks, name)) for name in names}
    texts = {name: list(getattr(text, name)) for name in parts}
    chats = {name: getattr(history, name) for name in parts}

    def make() -> TensorDict:
        return TensorDict(
            {
                "text": Text(**texts, batch_size=[1]),
                "tokens": Tokens.from_rows(**ids),
                "masks": Masks.from_rows(**shown),
                "log_probs": LogProbs.from_rows(**values),
                "history": ChatHistory(**chats, batch_size=[1]),
            },
            batch_size=[1],
        )

    return make

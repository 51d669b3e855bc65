"""The cost of generation, including log-probs.

    raw generate    ``model.generate`` of transformers, without log-probs
    backend         ``backend.generate`` of the transformers backend, from ids to records with raw log-probs
    policy, tokens  `LLMPolicy` from ids to containers with log-probs
    policy, text    `LLMPolicy` from texts to containers with texts and log-probs
    torchrl         TorchRL's `TransformersWrapper` from ids to log-probs, if torchrl is installed

With top-p 0.95 and top-k 50, these are compared with ``backend.generate`` without them:

    support         ``return_support=True``: the ids that each token was drawn from
    top 64          ``top_logprobs=64``: the most probable ids, and the mass of the others

All ways continue the same prompts of 32 tokens by 64 tokens, or by 16 if there are more than 8 prompts; no answer ends
earlier. The models are those of `scoring`: with V=151,936 most of the time is spent in the head and the sampler, with
V=32,000 in the body.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.measure import Figure, Way, compare, peaks
from benchmarks.models import BODY_HEAVY, HEAD_HEAVY, Shape, named, random_model, tokenizer
from benchmarks.work import decoding_work
from corelm import Backend, LLMPolicy, get_backend

PROMPT = 32
COUNTS = (1, 8, 32, 128)
#: With more prompts than this, answers are shorter; otherwise a turn would take minutes.
MOST_FOR_LONG = 8
#: With more prompts than this TorchRL's wrapper is left out, because it keeps all logits.
MOST_FOR_TORCHRL = 32


def figures(quick: bool) -> Iterator[list[Figure]]:
    new = 16 if quick else 64
    for shape in (BODY_HEAVY, HEAD_HEAVY):
        model = random_model(shape)
        # Defaults of `model.generate`: sample from the full distribution, never end early.
        model.generation_config.update(top_k=0, eos_token_id=None, pad_token_id=0)
        with get_backend("transformers", model, tokenizer=tokenizer()) as backend:
            if quick:
                yield sampling(backend, model, shape, 8, new, 1, all_ways=shape == BODY_HEAVY)
                yield greedy(backend, model, shape, 1, new, 1)
                yield more_ids(backend, shape, 8, new, 1)
                continue
            yield more_ids(backend, shape, 8, new, 7)
            for prompts in COUNTS:
                few = new if prompts <= MOST_FOR_LONG else new // 4
                yield sampling(backend, model, shape, prompts, few, 7)
                if prompts <= MOST_FOR_TORCHRL:
                    yield greedy(backend, model, shape, prompts, few, 7)
    for shape in (HEAD_HEAVY,) if quick else (HEAD_HEAVY, BODY_HEAVY):
        ways = ["backend"] if quick else ["raw generate", "backend"]
        work = f"memory of {new} sampled tokens for 8 prompts, {named(shape)}"
        yield peaks(work, prepare, ways, (shape, 8, new), {"backend": 60})


# Work -----------------------------------------------------------------------------------------------------------------


def sampling(
    backend: Backend, model: Any, shape: Shape, prompts: int, new: int, repeats: int, *, all_ways: bool = True
) -> list[Figure]:
    texts = words(prompts)
    ids = encoded(texts)
    ways: dict[str, Way] = {
        "raw generate": functools.partial(raw_generate, model, ids, new, do_sample=True),
        "backend": functools.partial(backend.generate, ids, asked(new)),
    }
    if all_ways:
        ways |= policies(backend, texts, ids, new)
        if prompts <= MOST_FOR_TORCHRL:
            ways |= torchrl(model, ids, new)
    most = 1.05 if prompts == 1 else 0.85
    ours = [way for way in ways if way.startswith(("backend", "policy"))] if prompts <= 32 else []
    work = f"{new} sampled tokens for {counted(prompts)}, {named(shape)}"
    return compare(work, ways, baseline="raw generate", repeats=repeats, goals=dict.fromkeys(ours, most))


def greedy(backend: Backend, model: Any, shape: Shape, prompts: int, new: int, repeats: int) -> list[Figure]:
    ids = encoded(words(prompts))
    ways: dict[str, Way] = {
        "raw generate": functools.partial(raw_generate, model, ids, new, do_sample=False),
        "backend": functools.partial(backend.generate, ids, {**asked(new), "temperature": 0}),
    }
    needed = decoding_work(model, prompts, PROMPT, new)
    return compare(
        f"{new} greedy tokens for {counted(prompts)}, {named(shape)}",
        ways,
        baseline="raw generate",
        repeats=repeats,
        goals={"backend": 1.05},
        flops=needed.flops,
        bytes=needed.bytes,
        dtype=needed.dtype,
        goal_shares={"backend": 0.8} if prompts <= MOST_FOR_LONG else {},
    )


def more_ids(backend: Backend, shape: Shape, prompts: int, new: int, repeats: int) -> list[Figure]:
    ask = functools.partial(
        backend.generate, encoded(words(prompts)), {**asked(new), "top_p": 0.95, "top_k": 50}, logprobs="processed"
    )
    ways: dict[str, Way] = {
        "backend": ask,
        "support": functools.partial(ask, return_support=True),
        "top 64": functools.partial(ask, top_logprobs=64),
    }
    work = f"{new} tokens sampled with top-p and top-k for {counted(prompts)}, {named(shape)}"
    return compare(work, ways, baseline="backend", repeats=repeats)


# Ways -----------------------------------------------------------------------------------------------------------------


def raw_generate(model: Any, ids: torch.Tensor, new: int, *, do_sample: bool) -> None:
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=do_sample, max_new_tokens=new)
    assert out.shape == (len(ids), PROMPT + new)


def asked(new: int) -> dict[str, Any]:
    return {"max_new_tokens": new, "ignore_eos": True}


def policies(backend: Backend, texts: list[str], ids: torch.Tensor, new: int) -> dict[str, Way]:
    size = [len(texts)]
    by_tokens, by_text = (
        LLMPolicy(backend, input_mode=mode, sampling_params=asked(new), inplace=False) for mode in ("tokens", "text")
    )
    return {
        "policy, tokens": lambda: by_tokens(TensorDict(tokens=ids, batch_size=size)),
        "policy, text": lambda: by_text(TensorDict(text=texts, batch_size=size)),
    }


def torchrl(model: Any, ids: torch.Tensor, new: int) -> dict[str, Way]:
    try:
        from torchrl.modules.llm import Tokens, TransformersWrapper
    except ImportError:
        return {}
    wrapper = TransformersWrapper(
        model,
        tokenizer=tokenizer(),
        input_mode="tokens",
        generate=True,
        return_log_probs=True,
        pad_output=False,
        generate_kwargs={"max_new_tokens": new, "do_sample": True},
    )
    size = [len(ids)]

    def ask() -> Any:
        return wrapper(TensorDict(tokens=Tokens(prompt=ids, batch_size=size), batch_size=size))

    # The wrapper drops arguments that it does not know, such as min_new_tokens, so check the lengths.
    assert [len(row) for row in ask()["tokens"].get("response", as_list=True)] == [new] * len(ids)
    return {"torchrl": ask}


def prepare(way: str, shape: Shape, prompts: int, new: int) -> Way:
    """Prepare a way in a new process; a first call does the lazy imports, which are not counted."""
    model, ids = random_model(shape), encoded(words(prompts))
    model.generation_config.update(top_k=0, eos_token_id=None, pad_token_id=0)
    if way == "raw generate":
        raw_generate(model, ids[:1], 1, do_sample=True)
        return functools.partial(raw_generate, model, ids, new, do_sample=True)
    backend = get_backend("transformers", model, tokenizer=tokenizer())
    backend.generate(ids[:1], asked(1))
    return functools.partial(backend.generate, ids, asked(new))


# Inputs ---------------------------------------------------------------------------------------------------------------


def words(prompts: int) -> list[str]:
    """Return texts of 32 tokens each, made of words that are single tokens."""
    known = sorted(word for word in tokenizer().get_vocab() if word.startswith("Ġ") and word[1:].isalpha())
    picked = torch.randint(len(known), (prompts, PROMPT), generator=torch.Generator().manual_seed(0))
    return ["".join(known[word] for word in row).replace("Ġ", " ") for row in picked.tolist()]


def encoded(texts: list[str]) -> torch.Tensor:
    """Return int64[prompts, 32]: the ids of the texts."""
    ids = torch.tensor(tokenizer()(texts, add_special_tokens=False)["input_ids"])
    assert ids.shape == (len(texts), PROMPT)
    return ids


def counted(prompts: int) -> str:
    return "one prompt" if prompts == 1 else f"{prompts} prompts"

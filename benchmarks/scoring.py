"""The cost of log-probabilities of given tokens.

    backend         ``backend.score_logprobs`` of the transformers backend
    log_softmax     the model's plain forward on padded rows, `log_softmax` over the vocabulary, `gather`
    head products   only the matrix products of the head for the scored tokens, in tiles
    torchrl         a scoring TorchRL `TransformersWrapper`, if torchrl is installed

In bfloat16 the backend is compared with itself in float32, and its errors with those of the plain forward in bfloat16.

The models are random. V=151,936 has a small body, two layers of 256, so that most of the time is spent in the head;
V=32,000 has six layers of 512. Ragged rows have slightly more than half as many tokens as padded ones.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

import corelm
from benchmarks.measure import LONGER, LONGEST, Figure, Way, compare, peaks, table
from benchmarks.models import BODY_HEAVY, HEAD_HEAVY, Shape, named, random_model, tokenizer
from benchmarks.work import Work, scoring_work
from corelm import Backend, Ragged, TokenSets

#: Log-probs in bfloat16 may be so many times as far from float64 as those of the plain forward in bfloat16.
MOST_ERROR = 1.1


def figures(quick: bool) -> Iterator[list[Figure]]:
    repeats = 2 if quick else 9
    rows, longest = (2, 160) if quick else (6, 512)
    for shape, goal in ((HEAD_HEAVY, 0.35), (BODY_HEAVY, 0.45)):
        # Goals apply to larger batches only: with few rows the fixed cost of a call dominates.
        yield against_log_softmax(shape, ragged(shape, rows, longest), repeats, None if quick else goal)
    for shape in (HEAD_HEAVY, BODY_HEAVY):
        yield in_bfloat16(shape, ragged(shape, rows, longest), repeats, None if quick else 1 / 2.5)
        yield errors_of_bfloat16(shape, ragged(shape, rows, longest))
    yield with_gradients(ragged(HEAD_HEAVY, rows, longest), 1 if quick else repeats, None if quick else 0.55)
    yield of_one_prompt(BODY_HEAVY, repeats, 1 / 2.2, *((128, 32) if quick else (256, 64)))
    yield of_several_ids(ragged(HEAD_HEAVY, rows, longest), repeats, not quick)
    if (found := against_torchrl(ragged(BODY_HEAVY, rows, longest), repeats)) is not None:
        yield found
    yield from memory(quick)
    yield kept_under_autocast(ragged(HEAD_HEAVY, rows, longest))
    if not quick:
        yield against_head_products(ragged(HEAD_HEAVY, rows, longest), repeats)
        yield of_one_prompt(HEAD_HEAVY, repeats, None, 256, 64)
        yield growth(repeats)


# Work -----------------------------------------------------------------------------------------------------------------


def against_log_softmax(shape: Shape, rows: Ragged, repeats: int, goal: float | None) -> list[Figure]:
    model = random_model(shape)
    backend = opened(model)
    ways = {
        "log_softmax": lambda: log_softmax(model, rows),
        "backend": lambda: backend.score_logprobs(rows),
    }
    needed = work_of(model, rows)
    return compare(
        f"scoring {described(rows)}, {named(shape)}",
        ways,
        baseline="log_softmax",
        repeats=repeats,
        goals={} if goal is None else {"backend": goal},
        longest=LONGEST if goal is None else LONGER,
        flops=needed.flops,
        bytes=needed.bytes,
        dtype=needed.dtype,
        goal_shares={} if goal is None else {"backend": 0.85},
    )


def in_bfloat16(shape: Shape, rows: Ragged, repeats: int, goal: float | None) -> list[Figure]:
    models = {"float32": random_model(shape), "bfloat16": random_model(shape).to(torch.bfloat16)}
    backends = {way: opened(model) for way, model in models.items()}
    needed = {way: work_of(model, rows) for way, model in models.items()}
    return compare(
        f"scoring in bfloat16, {described(rows)}, {named(shape)}",
        {way: functools.partial(backend.score_logprobs, rows) for way, backend in backends.items()},
        baseline="float32",
        repeats=repeats,
        goals={} if goal is None else {"bfloat16": goal},
        flops=needed["float32"].flops,
        bytes={way: each.bytes for way, each in needed.items()},
        dtype={way: each.dtype for way, each in needed.items()},
    )


def errors_of_bfloat16(shape: Shape, rows: Ragged) -> list[Figure]:
    """Compare log-probs in bfloat16 with those of the same weights in float64.

    Raises:
        AssertionError: errors of the backend are larger than those of the plain forward in bfloat16.
    """
    model = random_model(shape).to(torch.bfloat16)
    exact_model = copy.deepcopy(model).double()
    # One row at a time: logits of all rows in float64 take gigabytes.
    exact, plain = (
        torch.cat([log_softmax(each, Ragged.from_list([ids])) for ids in rows.split()]) for each in (exact_model, model)
    )
    scores = opened(model).score_logprobs(rows)
    ours = scores.logprobs.values[scores.scored.values]
    errors = {"log_softmax": (plain - exact).abs(), "backend": (ours - exact).abs()}
    work = f"error of log-probs in bfloat16, {described(rows)}, {named(shape)}"
    figures = compare_errors(work, errors, "log_softmax", {"backend": MOST_ERROR})
    assert all(figure.met is not False for figure in figures), table(figures)
    return figures


def compare_errors(work: str, errors: Mapping[str, Tensor], baseline: str, goals: Mapping[str, float]) -> list[Figure]:
    """Compare the largest and the mean of the absolute errors of each way with those of `baseline`."""
    figures = []
    for name, reduce in (("largest", Tensor.max), ("mean", Tensor.mean)):
        found = {way: float(reduce(error)) for way, error in errors.items()}
        for way, error in found.items():
            ratio = error / found[baseline]
            figures.append(
                Figure(
                    work=f"{name} {work}",
                    way=way,
                    baseline=baseline,
                    ratio=ratio,
                    spread=(ratio, ratio),
                    error=error,
                    goal=goals.get(way),
                )
            )
    return figures


def against_head_products(rows: Ragged, repeats: int) -> list[Figure]:
    model = random_model(HEAD_HEAVY)
    backend = opened(model)
    ways = {"head products": head_products(model, rows), "backend": lambda: backend.score_logprobs(rows)}
    work = f"scoring {described(rows)}, {named(HEAD_HEAVY)}, against its products"
    return compare(work, ways, baseline="head products", repeats=repeats, goals={"backend": 1.25})


def with_gradients(rows: Ragged, repeats: int, goal: float | None) -> list[Figure]:
    ways = {way: prepare_gradients(way, rows) for way in ("log_softmax", "backend")}
    work = f"log-probs and their gradients, {described(rows)}, {named(HEAD_HEAVY)}"
    goals = {} if goal is None else {"backend": goal}
    return compare(work, ways, baseline="log_softmax", repeats=repeats, goals=goals)


def of_one_prompt(shape: Shape, repeats: int, goal: float | None, prompt: int, answer: int) -> list[Figure]:
    """Score eight answers to one prompt; "alone" scores eight answers to eight prompts, which share nothing."""
    backend = opened(random_model(shape))
    alone = torch.randint(shape[0], (8, prompt + answer), generator=torch.Generator().manual_seed(0))
    shared = alone.clone()
    shared[:, :prompt] = alone[0, :prompt]
    start = [prompt] * 8
    ways = {
        "eight prompts": lambda: backend.score_logprobs(list(alone), score_from=start),
        "one prompt": lambda: backend.score_logprobs(list(shared), score_from=start),
        "one prompt, all tokens scored": lambda: backend.score_logprobs(list(shared)),
    }
    work = f"scoring 8 answers of {answer} tokens to prompts of {prompt}, {named(shape)}"
    goals = {} if goal is None else {"one prompt": goal}
    return compare(work, ways, baseline="eight prompts", repeats=repeats, goals=goals)


def of_several_ids(rows: Ragged, repeats: int, with_goals: bool) -> list[Figure]:
    """Score over sets of ids, and return the log-probs of several ids at each position."""
    backend = opened(random_model(HEAD_HEAVY))
    generator = torch.Generator().manual_seed(1)
    total, vocab = len(rows.values), HEAD_HEAVY[0]
    # The given id and ids after it, around the vocabulary, a thousand apart or fewer so that none comes twice.
    steps = torch.randint(1, vocab // 64, (total, 63), generator=generator).cumsum(1)
    ids = (rows.values[:, None] + torch.cat([torch.zeros(total, 1, dtype=torch.int64), steps], 1)) % vocab
    counts = torch.full((total,), 20)
    support = TokenSets(Ragged(ids[:, :20].sort(1).values.flatten(), counts), rows.lengths)
    ways = {
        "without": lambda: backend.score_logprobs(rows),
        "over sets of 20": lambda: backend.score_logprobs(rows, support=support),
        "with the 64 most probable ids": lambda: backend.score_logprobs(rows, top_k=64),
        "with 64 given ids": lambda: backend.score_logprobs(rows, top_ids=rows.with_values(ids)),
    }
    for way in ways.values():
        # The first call of each compares it with the model's own forward.
        way()
    goals = {"over sets of 20": 1.1, "with the 64 most probable ids": 1.3} if with_goals else {}
    work = f"scoring of several ids, {described(rows)}, {named(HEAD_HEAVY)}"
    return compare(work, ways, baseline="without", repeats=repeats, goals=goals, longest=LONGER)


def growth(repeats: int) -> list[Figure]:
    """Double the number of rows, the length and the vocabulary, one at a time."""
    sizes = {
        "4 rows of 128, V=32,768": (4, 128, 32_768),
        "8 rows": (8, 128, 32_768),
        "rows of 256": (4, 256, 32_768),
        "V=65,536": (4, 128, 65_536),
    }
    ways: dict[str, Way] = {}
    for name, (rows, length, vocab) in sizes.items():
        backend = opened(random_model((vocab, 256, 2)))
        ids = torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(0))
        ways[name] = functools.partial(backend.score_logprobs, list(ids))
    return compare("scoring, growth", ways, baseline=next(iter(sizes)), repeats=repeats)


def memory(quick: bool) -> Iterator[list[Figure]]:
    length = 128 if quick else 512
    for rows in (16,) if quick else (8, 16):
        work = f"memory of scoring {rows} rows of {length}, {named(HEAD_HEAVY)}"
        yield peaks(work, prepare_scoring, ["backend"], (rows, length), {"backend": 100})
    if not quick:
        batch = ragged(HEAD_HEAVY, 6, 512)
        work = f"memory of log-probs and their gradients, {described(batch)}, {named(HEAD_HEAVY)}"
        plain = peaks(work, prepare_gradients, ["log_softmax"], (batch,), {})
        yield plain + peaks(work, prepare_gradients, ["backend"], (batch,), {"backend": 0.45 * (plain[0].mib or 0)})


def kept_under_autocast(rows: Ragged) -> list[Figure]:
    """Count the bytes that log-probs keep for their gradients, with bfloat16 autocast and without.

    The body keeps its states in two dtypes under autocast. Logits that were kept would make the ratio a multiple.
    """
    backend, kept = opened(random_model(HEAD_HEAVY)), []
    for enabled in (False, True):
        storages: dict[int, int] = {}

        def keep(tensor: Tensor, storages: dict[int, int] = storages) -> Tensor:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with torch.autocast("cpu", torch.bfloat16, enabled), hooks:
            held = backend.score_logprobs(rows, grad=True)
        del held
        kept.append(sum(storages.values()))
    work = f"bytes kept for gradients, {described(rows)}, {named(HEAD_HEAVY)}"
    way, ratio = "backend under bfloat16 autocast", kept[1] / kept[0]
    figure = Figure(
        work=work, way=way, baseline="backend", ratio=ratio, spread=(ratio, ratio), mib=kept[1] / 2**20, goal=1.5
    )
    return [figure]


def against_torchrl(rows: Ragged, repeats: int) -> list[Figure] | None:
    try:
        from tensordict import TensorDict, lazy_stack
        from torchrl.modules.llm import Tokens, TransformersWrapper
    except ImportError:
        return None
    model = random_model(BODY_HEAVY)
    backend = opened(model)
    wrapper = TransformersWrapper(
        model, tokenizer=tokenizer(), input_mode="tokens", generate=False, return_log_probs=True, pad_output=False
    )

    def theirs() -> Any:
        # Copy the input, because the output is written into it.
        parts = [TensorDict(tokens=Tokens(full=ids)) for ids in rows.split()]
        with torch.no_grad():
            return wrapper(lazy_stack(parts))

    ways = {
        "torchrl": theirs,
        "backend": lambda: backend.score_logprobs(rows),
        "log_softmax": lambda: log_softmax(model, rows),
    }
    work = f"scoring {described(rows)}, {named(BODY_HEAVY)}, against TorchRL"
    return compare(work, ways, baseline="torchrl", repeats=repeats)


# Ways -----------------------------------------------------------------------------------------------------------------


def prepare_scoring(way: str, rows: int, length: int) -> Way:
    backend = opened(random_model(HEAD_HEAVY))
    ids = torch.randint(HEAD_HEAVY[0], (rows, length), generator=torch.Generator().manual_seed(0))
    return lambda: backend.score_logprobs(list(ids))


def prepare_gradients(way: str, rows: Ragged) -> Way:
    model = random_model(HEAD_HEAVY)
    backend = opened(model)

    def run() -> None:
        model.zero_grad()
        if way == "backend":
            backend.score_logprobs(rows, grad=True).logprobs.values.sum().backward()
        else:
            log_softmax(model, rows, grad=True).sum().backward()

    return run


def log_softmax(model: Any, rows: Ragged, *, grad: bool = False) -> Tensor:
    """Return log-probs of all tokens but the first of each row, row after row: float32, float64 of a float64 model."""
    ids, mask = rows.to_padded(0), rows.mask()
    with torch.set_grad_enabled(grad):
        logits = model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
        table = logits[:, :-1].log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        return table.gather(-1, ids[:, 1:, None])[..., 0][mask[:, 1:]]


def head_products(model: Any, rows: Ragged) -> Way:
    weight = model.get_output_embeddings().weight.detach()
    hidden = torch.randn(len(rows.values) - len(rows), weight.shape[1])
    buffer = torch.empty(512 * 4096)

    def run() -> None:
        for some in hidden.split(512):
            for part in weight.split(4096):
                torch.mm(some, part.T, out=buffer[: len(some) * len(part)].view(len(some), len(part)))

    return run


# Inputs ---------------------------------------------------------------------------------------------------------------


def ragged(shape: Shape, rows: int, longest: int) -> Ragged:
    """Return random rows with lengths from `longest` / 12 to `longest`."""
    lengths = torch.linspace(longest / 12, longest, rows).long()
    ids = torch.randint(shape[0], (int(lengths.sum()),), generator=torch.Generator().manual_seed(0))
    return Ragged(ids, lengths)


def work_of(model: Any, rows: Ragged) -> Work:
    """Count the work of scoring all tokens but the first of each row."""
    return scoring_work(model, rows.lengths.tolist(), len(rows.values) - len(rows))


def opened(model: Any) -> Backend:
    backend = corelm.get_backend("transformers", model, tokenizer=tokenizer())
    # The first call determines how the model can be run.
    backend.score_logprobs([[1, 2, 3]])
    return backend


def described(rows: Ragged) -> str:
    share = int(rows.lengths.sum()) / (len(rows) * int(rows.lengths.max()))
    return f"{len(rows)} rows up to {int(rows.lengths.max())} ({share:.0%} of the padded)"

"""What the engine may do to the reference's logits before it takes their softmax."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from corelm.tensors.log_probs import log_probs
from corelm_compare.cases import Case, Prediction
from corelm_compare.oracles import chosen

#: Positions that a constant is fitted on.
_FITTED_ON = 256
#: The constants by which logits may be multiplied.
_SCALES = torch.logspace(-1.5, 1.5, 61)
_TOP_PS = tuple(step / 100 for step in range(5, 100))


def scaled(case: Case) -> Iterator[Prediction]:
    """Logits times a constant: a temperature, or a scale that was left out."""
    if case.tables is None:
        return
    table, ids, numbers = flat(case)
    if len(numbers) < 4:
        return

    def left(scale: float) -> float:
        return _distance(log_probs(table * scale), ids, numbers)

    scale = _least(left)
    if abs(scale - 1.0) < 1e-3:
        return
    sampling = case.sampling
    id, advice = (
        "missing-scale",
        "the engine leaves a scale of the logits out, or applies one (logits_scaling, logit_scale, a temperature in "
        "its scores): compare its configuration with the checkpoint's",
    )
    if sampling is not None and sampling.temperature not in (0.0, 1.0):
        id, advice = (
            "temperature",
            "the engine returns log-probs after the temperature where those of the model are expected: ask it for the "
            'other ones (vLLM: logprobs_mode="raw_logprobs"; SGLang: SGLANG_RETURN_ORIGINAL_LOGPROB=1)',
        )
    yield Prediction(
        id=id,
        changed=f"all logits times {scale:.4g}",
        numbers=chosen([each * scale for each in case.tables], case.rows),
        advice=advice,
        note=f"a temperature of {1 / scale:.4g}",
        figures={"scale": scale},
        fitted=1,
    )


def padded(case: Case) -> Iterator[Prediction]:
    """A vocabulary that is longer in the softmax: padding, each with a logit of 0 or so."""
    # The reference's logits must be the model's own: a server may return them up to a constant.
    if case.tables is None or case.oracle is None:
        return
    table, ids, numbers = flat(case)
    own = table.gather(-1, ids[:, None])[:, 0].double()
    total = table.double().logsumexp(-1)
    extra = (own - numbers.double()).exp() - total.exp()
    usable = extra[torch.isfinite(extra)]
    if len(usable) < 4:
        return
    # A token whose total is small says most exactly what was added to it.
    steady = usable[total[torch.isfinite(extra)].argsort()[: max(4, len(usable) // 4)]]
    mass = float(steady.median())
    if not mass > 1e-6:
        return
    longer = [torch.cat([each, torch.full((len(each), 1), math.log(mass))], -1) for each in case.tables]
    yield Prediction(
        id="vocab-padding",
        changed=f"ids beyond the vocabulary that add {mass:.4g} to the sum of the softmax",
        numbers=chosen(longer, case.rows),
        advice="the engine counts padded rows of the output layer in its softmax: cut the logits at the vocabulary's "
        "size, or use a checkpoint that is not padded",
        note=f"{mass:.4g} ids with a logit of 0",
        figures={"mass": mass},
        fitted=1,
    )


def renormalized(case: Case) -> Iterator[Prediction]:
    """Numbers over the most probable ids alone."""
    if case.tables is None:
        return
    table, ids, numbers = flat(case)
    ranked, order = log_probs(table).sort(-1, descending=True)
    mass = ranked.logcumsumexp(-1)
    rank = (order == ids[:, None]).int().argmax(-1)
    own = ranked.gather(-1, rank[:, None])[:, 0]
    finite = torch.isfinite(numbers)
    off = (own[:, None] - mass - numbers[:, None]).abs()
    inside = (rank[:, None] < torch.arange(1, table.shape[-1] + 1)) & finite[:, None]
    # With k ids left, tokens of a higher rank have no number.
    counts = inside.sum(0)
    spread = torch.where(inside, off, 0.0).sum(0) / counts.clamp_min(1)
    spread[counts < max(2, int(0.3 * int(finite.sum())))] = math.inf
    k = int(spread[:-1].argmin()) + 1
    yield _kept(case, f"only the {k} most probable ids in the softmax", {"top_k": k}, lambda each: _top_k(each, k))
    p = _TOP_PS[int(_distances_of_top_p(ranked, mass, own, numbers).argmin())]
    yield _kept(case, f"only the ids of top_p={p:g} in the softmax", {"top_p": p}, lambda each: _top_p(each, p))


def masked(case: Case) -> Iterator[Prediction]:
    """Ids that cannot follow: EOS, or all special ones."""
    if case.tables is None:
        return
    for ids, words in ((case.eos_ids, "EOS"), (tuple({*case.eos_ids, *case.special_ids}), "the special ids")):
        if not ids:
            continue

        def without(table: Tensor, ids: Sequence[int] = ids) -> Tensor:
            return table.index_fill(-1, torch.tensor(list(ids)), -math.inf)

        yield Prediction(
            id="eos-suppressed",
            changed=f"{words} impossible ({', '.join(map(str, sorted(ids)))})",
            numbers=chosen([without(each) for each in case.tables], case.rows),
            advice="the engine forbids EOS where log-probs are taken: look for min_tokens, ignore_eos, bad_words or "
            "logit_bias in its defaults",
        )


def penalized(case: Case) -> Iterator[Prediction]:
    """Penalties, as they were asked for in sampling."""
    sampling = case.sampling
    if case.tables is None or sampling is None or not sampling.penalties:
        return
    numbers = []
    for table, row, start in zip(case.tables, case.rows, case.prompt_lengths, strict=True):
        changed = table.clone()
        for t in range(start - 1, len(table)):
            changed[t] = _penalized(table[t], row[: t + 1], row[start : t + 1], sampling)
        numbers.append(chosen([changed / (sampling.temperature or 1.0)], [row])[0])
    yield Prediction(
        id="penalties",
        changed="the penalties that were asked for in sampling",
        numbers=numbers,
        advice="the engine returns log-probs after penalties where those of the model are expected: ask it for raw "
        "ones, or leave the penalties out",
    )


def _penalized(logits: Tensor, seen: Sequence[int], answer: Sequence[int], sampling: object) -> Tensor:
    repetition = float(getattr(sampling, "repetition_penalty", 1.0))
    out = logits.clone()
    if repetition != 1.0:
        ids = torch.tensor(sorted({*seen}))
        out[ids] = torch.where(out[ids] > 0, out[ids] / repetition, out[ids] * repetition)
    if answer:
        counts = torch.bincount(torch.tensor(list(answer)), minlength=len(out)).to(out.dtype)
        out = out - float(getattr(sampling, "frequency_penalty", 0.0)) * counts
        out = out - float(getattr(sampling, "presence_penalty", 0.0)) * (counts > 0)
    return out


def _kept(case: Case, changed: str, figures: dict[str, float], cut: Callable[[Tensor], Tensor]) -> Prediction:
    assert case.tables is not None
    numbers = [
        torch.where(torch.isinf(row), torch.nan, row) for row in chosen([cut(each) for each in case.tables], case.rows)
    ]
    truncates = case.sampling is not None and case.sampling.truncates
    return Prediction(
        id="truncation-in-logprobs" if truncates else "top-only",
        changed=changed,
        numbers=numbers,
        advice="the engine returns log-probs over the ids that top-k or top-p left: ask it for raw ones, or compare "
        "with return_support=True"
        if truncates
        else "the engine normalises over its most probable ids alone: ask it for log-probs over the whole vocabulary",
        figures=figures,
        fitted=1,
        directed=True,
    )


def flat(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits ``[N, V]``, ids ``[N]`` and the side's numbers ``[N]``, at up to 256 positions that have one."""
    assert case.tables is not None
    tables, ids, numbers = [], [], []
    for table, row, found in zip(case.tables, case.rows, case.numbers, strict=True):
        known = torch.isfinite(found[1:])
        tables.append(table[known])
        ids.append(torch.tensor(list(row[1:]), dtype=torch.int64)[known])
        numbers.append(found[1:][known])
    table, chosen_ids, values = torch.cat([t for t in tables if len(t)]), torch.cat(ids), torch.cat(numbers)
    step = max(1, -(-len(values) // _FITTED_ON))
    return table[::step], chosen_ids[::step], values[::step]


def _top_k(table: Tensor, k: int) -> Tensor:
    least = table.topk(min(k, table.shape[-1]), -1).values[..., -1:]
    return table.masked_fill(table < least, -math.inf)


def _top_p(table: Tensor, p: float) -> Tensor:
    ranked, order = table.softmax(-1).sort(-1, descending=True)
    dropped = ranked.cumsum(-1) - ranked >= p
    return table.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -math.inf)


def _distances_of_top_p(ranked: Tensor, mass: Tensor, own: Tensor, numbers: Tensor) -> Tensor:
    """Return how far the numbers are from those over the ids of each top-p of `_TOP_PS`: float32[len(_TOP_PS)].

    Args:
        ranked: log-probs ``[N, V]``, the largest first.
        mass: their cumulated log-probs.
        own: the log-probs of the ids ``[N]``.
        numbers: the side's.
    """
    probability = mass.exp()
    left = []
    for p in _TOP_PS:
        last = (probability - ranked.exp() < p).sum(-1).clamp_min(1) - 1
        gap = (own - mass.gather(-1, last[:, None])[:, 0] - numbers).abs()
        gap = gap[torch.isfinite(gap)]
        left.append(float(gap.mean()) if len(gap) else math.inf)
    return torch.tensor(left)


def _distance(logprobs: Tensor, ids: Tensor, numbers: Tensor) -> float:
    gap = (logprobs.gather(-1, ids[:, None])[:, 0] - numbers).abs()
    return float(torch.where(torch.isfinite(gap), gap, 20.0).double().mean())


def _least(left: Callable[[float], float]) -> float:
    """Return where a function of a scale is least: on a grid, then between its neighbours by golden section."""
    tried = [left(float(scale)) for scale in _SCALES]
    place = min(range(len(tried)), key=tried.__getitem__)
    low, high = (math.log(float(_SCALES[min(max(place + by, 0), len(tried) - 1)])) for by in (-1, 1))
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(40):
        one, other = high - ratio * (high - low), low + ratio * (high - low)
        if left(math.exp(one)) < left(math.exp(other)):
            high = other
        else:
            low = one
    return math.exp((low + high) / 2)

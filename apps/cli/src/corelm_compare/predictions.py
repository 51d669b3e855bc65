"""Explanations that say which numbers a side would give: `PREDICTORS`, in the order in which they are tried.

Each is a function of a `Case` that yields `Prediction`s. A new explanation is a function here and a line in the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from corelm.errors import CoreLMError
from corelm.tensors.categorical import log_probs
from corelm_compare.cases import Case, Prediction, cause_of, judge
from corelm_compare.findings import Findings
from corelm_compare.oracles import Oracle, chosen
from corelm_compare.records import Cause, Experiment

#: How many ids are tried as a BOS that the engine may add.
_TRIED = 4
#: How many lengths of a window are tried, in one call.
_LENGTHS = 64
#: Positions that a constant is fitted on.
_FITTED_ON = 256
#: The constants by which logits may be multiplied, and the top-p that may be left.
_FACTORS = torch.logspace(-1.5, 1.5, 61)
_TOP_PS = tuple(step / 100 for step in range(5, 100))
#: Values that mean "no window": longer than every context.
_NO_WINDOW = 1 << 30
#: Scales that a configuration may have, and the value that changes nothing.
_SCALES = {
    **{"logits_scaling": 1.0, "logit_scale": 1.0, "embedding_multiplier": 1.0},
    **{"residual_multiplier": 1.0, "attention_multiplier": 1.0},
}
_LINEAR_ROPES = (2.0, 4.0, 8.0)
_THETAS = (10_000.0, 500_000.0, 1_000_000.0)

#: What to do about log-probs of sampled tokens that are of another distribution.
ADVICE = {
    "sampled-differs": "compare the engine's decoding with its prefill: cache, position ids, padding of the prompts",
    "temperature": "the engine returns log-probs after the temperature where the model's own are expected: ask it for "
    'raw ones (vLLM: logprobs_mode="raw_logprobs"; SGLang: SGLANG_RETURN_ORIGINAL_LOGPROB=1)',
    "truncation-in-logprobs": "the engine returns log-probs over the ids that top-k or top-p left: ask it for raw "
    "ones, or compare with return_support=True",
    "penalties": "the engine returns log-probs after penalties where those of the model are expected: ask it for raw "
    "ones, or leave the penalties out",
}

# Which number is returned -------------------------------------------------------------------------------------------


def _shifted(case: Case) -> Iterator[Prediction]:
    for by, words in ((1, "the number of the next token at each position"), (-1, "that of the token before")):
        shifted = [row.roll(-by) for row in case.truth]
        for row in shifted:
            row[-1 if by > 0 else 0] = torch.nan
        advice = (
            "compare how many log-probs the engine returns with how many ids it was given: entry t must be the "
            "log-prob of id t given those before it"
        )
        yield Prediction("shift", words, shifted, advice, figures={"by": by})


def _in_other_units(case: Case) -> Iterator[Prediction]:
    for base, words in ((2.0, "the logarithm to base 2"), (10.0, "the logarithm to base 10")):
        advice = f"multiply the engine's numbers by {math.log(base):.4g}: log-probs are in nats"
        numbers = [row / math.log(base) for row in case.truth]
        yield Prediction("units", words, numbers, advice, figures={"base": base})


# Another context: ids that the engine puts before a row, or leaves out of it ------------------------------------------


def _added(case: Case) -> Iterator[Prediction]:
    """An id that is put before every row, or before the rows that begin with it, or do not."""
    advice = "the engine puts an id before those that it is given: turn that off (add_bos_token, add_special_tokens)"
    for token in case.special_ids[:_TRIED]:
        numbers = [row[1:] for row in case.scorer([[token, *row] for row in case.rows])]
        begins = [len(row) > 0 and row[0] == token for row in case.rows]
        choices = [([True] * len(begins), all(begins), "every row")]
        if any(begins) and not all(begins):
            choices.append((begins, True, "every row that begins with it"))
            choices.append(([not each for each in begins], False, "every row that does not begin with it"))
        for rows, doubled, words in choices:
            id, changed = "bos-doubled" if doubled else "bos-added", f"id {token} before {words}"
            yield Prediction(id, changed, _where(rows, numbers, case.truth), advice, figures={"id": token})


def _dropped(case: Case) -> Iterator[Prediction]:
    """A first id that is left out, of every row or of those that begin with a special id."""
    usable = [list(row[1:]) if len(row) > 2 else list(row) for row in case.rows]
    numbers = []
    for row, found in zip(case.rows, case.scorer(usable), strict=True):
        moved = torch.full((len(row),), torch.nan)
        if len(row) > 2:
            moved[2:] = found[1:]
        numbers.append(moved)
    special = [len(row) > 0 and row[0] in case.special_ids for row in case.rows]
    advice = "the engine drops the first id that it is given: pass ids unchanged (add_bos_token)"
    id = "bos-missing" if all(special) else "first-token-dropped"
    yield Prediction(id, "the first id of every row left out", numbers, advice)
    if any(special) and not all(special):
        changed = "the first id left out of every row that begins with a special one"
        yield Prediction("bos-missing", changed, _where(special, numbers, case.truth), advice)


def _where(rows: Sequence[bool], changed: Sequence[Tensor], truth: Sequence[Tensor]) -> list[Tensor]:
    """Return the changed numbers of the chosen rows, and those of the reference for the others."""
    return [new if each else old for each, new, old in zip(rows, changed, truth, strict=True)]


def _truncated(case: Case) -> Iterator[Prediction]:
    """Long rows of which only the last tokens are read."""
    window = _window(case, lambda size, window: [size - window])
    if window is not None:
        yield Prediction(
            "truncation",
            f"only the last {window} ids of a row",
            _in_parts(case, window, lambda size: [size - window], head=False),
            "the engine cuts long rows on the left: raise its limit (max_model_len, context_length, truncation) to "
            f"{max(map(len, case.rows))}",
            *(f"length {window}", {"length": window}, 1, True),
        )


def _chunked(case: Case) -> Iterator[Prediction]:
    """Long rows that are read in chunks which do not see one another."""
    window = _window(case, lambda size, window: [window])
    if window is not None:
        yield Prediction(
            "chunked-prefill",
            f"each chunk of {window} ids read without the chunks before it",
            _in_parts(case, window, lambda size: range(window, size, window), head=True),
            "the engine forgets the first chunk of a long prompt: turn chunked prefill off, or make its chunk longer "
            f"than {max(map(len, case.rows))} ids (max_num_batched_tokens, chunked_prefill_size)",
            *(f"length {window}", {"length": window}, 1, True),
        )


def _window(case: Case, starts: Callable[[int, int], Sequence[int]]) -> int | None:
    """Return the length of the part of the longest row, from where `starts` says on, that gives the side's numbers.

    None if rows do not begin to differ at a length.
    """
    agree: list[int] = [0]
    differ: list[int] = []
    for row, numbers, truth in zip(case.rows, case.numbers, case.truth, strict=True):
        apart = (numbers - truth).abs()
        known = torch.isfinite(apart)
        if bool(known.any()):
            off = (apart > 10 * case.noise) & known
            (differ if bool(off.any()) else agree).append(len(row))
    longest = max(range(len(case.rows)), key=lambda index: len(case.rows[index]))
    row, size = list(case.rows[longest]), len(case.rows[longest])
    if not differ or max(agree) >= min(differ):
        return None
    # A row that differs may do so from any length below its own on.
    tried = list(range(max(*agree, 1), min(*differ, size - 1) + 1))[:_LENGTHS]
    if not tried:
        return None
    offsets = [starts(size, each)[0] for each in tried]
    parts = [row[start : start + each] for start, each in zip(offsets, tried, strict=True)]
    fits = []
    for start, part, found in zip(offsets, parts, case.scorer(parts), strict=True):
        gap = (case.numbers[longest][start + 1 : start + len(part)] - found[1:]).abs()
        gap = gap[torch.isfinite(gap)]
        fits.append(float(gap.mean()) if len(gap) >= 2 else math.inf)
    return tried[min(range(len(fits)), key=fits.__getitem__)]


def _in_parts(case: Case, window: int, starts: Callable[[int], Sequence[int]], *, head: bool) -> list[Tensor]:
    """Return the numbers of rows that are read from each start on for `window` ids; NaN elsewhere.

    Args:
        head: whether what is before the first start is read as well.
    """
    numbers = []
    for row, truth in zip(case.rows, case.truth, strict=True):
        if len(row) <= window:
            numbers.append(truth)
            continue
        moved = torch.full((len(row),), torch.nan)
        if head:
            moved[:window] = truth[:window]
        parts = {start: list(row[start : start + window]) for start in starts(len(row))}
        parts = {start: part for start, part in parts.items() if len(part) > 1}
        for (start, part), found in zip(parts.items(), case.scorer([*parts.values()]) if parts else (), strict=True):
            moved[start + 1 : start + len(part)] = found[1:]
        numbers.append(moved)
    return numbers


# What is done to the logits of the reference before their softmax -----------------------------------------------------


def _scaled(case: Case) -> Iterator[Prediction]:
    """Logits times a constant: a temperature, or a scale that was left out."""
    if case.tables is None:
        return
    table, ids, numbers = _flat(case)
    if len(numbers) < 4:
        return

    def left(factor: float) -> float:
        gap = (log_probs(table * factor).gather(-1, ids[:, None])[:, 0] - numbers).abs()
        return float(torch.where(torch.isfinite(gap), gap, 20.0).double().mean())

    factor = _least(left)
    if abs(factor - 1.0) < 1e-3:
        return
    id, advice = (
        "missing-scale",
        "the engine leaves a scale of the logits out, or applies one (logits_scaling, logit_scale, a temperature in "
        "its scores): compare its configuration with the checkpoint's",
    )
    if case.sampling is not None and case.sampling.temperature not in (0.0, 1.0):
        id, advice = "temperature", ADVICE["temperature"]
    scaled = chosen([each * factor for each in case.tables], case.rows)
    note = f"a temperature of {1 / factor:.4g}"
    yield Prediction(id, f"all logits times {factor:.4g}", scaled, advice, note, {"scale": factor}, 1)


def _least(left: Callable[[float], float]) -> float:
    """Return where a function of a factor is least: on a grid, then on finer ones between its neighbours."""
    factors = _FACTORS
    for _ in range(12):
        best = min(range(len(factors)), key=[left(float(factor)) for factor in factors].__getitem__)
        low, high = factors[max(best - 1, 0)], factors[min(best + 1, len(factors) - 1)]
        factors = torch.linspace(float(low), float(high), 9, dtype=torch.float64)
    return float((low + high) / 2)


def _padded(case: Case) -> Iterator[Prediction]:
    """A vocabulary that is longer in the softmax: padding, each with a logit of 0 or so."""
    # The reference's logits must be the model's own: a server may return them up to a constant.
    if case.tables is None or case.oracle is None:
        return
    table, ids, numbers = _flat(case)
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
        "vocab-padding",
        f"ids beyond the vocabulary that add {mass:.4g} to the sum of the softmax",
        chosen(longer, case.rows),
        "the engine counts padded rows of the output layer in its softmax: cut the logits at the vocabulary's size, or "
        "use a checkpoint that is not padded",
        *(f"{mass:.4g} ids with a logit of 0", {"mass": mass}, 1),
    )


def _renormalized(case: Case) -> Iterator[Prediction]:
    """Numbers over the most probable ids alone."""
    if case.tables is None:
        return
    table, ids, numbers = _flat(case)
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
    probability, left = mass.exp(), []
    for p in _TOP_PS:
        last = (probability - ranked.exp() < p).sum(-1).clamp_min(1) - 1
        gap = (own - mass.gather(-1, last[:, None])[:, 0] - numbers).abs()
        gap = gap[torch.isfinite(gap)]
        left.append(float(gap.mean()) if len(gap) else math.inf)
    p = _TOP_PS[min(range(len(left)), key=left.__getitem__)]
    id, advice = (
        "top-only",
        "the engine normalises over its most probable ids alone: ask it for log-probs over the whole vocabulary",
    )
    if case.sampling is not None and case.sampling.truncates:
        id, advice = "truncation-in-logprobs", ADVICE["truncation-in-logprobs"]
    for cut, words, figures in (
        (lambda each: _top_k(each, k), f"the {k} most probable ids", {"top_k": float(k)}),
        (lambda each: _top_p(each, p), f"the ids of top_p={p:g}", {"top_p": p}),
    ):
        kept = chosen([cut(each) for each in case.tables], case.rows)
        kept = [torch.where(torch.isinf(row), torch.nan, row) for row in kept]
        yield Prediction(id, f"only {words} in the softmax", kept, advice, "", figures, 1, True)


def _top_k(table: Tensor, k: int) -> Tensor:
    least = table.topk(min(k, table.shape[-1]), -1).values[..., -1:]
    return table.masked_fill(table < least, -math.inf)


def _top_p(table: Tensor, p: float) -> Tensor:
    ranked, order = table.softmax(-1).sort(-1, descending=True)
    dropped = ranked.cumsum(-1) - ranked >= p
    return table.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -math.inf)


def _masked(case: Case) -> Iterator[Prediction]:
    """Ids that cannot follow: EOS, or all special ones."""
    if case.tables is None:
        return
    for ids, words in ((case.eos_ids, "EOS"), (tuple({*case.eos_ids, *case.special_ids}), "the special ids")):
        if ids:
            without = [each.index_fill(-1, torch.tensor(ids), -math.inf) for each in case.tables]
            yield Prediction(
                "eos-suppressed",
                f"{words} impossible ({', '.join(map(str, sorted(ids)))})",
                chosen(without, case.rows),
                "the engine forbids EOS where log-probs are taken: look for min_tokens, ignore_eos, bad_words or "
                "logit_bias in its defaults",
            )


def _penalized(case: Case) -> Iterator[Prediction]:
    """Penalties, as they were asked for in sampling."""
    sampling = case.sampling
    if case.tables is None or sampling is None or not sampling.penalties:
        return
    numbers = []
    for table, row, start in zip(case.tables, case.rows, case.prompt_lengths, strict=True):
        changed = table.clone()
        for t in range(start - 1, len(table)):
            seen, logits = torch.tensor(sorted({*row[: t + 1]})), changed[t]
            repeated, factor = logits[seen], sampling.repetition_penalty
            logits[seen] = torch.where(repeated > 0, repeated / factor, repeated * factor)
            answer = torch.tensor(list(row[start : t + 1]), dtype=torch.int64)
            counts = torch.bincount(answer, minlength=len(logits)).to(logits.dtype)
            logits -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
        numbers.append(chosen([changed / (sampling.temperature or 1.0)], [row])[0])
    yield Prediction("penalties", "the penalties that were asked for in sampling", numbers, ADVICE["penalties"])


def _flat(case: Case) -> tuple[Tensor, Tensor, Tensor]:
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


# The checkpoint with one thing of its configuration, or of its weights, set otherwise ---------------------------------

#: The cause that a change would be, what is changed, the changed oracle, and what to look at.
Variant = tuple[str, str, Callable[[Oracle], Oracle], str]


def _variants(case: Case) -> Iterator[Prediction]:
    """The plain forward of the same rows with every change that the checkpoint's configuration allows."""
    if case.oracle is None:
        return
    for id, changed, make, advice in _changes(case, case.oracle):
        try:
            numbers = make(case.oracle).numbers(case.rows)
        except (CoreLMError, RuntimeError, ValueError, TypeError, KeyError, AttributeError):
            # A configuration that this model's code does not take: nothing is learned from it.
            continue
        yield Prediction(id, changed, numbers, advice)


def _changes(case: Case, oracle: Oracle) -> Iterator[Variant]:
    config = oracle.plain.config
    for name, words in (("final_logit_softcapping", "logits"), ("attn_logit_softcapping", "attention scores")):
        if getattr(config, name, None):
            changed = f"no softcap of the {words} ({name}={getattr(config, name):g})"
            advice = f"the engine leaves out {name}: use a version, or an attention backend, that knows it"
            yield "missing-softcap", changed, _with(**{name: None}), advice
    for name, neutral in _SCALES.items():
        if getattr(config, name, neutral) not in (neutral, None):
            changed = f"{name}={neutral:g} and not {getattr(config, name):g}"
            advice = f"the engine ignores {name} of the configuration: use a version that knows it"
            yield "missing-scale", changed, _with(**{name: neutral}), advice
    yield from _biases(oracle)
    if not case.begins_alike:
        return
    if getattr(config, "sliding_window", None):
        advice = (
            "the engine attends to the whole row: turn its sliding window on (disable_sliding_window=False), or use an "
            "attention backend that has one"
        )
        changed = f"no sliding window ({config.sliding_window})"
        yield "sliding-window", changed, _with(sliding_window=_NO_WINDOW), advice
    yield from _ropes(config)


def _biases(oracle: Oracle) -> Iterator[Variant]:
    names = [name for name in oracle.plain.state_dict() if name.endswith("bias")]
    groups = {
        "of the output layer": [name for name in names if "head" in name or name.startswith("embed_out")],
        "of the attention": [name for name in names if any(part in name for part in ("q_proj", "k_proj", "c_attn"))],
        "of the norms": [name for name in names if "norm" in name or ".ln_" in name],
        "of all layers": names,
    }
    for words, group in groups.items():
        if group:
            advice = f"the engine leaves out the biases {words}: check that it loaded {group[0]}"
            yield "missing-bias", f"no biases {words}", _without(frozenset(group)), advice


def _ropes(config: Any) -> Iterator[Variant]:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(rope, Mapping):
        return
    advice = "compare rope_scaling and rope_theta of the engine with those of the checkpoint's config.json"
    # Families with several kinds of layers have parameters for each.
    nested = all(isinstance(each, Mapping) for each in rope.values())
    layers: Mapping[str, Any] = rope if nested else {"": rope}

    def every(**changes: Any) -> Callable[[Oracle], Oracle]:
        changed = {name: {**old, **changes} for name, old in layers.items() if old}
        return _with(rope_parameters=changed if nested else changed[""])

    first: Mapping[str, Any] = next((each for each in layers.values() if each), {})
    kind, theta = first.get("rope_type", "default"), first.get("rope_theta")
    if kind != "default":
        yield "rope", f"no rope scaling ({kind})", every(rope_type="default"), advice
    for factor in _LINEAR_ROPES:
        if not (kind == "linear" and first.get("factor") == factor):
            yield "rope", f"linear rope scaling by {factor:g}", every(rope_type="linear", factor=factor), advice
    for other in _THETAS:
        if theta is not None and theta != other:
            yield "rope", f"rope_theta={other:g} and not {theta:g}", every(rope_theta=other), advice


def _with(**changes: Any) -> Callable[[Oracle], Oracle]:
    return lambda oracle: oracle.with_config(**changes)


def _without(names: frozenset[str]) -> Callable[[Oracle], Oracle]:
    return lambda oracle: oracle.with_weights(
        lambda name, weight: torch.zeros_like(weight) if name in names else weight
    )


#: name → what yields predictions. Of equally good explanations, the first counts.
PREDICTORS: dict[str, Callable[[Case], Iterator[Prediction]]] = {
    "shift": _shifted,
    "units": _in_other_units,
    "bos-added": _added,
    "first-token-dropped": _dropped,
    "penalties": _penalized,
    "variants": _variants,
    "scale": _scaled,
    "vocab-padding": _padded,
    "renormalized": _renormalized,
    "eos-suppressed": _masked,
    "truncation": _truncated,
    "chunked-prefill": _chunked,
}
#: Explanations that need the reference's logits.
_OF_LOGITS = ("scale", "vocab-padding", "renormalized", "eos-suppressed")


def predicted(found: Findings, case: Case, names: Iterable[str]) -> Cause | None:
    """Try the predictors of these names; return the cause that explains the case best, or None if none does."""
    judged: list[tuple[Prediction, Experiment]] = []
    for name in names:
        if case.tables is None and name in _OF_LOGITS and case.sampling is None:
            found.not_tried[name] = f"neither an oracle nor logits of {case.reference}"
        predictions = PREDICTORS[name](case)
        while found.may_try(name, f"explaining {case.side.name}: {name}"):
            prediction = next(predictions, None)
            if prediction is None:
                break
            judged.append((prediction, judge(case, prediction)))
    found.experiments += [experiment for _, experiment in judged]
    return cause_of(case, judged)

"""What is left where no single change of the reference gives a side's numbers: caches, adapters, weights, long rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from corelm.errors import CoreLMError
from corelm_compare.cases import FLOAT32_NOISE, Case, distance, exact, flat
from corelm_compare.oracles import Oracle
from corelm_compare.precision import correlation
from corelm_compare.records import Cause, Confidence, Experiment

Found = tuple[list[Experiment], Cause | None]
#: An adapter that changes less than this part of the difference does not explain it by being there.
_UNCHANGED = 0.02
#: How many standard errors a fitted number must be away from one that it is not.
_SIGMAS = 3.0
#: The least part of the tokens beyond a length that must differ.
_PERSISTENT = 0.5


def fresh_prefix(case: Case) -> Found:
    """Change the first id of every row, then the second: no cache can hold such a prefix."""
    name, before = case.side.name, case.distance
    experiments: list[Experiment] = []
    # An engine that treats some first ids in its own way, BOS for example, is right with another first id as well. A
    # cache is not asked for what it holds, either, if the second id is another one.
    for position, word, most in ((0, "first", case.noise), (1, "second", before / 2)):
        rows = [_with_other(case, row, position) for row in case.rows]
        after, tokens = distance(case.scorer(rows), case.side.score(rows))
        changed = f"another {word} id in every row, so that no cache holds its prefix"
        explains = after <= most and case.noise < before
        experiments.append(Experiment("prefix-cache", name, changed, before, after, tokens, explains))
        if not explains:
            return experiments, None
    after = experiments[0].after
    evidence = (
        f"{name} is {before:.3g} nats a token from {case.reference} on these rows, and {after:.2g} once their first id "
        "is another one, which no cache holds"
    )
    advice = (
        "reset the engine's cache of prefixes after every update of the weights, or turn it off "
        "(enable_prefix_caching=False, disable_radix_cache=True)"
    )
    certain = case.oracle is not None and exact(before, after)
    figures = {"before": before, "after": after}
    return experiments, Cause(
        "prefix-cache", case.accused, "certain" if certain else "likely", evidence, advice, figures
    )


def _with_other(case: Case, row: Sequence[int], position: int) -> list[int]:
    if len(row) <= position:
        return list(row)
    size, old = case.side.can.vocab_size, row[position]
    taken = {*case.eos_ids, *case.special_ids, old}
    new = next((token % size for token in range(old + 7, old + 7 + size) if token % size not in taken), old)
    return [*row[:position], new, *row[position + 1 :]]


def adapter(case: Case) -> Found:
    """Score without the adapter that the calls name."""
    side, before = case.side, case.distance
    if side.adapter in (None, False):
        return [], None
    without = side.score(case.rows, adapter=False)
    changed, tokens = distance(case.numbers, without)
    after, _ = distance(case.truth, without)
    # Not what rounding allows: an adapter with a small effect is applied.
    ignored = changed <= max(FLOAT32_NOISE, _UNCHANGED * before)
    id, note = "adapter-not-applied" if ignored else "wrong-adapter", f"the adapter changes its scores by {changed:.3g}"
    experiment = Experiment(
        id, side.name, "scores without the adapter", before, after, tokens, ignored, f"{note} nats a token"
    )
    if ignored:
        evidence = (
            f"{side.name} gives the same numbers with the adapter {side.adapter!r} as without it ({changed:.2g} nats a "
            "token apart)"
        )
        advice = "load the adapter again (backend.load_adapter), and check that its target modules are in the model"
        return [experiment], Cause(id, side.name, "likely", evidence, advice, {"changed": changed})
    evidence = (
        f"with the adapter {side.adapter!r}, {side.name} is {before:.3g} nats a token from {case.reference}; the "
        f"adapter changes its own scores by {changed:.3g}"
    )
    advice = "load the same adapter on both sides (backend.load_adapter); compare r, lora_alpha and target modules"
    figures = {"before": before, "changed": changed}
    return [experiment], Cause(id, case.accused, "possible", evidence, advice, figures)


def earlier_weights(case: Case, checkpoints: Sequence[str | PathLike[str]], rounded: bool) -> Found:
    """Score with other checkpoints that the side may hold.

    Args:
        rounded: whether the side computes in a low precision, whose rounding may be as large as an update.
    """
    name, before = case.side.name, case.distance
    experiments: list[Experiment] = []
    fitting: list[tuple[float, str]] = []
    for folder in map(str, checkpoints):
        numbers = Oracle.load(folder).numbers(case.rows)
        after, tokens = distance(numbers, case.numbers)
        part, error = _part(case, numbers)
        moved = part - _SIGMAS * error > 0.5 and part + _SIGMAS * error < 1.5
        explains = after <= case.noise and (before > case.noise or (rounded and moved)) and after < before
        if explains:
            fitting.append((after, folder))
        note = f"the numbers are {part:.2f} ± {error:.2f} of the way to this checkpoint's"
        changed = f"the plain forward of {folder}"
        experiments.append(Experiment("stale-weights", name, changed, before, after, tokens, explains, note))
    if not fitting:
        return experiments, None
    after, folder = min(fitting)
    evidence = (
        f"{name} is {before:.3g} nats a token from {case.reference}, and {after:.2g} from that of {folder}: it holds "
        "these weights"
    )
    advice = "load the new weights again: backend.update_weights(PATH)"
    figures = {"before": before, "after": after}
    confidence: Confidence = "certain" if exact(before, after) else "likely"
    return experiments, Cause("stale-weights", name, confidence, evidence, advice, figures)


def other_model(case: Case, folder: Path) -> Found:
    """Score with the model that the side was opened with, which is not that of the plain forward."""
    assert case.oracle is not None
    try:
        numbers = Oracle.load(folder).numbers(case.rows)
    except (CoreLMError, RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError):
        # Transformers cannot run this model, or its vocabulary lacks ids of the rows: nothing is learned from it.
        return [], None
    name, before, (after, tokens) = case.side.name, case.distance, distance(numbers, case.numbers)
    if after > min(case.noise, before / 2):
        return [], None
    experiment = Experiment(
        "other-weights", name, f"the plain forward of {folder}", before, after, tokens, True, "its own model"
    )
    evidence = (
        f"the sides were opened with different models: {name} is {before:.3g} nats a token from the plain forward of "
        f"{case.oracle.folder}, and {after:.2g} from that of its own, {folder}"
    )
    advice = "if you compare checkpoints, read the distances; to compare engines, give all sides the same model"
    confidence: Confidence = "certain" if exact(before, after) else "likely"
    figures = {"before": before, "after": after}
    return [experiment], Cause("other-weights", name, confidence, evidence, advice, figures)


def _part(case: Case, numbers: Sequence[Tensor]) -> tuple[float, float]:
    """Return how far the side is on the way from the reference to other numbers, and the standard error of that.

    1 is there, whatever rounding adds on both sides of 0.
    """
    said, truth, other = (flat(rows).double() for rows in (case.numbers, case.truth, numbers))
    both = torch.isfinite(said) & torch.isfinite(truth) & torch.isfinite(other)
    own, way = (said - truth)[both], (other - truth)[both]
    size = float(way.square().sum())
    if size == 0.0 or len(way) < 2:
        return 0.0, 0.0
    part = float((own * way).sum()) / size
    return part, float((own - part * way).square().sum() / (len(way) - 1) / size) ** 0.5


def other_weights(case: Case, others_agree: bool) -> Found:
    """Say that the weights are others, if differences begin with the first token and nothing else fits."""
    if case.oracle is None or not others_agree or case.begins_alike:
        return [], None
    numbers, truth = flat(case.numbers), flat(case.truth)
    both = torch.isfinite(numbers) & torch.isfinite(truth)
    related = correlation(numbers[both], truth[both])
    name, (before, tokens) = case.side.name, distance(case.truth, case.numbers)
    firsts = [float((n - t).abs()[1]) for n, t in zip(case.numbers, case.truth, strict=True) if len(n) > 1]
    firsts = [each for each in firsts if math.isfinite(each)]
    first = sum(firsts) / len(firsts)
    changed, note = "rows of two ids: no attention, no position, no cache", "correlation with the checkpoint's numbers"
    experiment = Experiment("other-weights", name, changed, before, first, tokens, True, f"{note} {related:.2f}")
    evidence = (
        f"{name} is {before:.3g} nats a token from {case.reference} of the checkpoint, which another side agrees with; "
        f"it is off from the first token on ({first:.3g}), no single change of the computation gives its numbers, and "
        f"they correlate with the checkpoint's by {related:.2f}: it holds other weights, or computes the model "
        "otherwise"
    )
    advice = (
        "load the weights again: backend.update_weights(PATH). If you know which ones it may hold, pass "
        "checkpoints=[PATH, …]"
    )
    figures = {"before": before, "first": first, "correlation": related}
    confidence: Confidence = "likely" if related > 0.5 else "possible"
    return [experiment], Cause("other-weights", name, confidence, evidence, advice, figures)


def long_rows(case: Case) -> Found:
    """Say from which position on long rows differ, if all begin to differ at one."""
    at = _onset(case)
    if at is None:
        return [], None
    name, (before, tokens) = case.side.name, distance(case.truth, case.numbers)
    start = distance([row[:at] for row in case.numbers], [row[:at] for row in case.truth])[0]
    changed = f"only the first {at} positions of every row"
    experiment = Experiment("chunked-prefill", name, changed, before, start, tokens, start <= case.noise)
    if not experiment.explains:
        return [experiment], None
    evidence = (
        f"{name} agrees with {case.reference} on the first {at} positions of every row ({start:.2g} nats a token) and "
        f"differs from there on ({before:.3g} over all): what it computes changes at that length"
    )
    advice = (
        "look for a chunk of prefill, a window, or a scaling of positions of this length (max_num_batched_tokens, "
        "chunked_prefill_size, sliding_window, original_max_position_embeddings)"
    )
    figures = {"position": at, "before": before, "head": start}
    return [experiment], Cause("chunked-prefill", case.accused, "possible", evidence, advice, figures)


def _onset(case: Case) -> int | None:
    """Return from which position on all longer rows differ, while none does before it; None if there is none."""
    wrong = []
    for numbers, truth in zip(case.numbers, case.truth, strict=True):
        size = (numbers - truth).abs()
        wrong.append(torch.isfinite(size) & (size > 10 * case.noise))
    firsts = [int(off.nonzero()[0]) for off in wrong if bool(off.any())]
    if not firsts or min(firsts) < 4 or max(firsts) - min(firsts) > 3:
        return None
    at = min(firsts)
    # A single wrong token begins somewhere too. What changes at a length changes for all rows and for what follows.
    after = [off[at:] for off in wrong if len(off) > at + 4]
    persistent = sum(int(off.sum()) for off in after) >= _PERSISTENT * sum(len(off) for off in after)
    return at if after and persistent else None

"""What is left where no single change of the reference gives a side's numbers: caches, adapters, weights, long rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from os import PathLike

import torch
from torch import Tensor

from corelm_compare.cases import FLOAT32_NOISE, Case, exact
from corelm_compare.gaps import distance
from corelm_compare.oracles import Oracle
from corelm_compare.precision import correlation
from corelm_compare.predictions.contexts import onset
from corelm_compare.predictions.variants import begins_alike
from corelm_compare.records import Cause, Experiment

Found = tuple[list[Experiment], Cause | None]
#: An adapter that changes less than this part of the difference does not explain it by being there.
_UNCHANGED = 0.02
#: How many standard errors a fitted number must be away from one that it is not.
_SIGMAS = 3.0


def fresh_prefix(case: Case) -> Found:
    """Change the first id of every row, then the second: no cache can hold such a prefix."""
    before = distance(case.truth, case.numbers)[0]
    experiments: list[Experiment] = []
    # An engine that treats some first ids in its own way, BOS for example, is right with another first id as well. A
    # cache is not asked for what it holds, either, if the second id is another one.
    for place, word, most in ((0, "first", case.noise), (1, "second", before / 2)):
        rows = [_with_other(case, row, place) for row in case.rows]
        after, tokens = distance(case.scorer(rows), case.side.score(rows))
        experiments.append(
            Experiment(
                id="prefix-cache",
                side=case.side.name,
                changed=f"another {word} id in every row, so that no cache holds its prefix",
                before=before,
                after=after,
                tokens=tokens,
                explains=after <= most and case.noise < before,
            )
        )
        if not experiments[-1].explains:
            return experiments, None
    after = experiments[0].after
    return experiments, Cause(
        id="prefix-cache",
        side=case.accused,
        confidence="certain" if case.oracle is not None and exact(before, after) else "likely",
        evidence=f"{case.side.name} is {before:.3g} nats a token from {case.reference} on these rows, and {after:.2g} "
        "once their first id is another one, which no cache holds",
        advice="reset the engine's cache of prefixes after every update of the weights, or turn it off "
        "(enable_prefix_caching=False, disable_radix_cache=True)",
        figures={"before": before, "after": after},
    )


def adapter(case: Case) -> Found:
    """Score without the adapter that the calls name."""
    side = case.side
    if side.adapter in (None, False):
        return [], None
    without = side.score(case.rows, adapter=False)
    changed, tokens = distance(case.numbers, without)
    base, _ = distance(case.truth, without)
    before = distance(case.truth, case.numbers)[0]
    # Not what rounding allows: an adapter with a small effect is applied.
    ignored = changed <= max(FLOAT32_NOISE, _UNCHANGED * before)
    experiment = Experiment(
        id="adapter-not-applied" if ignored else "wrong-adapter",
        side=side.name,
        changed="scores without the adapter",
        before=before,
        after=base,
        tokens=tokens,
        explains=ignored,
        note=f"the adapter changes its scores by {changed:.3g} nats a token",
    )
    if ignored:
        return [experiment], Cause(
            id="adapter-not-applied",
            side=side.name,
            confidence="likely",
            evidence=f"{side.name} gives the same numbers with the adapter {side.adapter!r} as without it "
            f"({changed:.2g} nats a token apart)",
            advice="load the adapter again (backend.load_adapter), and check that its target modules are in the model",
            figures={"changed": changed},
        )
    return [experiment], Cause(
        id="wrong-adapter",
        side=case.accused,
        confidence="possible",
        evidence=f"with the adapter {side.adapter!r}, {side.name} is {before:.3g} nats a token from {case.reference}; "
        f"the adapter changes its own scores by {changed:.3g}",
        advice="load the same adapter on both sides (backend.load_adapter); compare r, lora_alpha and target modules",
        figures={"before": before, "changed": changed},
    )


def earlier_weights(case: Case, checkpoints: Sequence[str | PathLike[str]], rounded: bool) -> Found:
    """Score with other checkpoints that the side may hold.

    Args:
        case: the side's scores.
        checkpoints: their folders.
        rounded: whether the side computes in a low precision, whose rounding may be as large as an update.
    """
    experiments = []
    before = distance(case.truth, case.numbers)[0]
    fitting: list[tuple[float, str]] = []
    for folder in checkpoints:
        numbers = Oracle.load(folder).numbers(case.rows)
        after, tokens = distance(numbers, case.numbers)
        part, error = _part(case, numbers)
        moved = part - _SIGMAS * error > 0.5 and part + _SIGMAS * error < 1.5
        explains = after <= case.noise and (before > case.noise or (rounded and moved)) and after < before
        if explains:
            fitting.append((after, str(folder)))
        experiments.append(
            Experiment(
                id="stale-weights",
                side=case.side.name,
                changed=f"the plain forward of {folder}",
                before=before,
                after=after,
                tokens=tokens,
                explains=explains,
                note=f"the numbers are {part:.2f} ± {error:.2f} of the way to this checkpoint's",
            )
        )
    if not fitting:
        return experiments, None
    after, folder = min(fitting)
    return experiments, Cause(
        id="stale-weights",
        side=case.side.name,
        confidence="certain" if exact(before, after) else "likely",
        evidence=f"{case.side.name} is {before:.3g} nats a token from {case.reference}, and {after:.2g} from "
        f"that of {folder}: it holds these weights",
        advice="load the new weights again: backend.update_weights(PATH)",
        figures={"before": before, "after": after},
    )


def _part(case: Case, numbers: Sequence[Tensor]) -> tuple[float, float]:
    """Return how far the side is on the way from the reference to other numbers, and the standard error of that.

    1 is there, whatever rounding adds on both sides of 0.
    """
    said, truth, other = (torch.cat([row.double() for row in rows]) for rows in (case.numbers, case.truth, numbers))
    both = torch.isfinite(said) & torch.isfinite(truth) & torch.isfinite(other)
    own, way = (said - truth)[both], (other - truth)[both]
    size = float(way.square().sum())
    if size == 0.0 or len(way) < 2:
        return 0.0, 0.0
    part = float((own * way).sum()) / size
    return part, float((own - part * way).square().sum() / (len(way) - 1) / size) ** 0.5


def other_weights(case: Case, others_agree: bool) -> Found:
    """Say that the weights are others, if differences begin with the first token and nothing else fits."""
    if case.oracle is None or not others_agree or begins_alike(case):
        return [], None
    numbers, truth = (torch.cat([row.float() for row in rows]) for rows in (case.numbers, case.truth))
    both = torch.isfinite(numbers) & torch.isfinite(truth)
    related = correlation(numbers[both], truth[both])
    before, tokens = distance(case.truth, case.numbers)
    first = [float((n - t).abs()[1]) for n, t in zip(case.numbers, case.truth, strict=True) if len(n) > 1]
    first = [each for each in first if math.isfinite(each)]
    experiment = Experiment(
        id="other-weights",
        side=case.side.name,
        changed="rows of two ids: no attention, no position, no cache",
        before=before,
        after=sum(first) / len(first),
        tokens=tokens,
        explains=True,
        note=f"correlation with the checkpoint's numbers {related:.2f}",
    )
    return [experiment], Cause(
        id="other-weights",
        side=case.side.name,
        confidence="likely" if related > 0.5 else "possible",
        evidence=f"{case.side.name} is {before:.3g} nats a token from {case.reference} of the checkpoint, which "
        f"another side agrees with; it is off from the first token on ({experiment.after:.3g}), no single change of "
        f"the computation gives its numbers, and they correlate with the checkpoint's by {related:.2f}: it holds other "
        "weights, or computes the model otherwise",
        advice="load the weights again: backend.update_weights(PATH). If you know which ones it may hold, pass "
        "checkpoints=[PATH, …]",
        figures={"before": before, "first": experiment.after, "correlation": related},
    )


def long_rows(case: Case) -> Found:
    """Say from which position on long rows differ, if all begin to differ at one."""
    at = onset(case)
    if at is None:
        return [], None
    before, tokens = distance(case.truth, case.numbers)
    head = [row[:at] for row in case.numbers], [row[:at] for row in case.truth]
    start = distance(*head)[0]
    experiment = Experiment(
        id="chunked-prefill",
        side=case.side.name,
        changed=f"only the first {at} positions of every row",
        before=before,
        after=start,
        tokens=tokens,
        explains=start <= case.noise,
    )
    if not experiment.explains:
        return [experiment], None
    return [experiment], Cause(
        id="chunked-prefill",
        side=case.accused,
        confidence="possible",
        evidence=f"{case.side.name} agrees with {case.reference} on the first {at} positions of every row ({start:.2g} "
        f"nats a token) and differs from there on ({before:.3g} over all): what it computes changes at that length",
        advice="look for a chunk of prefill, a window, or a scaling of positions of this length "
        "(max_num_batched_tokens, chunked_prefill_size, sliding_window, original_max_position_embeddings)",
        figures={"position": at, "before": before, "head": start},
    )


def _with_other(case: Case, row: Sequence[int], place: int) -> list[int]:
    """Return a row with another id at a place."""
    if len(row) <= place:
        return list(row)
    size, old = case.side.can.vocab_size, row[place]
    taken = {*case.eos_ids, *case.special_ids, old}
    new = next((token % size for token in range(old + 7, old + 7 + size) if token % size not in taken), old)
    return [*row[:place], new, *row[place + 1 :]]

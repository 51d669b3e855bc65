"""What a side says of a token when it samples it, against what it says when it scores it; and where answers end.

Sampling is changed in one parameter at a time: the plain distribution, then a temperature, truncation, penalties. If
only the numbers with one of them differ, they are of the distribution that this one makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from corelm.errors import CapabilityError, InvalidRequestError
from corelm.spec import SamplingParams, StopStrings
from corelm_compare.cases import Case, distance, measure
from corelm_compare.findings import Findings
from corelm_compare.measurements import COMPANY_ADVICE
from corelm_compare.oracles import Oracle
from corelm_compare.predictions import ADVICE, predicted
from corelm_compare.prompts import ids_differ
from corelm_compare.records import Cause, Experiment, Gap
from corelm_compare.sides import Answer, OpenSide

#: Returns the log-probs of rows.
Scorer = Callable[[Sequence[Sequence[int]]], list[Tensor]]
#: What each probe changes in plain sampling, and the cause if only its numbers differ.
PROBES: dict[str, tuple[dict[str, float], str]] = {
    "plain": ({}, "sampled-differs"),
    "temperature": ({"temperature": 0.5}, "temperature"),
    "top_k": ({"top_k": 5}, "truncation-in-logprobs"),
    "top_p": ({"top_p": 0.6}, "truncation-in-logprobs"),
    "penalties": ({"repetition_penalty": 1.8, "presence_penalty": 1.0}, "penalties"),
}
#: Explanations that are tried for each probe; those of long rows and other weights are for scores.
_TRIED = ("shift", "units", "penalties", "scale", "vocab-padding", "renormalized", "eos-suppressed")
#: How many prompts are sampled from, and how many tokens after each.
PROMPTS, TOKENS = 4, 16


def probe_sampling(
    found: Findings,
    side: OpenSide,
    prompts: Sequence[list[int]],
    scorer: OpenSide,
    arbiter: Scorer | None,
    oracle: Oracle | None,
    seed: int,
    noise: float,
) -> bool:
    """Sample with every probe, score what was sampled, and explain what differs.

    Return whether the plain sampled numbers are right while the side's own scores of them are not.

    Args:
        scorer: the side that scores rows: the side itself, or another one if it cannot score.
        arbiter: scores rows as the oracle, or another side, does: it says whether the sampled number or the scored one
            is wrong; None if there is no such.
    """
    scores_are_wrong = plain_differs = False
    prompts = prompts[:PROMPTS]
    for changes, cause in PROBES.values() if side.samples else ():
        sampling = SamplingParams.make({"max_new_tokens": TOKENS, **changes})
        if changes and side.mode == "processed":
            found.not_tried[cause] = f"{side.name} returns processed log-probs only, as it says"
            continue
        words = ", ".join(f"{key}={value:g}" for key, value in changes.items()) or "plain"
        if not found.may_try(cause, f"sampling from {side.name} ({words})"):
            continue
        try:
            answers = side.sample(prompts, sampling, seed)
        except (CapabilityError, InvalidRequestError) as error:
            found.not_tried[cause] = f"{side.name}: {error}"
            continue
        case, gap = _case(side, prompts, answers, scorer, oracle, sampling, noise, words)
        found.own.append(gap)
        infinite = any(bool(torch.isinf(row).any()) for row in case.numbers)
        if gap.mean_abs <= noise and not infinite:
            continue
        if arbiter is not None:
            truth = arbiter(case.rows)
            if distance(truth, case.numbers)[0] <= noise and not infinite:
                # What it says when it samples is right. The scores are not, and they are explained elsewhere.
                scores_are_wrong |= not changes and scorer is side
                continue
            if oracle is not None:
                case = replace(case, truth=truth, reference="the plain forward")
        if changes and plain_differs:
            # The plain numbers are wrong already, and this says no more.
            continue
        plain_differs |= not changes
        # What a side says when it samples against what it says itself: no oracle is needed to accuse it.
        accused = side.name if scorer is side or oracle is not None else None
        named = predicted(found, case, _TRIED)
        if named is not None:
            found.causes.append(replace(named, side=accused))
            continue
        if not changes and (company := _alone(found, case, gap, prompts, seed)) is not None:
            found.causes.append(company)
            continue
        apart, tokens = distance(case.truth, case.numbers)
        evidence = f"{side.name}'s {case.what} are {apart:.3g} nats a token from {case.reference} ({tokens} tokens)"
        evidence += "; those of plain sampling are not" if changes else ""
        figures = {"mean_abs": apart}
        found.causes.append(Cause(cause, accused, "likely", evidence, ADVICE[cause], figures))
    return scores_are_wrong


def _case(
    side: OpenSide,
    prompts: Sequence[list[int]],
    answers: Sequence[Answer],
    scorer: OpenSide,
    oracle: Oracle | None,
    sampling: SamplingParams,
    noise: float,
    words: str,
) -> tuple[Case, Gap]:
    rows, sampled = _rows(prompts, answers)
    scored = scorer.score(rows)
    only_answers = [
        row.where(torch.arange(len(row)) >= len(p), torch.nan) for p, row in zip(prompts, scored, strict=True)
    ]
    gap = measure("sampled", side.name, f"{side.name}, sampled ({words})", only_answers, sampled, rows, side.spell)
    return Case(
        side=side,
        what=f"log-probs of sampled tokens ({words})",
        rows=rows,
        numbers=sampled,
        truth=scored,
        tables=oracle.tables(rows) if oracle is not None else None,
        scorer=scorer.score,
        reference=f"what {scorer.name} says when it scores",
        oracle=oracle,
        noise=noise,
        sampling=sampling,
        prompt_lengths=tuple(map(len, prompts)),
    ), gap


def _rows(prompts: Sequence[list[int]], answers: Sequence[Answer]) -> tuple[list[list[int]], list[Tensor]]:
    """Return prompts with their answers, and what was said of the answers; NaN for the prompts."""
    pairs = list(zip(prompts, answers, strict=True))
    numbers = [torch.cat([torch.full((len(prompt),), torch.nan), answer.numbers]) for prompt, answer in pairs]
    return [[*prompt, *answer.ids] for prompt, answer in pairs], numbers


def _alone(found: Findings, case: Case, gap: Gap, prompts: Sequence[list[int]], seed: int) -> Cause | None:
    """Sample after each prompt alone: is it the company of other prompts that changes the numbers?"""
    side = case.side
    rows, sampled = _rows(prompts, [side.sample([prompt], case.sampling, seed)[0] for prompt in prompts])
    after = measure("sampled", side.name, f"{side.name}, sampled alone", case.scorer(rows), sampled, rows, side.spell)
    explains, changed = after.mean_abs <= case.noise, "sampling: each prompt alone"
    found.experiments.append(
        Experiment("company", side.name, changed, gap.mean_abs, after.mean_abs, after.count, explains)
    )
    if not explains:
        return None
    evidence = (
        f"what {side.name} samples is {gap.mean_abs:.3g} nats a token from its scores if prompts share a call, and "
        f"{after.mean_abs:.2g} if each is alone"
    )
    figures = {"together": gap.mean_abs, "alone": after.mean_abs}
    return Cause("company", side.name, "certain", evidence, COMPANY_ADVICE, figures)


# Where answers end ---------------------------------------------------------------------------------------------------


def compare_ends(
    found: Findings, sides: Sequence[OpenSide], prompts: Sequence[list[int]], oracle: Oracle | None, seed: int
) -> None:
    """Find where greedy answers differ, and sides that end answers at other ids or go on after a stop string."""
    _compare_eos(found, sides, oracle)
    greedy, prompts = SamplingParams(max_new_tokens=TOKENS, temperature=0.0), prompts[:PROMPTS]
    answers: dict[str, list[Answer]] = {}
    for side in sides:
        if not found.may_try("stop-string", f"sampling greedily from {side.name}"):
            continue
        try:
            answers[side.name] = side.sample(prompts, greedy, seed)
            if "stop" in side.can.sampling:
                _check_stop(found, side, prompts, answers[side.name], seed)
        except (CapabilityError, InvalidRequestError) as error:
            found.not_tried["stop-string"] = f"{side.name}: {error}"
    first = sides[0]
    for side in sides[1:]:
        pairs = zip(answers.get(first.name, ()), answers.get(side.name, ()), strict=False)
        for row, (one, other) in enumerate(pairs):
            if one.ids != other.ids:
                found.divergences.append(ids_differ("answer", first, (first.name, side.name), row, one.ids, other.ids))


def _compare_eos(found: Findings, sides: Sequence[OpenSide], oracle: Oracle | None) -> None:
    known = {side.name: frozenset(side.backend.eos_token_ids) for side in sides}
    # A server may not say at which ids it ends answers. That is not the same as ending at none.
    known = {name: ids for name, ids in known.items() if ids}
    if len(set(known.values())) < 2:
        return
    right = oracle.eos_ids() if oracle is not None else frozenset()
    right = right if right in known.values() else frozenset()
    first = next(iter(known))
    against, reference = (right, "the checkpoint") if right else (known[first], first)
    advice = "pass stop_token_ids= with all of them, or open the side with the checkpoint's generation_config.json"
    for name, ids in known.items():
        if ids != against:
            evidence = f"answers of {name} end at the ids {sorted(ids)}, those of {reference} at {sorted(against)}"
            found.causes.append(Cause("ends", name if right else None, "certain", evidence, advice))


def _check_stop(
    found: Findings, side: OpenSide, prompts: Sequence[list[int]], answers: Sequence[Answer], seed: int
) -> None:
    """Sample one of the greedy answers again, with a text from its middle as a stop string."""
    for row, answer in zip(prompts, answers, strict=True):
        for token in answer.ids[1:-4]:
            stop = side.spell(token).strip()
            if len(stop) < 2 or "\ufffd" in stop or stop.startswith("<"):
                continue
            sampling = SamplingParams(max_new_tokens=TOKENS, temperature=0.0, stop=(stop,))
            due = StopStrings.of(sampling, side.backend.tokenizer).after(row).first_end(answer.ids)
            if due is None or due > len(answer.ids) - 4:
                continue
            (ended,) = side.sample([row], sampling, seed)
            if ended.ids[:due] == answer.ids[:due] and len(ended.ids) > due:
                evidence = (
                    f"{side.name} goes on for {len(ended.ids) - due} tokens after the one that completes the stop "
                    f"string {stop!r}, which is number {due} of its answer"
                )
                advice = "pass stop_token_ids=, or compare answers up to the stop string only"
                figures = {"due": due, "ended": len(ended.ids)}
                found.causes.append(Cause("stop-string", side.name, "certain", evidence, advice, figures))
            return

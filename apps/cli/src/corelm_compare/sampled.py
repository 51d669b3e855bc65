"""What a side says of a token when it samples it, against what it says when it scores it.

Sampling is changed in one parameter at a time: the plain distribution, then a temperature, truncation, penalties. If
only the numbers with one of them differ, they are of the distribution that this one makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from corelm.errors import CapabilityError, InvalidRequestError
from corelm.spec import SamplingParams
from corelm_compare.cases import Case, best, judge
from corelm_compare.findings import Findings
from corelm_compare.gaps import distance, measure
from corelm_compare.oracles import Oracle
from corelm_compare.predictions import PREDICTORS
from corelm_compare.records import Cause, Experiment, Gap
from corelm_compare.sides import Answer, OpenSide

Numbers = list[Tensor]
#: Returns the log-probs of rows.
Scorer = Callable[[Sequence[Sequence[int]]], Numbers]
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
_ADVICE = {
    "sampled-differs": "compare the engine's decoding with its prefill: cache, position ids, padding of the prompts",
    "temperature": "the engine returns log-probs after the temperature where the model's own are expected: ask it for "
    'raw ones (vLLM: logprobs_mode="raw_logprobs"; SGLang: SGLANG_RETURN_ORIGINAL_LOGPROB=1)',
    "truncation-in-logprobs": "the engine returns log-probs over the ids that top-k or top-p left: ask it for raw ones",
    "penalties": "the engine returns log-probs after penalties: ask it for raw ones, or leave the penalties out",
}


def probe_sampling(
    side: OpenSide,
    prompts: Sequence[Sequence[int]],
    scorer: OpenSide,
    arbiter: Scorer | None,
    oracle: Oracle | None,
    seed: int,
    noise: float,
    special_ids: tuple[int, ...],
) -> tuple[Findings, bool]:
    """Sample with every probe, score what was sampled, and explain what differs.

    Return what was found, and whether the plain sampled numbers are right while the scores of them are not.

    Args:
        side: the side that samples.
        prompts: the prompts; the first few are used.
        scorer: the side that scores rows: the side itself, or another one if it cannot score.
        arbiter: scores rows as the oracle, or another side, does: it says whether the sampled number or the scored one
            is wrong; None if there is no such.
        oracle: the plain forward, if there is one.
        seed: of the sampling.
        noise: mean |Δ| that is rounding.
        special_ids: ids that may end or begin a row.
    """
    found, scores_are_wrong = Findings(), False
    if not side.samples:
        return found, False
    asked = [list(row) for row in prompts[:PROMPTS]]
    plain_differs = False
    for name, (changes, cause) in PROBES.items():
        sampling = SamplingParams.make({"max_new_tokens": TOKENS, **changes})
        if changes and side.mode == "processed":
            found.not_tried[cause] = f"{side.name} returns processed log-probs only, as it says"
            continue
        try:
            answers = side.sample(asked, sampling, seed)
        except (CapabilityError, InvalidRequestError) as error:
            found.not_tried[cause] = f"{side.name}: {error}"
            continue
        case, gap = _case(side, asked, answers, scorer, oracle, sampling, noise, special_ids, name)
        found.own.append(gap)
        if gap.mean_abs <= noise and not _one_sided_infinities(case):
            continue
        if arbiter is not None:
            truth = arbiter(case.rows)
            if distance(truth, case.numbers)[0] <= noise and not _one_sided_infinities(case):
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
        _explain(found, case, gap, cause, accused, None if changes else (asked, seed, sampling))
    return found, scores_are_wrong


def _case(
    side: OpenSide,
    prompts: Sequence[list[int]],
    answers: Sequence[Answer],
    scorer: OpenSide,
    oracle: Oracle | None,
    sampling: SamplingParams,
    noise: float,
    special_ids: tuple[int, ...],
    name: str,
) -> tuple[Case, Gap]:
    rows = [[*prompt, *answer.ids] for prompt, answer in zip(prompts, answers, strict=True)]
    starts = [len(prompt) for prompt in prompts]
    sampled = [_after(start, answer.numbers) for start, answer in zip(starts, answers, strict=True)]
    scored = scorer.score(rows)
    only_answers = [_from(start, row) for start, row in zip(starts, scored, strict=True)]
    words = "plain" if name == "plain" else ", ".join(f"{key}={value:g}" for key, value in _changes(name).items())
    gap = measure("sampled", side.name, f"{side.name}, sampled ({words})", only_answers, sampled, rows, side.spell)
    case = Case(
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
        special_ids=special_ids,
        eos_ids=tuple(sorted(side.backend.eos_token_ids)),
        sampling=sampling,
        prompt_lengths=tuple(starts),
    )
    return case, gap


def _explain(
    found: Findings,
    case: Case,
    gap: Gap,
    cause: str,
    accused: str | None,
    again: tuple[list[list[int]], int, SamplingParams] | None,
) -> None:
    judgements = [judge(case, made) for name in _TRIED for made in PREDICTORS[name](case)]
    found.experiments += [each.experiment for each in judgements]
    named = best(judgements)
    if named is not None:
        found.causes.append(replace(named.cause(case), side=accused))
        return
    if again is not None and (company := _alone(found, case, gap, *again)) is not None:
        found.causes.append(company)
        return
    apart, tokens = distance(case.truth, case.numbers)
    found.causes.append(
        Cause(
            id=cause,
            side=accused,
            confidence="likely",
            evidence=f"{case.side.name}'s {case.what} are {apart:.3g} nats a token from {case.reference} "
            f"({tokens} tokens)" + ("" if cause == "sampled-differs" else "; those of plain sampling are not"),
            advice=_ADVICE[cause],
            figures={"mean_abs": apart},
        )
    )


def _alone(
    found: Findings, case: Case, gap: Gap, prompts: list[list[int]], seed: int, sampling: SamplingParams
) -> Cause | None:
    """Sample after each prompt alone: is it the company of other prompts that changes the numbers?"""
    side, sampled, rows = case.side, [], []
    for prompt in prompts:
        (answer,) = side.sample([prompt], sampling, seed)
        rows.append([*prompt, *answer.ids])
        sampled.append(_after(len(prompt), answer.numbers))
    after = measure("sampled", side.name, f"{side.name}, sampled alone", case.scorer(rows), sampled, rows, side.spell)
    explains = after.mean_abs <= case.noise
    found.experiments.append(
        Experiment(
            id="company",
            side=side.name,
            changed="sampling: each prompt alone",
            before=gap.mean_abs,
            after=after.mean_abs,
            tokens=after.count,
            explains=explains,
        )
    )
    if not explains:
        return None
    return Cause(
        id="company",
        side=side.name,
        confidence="certain",
        evidence=f"what {side.name} samples is {gap.mean_abs:.3g} nats a token from its scores if prompts share a "
        f"call, and {after.mean_abs:.2g} if each is alone",
        advice="check attention mask, position ids and padding side of the engine's batches; until then send one row a "
        "call",
        figures={"together": gap.mean_abs, "alone": after.mean_abs},
    )


def _one_sided_infinities(case: Case) -> bool:
    return any(bool(torch.isinf(row).any()) for row in case.numbers)


def _changes(name: str) -> dict[str, float]:
    return PROBES[name][0]


def _after(start: int, numbers: Tensor) -> Tensor:
    return torch.cat([torch.full((start,), torch.nan), numbers])


def _from(start: int, row: Tensor) -> Tensor:
    moved = row.clone()
    moved[:start] = torch.nan
    return moved

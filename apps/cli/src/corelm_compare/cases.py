"""`measure`: two scorings of the same tokens become a `Gap`. `Case`: numbers of one side that differ from what they
should be, and `judge`, which tries an explanation of them.

An explanation is a `Prediction`: the numbers that the side would have given if one thing were as it says. It explains
the case if what remains is noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from corelm.kl import k3
from corelm_compare.oracles import Oracle, Rows, Tables
from corelm_compare.records import Cause, Confidence, Experiment, Gap, GapKind, WorstToken
from corelm_compare.sides import OpenSide

#: One tensor a row, float32[len(row)]; NaN where there is no number.
Numbers = Sequence[Tensor]
#: Returns the text of an id.
Spell = Callable[[int], str]

#: Ratios outside these are counted: the bounds that the published figures use.
LOW, HIGH = 0.9, 1.1
#: How many of the tokens that differ most are listed.
_LISTED = 10


def measure(
    kind: GapKind, one: str, other: str, first: Numbers, second: Numbers, ids: Sequence[Sequence[int]], spell: Spell
) -> Gap:
    """Return how far `second` is from `first`, over the tokens that both scored."""
    a, b = flat(first), flat(second)
    there, here = torch.isfinite(a), torch.isfinite(b)
    both = there & here
    lengths = torch.tensor([len(row) for row in first], dtype=torch.int64)
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)[both]
    positions = flat([torch.arange(len(row)) for row in first]).long()[both]
    before, after = a[both], b[both]
    delta = after - before
    size = delta.abs()
    quantiles = [0.0] * 4
    if len(delta):
        quantiles = torch.quantile(size.double(), torch.tensor([0.5, 0.9, 0.99, 0.999], dtype=torch.float64)).tolist()
    ratio = delta.exp()

    worst = []
    for index in size.argsort(descending=True, stable=True)[:_LISTED].tolist():
        row, position = int(rows[index]), int(positions[index])
        token = int(ids[row][position])
        pair = {"one": float(before[index]), "other": float(after[index])}
        worst.append(WorstToken(row=row, position=position, token_id=token, token=spell(token), **pair))
    return Gap(
        kind=kind,
        one=one,
        other=other,
        count=len(delta),
        skipped=int((there ^ here).sum()),
        mean=mean(delta),
        mean_abs=mean(size),
        median_abs=quantiles[0],
        p90=quantiles[1],
        p99=quantiles[2],
        p999=quantiles[3],
        max_abs=float(size.max()) if len(size) else 0.0,
        outside=mean(((ratio < LOW) | (ratio > HIGH)).float()),
        k3=mean(k3(before, after)) if len(delta) else 0.0,
        worst=tuple(worst),
        delta=delta,
        rows=rows,
        positions=positions,
        first=before,
        second=after,
    )


def mean(values: Tensor) -> float:
    """Return the mean; 0 of no values."""
    return float(values.double().mean()) if len(values) else 0.0


def distance(first: Numbers, second: Numbers) -> tuple[float, int]:
    """Return the mean of |Δ| over the tokens that both scored, and how many they are; 0.0 if there are none."""
    a, b = flat(first), flat(second)
    size = (a - b).abs()
    size = size[torch.isfinite(size)]
    return mean(size), len(size)


def flat(rows: Numbers) -> Tensor:
    """Return the numbers of all rows, one row after the other."""
    return torch.cat([row.float() for row in rows]) if rows else torch.zeros(0)


# Cases ----------------------------------------------------------------------------------------------------------------

#: Mean |Δ| in nats up to which float32 differs from float32. Real engines were at most 1e-5 from a plain forward.
FLOAT32_NOISE = 2e-4
#: A prediction explains a case if it leaves at most this part of the difference, and no more than the noise.
_LEFT = 0.2
#: Such a part of a large difference may be left by the other order in which float32 is summed.
_LEFT_OF_LARGE = 0.01
#: A log-prob from here on down may stand for -inf.
_IMPOSSIBLE = -20.0
#: A prediction must say something about so many tokens and such a part of them.
_FEWEST, _COVERED = 8, 0.2


@dataclass(frozen=True, kw_only=True)
class Case:
    """Numbers of a side, and what they should be.

    Attributes:
        what: what they are: "scores", or how they were sampled.
        numbers, truth: the side's, and the reference's; NaN where there is none.
        tables: the logits of the reference; None if it shows none.
        scorer: scores other rows as the reference does.
        reference: its name, for sentences.
        oracle: the plain forward; None if the reference is another side, so that either may be wrong.
        noise: mean |Δ| that counts as nothing.
        sampling: how the numbers were sampled; None for scores.
        prompt_lengths: how many ids of each row are the prompt.
    """

    side: OpenSide
    what: str
    rows: Rows
    numbers: Sequence[Tensor]
    truth: Sequence[Tensor]
    tables: Tables | None
    scorer: Callable[[Rows], list[Tensor]]
    reference: str
    oracle: Oracle | None
    noise: float
    sampling: Any = None
    prompt_lengths: tuple[int, ...] = ()

    @property
    def accused(self) -> str | None:
        """The side that is wrong, if the reference cannot be."""
        return self.side.name if self.oracle is not None else None

    @property
    def distance(self) -> float:
        """Mean |Δ| between the side's numbers and the reference's."""
        return distance(self.truth, self.numbers)[0]

    @property
    def begins_alike(self) -> bool:
        """Whether the numbers after the first id alone agree: attention then has nothing to choose from."""
        off = [abs(float(n[1] - t[1])) for n, t in zip(self.numbers, self.truth, strict=True) if len(n) > 1]
        off = [each for each in off if math.isfinite(each)]
        return not off or sum(off) / len(off) <= max(10 * FLOAT32_NOISE, self.noise)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end an answer of the side."""
        return tuple(sorted(self.side.backend.eos_token_ids))

    @property
    def special_ids(self) -> tuple[int, ...]:
        """The ids that the side's tokenizer, or the checkpoint's, names as special: they may stand for BOS."""
        tokenizers = [self.side.backend.tokenizer, *([self.oracle.tokenizer] if self.oracle is not None else [])]
        found = [getattr(each, name, None) for each in tokenizers for name in ("bos_token_id", "eos_token_id")]
        found += [token for each in tokenizers for token in getattr(each, "all_special_ids", None) or ()]
        size = self.side.can.vocab_size
        return tuple(dict.fromkeys(token for token in found if isinstance(token, int) and 0 <= token < size))


@dataclass(frozen=True)
class Prediction:
    """The numbers that a side would give if one thing were changed in the reference.

    Attributes:
        changed: the one thing, as a phrase: "one id later".
        numbers: what follows from it; NaN where nothing does.
        advice: what to type if it is the cause.
        note: a fitted constant, for example.
        figures: its numbers.
        fitted: how many constants were fitted.
        directed: whether the reference cannot be this change of the side, because the change loses something.
    """

    id: str
    changed: str
    numbers: Sequence[Tensor]
    advice: str
    note: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    fitted: int = 0
    directed: bool = False


def exact(before: float, after: float) -> bool:
    """Return whether a change explains the whole difference. If some is left, there may be a second cause."""
    return after <= min(_LEFT * before, max(FLOAT32_NOISE, _LEFT_OF_LARGE * before))


def judge(case: Case, prediction: Prediction) -> Experiment:
    """Try an explanation: how far are the side's numbers from the reference, and from the prediction?"""
    numbers, truth = flat(case.numbers), flat(case.truth)
    predicted = flat(prediction.numbers)
    # Engines write an impossible id as -inf, or as some number far below all others.
    same_infinity = (predicted == -torch.inf) & (numbers <= _IMPOSSIBLE)
    tried = ~torch.isnan(numbers) & ~torch.isnan(predicted) & ~torch.isnan(truth)
    before = (numbers - truth).abs()[tried & torch.isfinite(numbers) & torch.isfinite(truth)]
    after = torch.where(same_infinity, 0.0, (numbers - predicted).abs())[tried]
    was, left = mean(before), mean(after)
    moved = (predicted - truth).abs()[tried]
    # One that says the same as the reference explains nothing, even if it is a little nearer.
    says = mean(torch.where(torch.isfinite(moved), moved, (numbers - truth).abs()[tried])) >= was / 2
    known = int((~torch.isnan(numbers) & ~torch.isnan(truth)).sum())
    enough = int(tried.sum()) >= min(_FEWEST, known) and int(tried.sum()) >= _COVERED * known
    explains = enough and says and was > case.noise and left <= case.noise and left <= _LEFT * was
    changed = f"{case.what}: {case.reference} with {prediction.changed}"
    tokens = int(tried.sum())
    return Experiment(prediction.id, case.side.name, changed, was, left, tokens, explains, prediction.note)


def cause_of(case: Case, judged: Sequence[tuple[Prediction, Experiment]]) -> Cause | None:
    """Return the cause that leaves least; of equal ones that with fewest fitted constants, then the first."""
    explaining = [each for each in judged if each[1].explains]
    if not explaining:
        return None
    most = max(2 * min(done.after for _, done in explaining), FLOAT32_NOISE / 10)
    made, done = min((each for each in explaining if each[1].after <= most), key=lambda each: each[0].fitted)
    confidence: Confidence = "certain" if exact(done.before, done.after) and case.oracle is not None else "likely"
    fitted = f" ({made.note})" if made.note else ""
    evidence = (
        f"{case.side.name}'s {case.what} are {done.before:.3g} nats a token from {case.reference}, and "
        f"{done.after:.2g} from {case.reference} with {made.changed}{fitted}, over {done.tokens} tokens"
    )
    accused = case.side.name if made.directed else case.accused
    if accused is None:
        evidence += "; without an oracle it may be the other way round"
    figures = {"before": done.before, "after": done.after, "tokens": done.tokens, **made.figures}
    return Cause(made.id, accused, confidence, evidence, made.advice, figures)

"""`Explainer`: which one change takes the difference between the sides' scores away?"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike

from torch import Tensor

from corelm_compare.cases import Case, best, judge
from corelm_compare.findings import Findings
from corelm_compare.gaps import distance, measure
from corelm_compare.measurements import Measurements
from corelm_compare.oracles import Oracle, Tables, chosen
from corelm_compare.own_distance import best_numbers
from corelm_compare.precision import HALVES, explain, halves, quantized
from corelm_compare.predictions import PREDICTORS
from corelm_compare.predictions.variants import begins_alike
from corelm_compare.records import Cause, Gap
from corelm_compare.residuals import adapter, earlier_weights, fresh_prefix, long_rows, other_weights
from corelm_compare.sides import OpenSide

#: Causes whose side does not say the same twice.
_UNSTEADY = frozenset({"not-deterministic", "prefix-cache", "company"})
#: A token may differ by so many times the mean that is allowed: 0.1 nats in float32.
_TAIL = 500
#: Explanations that need the reference's logits.
_OF_LOGITS = ("scale", "vocab-padding", "renormalized", "eos-suppressed")


class Explainer:
    """Explains the differences between scores.

    Args:
        made: what the sides said.
        found: where what is found is added.
        checkpoints: folders of other weights that a side may hold.
    """

    def __init__(self, made: Measurements, found: Findings, checkpoints: Sequence[str | PathLike[str]]) -> None:
        self._made, self._found, self._checkpoints = made, found, checkpoints

    def explain(self, gaps: Sequence[Gap]) -> None:
        """Explain each side that is not where the reference is, if the sides differ at all."""
        differing = [gap for gap in gaps if gap.kind == "sides" and not self._agree(gap)]
        if not differing:
            self._note_common_distance(gaps)
            return
        if self._made.truth is None:
            for gap in differing:
                self._explain_pair(gap)
            return
        involved = dict.fromkeys(name for gap in differing for name in (gap.one, gap.other))
        wrong = [side for side in self._made.sides if side.name in involved and self._wrong(side)]
        for side in wrong:
            others_agree = any(not self._wrong(other) for other in self._made.sides if other is not side)
            self._explain_side(self._case(side), others_agree)
        if not wrong:
            self._found.unexplained = True
            self._found.notes.append("the sides differ, and in the examined rows none differs from the plain forward")

    def _agree(self, gap: Gap) -> bool:
        """Return whether two sides are within their distances to themselves, in the mean and in the tail."""
        pair = [side for side in self._made.sides if side.name in (gap.one, gap.other)]
        allowed = max(map(self._made.allowed, pair))
        rounded = any(self._made.dtype(side) in HALVES for side in pair)
        # One token in a thousand that is wrong is a fault, and does not show in a mean.
        return gap.mean_abs <= allowed and (rounded or gap.max_abs <= _TAIL * allowed)

    def _note_common_distance(self, gaps: Sequence[Gap]) -> None:
        for gap in gaps:
            if gap.kind == "oracle" and gap.mean_abs > self._made.noise[gap.other]:
                self._found.notes.append(
                    f"{gap.other} agrees with the others, and is {gap.mean_abs:.3g} nats a token from the plain forward"
                )

    def _wrong(self, side: OpenSide) -> bool:
        assert self._made.truth is not None
        gap = measure("oracle", "", "", self._made.truth, self._made.examined_of(side), self._made.examined, str)
        floor = self._made.floor(side)
        return gap.mean_abs > floor or (self._made.dtype(side) not in HALVES and gap.max_abs > _TAIL * floor)

    def _case(self, side: OpenSide) -> Case:
        assert self._made.truth is not None and self._made.oracle is not None
        numbers = self._made.examined_of(side)
        if side.name in self._made.own:
            numbers = best_numbers(self._made.own[side.name], self._made.noise[side.name])
        return Case(
            side=side,
            what="scores",
            rows=self._made.examined,
            numbers=numbers,
            truth=self._made.truth,
            tables=self._made.tables,
            scorer=self._made.oracle.numbers,
            reference="the plain forward",
            oracle=self._made.oracle,
            noise=self._made.noise[side.name],
            special_ids=special_ids(side, self._made.oracle),
            eos_ids=tuple(sorted(side.backend.eos_token_ids)),
        )

    def _explain_side(self, case: Case, others_agree: bool) -> None:
        """Find what takes a side's numbers away from the plain forward."""
        name = case.side.name
        before = distance(case.truth, case.numbers)[0]
        if before <= case.noise and self._made.dtype(case.side) not in HALVES:
            # Alone, or in the first call, the side is right: what it does otherwise has been named. Or a few tokens are
            # wrong, which are too few to try changes on.
            self._found.unexplained |= not self._found.of(name) & _UNSTEADY
            return
        assert case.oracle is not None
        self._made.roundings = self._made.roundings or halves(case.oracle, case.rows)
        rounded = self._made.dtype(case.side) in HALVES
        # What the caller named comes before what is guessed: an update may be as small as rounding.
        if before <= case.noise and self._found.take(*earlier_weights(case, self._checkpoints, rounded)):
            return
        if before <= case.noise and self._found.take(*explain(case, case.side.dtype(), self._made.roundings)):
            return
        named = self._predicted(case)
        if named:
            return
        if self._found.of(name) & _UNSTEADY:
            # The numbers change from call to call, so nothing is learned from how far they are off.
            return
        if case.side.can.score and self._found.take(*fresh_prefix(case)):
            return
        # What the caller named comes before what is guessed: weights with noise may look like quantized ones.
        if before > case.noise and self._found.take(*earlier_weights(case, self._checkpoints, rounded)):
            return
        # Rounded weights change the first number too.
        roundings = [*self._made.roundings, *([] if begins_alike(case) else quantized(case.oracle, case.rows))]
        for found in (
            lambda: explain(case, case.side.dtype(), roundings),
            lambda: adapter(case),
            lambda: long_rows(case),
            lambda: other_weights(case, others_agree),
        ):
            if self._found.take(*found()):
                return
        self._found.unexplained = True

    def _explain_pair(self, gap: Gap) -> None:
        """Without an oracle: which change of one side gives the numbers of the other?"""
        by_name = {side.name: side for side in self._made.sides}
        known = {cause.side for cause in self._found.causes}
        for one, other in ((gap.one, gap.other), (gap.other, gap.one)):
            reference, side = by_name[one], by_name[other]
            if not reference.can.score:
                continue
            case = self._pair_case(reference, side)
            if distance(case.truth, case.numbers)[0] <= case.noise and known & {one, other}:
                return
            if self._predicted(case) or (side.can.score and self._found.take(*fresh_prefix(case))):
                return
            if side.can.score and self._found.take(*adapter(case)):
                return
        if self._dtypes_differ(gap, by_name):
            return
        case = self._pair_case(by_name[gap.one], by_name[gap.other])
        if not self._found.take(*long_rows(case)):
            self._found.unexplained |= not known & {gap.one, gap.other}

    def _pair_case(self, reference: OpenSide, side: OpenSide) -> Case:
        largest = {each.name: self._made.noise[each.name] for each in (reference, side)}
        numbers, truth = (
            best_numbers(self._made.own[each.name], largest[each.name])
            if each.name in self._made.own
            else self._made.examined_of(each)
            for each in (side, reference)
        )
        return Case(
            side=side,
            what="scores",
            rows=self._made.examined,
            numbers=numbers,
            truth=truth,
            tables=self._tables_of(reference, truth),
            scorer=reference.score,
            reference=reference.name,
            oracle=None,
            noise=max(self._made.floor(side), self._made.allowed(side)),
            special_ids=special_ids(side, self._made.oracle),
            eos_ids=tuple(sorted(side.backend.eos_token_ids)),
        )

    def _tables_of(self, reference: OpenSide, truth: Sequence[Tensor]) -> Tables | None:
        """Return the logits of a side, if its scores are those of its logits; None if it returns none."""
        tables = reference.tables(self._made.examined)
        if tables is None:
            return None
        apart = distance(truth, chosen(tables, self._made.examined))[0]
        if apart <= max(self._made.floor(reference), self._made.allowed(reference)):
            return tables
        # With right logits, any cause would seem to lead from its scores to those of a right side.
        self._found.note(f"{reference.name}'s scores are {apart:.3g} nats a token from the log-probs of its own logits")
        return None

    def _dtypes_differ(self, gap: Gap, by_name: dict[str, OpenSide]) -> bool:
        low = [name for name in (gap.one, gap.other) if by_name[name].dtype() in HALVES]
        allowed = max((self._made.noise[name] for name in low), default=0.0)
        if not low or gap.mean_abs > allowed or abs(gap.mean) > gap.mean_abs / 2:
            return False
        self._found.causes.append(
            Cause(
                id="dtype",
                side=low[0] if len(low) == 1 else None,
                confidence="possible",
                evidence=f"the dtype of {' and '.join(low)} is {by_name[low[0]].dtype()}; the sides are "
                f"{gap.mean_abs:.3g} nats a token apart, on both sides of 0 (mean {gap.mean:+.2g})",
                advice="open both sides with dtype='float32' to compare anything else, or pass oracle= a folder",
                figures={"mean_abs": gap.mean_abs, "mean": gap.mean},
            )
        )
        return True

    def _predicted(self, case: Case) -> bool:
        judgements = []
        for name, predict in PREDICTORS.items():
            if case.tables is None and name in _OF_LOGITS:
                self._found.not_tried[name] = f"neither an oracle nor logits of {case.reference}"
            for made in predict(case):
                judgements.append(judge(case, made))
        self._found.experiments += [each.experiment for each in judgements]
        named = best(judgements)
        if named is not None:
            self._found.causes.append(named.cause(case))
        return named is not None


def special_ids(side: OpenSide, oracle: Oracle | None) -> tuple[int, ...]:
    """Return the ids that a side's tokenizer, or the checkpoint's, names as special."""
    tokenizers = [side.backend.tokenizer, *([oracle.tokenizer] if oracle is not None else [])]
    found = [getattr(each, name, None) for each in tokenizers for name in ("bos_token_id", "eos_token_id")]
    found += [token for each in tokenizers for token in getattr(each, "all_special_ids", None) or ()]
    size = side.can.vocab_size
    return tuple(dict.fromkeys(token for token in found if isinstance(token, int) and 0 <= token < size))

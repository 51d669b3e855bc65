"""`Explainer`: which one change takes the difference between the sides' scores away?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from os import PathLike

from torch import Tensor

from corelm_compare.cases import Case, distance, measure
from corelm_compare.measurements import Measurements
from corelm_compare.oracles import Tables, chosen
from corelm_compare.precision import HALVES, explain, halves, quantized
from corelm_compare.predictions import PREDICTORS, predicted
from corelm_compare.records import Cause, Gap
from corelm_compare.residuals import (
    Found,
    adapter,
    earlier_weights,
    fresh_prefix,
    long_rows,
    other_model,
    other_weights,
)
from corelm_compare.sides import OpenSide

#: Causes whose side does not say the same twice.
_UNSTEADY = frozenset({"not-deterministic", "prefix-cache", "company"})
#: A token may differ by so many times the mean that is allowed: 0.1 nats in float32.
_TAIL = 500


class Explainer:
    """Explains the differences between scores."""

    def __init__(self, made: Measurements, checkpoints: Sequence[str | PathLike[str]]) -> None:
        self._made, self._found, self._checkpoints = made, made.found, checkpoints

    def explain(self, gaps: Sequence[Gap]) -> None:
        """Explain each side that is not where the reference is, if the sides differ at all."""
        differing = [gap for gap in gaps if gap.kind == "sides" and not self._agree(gap)]
        if not differing:
            for gap in gaps:
                if gap.kind == "oracle" and gap.mean_abs > self._made.noise[gap.other]:
                    apart = f"is {gap.mean_abs:.3g} nats a token from the plain forward"
                    self._found.note(f"{gap.other} agrees with the others, and {apart}")
            return
        if self._made.truth is None:
            for gap in differing:
                self._explain_pair(gap)
            return
        involved = {name for gap in differing for name in (gap.one, gap.other)}
        wrong = [side for side in self._made.sides if side.name in involved and self._wrong(side)]
        self._made.expect_explanations(len(wrong))
        for side in wrong:
            others_agree = any(not self._wrong(other) for other in self._made.sides if other is not side)
            self._explain_side(side, others_agree)
        if not wrong:
            self._found.unexplained = True
            self._found.note("the sides differ, and in the examined rows none differs from the plain forward")

    def _agree(self, gap: Gap) -> bool:
        """Return whether two sides are within their distances to themselves, in the mean and in the tail."""
        pair = [side for side in self._made.sides if side.name in (gap.one, gap.other)]
        allowed = max(map(self._made.allowed, pair))
        rounded = any(self._made.dtype(side) in HALVES for side in pair)
        # One token in a thousand that is wrong is a fault, and does not show in a mean.
        return gap.mean_abs <= allowed and (rounded or gap.max_abs <= _TAIL * allowed)

    def _wrong(self, side: OpenSide) -> bool:
        assert self._made.truth is not None
        gap = measure("oracle", "", "", self._made.truth, self._made.examined_of(side), self._made.examined, str)
        floor = self._made.floor(side)
        return gap.mean_abs > floor or (self._made.dtype(side) not in HALVES and gap.max_abs > _TAIL * floor)

    def _explain_side(self, side: OpenSide, others_agree: bool) -> None:
        made, found = self._made, self._found
        assert made.truth is not None and made.oracle is not None
        case = Case(
            side=side,
            what="scores",
            rows=made.examined,
            numbers=made.best_of(side),
            truth=made.truth,
            tables=made.tables,
            scorer=made.oracle.numbers,
            reference="the plain forward",
            oracle=made.oracle,
            noise=made.noise[side.name],
        )
        rounded, small = made.dtype(side) in HALVES, case.distance <= case.noise
        if small and not rounded:
            # Alone, or in the first call, the side is right: what it does otherwise has been named. Or a few tokens are
            # wrong, which are too few to try changes on.
            found.unexplained |= not found.of(side.name) & _UNSTEADY
            return
        made.roundings = made.roundings or halves(made.oracle, case.rows)
        earlier = partial(earlier_weights, checkpoints=self._checkpoints, rounded=rounded)
        # Try the caller's checkpoints before guessing: an update may be as small as rounding, and weights with noise
        # may look like quantized ones.
        if self._checkpoints and small and self._try("stale-weights", case, earlier):
            return
        if not small and self._of_other_model(case):
            return
        untried = bool(self._checkpoints) and found.clock.spent
        if small and not untried and found.take(*explain(case, side.dtype(), made.roundings)):
            return
        if found.take([], predicted(found, case, PREDICTORS)):
            return
        if found.of(side.name) & _UNSTEADY:
            # The numbers change from call to call, so nothing is learned from how far they are off.
            return
        if side.can.score and self._try("prefix-cache", case, fresh_prefix):
            return
        if self._checkpoints and not small and self._try("stale-weights", case, earlier):
            return
        found.unexplained |= not (
            self._try("quantized", case, self._rounded)
            or self._try("wrong-adapter", case, adapter)
            or self._try("chunked-prefill", case, long_rows)
            or self._try("other-weights", case, partial(other_weights, others_agree=others_agree))
        )

    def _of_other_model(self, case: Case) -> bool:
        """Try the model that the side was opened with, if it is another one: one pass, and no guess."""
        folder, oracle = case.side.folder, case.oracle
        if (
            folder is None
            or oracle is None
            or folder.samefile(oracle.folder)
            or str(folder) in map(str, self._checkpoints)
        ):
            return False
        # The same weights, saved in a lower precision, are in another folder as well.
        if explain(case, case.side.dtype(), self._made.roundings)[1] is not None:
            return False
        return self._try("other-weights", case, partial(other_model, folder=folder))

    def _rounded(self, case: Case) -> Found:
        """Try dtypes and, as rounded weights change the first number too, quantized weights."""
        roundings = [*self._made.roundings]
        if not case.begins_alike and case.oracle is not None:
            for rounding in quantized(case.oracle, case.rows):
                roundings.append(rounding)
                if not self._found.may_try("quantized", "trying quantized weights"):
                    break
        return explain(case, case.side.dtype(), roundings)

    def _try(self, id: str, case: Case, explanation: Callable[[Case], Found]) -> bool:
        """Try an explanation if there is time. Return whether it is the cause."""
        return self._found.may_try(id, f"explaining {case.side.name}: {id}") and self._found.take(*explanation(case))

    def _explain_pair(self, gap: Gap) -> None:
        """Without an oracle: which change of one side gives the numbers of the other?"""
        by_name = {side.name: side for side in self._made.sides}
        pair, known = {gap.one, gap.other}, {cause.side for cause in self._found.causes}
        for one, other in ((gap.one, gap.other), (gap.other, gap.one)):
            side = by_name[other]
            if not by_name[one].can.score:
                continue
            case = self._pair_case(by_name[one], side)
            if case.distance <= case.noise and known & pair:
                return
            if self._found.take([], predicted(self._found, case, PREDICTORS)):
                return
            if side.can.score and self._try("prefix-cache", case, fresh_prefix):
                return
            if side.can.score and self._try("wrong-adapter", case, adapter):
                return
        # Not if there was no time for the other explanations: a difference as small as rounding may have any of them.
        if self._found.may_try("dtype", "comparing dtypes") and self._dtypes_differ(gap, by_name):
            return
        if not self._try("chunked-prefill", self._pair_case(by_name[gap.one], by_name[gap.other]), long_rows):
            self._found.unexplained |= not known & pair

    def _pair_case(self, reference: OpenSide, side: OpenSide) -> Case:
        truth = self._made.best_of(reference)
        return Case(
            side=side,
            what="scores",
            rows=self._made.examined,
            numbers=self._made.best_of(side),
            truth=truth,
            tables=self._tables_of(reference, truth),
            scorer=reference.score,
            reference=reference.name,
            oracle=None,
            noise=max(self._made.floor(side), self._made.allowed(side)),
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
        evidence = (
            f"the dtype of {' and '.join(low)} is {by_name[low[0]].dtype()}; the sides are {gap.mean_abs:.3g} nats a "
            f"token apart, on both sides of 0 (mean {gap.mean:+.2g})"
        )
        advice = "open both sides with dtype='float32' to compare anything else, or pass oracle= a folder"
        figures = {"mean_abs": gap.mean_abs, "mean": gap.mean}
        accused = low[0] if len(low) == 1 else None
        self._found.causes.append(Cause("dtype", accused, "possible", evidence, advice, figures))
        return True

"""`Trial`: one comparison from the first question to the verdict."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike

import torch
from torch import Tensor

from corelm.compare.cases import FLOAT32_NOISE, Case, best, judge
from corelm.compare.ends import end_causes
from corelm.compare.gaps import distance, measure
from corelm.compare.material import EXAMINED, Material
from corelm.compare.oracles import Oracle, Rows, affordable, chosen
from corelm.compare.own_distance import OwnDistances, best_numbers, measure_own, own_faults
from corelm.compare.precision import HALVES, Rounding, explain, halves, noise_of, quantized
from corelm.compare.predictions import PREDICTORS
from corelm.compare.records import Cause, Comparison, Divergence, Experiment, Gap, Row, Verdict
from corelm.compare.residuals import adapter, earlier_weights, fresh_prefix, long_rows, other_weights
from corelm.compare.sampled import probe_sampling
from corelm.compare.sides import OpenSide
from corelm.compare.texts import text_causes

#: How far apart a side may be from itself before its distance is a fault, as a multiple of its noise.
_OWN = 2.0
#: Causes whose side does not say the same twice.
_UNSTEADY = ("not-deterministic", "prefix-cache", "company")


class Trial:
    """Asks all sides, compares, explains.

    Args:
        sides: the engines.
        material: what they are asked.
        oracle: the plain forward, if there is one.
        checkpoints: folders of other weights that a side may hold.
        seed: of what is sampled.
        tolerance: the caller's; None to measure.
    """

    def __init__(
        self,
        sides: Sequence[OpenSide],
        material: Material,
        oracle: Oracle | None,
        checkpoints: Sequence[str | PathLike[str]],
        seed: int,
        tolerance: float | None,
    ) -> None:
        self.sides, self.material, self.oracle = sides, material, oracle
        self._checkpoints, self._seed, self._tolerance = checkpoints, seed, tolerance
        self.rows = [source.ids for source in material.rows]
        self.numbers: dict[str, list[Tensor]] = {}
        self.own: dict[str, OwnDistances] = {}
        self.noise: dict[str, float] = {}
        self.experiments: list[Experiment] = []
        self.causes: list[Cause] = []
        self.divergences: list[Divergence] = []
        self.own_gaps: list[Gap] = []
        self.not_tried: dict[str, str] = {}
        self.notes: list[str] = []
        self._roundings: list[Rounding] = []
        self._unexplained = False

    def run(self, notes: Sequence[str], started: float) -> Comparison:
        """Ask everything, and return what was found."""
        self.notes += notes
        self._texts()
        self._scores()
        self._choose_examined()
        self._measure_own()
        gaps = self._gaps()
        self._explain_scores(gaps)
        self._sampled()
        self._ends()
        return Comparison(
            sides=tuple(side.record() for side in self.sides),
            rows=tuple(self._records()),
            gaps=tuple(gaps),
            own=tuple(self.own_gaps),
            tolerances={side.name: self._allowed(side) for side in self.sides},
            divergences=tuple(self.divergences),
            experiments=tuple(self.experiments),
            causes=tuple(_sorted(self.causes)),
            ruled_out=self._ruled_out(),
            not_tried=self.not_tried,
            notes=(*self.notes, *(note for side in self.sides for note in side.notes)),
            oracle=None if self.oracle is None else str(self.oracle.folder),
            seed=self._seed,
            seconds=time.monotonic() - started,
            verdict=self._verdict(),
        )

    # What is asked ---------------------------------------------------------------------------------------------------

    def _texts(self) -> None:
        divergences, causes = text_causes(self.material.prompts, self.sides, self.oracle)
        self.divergences += divergences
        self.causes += causes

    def _scores(self) -> None:
        for side in self.sides:
            if side.can.score:
                self.numbers[side.name] = side.score(self.rows)
            else:
                self.numbers[side.name] = [self._said(side, n) for n in range(len(self.rows))]

    def _said(self, side: OpenSide, row: int) -> Tensor:
        """Return what a side that cannot score said of a row when it sampled it."""
        source = self.material.rows[row]
        numbers = torch.full((len(source.ids),), torch.nan)
        if source.sampled_by == side.name:
            numbers[source.prompt_length :] = torch.tensor(source.numbers)
        return numbers

    def _choose_examined(self) -> None:
        """Take the rows made of others, and the first of the caller's, as far as their logits fit into memory."""
        made = [n for n, source in enumerate(self.material.rows) if source.text.startswith("(made")]
        given = [n for n in range(len(self.rows)) if n not in made]
        index = sorted([*given[: EXAMINED - len(made)], *made])
        vocabulary = max(side.can.vocab_size for side in self.sides)
        kept = affordable([self.rows[n] for n in index], vocabulary)
        self.index = [index[n] for n in kept]
        if len(self.index) < len(self.rows):
            self.notes.append(f"causes are looked for in {len(self.index)} of {len(self.rows)} rows; all are compared")

    def _examined(self, side: OpenSide) -> list[Tensor]:
        return [self.numbers[side.name][n] for n in self.index]

    @property
    def examined(self) -> Rows:
        """The rows in which causes are looked for."""
        return [self.rows[n] for n in self.index]

    def _measure_own(self) -> None:
        self.tables = self.oracle.tables(self.examined) if self.oracle is not None else None
        self.truth = chosen(self.tables, self.examined) if self.tables is not None else None
        wanted = {dtype for side in self.sides if (dtype := side.dtype()) in HALVES}
        if self.oracle is not None and wanted:
            self._roundings = halves(self.oracle, self.examined)
        for side in self.sides:
            noise = noise_of(side.dtype(), self._roundings)
            self.noise[side.name] = noise
            if not side.can.score:
                continue
            # If all rows are examined, the first call is the same as the next. Else it had more company.
            whole = len(self.index) == len(self.rows)
            first = self._examined(side) if whole else side.score(self.examined)
            own = measure_own(side, self.examined, first)
            self.own[side.name] = own
            self.own_gaps += own.gaps
            experiments, causes = own_faults(own, self.truth, self._largest_own(side))
            self.experiments += experiments
            self.causes += causes

    def _largest_own(self, side: OpenSide) -> float:
        """Return the largest distance of a side to itself that is rounding."""
        if side.dtype() is not None or self.oracle is None or self.truth is None:
            return self.noise[side.name]
        # The dtype is not known: if the numbers are those of float32 in any of the calls, it is float32.
        return self.noise[side.name]

    def _allowed(self, side: OpenSide) -> float:
        """Return mean |Δ| up to which another side agrees with this one."""
        if self._tolerance is not None:
            return self._tolerance
        own = self.own.get(side.name)
        return max(FLOAT32_NOISE, _OWN * own.noise(self.noise[side.name]) if own is not None else 0.0)

    def _gaps(self) -> list[Gap]:
        spell = self.sides[0].spell
        gaps = []
        for one, other in itertools.combinations(self.sides, 2):
            first, second = self.numbers[one.name], self.numbers[other.name]
            gap = measure("sides", one.name, other.name, first, second, self.rows, spell)
            gaps.append(gap)
            self._first_divergences(one, other, first, second)
        if self.truth is not None:
            for side in self.sides:
                found = self._examined(side)
                gaps.append(measure("oracle", "plain forward", side.name, self.truth, found, self.examined, spell))
        return gaps

    def _first_divergences(
        self, one: OpenSide, other: OpenSide, first: Sequence[Tensor], second: Sequence[Tensor]
    ) -> None:
        allowed = max(self._allowed(one), self._allowed(other))
        for row, (a, b) in enumerate(zip(first, second, strict=True)):
            off = ((a - b).abs() > 10 * allowed).nonzero()
            if not len(off):
                continue
            at = int(off[0])
            ids = self.rows[row]
            self.divergences.append(
                Divergence(
                    what="numbers",
                    one=one.name,
                    other=other.name,
                    row=row,
                    position=at,
                    first=float(a[at]),
                    second=float(b[at]),
                    text="".join(one.spell(token) for token in ids[max(0, at - 5) : at]),
                )
            )

    # What explains it ------------------------------------------------------------------------------------------------

    def _explain_scores(self, gaps: Sequence[Gap]) -> None:
        """Explain each side that is not where the reference is, if the sides differ at all."""
        differing = [gap for gap in gaps if gap.kind == "sides" and not self._agree(gap.one, gap.other, gap.mean_abs)]
        if not differing:
            self._note_common_distance(gaps)
            return
        if self.truth is None:
            for gap in differing:
                self._explain_pair(gap)
            return
        involved = dict.fromkeys(name for gap in differing for name in (gap.one, gap.other))
        wrong = [side for side in self.sides if side.name in involved and self._wrong(side)]
        for side in wrong:
            others_agree = any(not self._wrong(other) for other in self.sides if other is not side)
            self._explain_side(self._case(side), others_agree)
        if not wrong:
            self._unexplained = True
            self.notes.append("the sides differ from each other by more than from the plain forward")

    def _agree(self, one: str, other: str, size: float) -> bool:
        by_name = {side.name: side for side in self.sides}
        return size <= max(self._allowed(by_name[one]), self._allowed(by_name[other]))

    def _note_common_distance(self, gaps: Sequence[Gap]) -> None:
        for gap in gaps:
            if gap.kind == "oracle" and gap.mean_abs > self.noise[gap.other]:
                self.notes.append(
                    f"{gap.other} agrees with the others, and is {gap.mean_abs:.3g} nats a token from the plain forward"
                )

    def _wrong(self, side: OpenSide) -> bool:
        assert self.truth is not None
        return distance(self.truth, self._examined(side))[0] > FLOAT32_NOISE

    def _case(self, side: OpenSide) -> Case:
        assert self.truth is not None and self.oracle is not None
        numbers = self._examined(side)
        if side.name in self.own:
            numbers = best_numbers(self.own[side.name], self._largest_own(side))
        return Case(
            side=side,
            what="scores",
            rows=self.examined,
            numbers=numbers,
            truth=self.truth,
            tables=self.tables,
            scorer=self.oracle.numbers,
            reference="the plain forward",
            oracle=self.oracle,
            noise=self.noise[side.name],
            special_ids=self._special_ids(side),
            eos_ids=tuple(sorted(side.backend.eos_token_ids)),
        )

    def _special_ids(self, side: OpenSide) -> tuple[int, ...]:
        tokenizers = [side.backend.tokenizer, *([self.oracle.tokenizer] if self.oracle is not None else [])]
        found = [getattr(each, name, None) for each in tokenizers for name in ("bos_token_id", "eos_token_id")]
        found += [token for each in tokenizers for token in getattr(each, "all_special_ids", None) or ()]
        size = side.can.vocab_size
        return tuple(dict.fromkeys(token for token in found if isinstance(token, int) and 0 <= token < size))

    def _explain_side(self, case: Case, others_agree: bool) -> None:
        """Find what takes a side's numbers away from the plain forward."""
        name = case.side.name
        before = distance(case.truth, case.numbers)[0]
        if before <= case.noise and case.side.dtype() not in HALVES:
            # Alone, or in the first call, the side is right: what it does otherwise has been named.
            self._unexplained |= not any(cause.side == name for cause in self.causes)
            return
        assert case.oracle is not None
        self._roundings = self._roundings or halves(case.oracle, case.rows)
        if before <= case.noise and self._take(*explain(case, case.side.dtype(), self._roundings)):
            return
        named = self._predicted(case)
        if named:
            return
        if any(cause.side == name and cause.id in _UNSTEADY for cause in self.causes):
            # The numbers change from call to call, so nothing is learned from how far they are off.
            return
        if case.side.can.score and self._take(*fresh_prefix(case)):
            return
        roundings = [*self._roundings, *quantized(case.oracle, case.rows)]
        for found in (
            lambda: explain(case, case.side.dtype(), roundings),
            lambda: adapter(case),
            lambda: earlier_weights(case, self._checkpoints),
            lambda: long_rows(case),
            lambda: other_weights(case, others_agree),
        ):
            if self._take(*found()):
                return
        self._unexplained |= not any(cause.side == name for cause in self.causes)

    def _explain_pair(self, gap: Gap) -> None:
        """Without an oracle: which change of one side gives the numbers of the other?"""
        by_name = {side.name: side for side in self.sides}
        known = {cause.side for cause in self.causes}
        for one, other in ((gap.one, gap.other), (gap.other, gap.one)):
            reference, side = by_name[one], by_name[other]
            if not reference.can.score:
                continue
            case = self._pair_case(reference, side)
            if distance(case.truth, case.numbers)[0] <= case.noise and known & {one, other}:
                return
            if self._predicted(case) or (side.can.score and self._take(*fresh_prefix(case))):
                return
            if side.can.score and self._take(*adapter(case)):
                return
        if self._dtypes_differ(gap, by_name):
            return
        case = self._pair_case(by_name[gap.one], by_name[gap.other])
        if not self._take(*long_rows(case)):
            self._unexplained |= not known & {gap.one, gap.other}

    def _pair_case(self, reference: OpenSide, side: OpenSide) -> Case:
        largest = {each.name: self._largest_own(each) for each in (reference, side)}
        numbers, truth = (
            best_numbers(self.own[each.name], largest[each.name]) if each.name in self.own else self._examined(each)
            for each in (side, reference)
        )
        return Case(
            side=side,
            what="scores",
            rows=self.examined,
            numbers=numbers,
            truth=truth,
            tables=reference.tables(self.examined),
            scorer=reference.score,
            reference=reference.name,
            oracle=None,
            noise=max(self.noise[side.name] if side.dtype() not in HALVES else 0.0, self._allowed(side)),
            special_ids=self._special_ids(side),
            eos_ids=tuple(sorted(side.backend.eos_token_ids)),
        )

    def _dtypes_differ(self, gap: Gap, by_name: dict[str, OpenSide]) -> bool:
        low = [name for name in (gap.one, gap.other) if by_name[name].dtype() in HALVES]
        allowed = max((self.noise[name] for name in low), default=0.0)
        if not low or gap.mean_abs > allowed or abs(gap.mean) > gap.mean_abs / 2:
            return False
        self.causes.append(
            Cause(
                id="dtype",
                side=low[0] if len(low) == 1 else None,
                confidence="possible",
                evidence=f"the dtype of {' and '.join(low)} is {by_name[low[0]].dtype()}; the sides are {gap.mean_abs:.3g} "
                f"nats a token apart, on both sides of 0 (mean {gap.mean:+.2g})",
                advice="open both sides with dtype='float32' to compare anything else, or pass oracle= a folder",
                figures={"mean_abs": gap.mean_abs, "mean": gap.mean},
            )
        )
        return True

    def _predicted(self, case: Case) -> bool:
        judgements = []
        for name, predict in PREDICTORS.items():
            if case.tables is None and name in ("scale", "vocab-padding", "renormalized", "eos-suppressed"):
                self.not_tried[name] = f"neither an oracle nor logits of {case.reference}"
            for made in predict(case):
                judgements.append(judge(case, made))
        self.experiments += [each.experiment for each in judgements]
        named = best(judgements)
        if named is not None:
            self.causes.append(named.cause(case))
        return named is not None

    def _take(self, experiments: Sequence[Experiment], cause: Cause | None) -> bool:
        self.experiments += experiments
        if cause is not None:
            self.causes.append(cause)
        return cause is not None

    # Sampling --------------------------------------------------------------------------------------------------------

    def _sampled(self) -> None:
        scorers = [side for side in self.sides if side.can.score]
        for side in self.sides:
            scorer = side if side.can.score else next((each for each in scorers if each is not side), None)
            if scorer is None or any(
                cause.side == side.name and cause.id == "not-deterministic" for cause in self.causes
            ):
                continue
            noise = max(self.noise[side.name], self._rounding_of(side))
            ids = self._special_ids(side)
            others = [each.score for each in scorers if each is not scorer and each is not side]
            judge_of_both = self.oracle.numbers if self.oracle is not None else others[0] if others else None
            found = probe_sampling(
                side, self.material.prompt_ids, scorer.score, judge_of_both, self.oracle, self._seed, noise, ids
            )
            if found.scores_are_wrong:
                # Its scores contradict what it says when it samples, and the other side agrees with the latter.
                self.causes = [replace(c, side=side.name) if c.side is None else c for c in self.causes]
            self.own_gaps += found.gaps
            self.experiments += found.experiments
            self.causes += found.causes
            self.not_tried |= found.not_tried

    def _rounding_of(self, side: OpenSide) -> float:
        """Return what a side that was found to round may be apart from itself."""
        sizes = [c.figures.get("mean_abs", 0.0) for c in self.causes if c.side == side.name and c.id == "dtype"]
        return 2 * max(sizes, default=0.0)

    def _ends(self) -> None:
        samplers = [side for side in self.sides if side.samples]
        if len(samplers) > 1:
            divergences, causes, not_tried = end_causes(samplers, self.material.prompt_ids, self.oracle, self._seed)
            self.divergences += divergences
            self.causes += causes
            self.not_tried |= not_tried

    # What comes of it ------------------------------------------------------------------------------------------------

    def _records(self) -> list[Row]:
        spell = self.sides[0].spell
        known: dict[int, str] = {}
        for token in {token for row in self.rows for token in row}:
            known[token] = spell(token)
        return [
            Row(
                ids=tuple(source.ids),
                prompt_length=source.prompt_length,
                tokens=tuple(known[token] for token in source.ids),
                text=source.text or "".join(known[token] for token in source.ids[: source.prompt_length]),
                kind=source.kind,
                sampled_by=source.sampled_by,
                numbers={name: tuple(found[n].tolist()) for name, found in self.numbers.items()},
            )
            for n, source in enumerate(self.material.rows)
        ]

    def _ruled_out(self) -> tuple[str, ...]:
        named = {cause.id for cause in self.causes}
        tried = dict.fromkeys(each.id for each in self.experiments if not each.explains)
        return tuple(name for name in tried if name not in named)

    def _verdict(self) -> Verdict:
        ids = {cause.id for cause in self.causes}
        if self._unexplained:
            return "unexplained" if not ids - {"dtype"} else "differ"
        if not ids:
            return "agree"
        return "rounding" if ids == {"dtype"} else "differ"


def _sorted(causes: Sequence[Cause]) -> list[Cause]:
    order = ("certain", "likely", "possible")
    unique = {(cause.id, cause.side): cause for cause in reversed(causes)}
    return sorted(list(unique.values())[::-1], key=lambda cause: order.index(cause.confidence))

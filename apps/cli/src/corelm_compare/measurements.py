"""`Measurements`: what every side says of the rows, how far it is from itself, and what counts as noise."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from corelm_compare.cases import FLOAT32_NOISE
from corelm_compare.findings import Findings
from corelm_compare.gaps import distance, measure
from corelm_compare.material import EXAMINED, Material
from corelm_compare.oracles import Oracle, Rows, Tables, affordable, chosen
from corelm_compare.own_distance import OwnDistances, measure_own, own_faults
from corelm_compare.precision import HALVES, Rounding, halves, noise_of, related_dtype
from corelm_compare.records import Divergence, Gap
from corelm_compare.sides import OpenSide

#: Sides agree within this multiple of their distances to themselves.
_OWN = 2.0


class Measurements:
    """Asks every side to score the rows, in several ways.

    Args:
        sides: the engines.
        material: the rows.
        oracle: the plain forward, if there is one.
        tolerance: the caller's; None to measure.
        findings: where what is found is added.

    Attributes:
        sides, material, oracle: as given.
        rows: the ids of the rows.
        index: which rows are examined: those in which causes are looked for.
        numbers: each side's log-probs of all rows.
        tables, truth: the logits and the log-probs of the oracle for the examined rows; None without one.
        own: each side's distances to itself, if it scores.
        noise: mean |Δ| that is rounding, for each side.
        own_noise: the same for its distances to itself: larger if the side's dtype is not known.
        roundings: what low precision does to the examined rows.
    """

    def __init__(
        self,
        sides: Sequence[OpenSide],
        material: Material,
        oracle: Oracle | None,
        tolerance: float | None,
        findings: Findings,
    ) -> None:
        self.sides, self.material, self.oracle, self._tolerance = sides, material, oracle, tolerance
        self.rows = [source.ids for source in material.rows]
        self.numbers: dict[str, list[Tensor]] = {}
        self.own: dict[str, OwnDistances] = {}
        self.noise: dict[str, float] = {}
        self.own_noise: dict[str, float] = {}
        self._assumed: dict[str, str | None] = {}
        self.roundings: list[Rounding] = []
        self.index: list[int] = []
        self._scores()
        self._choose_rows(findings)
        self.tables: Tables | None = oracle.tables(self.examined) if oracle is not None else None
        self.truth = chosen(self.tables, self.examined) if self.tables is not None else None
        self._measure_own(findings)

    def _scores(self) -> None:
        for side in self.sides:
            if side.can.score:
                self.numbers[side.name] = side.score(self.rows)
            else:
                self.numbers[side.name] = [self._said(side, n) for n in range(len(self.rows))]

    def unanswered(self) -> Iterator[str]:
        """Return as sentences what no number says anything about: rows that a side failed on, pairs without a token."""
        for side in self.sides:
            rows = [n for n, numbers in enumerate(self.numbers[side.name]) if self._failed(side, n, numbers)]
            if rows:
                more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
                yield f"{side.name} did not score row {', '.join(map(str, rows[:5]))}{more}; its error is in a note"
        for one, other in itertools.combinations(self.sides, 2):
            pairs = zip(self.numbers[one.name], self.numbers[other.name], strict=True)
            if not any(bool((torch.isfinite(a) & torch.isfinite(b)).any()) for a, b in pairs):
                names = f"{one.name} and {other.name}"
                yield f"no token of {names} could be compared; pass prompts or completions of more ids"

    def _failed(self, side: OpenSide, row: int, numbers: Tensor) -> bool:
        source = self.material.rows[row]
        # Whether a side takes the long rows that are added here is not the caller's question.
        asked = side.can.score and len(source.ids) > 1 and not source.made_of_others
        return asked and not bool(torch.isfinite(numbers).any())

    def _said(self, side: OpenSide, row: int) -> Tensor:
        """Return what a side that cannot score said of a row when it sampled it."""
        source = self.material.rows[row]
        numbers = torch.full((len(source.ids),), torch.nan)
        if source.sampled_by == side.name:
            numbers[source.prompt_length :] = torch.tensor(source.numbers)
        return numbers

    def _choose_rows(self, findings: Findings) -> None:
        """Take the rows made of others, and those in which sides differ most, as far as their logits fit in memory."""
        made = [n for n, source in enumerate(self.material.rows) if source.made_of_others]
        # Rows that a side does not answer teach nothing, and may be too long for the plain forward as well.
        answered = [
            n
            for n in range(len(self.rows))
            if n not in made and not any(self._failed(side, n, self.numbers[side.name][n]) for side in self.sides)
        ]
        answered.sort(key=self._spread, reverse=True)
        index = [*answered[: EXAMINED - len(made)], *made]
        vocabulary = max(side.can.vocab_size for side in self.sides)
        self.index = sorted(index[n] for n in affordable([self.rows[n] for n in index], vocabulary))
        if len(self.index) < len(self.rows):
            findings.notes.append(
                f"causes are looked for in {len(self.index)} of {len(self.rows)} rows; all are compared"
            )

    def examined_of(self, side: OpenSide) -> list[Tensor]:
        """Return what a side said of the examined rows in the first call."""
        return [self.numbers[side.name][n] for n in self.index]

    @property
    def examined(self) -> Rows:
        """The rows in which causes are looked for."""
        return [self.rows[n] for n in self.index]

    def _spread(self, row: int) -> float:
        """Return the largest |Δ| between two sides in a row."""
        first, *others = (numbers[row] for numbers in self.numbers.values())
        sizes = [(other - first).abs().nan_to_num(0.0) for other in others]
        return max((float(size.max()) for size in sizes if len(size)), default=0.0)

    @property
    def _starts(self) -> list[int]:
        """From where on each examined row is scored late: its prompt's end, or its middle if it is made of others."""
        sources = [self.material.rows[n] for n in self.index]
        return [max(1, len(s.ids) // 2 if s.made_of_others else min(s.prompt_length, len(s.ids) - 1)) for s in sources]

    def _measure_own(self, findings: Findings) -> None:
        doubtful = [side.name for side in self.sides if side.dtype() is None and not self._is_float32(side)]
        if self.oracle is not None and (doubtful or any(side.dtype() in HALVES for side in self.sides)):
            self.roundings = halves(self.oracle, self.examined)
        for side in self.sides:
            if side.name in doubtful:
                self._assumed[side.name] = self._fitting_dtype(side)
            self.noise[side.name] = noise_of(self.dtype(side), self.roundings)
            # Rounding is no fault of a side that does not say how it rounds.
            unknown = side.name in doubtful and self._assumed[side.name] is None
            self.own_noise[side.name] = noise = noise_of("bfloat16" if unknown else self.dtype(side), self.roundings)
            if unknown:
                findings.note(
                    f"{side.name} does not say in which dtype it computes, so less than {noise:.2g} nats a token from "
                    "itself is taken for rounding; open it with dtype="
                )
            if not side.can.score:
                continue
            # If all rows are examined, the first call is the same as the next. Else it had more company.
            whole = len(self.index) == len(self.rows)
            first = self.examined_of(side) if whole else side.score(self.examined)
            own = measure_own(side, self.examined, self._starts, first)
            self.own[side.name] = own
            findings.own += own.gaps
            experiments, causes = own_faults(own, self.truth, noise)
            findings.experiments += experiments
            findings.causes += causes

    def dtype(self, side: OpenSide) -> str | None:
        """Return the dtype that a side says it computes in, or the one whose rounding its numbers show."""
        return side.dtype() or self._assumed.get(side.name)

    def _is_float32(self, side: OpenSide) -> bool:
        """Return whether a side's numbers are the plain forward's."""
        return self.truth is not None and distance(self.truth, self.examined_of(side))[0] <= FLOAT32_NOISE

    def _fitting_dtype(self, side: OpenSide) -> str | None:
        """Return the low precision whose rounding is correlated with that of a side; None if neither is."""
        if self.truth is None:
            return None
        return related_dtype(self.examined_of(side), self.truth, self.roundings)

    def floor(self, side: OpenSide) -> float:
        """Return mean |Δ| from the plain forward that is not even rounding."""
        return self.noise[side.name] if side.dtype() == "tf32" else FLOAT32_NOISE

    def allowed(self, side: OpenSide) -> float:
        """Return mean |Δ| up to which another side agrees with this one."""
        if self._tolerance is not None:
            return self._tolerance
        own = self.own.get(side.name)
        return max(self.floor(side), _OWN * own.noise(self.own_noise[side.name]) if own is not None else 0.0)

    def gaps(self, findings: Findings) -> list[Gap]:
        """Return the gaps between each two sides, and between the oracle and each side."""
        spell = self.sides[0].spell
        gaps = []
        for one, other in itertools.combinations(self.sides, 2):
            first, second = self.numbers[one.name], self.numbers[other.name]
            gap = measure("sides", one.name, other.name, first, second, self.rows, spell)
            gaps.append(gap)
            findings.divergences += self._first_divergences(one, other, first, second)
        if self.truth is not None:
            for side in self.sides:
                found = self.examined_of(side)
                gaps.append(measure("oracle", "plain forward", side.name, self.truth, found, self.examined, spell))
        return gaps

    def _first_divergences(
        self, one: OpenSide, other: OpenSide, first: Sequence[Tensor], second: Sequence[Tensor]
    ) -> list[Divergence]:
        found = []
        allowed = max(self.allowed(one), self.allowed(other))
        for row, (a, b) in enumerate(zip(first, second, strict=True)):
            off = ((a - b).abs() > 10 * allowed).nonzero()
            if not len(off):
                continue
            at = int(off[0])
            ids = self.rows[row]
            found.append(
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
        return found

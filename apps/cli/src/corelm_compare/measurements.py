"""`Measurements`: what every side says of the rows, how far it is from itself, and what counts as noise."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from corelm_compare.cases import FLOAT32_NOISE
from corelm_compare.findings import Findings
from corelm_compare.gaps import distance, measure
from corelm_compare.oracles import Oracle, Rows, Tables, affordable, chosen
from corelm_compare.own_distance import OwnDistances
from corelm_compare.precision import HALVES, Rounding, halves, noise_of, related_dtype
from corelm_compare.prompts import RowSource
from corelm_compare.records import Divergence, Gap
from corelm_compare.sides import OpenSide

#: Sides agree within this multiple of their distances to themselves.
_OWN = 2.0
#: Rows that are examined closely, at most, and at least if the time is short. All are scored.
_MOST, _FEWEST = 10, 3
#: How often the examined rows are scored by each side, and read by the plain forward: if sides agree, and if not.
_SCORED, _READ, _READ_IF_DIFFERENT = 6, 5, 40


class Measurements:
    """Asks every side to score the rows, in several ways.

    Args:
        sides: the engines.
        sources: the rows.
        oracle: the plain forward, if there is one.
        tolerance: the caller's; None to measure.
        found: where what is found is added.

    Attributes:
        sides, sources, oracle, found: as given.
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
        sources: Sequence[RowSource],
        oracle: Oracle | None,
        tolerance: float | None,
        found: Findings,
    ) -> None:
        self.sides, self.sources, self.oracle, self.found, self._tolerance = sides, sources, oracle, found, tolerance
        self.rows = [source.ids for source in sources]
        self.own: dict[str, OwnDistances] = {}
        self.noise: dict[str, float] = {}
        self.own_noise: dict[str, float] = {}
        self._assumed: dict[str, str | None] = {}
        self.roundings: list[Rounding] = []
        self.numbers = {side.name: self._scores(side) for side in sides}
        self.index = self._chosen_rows()
        self._tell_duration()
        self.tables: Tables | None = oracle.tables(self.examined) if oracle is not None else None
        self.truth = chosen(self.tables, self.examined) if self.tables is not None else None
        self._measure_own()

    def _scores(self, side: OpenSide) -> list[Tensor]:
        self.found.clock.step(f"{side.name} scores {len(self.rows)} rows")
        if side.can.score:
            return side.score(self.rows)
        # A side that cannot score says something of the rows that it has sampled.
        numbers = [torch.full((len(row),), torch.nan) for row in self.rows]
        for row, source in zip(numbers, self.sources, strict=True):
            if source.sampled_by == side.name:
                row[source.prompt_length :] = torch.tensor(source.numbers)
        return numbers

    def unanswered(self) -> Iterator[str]:
        """Return as sentences what no number says anything about: rows that a side failed on, pairs without a token."""
        for side in self.sides:
            rows = [n for n in range(len(self.rows)) if self._failed(side, n)]
            if rows:
                more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
                yield f"{side.name} did not score row {', '.join(map(str, rows[:5]))}{more}; its error is in a note"
        for one, other in itertools.combinations(self.sides, 2):
            pairs = zip(self.numbers[one.name], self.numbers[other.name], strict=True)
            if not any(bool((torch.isfinite(a) & torch.isfinite(b)).any()) for a, b in pairs):
                names = f"{one.name} and {other.name}"
                yield f"no token of {names} could be compared; pass prompts or completions of more ids"

    def _failed(self, side: OpenSide, row: int) -> bool:
        source = self.sources[row]
        # Whether a side takes the long rows that are added here is not the caller's question.
        asked = side.can.score and len(source.ids) > 1 and not source.made_of_others
        return asked and not bool(torch.isfinite(self.numbers[side.name][row]).any())

    def _chosen_rows(self) -> list[int]:
        """Take the rows made of others, and those in which sides differ most, as far as memory and time allow."""
        made = [n for n, source in enumerate(self.sources) if source.made_of_others]
        # Rows that a side does not answer teach nothing, and may be too long for the plain forward as well.
        answered = [
            n for n in range(len(self.rows)) if n not in made and not any(self._failed(side, n) for side in self.sides)
        ]
        answered.sort(key=self._spread, reverse=True)
        index = [*answered[: _MOST - len(made)], *made]
        vocabulary = max(side.can.vocab_size for side in self.sides)
        index = [index[n] for n in affordable([self.rows[n] for n in index], vocabulary)]
        if self.found.clock.budget is not None:
            # Half of the time for these, and half for the causes.
            room = (self.found.clock.budget - self.found.clock.seconds) / 2
            while len(index) > _FEWEST and self._duration(index, _READ) > room:
                index.remove(max(index, key=lambda n: len(self.rows[n])))
        if len(index) < len(self.rows):
            self.found.note(f"causes are looked for in {len(index)} of {len(self.rows)} rows; all are compared")
        return sorted(index)

    def _duration(self, index: Sequence[int], passes: int) -> float:
        """Return about how many seconds it takes to examine rows, with so many passes of the plain forward."""
        pace = [side.seconds / max(side.tokens, 1) for side in self.sides]
        plain = passes * max(pace) if self.oracle is not None else 0.0
        return (_SCORED * sum(pace) + plain) * sum(len(self.rows[n]) for n in index)

    def _tell_duration(self) -> None:
        agree, differ = (self._duration(self.index, passes) for passes in (_READ, _READ_IF_DIFFERENT))
        # Sampling takes about as long as what was done so far.
        self.found.clock.expect(agree + self.found.clock.seconds)
        more = f", and up to {differ - agree:.0f} s more if the sides differ" if differ > agree + 1 else ""
        self.found.clock.step(f"examining {len(self.index)} rows{more}")

    def expect_explanations(self, sides: int) -> None:
        """Expect that so many sides are explained."""
        self.found.clock.expect(sides * self._duration(self.index, _READ_IF_DIFFERENT))

    def examined_of(self, side: OpenSide) -> list[Tensor]:
        """Return what a side said of the examined rows in the first call."""
        return [self.numbers[side.name][n] for n in self.index]

    def best_of(self, side: OpenSide) -> list[Tensor]:
        """Return what a side said of the examined rows where nothing else that it did spoils it."""
        own = self.own.get(side.name)
        return self.examined_of(side) if own is None else own.best(self.noise[side.name])

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
        sources = [self.sources[n] for n in self.index]
        return [max(1, len(s.ids) // 2 if s.made_of_others else min(s.prompt_length, len(s.ids) - 1)) for s in sources]

    def _measure_own(self) -> None:
        doubtful = [side.name for side in self.sides if side.dtype() is None and not self._is_float32(side)]
        if self.oracle is not None and (doubtful or any(side.dtype() in HALVES for side in self.sides)):
            self.found.clock.step("the plain forward in low precision")
            self.roundings = halves(self.oracle, self.examined)
        for side in self.sides:
            if side.name in doubtful and self.truth is not None:
                self._assumed[side.name] = related_dtype(self.examined_of(side), self.truth, self.roundings)
            self.noise[side.name] = noise_of(self.dtype(side), self.roundings)
            # Rounding is no fault of a side that does not say how it rounds.
            unknown = side.name in doubtful and self._assumed.get(side.name) is None
            self.own_noise[side.name] = noise = noise_of("bfloat16" if unknown else self.dtype(side), self.roundings)
            if unknown:
                self.found.note(
                    f"{side.name} does not say in which dtype it computes, so less than {noise:.2g} nats a token from "
                    "itself is taken for rounding; open it with dtype="
                )
            if not side.can.score:
                continue
            self.found.clock.step(f"{side.name} scores the same rows again")
            # If all rows are examined, the first call is the same as the next. Else it had more company.
            whole = len(self.index) == len(self.rows)
            first = self.examined_of(side) if whole else side.score(self.examined)
            own = self.own[side.name] = OwnDistances(side, self.examined, self._starts, first)
            self.found.own += own.gaps
            self.found.take(*own.faults(self.truth, noise))

    def dtype(self, side: OpenSide) -> str | None:
        """Return the dtype that a side says it computes in, or the one whose rounding its numbers show."""
        return side.dtype() or self._assumed.get(side.name)

    def _is_float32(self, side: OpenSide) -> bool:
        """Return whether a side's numbers are the plain forward's."""
        return self.truth is not None and distance(self.truth, self.examined_of(side))[0] <= FLOAT32_NOISE

    def floor(self, side: OpenSide) -> float:
        """Return mean |Δ| from the plain forward that is not even rounding."""
        return self.noise[side.name] if side.dtype() == "tf32" else FLOAT32_NOISE

    def allowed(self, side: OpenSide) -> float:
        """Return mean |Δ| up to which another side agrees with this one."""
        if self._tolerance is not None:
            return self._tolerance
        own = self.own.get(side.name)
        return max(self.floor(side), _OWN * own.noise(self.own_noise[side.name]) if own is not None else 0.0)

    def gaps(self) -> list[Gap]:
        """Return the gaps between each two sides, and between the oracle and each side."""
        spell = self.sides[0].spell
        gaps = []
        for one, other in itertools.combinations(self.sides, 2):
            first, second = self.numbers[one.name], self.numbers[other.name]
            gaps.append(measure("sides", one.name, other.name, first, second, self.rows, spell))
            self.found.divergences += self._first_divergences(one, other)
        if self.truth is not None:
            for side in self.sides:
                found = self.examined_of(side)
                gaps.append(measure("oracle", "plain forward", side.name, self.truth, found, self.examined, spell))
        return gaps

    def _first_divergences(self, one: OpenSide, other: OpenSide) -> Iterator[Divergence]:
        allowed = max(self.allowed(one), self.allowed(other))
        for row, (a, b) in enumerate(zip(self.numbers[one.name], self.numbers[other.name], strict=True)):
            off = ((a - b).abs() > 10 * allowed).nonzero()
            if len(off):
                at = int(off[0])
                yield Divergence(
                    what="numbers",
                    one=one.name,
                    other=other.name,
                    row=row,
                    position=at,
                    first=float(a[at]),
                    second=float(b[at]),
                    text="".join(one.spell(token) for token in self.rows[row][max(0, at - 5) : at]),
                )

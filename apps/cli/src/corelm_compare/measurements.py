"""`Measurements`: what every side says of the rows, how far it is from itself, and what counts as noise.

A difference between two sides means something only beyond their distances to themselves. Such a distance that is larger
than rounding is itself a fault of that side, whatever the other side returns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from corelm_compare.cases import FLOAT32_NOISE, distance, measure
from corelm_compare.findings import Findings
from corelm_compare.oracles import Oracle, Rows, Tables, affordable, chosen
from corelm_compare.precision import HALVES, Rounding, halves, noise_of, related_dtype
from corelm_compare.records import Cause, Divergence, Experiment, Gap, GapKind, Row, counted
from corelm_compare.sides import OpenSide

#: Sides agree within this multiple of their distances to themselves.
_OWN = 2.0
#: Rows that are examined closely, at most, and at least if the time is short. All are scored.
_MOST, _FEWEST = 10, 3
#: How often the examined rows are scored by each side, and read by the plain forward: if sides agree, and if not.
_SCORED, _READ, _READ_IF_DIFFERENT = 6, 5, 40
_CACHE = "turn the engine's cache of prefixes off (enable_prefix_caching=False, disable_radix_cache=True)"
COMPANY_ADVICE = (
    "check attention mask, position ids and padding side of the engine's batches; until then send one row a call"
)


class Measurements:
    """Asks every side to score the rows, in several ways.

    Args:
        tolerance: the caller's; None to measure.

    Attributes:
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
        sources: Sequence[Row],
        oracle: Oracle | None,
        tolerance: float | None,
        found: Findings,
    ) -> None:
        self.sides, self.sources, self.oracle, self.found, self._tolerance = sides, sources, oracle, found, tolerance
        self.rows = [list(source.ids) for source in sources]
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
        self.found.clock.step(f"{side.name} scores {counted(self.sources)}")
        if side.can.score:
            return side.score(self.rows)
        # A side that cannot score says something of the rows that it has sampled.
        return [torch.tensor(row.numbers.get(side.name) or [torch.nan] * len(row.ids)) for row in self.sources]

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
            examined = counted([self.sources[n] for n in index])
            self.found.note(f"causes are looked for in {examined}, of {counted(self.sources)}; all are compared")
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
        rates = (f"{side.name} {side.tokens / side.seconds:,.0f} tokens/s" for side in self.sides if side.seconds)
        self.found.clock.step(f"examining {counted([self.sources[n] for n in self.index])} ({', '.join(rates)}){more}")

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
        starts = []
        for row in (self.sources[n] for n in self.index):
            size = len(row.ids)
            starts.append(max(1, size // 2 if row.made_of_others else min(row.prompt_length, size - 1)))
        return starts

    def _measure_own(self) -> None:
        silent = [side for side in self.sides if side.dtype() is None and side.can.precision is None]
        doubtful = [side.name for side in silent if not self._is_float32(side)]
        if self.oracle is not None and (doubtful or any(side.dtype() in HALVES for side in self.sides)):
            self.found.clock.step("the plain forward in low precision")
            self.roundings = halves(self.oracle, self.examined)
        for side in self.sides:
            if side.name in doubtful and self.truth is not None:
                self._assumed[side.name] = related_dtype(self.examined_of(side), self.truth, self.roundings)
            self.noise[side.name] = side.can.precision or noise_of(self.dtype(side), self.roundings)
            # Rounding is no fault of a side that does not say how it rounds.
            unknown = side.name in doubtful and self._assumed.get(side.name) is None
            noise = noise_of("bfloat16", self.roundings) if unknown else self.noise[side.name]
            self.own_noise[side.name] = noise
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
        declared = side.can.precision is not None or side.dtype() == "tf32"
        return self.noise[side.name] if declared else FLOAT32_NOISE

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


class OwnDistances:
    """What a side says about the same rows in different calls: four calls, and one for each row.

    Args:
        starts: from where on each row is scored late: the end of its prompt, for example.
        first: what it said of these rows when it was asked for the first time.

    Attributes:
        together: its numbers for all rows in one call.
        alone: its numbers for each row in a call of its own.
        again: its numbers when exactly the same call was made again.
        late: its numbers from the end of each prompt on.
    """

    def __init__(self, side: OpenSide, rows: Rows, starts: Sequence[int], first: list[Tensor]) -> None:
        self._side, self._rows, self.together = side, rows, first
        self.again = side.score(rows)
        self.alone = [side.score([row])[0] for row in rows]
        reordered = side.score(list(reversed(rows)))[::-1]
        # The first of the two may fill a cache of prefixes, which the second reads.
        side.score(rows, starts=starts)
        self.late = side.score(rows, starts=starts)
        kinds: list[tuple[GapKind, str, list[Tensor]]] = [
            ("again", "the same call again", self.again),
            ("company", "each row alone", self.alone),
            ("order", "the rows in another order", reordered),
            ("late_start", "from the end of the prompt on", self.late),
        ]
        self.gaps = [
            measure(kind, side.name, f"{side.name}, {words}", first, numbers, rows, side.spell)
            for kind, words, numbers in kinds
        ]

    def size(self, *kinds: GapKind) -> float:
        """Return the largest mean |Δ| of these distances."""
        return max(gap.mean_abs for gap in self.gaps if gap.kind in kinds)

    def noise(self, largest: float) -> float:
        """Return the largest distance that is not above `largest`, which would be a fault."""
        return max((gap.mean_abs for gap in self.gaps if gap.mean_abs <= largest), default=0.0)

    def best(self, noise: float) -> list[Tensor]:
        """Return the numbers that are least spoilt by what else the engine did: alone, if company changes them."""
        steady = self.size("again") <= noise
        return self.alone if steady and self.size("company", "order") > noise else self.together

    def faults(self, truth: Sequence[Tensor] | None, noise: float) -> tuple[list[Experiment], Cause | None]:
        """Return what was tried, and the cause that the distances show.

        A side that does not say the same twice is asked twice more.
        """
        experiments = []
        kinds: list[tuple[str, GapKind, str, list[Tensor]]] = [
            ("prefix-cache", "again", "the same call again", self.again),
            ("company", "company", "each row alone", self.alone),
            ("prefix-cache", "late_start", "scores from the end of each prompt on", self.late),
        ]
        for id, kind, changed, numbers in kinds:
            before, after, size = 0.0, 0.0, self.size(kind)
            if truth is not None:
                asked = [n.where(torch.isfinite(m), torch.nan) for n, m in zip(self.together, numbers, strict=True)]
                before, after = distance(truth, asked)[0], distance(truth, numbers)[0]
            note = f"{size:.3g} nats a token from the first call"
            tokens = self.gaps[0].count
            experiments.append(
                Experiment(id, self._side.name, f"scores: {changed}", before, after, tokens, size > noise, note)
            )
        if self.size("again") > noise:
            return experiments, self._repeated(noise)
        if self.size("company", "order") > noise:
            return experiments, self._company(truth, noise)
        late = self.size("late_start")
        if late <= noise:
            return experiments, None
        evidence = (
            f"{self._side.name} scores what follows each prompt {late:.3g} nats a token from its own scores of the "
            "whole row: what it keeps of the prompt is not what it computes"
        )
        advice = f"{_CACHE}, or reset it after every update of the weights"
        return experiments, Cause("prefix-cache", self._side.name, "certain", evidence, advice, {"mean_abs": late})

    def _repeated(self, noise: float) -> Cause:
        name, third, fourth = self._side.name, self._side.score(self._rows), self._side.score(self._rows)
        first = distance(self.together, self.again)[0]
        later = max(distance(self.again, third)[0], distance(third, fourth)[0])
        figures = {"first_second": first, "later": later}
        if later <= noise:
            evidence = (
                f"{name} gives the second of two equal calls {first:.3g} nats a token from the first, and all later "
                f"ones as the second (at most {later:.2g} apart): it answers from a cache"
            )
            advice = f"{_CACHE}; if that helps, its cache is wrong"
            return Cause("prefix-cache", name, "certain", evidence, advice, figures)
        evidence = f"{name} gives every one of four equal calls other numbers, up to {later:.3g} nats a token apart"
        advice = (
            "look for dropout (model.eval()), sampling in the scores, or several engines with different weights behind "
            "one URL"
        )
        return Cause("not-deterministic", name, "certain", evidence, advice, figures)

    def _company(self, truth: Sequence[Tensor] | None, noise: float) -> Cause:
        name, size = self._side.name, self.size("company", "order")
        longest = max(map(len, self._rows))
        apart = [distance([a], [b])[0] for a, b in zip(self.alone, self.together, strict=True)]
        short = [each for each, row in zip(apart, self._rows, strict=True) if len(row) < longest]
        full = [each for each, row in zip(apart, self._rows, strict=True) if len(row) == longest]
        evidence = f"{name} scores a row {size:.3g} nats a token away from what it says of the row alone"
        if truth is not None:
            alone, together = distance(truth, self.alone)[0], distance(truth, self.together)[0]
            evidence += f"; from the reference it is {alone:.2g} alone and {together:.3g} in company"
        if short and full and max(full) <= noise < max(short):
            evidence += "; only rows that are shorter than the longest change, so padding takes part (side, position "
            evidence += "ids, mask)"
        return Cause("company", name, "certain", evidence, COMPANY_ADVICE, {"mean_abs": size})

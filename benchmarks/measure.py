"""How everything here is measured: ways that do the same work take turns, and each is a ratio to one of them.

A ratio is the median of the ratios within a turn, so that what else the machine does falls on both sides. The baseline
runs a second time in every turn: its ratio to itself says how much is noise.
"""

from __future__ import annotations

import ctypes
import gc
import math
import multiprocessing
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

#: Does the work once.
Way = Callable[[], object]

AGAIN = "the same again"

#: Seconds that are measured at a time, at least. Seconds and turns after which a work may end.
SHORTEST, LONGEST, FEWEST = 0.01, 45.0, 3
#: Seconds for a work that may come near its goal: it takes more turns to tell.
LONGER = 120.0


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One way of doing some work.

    Attributes:
        work: what is done, such as ``scoring 16 ragged rows, V=151,936``. way: how.
        seconds: of one run, by the clock used; None where only memory was measured.
        baseline: the way that ratios are to. ratio: the median over so many `turns`. spread: its quartiles.
        mib: MiB of peak memory above what the process held before the work.
        goal: what the ratio, or else the memory, should not exceed.
        rows: how many rows the work has. goal_seconds: what `seconds`, of a row if there are rows, should not exceed.
    """

    work: str
    way: str
    seconds: float | None = None
    baseline: str | None = None
    ratio: float | None = None
    spread: tuple[float, float] | None = None
    turns: int = 1
    mib: float | None = None
    goal: float | None = None
    rows: int | None = None
    goal_seconds: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the goals are met; None without one."""
        found = self.mib if self.ratio is None else self.ratio
        held = ((found, self.goal), (self.each, self.goal_seconds))
        reached = [value <= goal for value, goal in held if value is not None and goal is not None]
        return all(reached) if reached else None

    @property
    def each(self) -> float | None:
        """Seconds a row, or all of them where rows are not counted."""
        return None if self.seconds is None else self.seconds / (self.rows or 1)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Figure:
        return cls(**{name: value for name, value in found.items() if name != "met"})


def compare(
    work: str,
    ways: Mapping[str, Way],
    *,
    baseline: str,
    repeats: int,
    goals: Mapping[str, float] | None = None,
    clock: Callable[[], float] = time.process_time,
    rows: int | None = None,
    goal_seconds: Mapping[str, float] | None = None,
    longest: float = LONGEST,
) -> list[Figure]:
    """Time all `ways`, in turns, against the one named `baseline`. What is short runs several times in a row, as by
    itself it would be measured with the caches that its neighbour left.

    Args:
        repeats: turns. longest: seconds after which no further one begins, if there were a `FEWEST`.
        goals: ratios that ways should stay under. clock: seconds; of processor time by default, which a machine that
            is busy with something else disturbs least.
        rows: how many rows the work has. goal_seconds: what ways should stay under, a row if there are rows.
    """
    turns: list[dict[str, float]] = []
    counts = dict.fromkeys([*ways, AGAIN], 1)
    began = time.monotonic()
    # What is here already is nobody's garbage, and need not be gone through.
    gc.freeze()
    # The first turn warms up.
    for turn in range(repeats + 1):
        if len(turns) >= FEWEST and time.monotonic() - began > longest:
            break
        taken = {}
        # Every other turn runs backwards, so that nobody always comes after the same neighbour.
        order = [*ways.items(), (AGAIN, ways[baseline])]
        for name, way in order if turn % 2 else reversed(order):
            # So that everybody pays for their own garbage.
            gc.collect()
            start = clock()
            for _ in range(counts[name]):
                way()
            taken[name] = (clock() - start) / counts[name]
        if turn:
            turns.append(taken)
        else:
            counts = {name: max(1, math.ceil(SHORTEST / max(taken[name], 1e-6))) for name in counts}
    gc.unfreeze()
    figures = []
    for name in [*ways, AGAIN]:
        ratios = sorted(taken[name] / taken[baseline] for taken in turns)
        figures.append(
            Figure(
                work=work,
                way=name,
                seconds=statistics.median(taken[name] for taken in turns),
                baseline=baseline,
                ratio=statistics.median(ratios),
                spread=(ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]),
                turns=len(turns),
                goal=(goals or {}).get(name),
                rows=rows,
                goal_seconds=(goal_seconds or {}).get(name),
            )
        )
    return figures


def peaks(
    work: str, prepare: Callable[..., Way], ways: Iterable[str], arguments: tuple[Any, ...], goals: Mapping[str, float]
) -> list[Figure]:
    """The peak memory of each way, in a process of its own.

    Args:
        prepare: a function at a module's top level; ``prepare(way, *arguments)`` loads the model and returns what does
            the work. What it holds then is not counted.
    """
    figures = []
    for way in ways:
        context = multiprocessing.get_context("spawn")
        found: Any = context.SimpleQueue()
        process = context.Process(target=_peak, args=(found, prepare, way, arguments))
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"{work}, {way}: the process ended with {process.exitcode}")
        figures.append(Figure(work=work, way=way, mib=found.get(), goal=goals.get(way)))
    return figures


def _peak(found: Any, prepare: Callable[..., Way], way: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    work = prepare(way, *arguments)
    # What loading left over is given back, or the work would find its memory there and seem to need none.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    # Linux: sets the high-water mark back to what is held now.
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    work()
    found.put((_memory("VmHWM") - before) / 1024)


def _memory(name: str) -> int:
    """KiB, as the kernel counts them."""
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1])


def table(figures: Iterable[Figure]) -> str:
    """The figures as text, one work after the other."""
    lines, work = [], None
    for figure in figures:
        if figure.work != work:
            work = figure.work
            lines.append(f"\n{work}")
        cells = [f"  {figure.way:44}"]
        cells.append(f"{figure.seconds * 1e3:10.2f} ms" if figure.seconds is not None else " " * 13)
        if figure.ratio is not None and figure.spread is not None:
            low, high = figure.spread
            cells.append(f"{figure.ratio:8.3f} ({low:.3f} to {high:.3f}) in {figure.turns}")
        if figure.mib is not None:
            cells.append(f"{figure.mib:8.1f} MiB")
        if figure.rows is not None and figure.each is not None:
            cells.append(f"{figure.each * 1e6:8.2f} µs a row")
        goals = [] if figure.goal is None else [f"{figure.goal:g}"]
        if figure.goal_seconds is not None:
            goals.append(f"{figure.goal_seconds * 1e6:g} µs a row" if figure.rows else f"{figure.goal_seconds:g} s")
        if goals:
            cells.append(f"goal {' and '.join(goals)}: {'met' if figure.met else 'NOT MET'}")
        lines.append("".join(f"{cell} " for cell in cells).rstrip())
    return "\n".join(lines)

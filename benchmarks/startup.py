"""Start-up time: the processor time of a new interpreter per run.

corelm           import every public name of corelm; torch and tensordict are imported before
corelm --help    the command's help
corelm backends  the command that lists the backends
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

from benchmarks.measure import Figure, compare

EVERY_NAME = """
import time, torch, tensordict
start = time.process_time()
import corelm; [getattr(corelm, name) for name in corelm.__all__]
print(time.process_time() - start)
"""
HELP = "import sys; sys.argv = ['corelm', '--help']; from corelm.cli import main; main()"
LISTING = "import sys; sys.argv = ['corelm', 'backends', '--json']; from corelm.cli import main; main()"


def figures(quick: bool) -> Iterator[list[Figure]]:
    turns = 3 if quick else 11
    taken = statistics.median(float(run(EVERY_NAME)) for _ in range(turns))
    work = "import after torch and tensordict"
    yield [Figure(work=work, way="corelm", seconds=taken, turns=turns, goal_seconds=0.15)]
    for name, code in {"corelm --help": HELP, "corelm backends": LISTING}.items():
        yield compare(
            name,
            {"an interpreter": lambda: run("pass"), name: partial(run, code)},
            baseline="an interpreter",
            repeats=5 if quick else 21,
            clock=of_children,
            goal_seconds={name: 0.3},
        )


def run(code: str) -> str:
    """Run the code in a new interpreter and return what it prints."""
    return subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout


def of_children() -> float:
    """Return the processor seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime

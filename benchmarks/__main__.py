"""Run all benchmarks, or some of them, and save the results.

    python -m benchmarks [--quick] [--only scoring containers …]

Each part is a module with a function ``figures(quick)`` that yields lists of `Figure`. Results are written to
``benchmarks/results/``: one JSON file with the machine, the versions and the date. Parts that are not measured keep
their earlier figures. docs/verified.md shows the file as a table.

What the machine can do is measured before the parts and after them, and figures whose work is counted are also reported
as a share of it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.machine import Machine, measure_machine
from benchmarks.measure import Figure, table
from benchmarks.report import surroundings

PARTS = (
    "scoring",
    "row_lengths",
    "distillation",
    "generation",
    "sampling",
    "host",
    "containers",
    "chats",
    "startup",
    "callers",
    "observers",
    "in_flight",
    "client_time",
    "serving",
    "hosting",
    "weights",
    "fleet",
    "ray",
    "vllm_overhead",
    "cassettes",
    "lm_eval",
)
#: Parts that need an engine or a harness: the module to look for, and the name of the environment that has it.
ELSEWHERE = {"ray": ("ray", "ray"), "vllm_overhead": ("vllm", "vllm"), "lm_eval": ("lm_eval", "harnesses")}
RESULTS = Path(__file__).parent / "results"
#: A larger change of the machine between the start and the end of a run is worth a warning.
DRIFT = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Compare core with other ways to work.")
    parser.add_argument("--quick", action="store_true", help="run fewer and smaller benchmarks, in a few minutes")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=" ".join(PARTS))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--skip-machine", action="store_true", help="do not measure the machine, and report no shares")
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / ("quick.json" if given.quick else "full.json")
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    machine = None
    if not given.skip_machine:
        print("\nmeasuring the machine", file=sys.stderr)
        machine = measure_machine(given.quick)
        print(f"\nthe machine on {machine.threads} thread{'s' * (machine.threads > 1)}\n{machine.described()}")
        found["machine"] = {"before": machine.as_dict(), "after": None}
    for part in given.only:
        if (result := measured(part, given.quick, machine)) is None:
            continue
        found[part] = result
        # Save at once, because the next part may fail.
        save(found, path)
    if machine is not None:
        print("\nmeasuring the machine again", file=sys.stderr)
        later = measure_machine(given.quick)
        found["machine"]["after"] = later.as_dict()
        save(found, path)
        if (drift := machine.drift(later)) > DRIFT:
            print(f"\nwarning: the machine changed by {100 * drift:.0f} % during the run; at the end it did")
            print(later.described())
    print(f"\nwritten to {path}")


def save(found: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(found, indent=1) + "\n")


def measured(part: str, quick: bool, machine: Machine | None) -> dict[str, Any] | None:
    """Measure a part and print its figures; return what is saved, or None if the part cannot be measured here."""
    needed, environment = ELSEWHERE.get(part, (None, ""))
    if needed is not None and find_spec(needed) is None:
        python = Path(f".venv-{environment}/bin/python")
        if not python.exists():
            print(f"\n{part}: skipped, {needed} is not installed (make test-{environment} installs it)")
            return None
        with tempfile.TemporaryDirectory() as folder:
            options = ["--skip-machine", *(["--quick"] if quick else [])]
            subprocess.run([python, "-m", "benchmarks", "--only", part, "--out", folder, *options], check=True)
            (path,) = Path(folder).glob("*.json")
            # With the versions in the engine's environment, which are not those in this one.
            result: dict[str, Any] = json.loads(path.read_text())[part]
            return result
    return recorded(part, importlib.import_module(f"benchmarks.{part}").figures(quick), machine)


def recorded(part: str, works: Iterable[list[Figure]], machine: Machine | None = None) -> dict[str, Any]:
    """Measure a part, print the figures of each work at once, and return what `save` writes."""
    print(f"\n{part}", file=sys.stderr)
    # Before the work, which is a load itself.
    where = surroundings()
    figures: list[Figure] = []
    for some in tqdm(works, desc=part, unit="work"):
        if machine is not None:
            some = [figure.on(machine) for figure in some]
        tqdm.write(table(some))
        figures += some
    if machine is not None:
        where["roof"] = machine.as_dict()
    return {**where, "figures": [figure.as_dict() for figure in figures]}


if __name__ == "__main__":
    main()

"""Run everything that can be measured on one GPU, and save the results.

    python -m benchmarks.gpu [--only head scoring …] [--checkpoint FOLDER] [--short | --tiny] [--out FOLDER]

Each part is a module of this package with a function ``figures(size)`` that yields lists of `Figure`. Each part
runs in a separate process, so that it finds an empty GPU, and is ended after nine minutes. All parts together should
take less than 40. Where a command may not run that long, give one part at a time: ``--only`` keeps the figures of the
other parts.

A part that cannot run here, because there is no GPU or an engine is not installed, is skipped, and the reason is saved
with the results. The part ``real`` runs with ``--checkpoint``, the folder of a model. ``--short`` asks for fewer
answers of half the length and repeats less. ``--tiny`` runs the parts on the CPU with toy sizes, to find out whether
they still work.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.gpu.device import SIZES, gpu
from benchmarks.measure import Figure, table
from benchmarks.report import surroundings

#: Each part, and the package that it needs besides transformers.
PARTS = {"head": None, "scoring": None, "generation": None, "real": None, "vllm": "vllm", "vllm_updates": "vllm"}
#: Seconds after which a part is ended.
LIMIT = 540
RESULTS = Path("benchmarks/results/gpu")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Measure on one GPU.")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=" ".join(PARTS))
    parser.add_argument("--checkpoint", type=Path, help="folder of a model and its tokenizer, for the part real")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--short", dest="size", action="store_const", const="short", help="fewer answers, fewer repeats")
    sizes.add_argument(
        "--tiny", dest="size", action="store_const", const="tiny", help="toy sizes, on the CPU if there is no GPU"
    )
    parser.set_defaults(size="full")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    # Without a checkpoint, keep the figures of an earlier one.
    parts = given.only or [part for part in PARTS if part != "real" or given.checkpoint is not None]
    if "real" in parts and given.checkpoint is None:
        parser.error("the part real needs --checkpoint FOLDER")
    if given.here is not None:
        _measure(parts[0], given.size, given.checkpoint, given.here)
        return
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / ("tiny.json" if given.size == "tiny" else "gpu.json")
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for part in parts:
        found[part] = _in_process(part, given.size, given.checkpoint, given.out)
        # Save at once, because the next part may fail.
        path.write_text(json.dumps(found, indent=1) + "\n")
        if reason := found[part].get("reason"):
            print(f"\n{part}: {reason}", flush=True)
    print(f"\nwritten to {path}")


def _in_process(part: str, size: str, checkpoint: Path | None, out: Path) -> dict[str, Any]:
    """Measure a part in a separate process. Return its figures, and the reason if figures are missing."""
    if reason := _missing(part, size):
        return {"reason": f"skipped: {reason}", "figures": []}
    result = out / f".{part}.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu", "--only", part, "--here", str(result)]
    command += [] if checkpoint is None else ["--checkpoint", str(checkpoint)]
    command += [] if size == "full" else [f"--{size}"]
    began = time.monotonic()
    try:
        status = subprocess.run(command, timeout=LIMIT).returncode
        reason = f"the process ended with status {status}" if status else None
    except subprocess.TimeoutExpired:
        reason = f"ended after {LIMIT} seconds"
    saved: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {"figures": []}
    result.unlink(missing_ok=True)
    return {**saved, "seconds": round(time.monotonic() - began), **({"reason": reason} if reason else {})}


def _missing(part: str, size: str) -> str | None:
    """Return why a part cannot run here, or None."""
    if gpu() is None and size != "tiny":
        return "torch finds no CUDA device"
    needed = PARTS[part]
    if needed is not None and find_spec(needed) is None:
        return f"{needed} is not installed"
    return None


def _measure(part: str, name: str, checkpoint: Path | None, result: Path) -> None:
    """Measure a part in this process, and save after every work, so that a part that is ended loses one at most."""
    figures: list[Figure] = []
    size = replace(SIZES[name], checkpoint=checkpoint)
    about = {**surroundings(), "size": name, "gpu": gpu(), "cuda": torch.version.cuda}
    for some in tqdm(importlib.import_module(f"benchmarks.gpu.{part}").figures(size), desc=part, unit="work"):
        if name == "tiny":
            # The goals are for large work: with toy sizes the fixed cost of a call dominates.
            some = [replace(figure, goal=None, goal_seconds=None) for figure in some]
        tqdm.write(table(some))
        figures += some
        result.write_text(json.dumps({**about, "figures": [figure.as_dict() for figure in figures]}))


if __name__ == "__main__":
    main()

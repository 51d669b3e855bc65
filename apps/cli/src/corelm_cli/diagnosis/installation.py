"""Whether core and its plugins are installed as they ask to be: read from metadata, nothing is imported."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import corelm
from corelm._version import __version__
from corelm.application import ALLOW_LIST, DISTRIBUTION, Scan, allow_list
from corelm.errors import how_to_install
from corelm_cli.diagnosis import Finding

#: Python versions that core is tested with.
_OLDEST, _NEWEST = (3, 11), (3, 13)


def installation(found: Scan) -> Iterator[Finding]:
    """Check Python, core, and the distributions that core and its plugins require, and yield the findings."""
    yield _python()
    yield from _core()
    yield from _requirements(found)
    yield from _allowed(found)
    for line in found.unreadable:
        yield Finding("metadata", "problem", f"that of {line} cannot be read", "reinstall it, or remove the folder")


def _python() -> Finding:
    text = f"{platform.python_version()}, {sys.executable}"
    if not _OLDEST <= sys.version_info[:2] <= _NEWEST:
        return Finding("Python", "warning", f"{text}; core is tested with 3.11 to 3.13")
    return Finding("Python", "ok", text)


def _core() -> Iterator[Finding]:
    """Look for a foreign distribution of the same name, outdated metadata, and a second copy."""
    home = Path(corelm.__file__).resolve().parent
    ours, foreign = _ours(), [each for each in metadata.distributions(name=DISTRIBUTION) if not _is_ours(each)]
    install = how_to_install(DISTRIBUTION, python=sys.executable)
    for distribution in foreign:
        summary = distribution.metadata["Summary"] or "no summary"
        yield Finding(
            "core",
            "problem",
            f"another project's distribution called {DISTRIBUTION} {distribution.version} is installed: {summary!r}",
            f"{sys.executable} -m pip uninstall {DISTRIBUTION}, then {install}",
        )
    if ours is None:
        yield Finding("core", "warning", f"{__version__} runs from {home}, and is not installed", install)
    elif ours.version != __version__:
        text = f"{home} has {__version__}, but what pip installed says {ours.version}"
        yield Finding("core", "warning", text, install)
    else:
        yield Finding("core", "ok", f"{__version__}, {home}")
    copies = {str(path) for entry in sys.path if (path := _package_in(entry)) is not None and path != home}
    for copy in sorted(copies):
        yield Finding("core", "warning", f"there is a second copy, {copy}, which is not used", "uninstall one of them")


def _ours() -> metadata.Distribution | None:
    return next(filter(_is_ours, metadata.distributions(name=DISTRIBUTION)), None)


def _is_ours(distribution: metadata.Distribution) -> bool:
    # Its extras name our plugins.
    return any("core-transformers-backend" in line for line in distribution.requires or ())


def _package_in(entry: str) -> Path | None:
    file = Path(entry or ".") / "corelm" / "__init__.py"
    return file.resolve().parent if file.is_file() else None


def _requirements(found: Scan) -> Iterator[Finding]:
    """Compare what core and the plugins ask for with what is installed."""
    met = []
    asking = {info.distribution: metadata.distribution(info.distribution) for info in found.backends}
    if (ours := _ours()) is not None:
        asking[DISTRIBUTION] = ours
    for name, distribution in sorted(asking.items()):
        lines = distribution.requires or ()
        unmet = list(unmet_requirements(lines))
        for wanted, installed in unmet:
            has = "it is not installed" if installed is None else f"{installed} is installed"
            part = Requirement(wanted).name
            install = how_to_install(part if part.startswith("core-") else wanted, python=sys.executable)
            yield Finding(name, "problem", f"asks for {wanted}, and {has}", install)
        if not unmet:
            met.append(name)
    if met:
        yield Finding("requirements", "ok", f"installed is everything that these ask for: {', '.join(met)}")


def unmet_requirements(lines: Iterable[str]) -> Iterator[tuple[str, str | None]]:
    """Yield each requirement that applies here and is not met, with the installed version; None if there is none.

    Left out is core itself: whether a plugin fits this core is in `BackendInfo.problem`.
    """
    for requirement in map(Requirement, lines):
        if canonicalize_name(requirement.name) == DISTRIBUTION:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        wanted = f"{requirement.name}{requirement.specifier}"
        try:
            version = metadata.version(canonicalize_name(requirement.name))
        except metadata.PackageNotFoundError:
            yield wanted, None
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield wanted, version


def _allowed(found: Scan) -> Iterator[Finding]:
    """Say what the variable that restricts the backends leaves out."""
    allowed = allow_list()
    if allowed is None:
        return
    missing = sorted(allowed - set(found.names))
    text = f"{ALLOW_LIST}={os.environ[ALLOW_LIST]!r} hides all other backends"
    if missing:
        yield Finding(ALLOW_LIST, "warning", f"{text}; not installed: {', '.join(missing)}", f"unset {ALLOW_LIST}")
    else:
        yield Finding(ALLOW_LIST, "ok", text)

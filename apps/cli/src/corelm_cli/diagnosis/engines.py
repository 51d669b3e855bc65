"""Whether the installed plugins and their engines can be imported: each is tried in its own process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

from corelm import BackendInfo
from corelm.application import Scan, install_line
from corelm_cli.diagnosis.findings import Finding
from corelm_cli.diagnosis.installation import unmet_requirements
from corelm_cli.diagnosis.probes import ProbeError, probe

_PLUGIN = """
from corelm.backend.registry import load_backend
from corelm.errors import CoreLMError
try:
    load_backend({0!r})
    found = ""
except CoreLMError as error:
    found = str(error)
"""
_ENGINE = """
import importlib
from corelm.backend.registry import load_backend
importlib.import_module({0!r})
found = getattr(load_backend({1!r})[0], "engine_warning", str)()
"""


def engines(found: Scan) -> Iterator[Finding]:
    """Yield what is found about each installed backend."""
    if not found.backends:
        yield Finding("backends", "problem", "no backend is installed", install_line("transformers") or "")
    # Each waits for a process. Two at a time: an import of an engine takes a core for many seconds.
    with ThreadPoolExecutor(2) as pool:
        yield from pool.map(_backend, found.backends)


def _newer(info: BackendInfo) -> str:
    return f"install a newer {info.distribution} from where you have it"


def _backend(info: BackendInfo) -> Finding:
    about = f"backend {info.name!r}"
    if info.problem is not None:
        return Finding(about, "problem", f"{info.label}: {info.problem}", _newer(info))
    try:
        refused = probe(_PLUGIN.format(info.name))
    except ProbeError as error:
        refused = f"importing {info.target} failed: {error}"
    if refused:
        return Finding(about, "problem", refused, _newer(info))
    module = info.engine_module
    if module is None:
        return Finding(about, "ok", f"{info.label}; the plugin names no engine")
    if not info.engine_available:
        # A plugin without its engine can use servers, and engines in other environments.
        line = install_line(info.name)
        return Finding(
            about, "ok", f"{info.label}; {module} is not installed here" + (f": {line}, if you need it" if line else "")
        )
    try:
        warning = probe(_ENGINE.format(module, info.name))
    except ProbeError as error:
        fits = "; ".join(_misfits(module))
        return Finding(
            about,
            "problem",
            f"{info.software()}: importing {module} failed: {error}" + (f" ({fits})" if fits else ""),
            "install the versions that the engine asks for, best in an environment that has no other engine",
        )
    if warning:
        remedy = f"install a release of {module} that {info.distribution} was tested with"
        return Finding(about, "warning", f"{info.software()}: {warning}", remedy)
    return Finding(about, "ok", info.software())


def _misfits(module: str) -> Iterator[str]:
    """Yield what the distribution of an engine asks for and does not find: the likely reason why it fails."""
    top = module.partition(".")[0]
    for name in sorted(set(metadata.packages_distributions().get(top, ()))):
        for wanted, installed in unmet_requirements(metadata.requires(name) or ()):
            yield f"{name} asks for {wanted}, found {installed or 'nothing'}"

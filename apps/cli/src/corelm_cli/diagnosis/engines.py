"""Whether the installed plugins and their engines can be imported: plugins in one process, each engine in its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import metadata

from corelm import BackendInfo
from corelm.application import Scan, install_line
from corelm_cli.diagnosis import Finding, ProbeError, probe
from corelm_cli.diagnosis.installation import unmet_requirements

_PLUGINS = """
from corelm.backend.registry import load_backend
from corelm.errors import CoreLMError
found = dict.fromkeys({0!r}, "")
for name in found:
    try:
        load_backend(name)
    except CoreLMError as error:
        found[name] = str(error)
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
    refused = _refusals([info.name for info in found.backends if info.problem is None])
    yield from (_backend(info, refused.get(info.name, "")) for info in found.backends)


def _refusals(names: Sequence[str]) -> dict[str, str]:
    """Return why each plugin cannot be imported; "" if it can."""
    try:
        found: dict[str, str] = probe(_PLUGINS.format([*names])) if names else {}
        return found
    except ProbeError as error:
        if len(names) == 1:
            return {names[0]: f"importing it failed: {error}"}
    # One of them crashes: each alone.
    return {name: why for each in names for name, why in _refusals([each]).items()}


def _newer(info: BackendInfo) -> str:
    return f"install a newer {info.distribution} from where you have it"


def _backend(info: BackendInfo, refused: str) -> Finding:
    about = f"backend {info.name!r}"
    if info.problem is not None:
        return Finding(about, "problem", f"{info.label}: {info.problem}", _newer(info))
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

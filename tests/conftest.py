"""Fixtures that several test files share."""

import os
import signal
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests plant faults in models of the same class and configuration.
os.environ["CORELM_CACHE"] = ""
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell ignores Ctrl-C in what it starts in the background, and the processes of tests would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from hypothesis import HealthCheck, settings

# Drawing examples may be slow on a busy machine. The profile `ci` draws the same ones in every run, `nightly` ten times
# as many: `examples` in tests/helpers/each.py follows the profile.
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, database=None)
settings.register_profile("nightly", settings.get_profile("local"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "local"))

Fabricate = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def options_of_this_run_only() -> None:
    """Keep what PYTEST_ADDOPTS gives this run from the runs of pytest that tests start: it may not fit them."""
    os.environ.pop("PYTEST_ADDOPTS", None)


@pytest.fixture
def fabricate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fabricate:
    """Return a function that puts a distribution on ``sys.path`` for one test, as an installer would.

    ``fabricate("pkg", "1.0", {"toy": "toy_pkg:Toy"}, {"toy_pkg": "class Toy: ..."})`` returns its dist-info folder.
    """

    def make(
        name: str,
        version: str,
        backends: Mapping[str, str],
        modules: Mapping[str, str] | None = None,
        *,
        requires: Iterable[str] = (),
        engines: Mapping[str, str] | None = None,
        groups: Mapping[str, Mapping[str, str]] | None = None,
        site: str = "site",
    ) -> Path:
        root = tmp_path / site
        info = root / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        lines = [
            "Metadata-Version: 2.1",
            f"Name: {name}",
            f"Version: {version}",
            *(f"Requires-Dist: {r}" for r in requires),
        ]
        (info / "METADATA").write_text("\n".join([*lines, "", ""]))
        points = ["[corelm.backends]", *(f"{k} = {v}" for k, v in backends.items())]
        points += ["[corelm.engines]", *(f"{k} = {v}" for k, v in (engines or {}).items())]
        for group, named in (groups or {}).items():
            points += [f"[{group}]", *(f"{k} = {v}" for k, v in named.items())]
        (info / "entry_points.txt").write_text("\n".join([*points, ""]))
        for module, source in (modules or {}).items():
            (root / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(str(root))
        return info

    return make


@pytest.fixture
def uninstalled(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that hides a distribution for one test: ``uninstalled("core-vllm-backend")``."""

    def hide(name: str) -> None:
        there = metadata.distributions
        others = lambda: (each for each in there() if each.metadata["Name"] != name)  # noqa: E731
        monkeypatch.setattr(metadata, "distributions", others)

    return hide


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the demo's tiny model, trained for 60 steps."""
    from corelm_testing.tiny import build_tiny

    return build_tiny(tmp_path_factory.mktemp("models") / "tiny", steps=60, progress=False)

"""Discovery with real distributions on ``sys.path``: each failure has its own error, which says what to do."""

import subprocess
import sys

import pytest

import corelm
from corelm.backend import registry
from corelm.errors import (
    BackendConflictError,
    BackendImportError,
    BackendIncompatibleError,
    BackendNotFoundError,
    BackendNotInstalledError,
    EngineError,
    how_to_install,
)

GOOD = """
import corelm

class Plugin:
    requires_api = ">=1,<2"

    @classmethod
    def open(cls, model=None, **options):
        return cls()

    @corelm.hookimpl
    def generate(self, request): ...

    @corelm.hookimpl
    def score_logprobs(self, request): ...
"""


def named(name: str) -> list[registry.BackendInfo]:
    return [info for info in corelm.list_backends() if info.name == name]


def load(name: str) -> registry.BackendInfo:
    return registry.load_backend(name)[1]


# ---------------------------------------------------------------- listing


def test_a_fabricated_plugin_is_listed_and_loaded(fabricate):
    fabricate("fine-plugin", "3.1", {"fine": "fine_plugin:Plugin"}, {"fine_plugin": GOOD}, requires=["core>=0.1,<0.2"])
    (info,) = named("fine")
    assert (info.distribution, info.version, info.target) == ("fine-plugin", "3.1", "fine_plugin:Plugin")
    assert set(info.requires_core.split(",")) == {">=0.1", "<0.2"}
    assert info.engine_available is None and info.problem is None
    assert "fine_plugin" not in sys.modules
    plugin, loaded = registry.load_backend("fine")
    assert plugin is sys.modules["fine_plugin"].Plugin and loaded == info


def test_the_engine_is_looked_up_but_not_imported(fabricate, tmp_path):
    (tmp_path / "site" / "folder_of_that_name").mkdir(parents=True)
    (tmp_path / "site" / "loud_engine.py").write_text("raise RuntimeError('imported')")
    engines = {"here": "loud_engine", "gone": "no_such_engine", "folder": "folder_of_that_name"}
    fabricate("engines", "1", dict.fromkeys((*engines, "silent"), "m:P"), engines=engines)
    available = {info.name: info.engine_available for info in corelm.list_backends() if info.distribution == "engines"}
    assert available == {"here": True, "gone": False, "folder": False, "silent": None}


def test_a_plugin_for_another_version_of_core_has_a_problem(fabricate):
    fabricate("newer", "1", {"newer": "m:P"}, requires=["core>=99"])
    assert ">=99" in named("newer")[0].problem


def test_one_distribution_found_twice_is_one_claim(fabricate):
    fabricate("twice", "1", {"twice": "twice_mod:Plugin"}, {"twice_mod": GOOD}, site="a")
    fabricate("Twice", "2", {"twice": "twice_mod:Plugin"}, {"twice_mod": GOOD}, site="b")
    # The one that comes first on sys.path, whose module an import finds.
    assert [info.version for info in named("twice")] == ["2"]
    assert load("twice").name == "twice"


# ---------------------------------------------------------------- 1. unknown name


def test_an_unknown_name_gives_a_suggestion_and_the_installed_names(fabricate):
    fabricate("blue", "1", {"bluebird": "m:P"})
    with pytest.raises(
        BackendNotFoundError, match=r"no backend is named 'bluebrid'.*Did you mean 'bluebird'\?"
    ) as error:
        load("bluebrid")
    assert "Installed: " in str(error.value) and isinstance(error.value, LookupError)


def test_the_allow_list_is_applied_before_any_import(fabricate, monkeypatch):
    fabricate("loud", "1", {"loud": "loud_module:P", "quiet": "q:P"}, {"loud_module": "raise SystemExit('imported')"})
    monkeypatch.setenv("CORELM_BACKENDS", "quiet, other")
    assert [info.name for info in corelm.list_backends()] == ["quiet"]
    with pytest.raises(BackendNotFoundError):
        load("loud")
    with pytest.raises(BackendNotFoundError):
        load("vllm")


def test_an_empty_allow_list_allows_nothing(monkeypatch):
    monkeypatch.setenv("CORELM_BACKENDS", "")
    assert corelm.list_backends() == []


# ---------------------------------------------------------------- 2. extra not installed


def test_a_known_extra_says_how_to_install_it(uninstalled):
    uninstalled("core-vllm-backend")
    with pytest.raises(BackendNotInstalledError) as error:
        load("vllm")
    assert isinstance(error.value, ImportError)
    assert registry.install_line("sglang") == how_to_install("core-sglang-backend[engine]")


# ---------------------------------------------------------------- 3. import failed


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import a_module_nobody_has", ModuleNotFoundError),
        ("raise RuntimeError('driver too old')", RuntimeError),
        ("def :", SyntaxError),
        ("Other = 1", AttributeError),
    ],
)
def test_a_failed_import_chains_its_cause(fabricate, source, cause):
    module = f"fails_with_{cause.__name__}"
    fabricate("fails", "2.0", {"fails": f"{module}:Plugin"}, {module: source})
    assert len(named("fails")) == 1
    with pytest.raises(BackendImportError) as error:
        load("fails")
    assert type(error.value.__cause__) is cause and str(error.value.__cause__) in str(error.value)
    assert "a newer fails" in str(error.value) and "pip install" not in str(error.value)
    assert ("Install what has the module 'a_module_nobody_has'" in str(error.value)) is ("a_module_nobody" in source)


# ---------------------------------------------------------------- 4. incompatible


@pytest.mark.parametrize(
    "change",
    [
        ('requires_api = ">=1,<2"', "pass"),
        ('">=1,<2"', '">=2,<3"'),
        ('">=1,<2"', '"~=1.5"'),
        ('">=1,<2"', '"==1.0.*"'),
        ('">=1,<2"', '"one"'),
        ('">=1,<2"', "1"),
        ("def generate", "def genrate"),
        ("    @corelm.hookimpl\n    def score_logprobs", "    def score_logprobs"),
        ("def open", "def opn"),
        ("class Plugin:", "Plugin = 1\nclass Other:"),
    ],
)
def test_an_incompatible_plugin_says_why(fabricate, request, change):
    source = GOOD.replace(*change)
    assert source != GOOD
    module = "misfit_" + request.node.callspec.id.encode().hex()[:24]
    fabricate("misfit", "1", {"misfit": f"{module}:Plugin"}, {module: source})
    with pytest.raises(BackendIncompatibleError) as error:
        load("misfit")
    assert "misfit 1" in str(error.value) and isinstance(error.value, TypeError)


# ---------------------------------------------------------------- 5. two claims


def test_two_distributions_that_claim_one_name_are_both_named(fabricate):
    fabricate("first-plugin", "1.0", {"shared": "first_plugin:P"}, site="a")
    fabricate("second-plugin", "2.0", {"shared": "second_plugin:P"}, site="b")
    assert [info.problem is None for info in named("shared")] == [False, False]
    with pytest.raises(BackendConflictError):
        load("shared")


# ---------------------------------------------------------------- 6. open failed


OPENS_BADLY = GOOD.replace("return cls()", "raise OSError('no model there')")


@pytest.mark.parametrize(
    ("name", "engine"), [("vllm", "json"), ("vllm", "no_such_engine"), ("other", "no_such_engine")]
)
def test_a_failed_open_chains_its_cause_and_says_if_the_engine_is_missing(fabricate, uninstalled, name, engine):
    uninstalled("core-vllm-backend")
    module = f"opens_badly_{name}_{engine}"
    fabricate("stand-in", "1", {name: f"{module}:Plugin"}, {module: OPENS_BADLY}, engines={name: engine})
    with pytest.raises(EngineError) as error:
        corelm.get_backend(name)
    assert "(stand-in 1) could not be opened" in str(error.value)
    assert isinstance(error.value.__cause__, OSError) and error.value.usable is False


@pytest.mark.parametrize("fault", ["1 / 0", "return None"])
def test_an_engine_that_does_not_fit_is_closed_and_its_misfit_reported(fabricate, fault):
    source = f"{GOOD}\n    @property\n    def capabilities(self): {fault}\n    tokenizer = None\n"
    source += "\n    @corelm.hookimpl\n    def close(self, request): raise OSError('closed badly')\n"
    module = f"unfit_{len(fault)}"
    fabricate("unfit", "1", {"unfit": f"{module}:Plugin"}, {module: source})
    with pytest.raises(BackendIncompatibleError):
        corelm.get_backend("unfit")


# ---------------------------------------------------------------- a broken plugin does not stop another


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("entry_points.txt", b"\xff\xfe[corelm.backends]\nbad = m:P\n"),
        ("entry_points.txt", b"[corelm.backends]\nno equals sign here\n"),
        ("METADATA", b"\xff\xfe\x00"),
        ("METADATA", b""),
        ("METADATA", b"Name: bad\nVersion: 1\nRequires-Dist: core >>> 1\n"),
        ("METADATA", None),
    ],
)
def test_corrupt_metadata_does_not_stop_the_listing(fabricate, file, content):
    info = fabricate("bad", "1", {"bad": "m:P"}, site="a")
    (info / file).unlink() if content is None else (info / file).write_bytes(content)
    fabricate("intact", "1", {"intact": "intact_plugin:Plugin"}, {"intact_plugin": GOOD}, site="b")
    assert len(named("intact")) == 1
    assert load("intact").name == "intact"
    assert named("bad") == []
    with pytest.raises(BackendNotFoundError):
        load("bad")


# ---------------------------------------------------------------- imports


@pytest.mark.process
def test_listing_imports_neither_torch_nor_a_plugin():
    code = (
        "import sys, corelm\n"
        "infos = corelm.list_backends()\n"
        "print(*(info.target.partition(':')[0] for info in infos))\n"
        "print(*sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    plugins, modules = (set(line.split()) for line in result.stdout.splitlines())
    assert {"corelm_testing.toy", "transformers_backend"} <= plugins
    assert not modules & {"torch", "tensordict", "numpy", "transformers", *plugins}


@pytest.mark.process
def test_a_plugin_module_is_loaded_without_its_engine():
    code = (
        "import sys\nfrom corelm.backend.registry import load_backend\n"
        "load_backend('transformers')\nprint('transformers' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"

"""`corelm new-backend` writes a distribution that installs, passes the kit and can be used by name."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest

from corelm.errors import EngineError
from helpers.command_line import corelm_command
from helpers.environments import install, new_environment, run_in
from helpers.http_server import FaultServer, json_reply


@pytest.mark.process
@pytest.mark.parametrize("kind", ["logits", "http", "engine"])
@pytest.mark.parametrize("select", ["greedy or log_prob", pytest.param("", marks=pytest.mark.nightly)])
def test_what_it_writes_installs_passes_the_kit_and_is_used_by_name(select, kind, tiny_model, tmp_path):
    project = tmp_path / "my-engine-backend"
    result = corelm_command("new-backend", "my-engine", "--kind", kind, "--output", project)
    (what,) = re.findall(r"^  pip install -e '(.*)'$", result.stdout, re.MULTILINE)
    python = new_environment(tmp_path / "environment")
    install(python, project, what)
    told = run_in(project, python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", select)
    counted = re.search(r"^corelm conformance: (\d+) passed.* \(TestMyEngineBackend\)$", told, re.MULTILINE)
    assert counted and int(counted[1]) > (10 if select else 200), told
    if kind == "http":  # it needs a server
        return
    used = (
        "import corelm\n"
        "print([each.name for each in corelm.list_backends() if each.distribution == 'my-engine-backend'])\n"
        f"with corelm.get_backend('my-engine', {str(tiny_model)!r}) as backend:\n"
        "    print(len(backend.generate([[5, 6]], {'max_new_tokens': 3, 'ignore_eos': True}).ids.values))"
    )
    assert run_in(project, python, "-c", used) == "['my-engine']\n3\n"


@pytest.mark.process
@pytest.mark.parametrize("kind", ["logits", "http", "engine"])
def test_its_files_are_in_the_projects_format(kind, tmp_path):
    assert corelm_command("new-backend", "a_b", "--kind", kind, "--output", tmp_path / "new").exit_code == 0
    for check in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *check, "--isolated", "--line-length", "120", str(tmp_path)]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
    written = {
        path.relative_to(tmp_path / "new").as_posix() for path in (tmp_path / "new").rglob("*") if path.is_file()
    }
    assert written >= {
        "README.md",
        ".gitignore",
        ".github/workflows/test.yml",
        "src/a_b_backend/backend.py",
        "tests/test_conformance.py",
    }
    project = tomllib.loads((tmp_path / "new" / "pyproject.toml").read_text())["project"]
    assert project["name"] == "a-b-backend"
    assert project["entry-points"]["corelm.backends"] == {"a_b": "a_b_backend:ABBackend"}


@pytest.mark.parametrize(
    ("kind", "page", "has_engine"),
    [
        ("logits", "docs/local-engines.md", True),
        ("http", "docs/write-a-backend.md, section 6,", False),
        ("engine", "docs/write-a-backend.md", True),
    ],
)
def test_it_names_the_page_about_its_kind_and_asks_for_the_module_of_an_engine(kind, page, has_engine, tmp_path):
    told = corelm_command("new-backend", "mine", "--kind", kind, "--output", tmp_path / "new").stdout
    assert told.endswith(f"Then open src/mine_backend/backend.py, and {page} of core.\n")
    path, _, section = page.rstrip(",").partition(", section ")
    assert f"\n## {section}. A server\n" * bool(section) in (Path(__file__).parents[3] / path).read_text()
    project = tomllib.loads((tmp_path / "new" / "pyproject.toml").read_text())["project"]
    assert ("corelm.engines" in project["entry-points"]) == has_engine
    assert ("corelm.engines" in (tmp_path / "new" / "README.md").read_text()) == has_engine


def test_a_server_that_does_not_say_its_context_is_at_fault_and_its_client_is_closed(tiny_model, tmp_path, monkeypatch):
    assert corelm_command("new-backend", "unsaid", "--kind", "http", "--output", tmp_path / "new").exit_code == 0
    monkeypatch.syspath_prepend(tmp_path / "new" / "src")
    plugin = importlib.import_module("unsaid_backend").UnsaidBackend
    before = {*threading.enumerate()}
    for page in ([], {}, {"max_context": "many"}, {"max_context": 0}):
        said = pytest.raises(EngineError, match="does not say the max_context")
        with FaultServer(lambda request, page=page: json_reply(page)) as server, said:
            plugin.open(base_url=server.url, tokenizer=str(tiny_model))
        assert not [each for each in {*threading.enumerate()} - before if each.name.startswith("corelm-http")]


def test_names_that_cannot_be_used_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("Llama", "1st", "a--b", "../up", "class", "transformers"):
        result = corelm_command("new-backend", name)
        said = "installed here already" if name == "transformers" else "small letters"
        assert result.exit_code == 2 and said in result.stderr, name
        assert not list(tmp_path.iterdir())


def test_nothing_that_is_there_is_overwritten(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine-backend").mkdir()
    assert corelm_command("new-backend", "mine").exit_code == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    result = corelm_command("new-backend", "mine")
    assert result.exit_code == 2 and "not an empty folder" in result.stderr
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before

"""`corelm doctor`: what it finds with distributions that are there and wrong, and what its exit code says.

The command runs in this process, and so do the lines that it would send to new processes. Two tests start real ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import corelm
from corelm.backend.registry import scan
from corelm_cli import diagnosis
from corelm_cli.diagnosis import ProbeError, probe, server_findings, torch_findings
from helpers.command_line import corelm_command
from helpers.serving import serving

CUDA = {
    "version": "2.13.0+cu130",
    "cuda": "13.0",
    "hip": None,
    "mps": False,
    "error": "",
    "kernels": ["sm_90"],
    "gpus": [],
}
H100 = {"name": "NVIDIA H100", "capability": [9, 0]}
Findings = list[dict[str, str]]


def answered_here(lines: str) -> Any:
    """Do what `probe` does, in this process."""
    names: dict[str, Any] = {}
    try:
        exec(lines, names)
    except Exception as error:
        raise ProbeError(f"{type(error).__name__}: {error}") from error
    return names["found"]


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Findings]:
    """Run the command for the toy and the named backends, and return its findings."""
    monkeypatch.setattr(diagnosis, "probe", answered_here)

    def run(*backends: str, status: int) -> Findings:
        monkeypatch.setenv("CORELM_BACKENDS", ",".join(["toy", *backends]))
        result = corelm_command("doctor", "--json")
        assert result.exit_code == status, result.output
        found: Findings = json.loads(result.stdout)
        return found

    return run


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Make a distribution with its metadata, put its folder on the path and return the folder."""

    def make(name: str, version: str = "1.0", requires: str = "", points: str = "", **modules: str) -> Path:
        folder = tmp_path / "site"
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        needs = f"Requires-Dist: {requires}\n" if requires else ""
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: Other\n{needs}"
        )
        (info / "entry_points.txt").write_text(points)
        for module, text in modules.items():
            (folder / f"{module}.py").write_text(text)
        monkeypatch.syspath_prepend(str(folder))
        return folder

    return make


def bad(findings: Findings, level: str = "problem") -> Findings:
    return [finding for finding in findings if finding["level"] == level]


def test_a_requirement_that_is_not_met_is_found_with_what_to_type(doctor, distribution):
    points = "[corelm.backends]\nnew = corelm_testing.toy:ToyBackend\n"
    distribution("new-backend", requires="pluggy>=99", points=points)
    (found,) = bad(doctor("new", status=1))
    assert found["about"] == "new-backend" and "pluggy>=99" in found["text"]
    assert 'pip install "pluggy>=99"' in found["remedy"]


def test_plugins_that_cannot_be_imported_are_found(doctor, distribution):
    distribution(
        "new-backends",
        points="[corelm.backends]\nraising = raising:Engine\nlacking = lacking:Engine\n",
        raising="raise OSError('libcudart.so.99: cannot open')",
        lacking="import missing_library",
    )
    texts = {each["about"]: each["text"] for each in bad(doctor("raising", "lacking", status=1))}
    assert texts.keys() == {"backend 'raising'", "backend 'lacking'"}
    assert "libcudart.so.99" in texts["backend 'raising'"] and "missing_library" in texts["backend 'lacking'"]


def test_an_engine_that_cannot_be_imported_is_found_with_what_it_asks_for(doctor, distribution):
    points = "[corelm.backends]\nnew = corelm_testing.toy:ToyBackend\n[corelm.engines]\nnew = new_engine\n"
    path = distribution("new-backend", points=points, new_engine="raise ImportError('undefined symbol: _ZN3c10')")
    info = path / "new_engine-3.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: new-engine\nVersion: 3.0\nRequires-Dist: torch==1.0\n")
    (info / "top_level.txt").write_text("new_engine\n")
    (found,) = bad(doctor("new", status=1))
    assert "undefined symbol: _ZN3c10" in found["text"]
    assert "new-engine asks for torch==1.0, found" in found["text"]


def test_an_engine_that_its_plugin_finds_slow_is_a_warning(doctor, distribution):
    plugin = """
from corelm_testing.toy import ToyBackend
class Slow(ToyBackend):
    @classmethod
    def engine_warning(cls):
        return "answers are decoded without a cache"
"""
    points = "[corelm.backends]\nslow = slow_backend:Slow\n[corelm.engines]\nslow = slow_engine\n"
    distribution("slow-backend", points=points, slow_backend=plugin, slow_engine="")
    found = [each for each in bad(doctor("slow", status=0), "warning") if each["about"] == "backend 'slow'"]
    assert len(found) == 1 and "decoded without a cache" in found[0]["text"]
    assert "slow-backend was tested with" in found[0]["remedy"]


def test_two_distributions_with_one_backend_and_metadata_that_cannot_be_read(doctor, distribution):
    path = distribution("new-backend", points="[corelm.backends]\ntoy = corelm_testing.toy:ToyBackend\n")
    broken = path / "broken-1.0.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\n")
    (broken / "entry_points.txt").write_text("[corelm.backends]\nx = y:Z\n")
    texts = [each["text"] for each in bad(doctor(status=1))]
    assert sum("several distributions claim this name" in text for text in texts) == 2
    assert any("broken-1.0.dist-info" in text for text in texts)


def test_a_name_that_the_variable_allows_and_that_is_not_installed_is_a_warning(doctor):
    assert any("not installed: tpu" in each["text"] for each in bad(doctor("tpu", status=0), "warning"))


def test_a_second_copy_of_core_is_a_warning(doctor, tmp_path, monkeypatch):
    (tmp_path / "copy" / "corelm").mkdir(parents=True)
    (tmp_path / "copy" / "corelm" / "__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "copy")])
    texts = [each["text"] for each in bad(doctor(status=0), "warning")]
    assert any("second copy" in text and str(tmp_path / "copy") in text for text in texts)


def test_another_projects_core_is_named_with_what_to_type(doctor, distribution):
    distribution("core", "9.1")
    (found,) = bad(doctor(status=1))
    assert found["about"] == "core" and "core 9.1 is installed: 'Other'" in found["text"]
    assert "pip uninstall core" in found["remedy"]
    said = corelm_command("doctor").stdout
    assert "PROBLEM core: another project's distribution called core 9.1" in " ".join(said.split())
    assert said.rstrip().splitlines()[-1].startswith("1 problem, ")


# ---------------------------------------------------------------- devices


def test_what_the_facts_about_torch_mean():
    for facts, driver, level, expected in (
        ({"cuda": None, "version": "2.13.0+cpu"}, [], "ok", "a build for CPUs"),
        ({"cuda": None, "version": "2.13.0+cpu"}, ["NVIDIA H100, 550.1"], "problem", "this machine has NVIDIA H100"),
        ({}, [], "ok", "shows no GPU"),
        ({"error": "RuntimeError: driver too old"}, ["NVIDIA H100, 450.1"], "problem", "driver too old"),
        ({"gpus": [H100]}, ["NVIDIA H100, 570.1"], "ok", "with NVIDIA H100"),
        ({"gpus": [H100], "kernels": ["sm_70", "compute_70"]}, ["x"], "ok", "with NVIDIA H100"),
        ({"gpus": [H100], "kernels": ["sm_70", "sm_100"]}, ["x"], "problem", "kernels for sm_70, sm_100"),
    ):
        *_, last = torch_findings({**CUDA, **facts}, driver)
        assert last.level == level and expected in last.text, (facts, driver, last)


def test_a_driver_with_gpus_and_a_torch_without_cuda_is_a_problem(doctor, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    if torch.version.cuda:
        pytest.skip("this torch is a build for CUDA")
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H100, 570.86'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    (found,) = bad(doctor(status=1))
    assert "NVIDIA H100, 570.86" in found["text"] and "build of torch for CUDA" in found["remedy"]


# ---------------------------------------------------------------- servers


@pytest.fixture(scope="module")
def backend(tiny_model):
    with corelm.get_backend("transformers", tiny_model, dtype="float32") as opened:
        yield opened


def test_a_server_that_means_what_core_means_is_all_right(backend, tiny_model):
    with serving(backend) as server:
        options = {"api_key": server.api_key, "tokenizer": str(tiny_model)}
        findings = list(server_findings(f"{server.url}/v1", scan(), options))
    assert [each.level for each in findings] == ["ok"] * 3
    assert "from corelm" in findings[0].text and "same log-probs" in findings[-1].text


def test_a_key_that_is_missing_and_a_server_that_is_gone_are_problems(backend):
    with serving(backend) as server:
        (found,) = server_findings(server.url, scan(), {})
        assert found.level == "problem" and "--option api_key=KEY" in found.remedy
    (found,) = server_findings(server.url, scan(), {})
    assert found.level == "problem" and "is the server running" in found.text


def test_a_model_that_is_not_listed_and_a_tokenizer_that_is_missing_are_said(backend, tmp_path):
    with serving(backend) as server:
        options = {"api_key": server.api_key, "tokenizer": str(tmp_path / "none")}
        findings = list(server_findings(server.url, scan(), options, model="other"))
    assert [each.level for each in findings] == ["ok", "warning", "problem"]
    assert "tokenizer" in findings[-1].text


LYING = """
from dataclasses import replace
import corelm
from corelm_testing.toy import ToyBackend

class Lying(ToyBackend):
    'Labels log-probs of the temperature that it sampled at as those of the model.'

    @classmethod
    def open(cls, model=None, base_url=None, api_key=None):
        return super().open()

    @corelm.hookimpl
    def generate(self, request):
        made = super().generate(request)
        return replace(made, logprobs=made.logprobs.with_values(made.logprobs.values * 0.5))
"""


def test_log_probs_that_mean_something_else_are_a_problem(distribution):
    distribution("lying", points="[corelm.backends]\nlying = lying:Lying\n", lying=LYING)
    with corelm.get_backend("toy") as toy, serving(toy) as server:
        *_, last = server_findings(server.url, scan(), {"api_key": server.api_key}, "lying")
    assert last.level == "problem" and "not of the same distribution" in last.text
    assert last.text.startswith("log-probs of 16 tokens that it sampled at temperature 0.5")


# ---------------------------------------------------------------- processes


@pytest.mark.process
def test_a_process_that_crashes_raises_or_hangs_is_told_apart():
    assert probe("found = [1, 2]") == [1, 2]
    for lines, said in (
        ("import os; os.kill(os.getpid(), 11)", "signal 11"),
        ("import missing_library", "ModuleNotFoundError: No module named 'missing_library'"),
        ("raise SystemExit(5)", "exit status 5"),
    ):
        with pytest.raises(ProbeError, match=said):
            probe(lines)
    with pytest.raises(ProbeError, match=r"did not end within 0\.5 seconds"):
        probe("import time; time.sleep(600)", timeout=0.5)


@pytest.mark.nightly
@pytest.mark.process
def test_this_and_another_interpreter_are_looked_at_and_one_that_is_none_is_a_problem(tmp_path):
    """Nothing is wrong where the tests run: the only problem is the interpreter that is none."""
    others = ("--python", sys.executable, "--python", str(tmp_path / "gone"))
    result = subprocess.run(
        [sys.executable, "-m", "corelm_cli", "doctor", "--json", *others],
        env={**os.environ, "CORELM_BACKENDS": "toy"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1, result.stdout + result.stderr
    findings = json.loads(result.stdout)
    (found,) = bad(findings)
    assert found["where"].endswith("gone") and "no such file" in found["text"]
    here, there = (
        [each for each in findings if each["where"] == where]
        for where in ("this interpreter", f"the interpreter {sys.executable}")
    )
    assert {"Python", "core", "torch", "backend 'toy'"} <= {each["about"] for each in here}
    assert "can hold an engine" in there[0]["text"] and {"torch", "backend 'toy'"} <= {each["about"] for each in there}


@pytest.mark.process
def test_another_interpreter_needs_no_command_of_core(tmp_path, monkeypatch):
    (tmp_path / "corelm_cli.py").write_text("raise ImportError('this environment has core and an engine alone')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setenv("CORELM_BACKENDS", "toy")
    first, *rest = diagnosis.findings_of(sys.executable)
    assert "can hold an engine" in first.text and {"torch", "backend 'toy'"} <= {each.about for each in rest}


def test_a_model_is_opened_and_timed_and_an_index_that_does_not_answer_is_no_problem(tiny_model, monkeypatch):
    asked: list[list[str]] = []

    def index(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        asked.append(command)
        if command[5] == "transformers":
            raise subprocess.CalledProcessError(1, command)
        return subprocess.CompletedProcess(
            command, 0, stdout=command[5].encode() + b" (999.0)\nAvailable versions: 999.0, 1.0\n"
        )

    monkeypatch.setattr(diagnosis.subprocess, "run", index)
    result = corelm_command("doctor", "--json", tiny_model, "--option", "dtype=bfloat16")
    found = {(each["about"], each["text"].partition(":")[0]): each for each in json.loads(result.stdout)}
    assert result.exit_code == 0
    about = f"model {tiny_model}"
    assert "tokens/s in the first batch" in found[about, "it answers"]["text"]
    assert found[about, "model"]["text"] == "model: bfloat16 on cpu"
    assert found[about, "model"]["level"] == ("ok" if diagnosis._cpu_has_bfloat16() else "warning")
    assert (about, "decoding") in found and (about, "scoring") in found
    assert [command[5] for command in asked] == ["torch", "transformers"]
    newest = {each["about"]: each for each in found.values() if each["about"] in ("torch", "transformers")}
    assert newest["torch"]["text"].endswith("999.0 is the newest")
    assert newest["transformers"]["level"] == "ok" and "pip could not ask" in newest["transformers"]["text"]


@pytest.mark.parametrize(
    ("part", "way", "level"),
    [
        ("model", "float32 on cuda:0", "warning"),
        ("model", "bfloat16 on cuda:0", "ok"),
        ("decoding", "uncached: its forward takes no cache", "warning"),
        ("scoring", "packed", "ok"),
        ("scoring", "padded: packed rows differ", "warning"),
    ],
)
def test_what_is_slower_than_it_could_be_is_a_warning(part, way, level):
    assert diagnosis._judged(part, way)[0] == level


def test_a_model_that_does_not_open_is_a_problem(tmp_path):
    result = corelm_command("doctor", tmp_path / "gone")
    assert result.exit_code == 1 and "PROBLEM" in result.stdout and "gone" in result.stdout


@pytest.mark.process
def test_plugins_are_imported_in_one_process_and_one_that_crashes_is_named(distribution, monkeypatch):
    path = distribution(
        "crashing", points="[corelm.backends]\ncrashing = crashing:Engine\n", crashing="import os; os.abort()"
    )
    monkeypatch.setenv("PYTHONPATH", f"{path}{os.pathsep}{os.pathsep.join(sys.path)}")
    asked: list[str] = []

    def counted(lines: str) -> Any:
        asked.append(lines)
        return probe(lines)

    monkeypatch.setattr(diagnosis, "probe", counted)
    for names, processes in ((["toy", "cassette"], 1), (["toy", "crashing"], 3)):
        asked.clear()
        monkeypatch.setenv("CORELM_BACKENDS", ",".join(names))
        found = {each.about: each for each in diagnosis.engines(scan())}
        assert len(asked) == processes and found["backend 'toy'"].level == "ok"
    assert "killed by signal 6" in found["backend 'crashing'"].text

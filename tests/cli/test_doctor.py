"""`corelm doctor`: what it finds in real processes, with distributions that are really there and really wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import corelm
from corelm.backend.registry import scan
from corelm.cli.diagnosis.devices import torch_findings
from corelm.cli.diagnosis.probes import ProbeError, probe
from corelm.cli.diagnosis.servers import ServerChoice, server_findings
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


@pytest.fixture
def doctor(tmp_path):
    """Run the command in an empty folder, with more distributions than are installed, and return its findings."""

    def run(*arguments: str, path: Path | None = None, status: int, **environment: str) -> list[dict[str, str]]:
        (tmp_path / "empty").mkdir(exist_ok=True)
        before = os.environ.get("PYTHONPATH")
        places = [*([] if path is None else [str(path)]), *([] if before is None else [before])]
        result = subprocess.run(
            [sys.executable, "-m", "corelm", "doctor", "--json", *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places), **environment},
            cwd=tmp_path / "empty",
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert result.returncode == status, result.stdout + result.stderr
        return json.loads(result.stdout)

    return run


@pytest.fixture
def distribution(tmp_path):
    """Make a distribution with its metadata, and return the folder to put on the path."""

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
        return folder

    return make


def bad(findings, level="problem"):
    return [finding for finding in findings if finding["level"] == level]


ALL_OF_ONE = {"CORELM_BACKENDS": "toy"}


def test_nothing_is_wrong_where_the_tests_run(doctor):
    findings = doctor(status=0, **ALL_OF_ONE)
    assert not bad(findings), findings
    assert {"Python", "core", "torch", "backend 'toy'"} <= {each["about"] for each in findings}


def test_a_requirement_that_is_not_met_is_found_with_what_to_type(doctor, distribution):
    points = "[corelm.backends]\nnew = toy_backend:ToyBackend\n"
    path = distribution("new-backend", requires="pluggy>=99", points=points)
    (found,) = bad(doctor(path=path, status=1, CORELM_BACKENDS="toy,new"))
    assert (
        found["about"] == "new-backend"
        and "pluggy>=99" in found["text"]
        and 'pip install "pluggy>=99"' in found["remedy"]
    )


def test_plugins_that_cannot_be_imported_are_found(doctor, distribution):
    path = distribution(
        "new-backends",
        points="[corelm.backends]\nraising = raising:Engine\ncrashing = crashing:Engine\nlacking = lacking:Engine\n",
        raising="raise OSError('libcudart.so.99: cannot open')",
        crashing="import os; os.kill(os.getpid(), 11)",
        lacking="import missing_library",
    )
    findings = bad(doctor(path=path, status=1, CORELM_BACKENDS="toy,raising,crashing,lacking"))
    texts = {each["about"]: each["text"] for each in findings}
    assert texts.keys() == {"backend 'raising'", "backend 'crashing'", "backend 'lacking'"}
    assert "libcudart.so.99" in texts["backend 'raising'"]
    assert "signal 11" in texts["backend 'crashing'"]
    assert "missing_library" in texts["backend 'lacking'"]


def test_an_engine_that_cannot_be_imported_is_found_with_what_it_asks_for(doctor, distribution):
    points = "[corelm.backends]\nnew = toy_backend:ToyBackend\n[corelm.engines]\nnew = new_engine\n"
    path = distribution("new-backend", points=points, new_engine="raise ImportError('undefined symbol: _ZN3c10')")
    info = path / "new_engine-3.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: new-engine\nVersion: 3.0\nRequires-Dist: torch==1.0\n")
    (info / "top_level.txt").write_text("new_engine\n")
    (found,) = bad(doctor(path=path, status=1, CORELM_BACKENDS="toy,new"))
    assert "undefined symbol: _ZN3c10" in found["text"]
    assert "new-engine asks for torch==1.0, found" in found["text"]


def test_two_distributions_with_one_backend_and_metadata_that_cannot_be_read(doctor, distribution):
    path = distribution("new-backend", points="[corelm.backends]\ntoy = toy_backend:ToyBackend\n")
    broken = path / "broken-1.0.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\n")
    (broken / "entry_points.txt").write_text("[corelm.backends]\nx = y:Z\n")
    texts = [each["text"] for each in bad(doctor(path=path, status=1, **ALL_OF_ONE))]
    assert sum("several distributions claim this name" in text for text in texts) == 2
    assert any("broken-1.0.dist-info" in text for text in texts)


def test_a_name_that_the_variable_allows_and_that_is_not_installed_is_a_warning(doctor):
    (found,) = bad(doctor(status=0, CORELM_BACKENDS="toy,tpu"), "warning")
    assert "not installed: tpu" in found["text"]


def test_a_second_copy_of_core_is_a_warning(doctor, tmp_path):
    (tmp_path / "copy" / "corelm").mkdir(parents=True)
    (tmp_path / "copy" / "corelm" / "__init__.py").write_text("")
    here = str(Path(corelm.__file__).parents[1])
    found = bad(doctor(status=0, PYTHONPATH=os.pathsep.join([here, str(tmp_path / "copy")]), **ALL_OF_ONE), "warning")
    assert any("second copy" in each["text"] for each in found)


def test_another_interpreter_is_looked_at_and_one_that_is_none_is_a_problem(doctor, tmp_path):
    findings = doctor("--python", sys.executable, "--python", str(tmp_path / "gone"), status=1, **ALL_OF_ONE)
    sections = {each["where"] for each in findings}
    assert len(sections) == 3
    (found,) = bad(findings)
    assert found["where"].endswith("gone") and "no such file" in found["text"]
    there = [each for each in findings if each["where"] == f"the interpreter {sys.executable}"]
    assert "can hold an engine" in there[0]["text"] and {"torch", "backend 'toy'"} <= {each["about"] for each in there}


def test_another_projects_core_is_named_with_what_to_type(distribution, tmp_path):
    path = distribution("core", "9.1")
    result = subprocess.run(
        [sys.executable, "-m", "corelm", "doctor"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")]), **ALL_OF_ONE},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    said = " ".join(result.stdout.split())
    assert "PROBLEM core: another project's distribution called core 9.1 is installed: 'Other'" in said
    assert "→ " in said and "pip uninstall core" in said
    assert result.stdout.rstrip().splitlines()[-1].startswith("1 problem, ")


# ---------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("facts", "driver", "level", "expected"),
    [
        ({"cuda": None, "version": "2.13.0+cpu"}, [], "ok", "a build for CPUs"),
        ({"cuda": None, "version": "2.13.0+cpu"}, ["NVIDIA H100, 550.1"], "problem", "this machine has NVIDIA H100"),
        ({}, [], "ok", "shows no GPU"),
        ({"error": "RuntimeError: driver too old"}, ["NVIDIA H100, 450.1"], "problem", "driver too old"),
        ({"gpus": [H100]}, ["NVIDIA H100, 570.1"], "ok", "with NVIDIA H100"),
        ({"gpus": [H100], "kernels": ["sm_70", "compute_70"]}, ["x"], "ok", "with NVIDIA H100"),
        ({"gpus": [H100], "kernels": ["sm_70", "sm_100"]}, ["x"], "problem", "kernels for sm_70, sm_100"),
    ],
)
def test_what_the_facts_about_torch_mean(facts, driver, level, expected):
    *_, last = torch_findings({**CUDA, **facts}, driver)
    assert last.level == level and expected in last.text


def test_a_driver_with_gpus_and_a_torch_without_cuda_is_a_problem(doctor, tmp_path):
    torch = pytest.importorskip("torch")
    if torch.version.cuda:
        pytest.skip("this torch is a build for CUDA")
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H100, 570.86'\n")
    program.chmod(0o755)
    findings = doctor(status=1, PATH=f"{program.parent}{os.pathsep}{os.environ['PATH']}", **ALL_OF_ONE)
    (found,) = bad(findings)
    assert "NVIDIA H100, 570.86" in found["text"] and "build of torch for CUDA" in found["remedy"]


# ---------------------------------------------------------------- servers


@pytest.fixture(scope="module")
def backend(tiny_model):
    with corelm.get_backend("transformers", tiny_model, dtype="float32") as opened:
        yield opened


def test_a_server_that_means_what_core_means_is_all_right(backend, tiny_model):
    with serving(backend) as server:
        options = {"api_key": server.api_key, "tokenizer": str(tiny_model)}
        findings = list(server_findings(ServerChoice(url=f"{server.url}/v1", options=options), scan()))
    assert [each.level for each in findings] == ["ok"] * 3
    assert "from corelm" in findings[0].text and "same log-probs" in findings[-1].text


def test_a_key_that_is_missing_and_a_server_that_is_gone_are_problems(backend):
    with serving(backend) as server:
        (found,) = server_findings(ServerChoice(url=server.url), scan())
        assert found.level == "problem" and "--option api_key=KEY" in found.remedy
    (found,) = server_findings(ServerChoice(url=server.url), scan())
    assert found.level == "problem" and "is the server running" in found.text


def test_a_model_that_is_not_listed_and_a_tokenizer_that_is_missing_are_said(backend, tmp_path):
    with serving(backend) as server:
        options = {"api_key": server.api_key, "tokenizer": str(tmp_path / "none")}
        findings = list(server_findings(ServerChoice(url=server.url, model="other", options=options), scan()))
    assert [each.level for each in findings] == ["ok", "warning", "problem"]
    assert "tokenizer" in findings[-1].text


def test_log_probs_that_mean_something_else_are_a_problem(tiny_model):
    from corelm.cli.diagnosis.servers import _meaning

    class Processed:
        """Labels log-probs of the temperature that was sampled at as the model's own."""

        @corelm.hookimpl(wrapper=True)
        def generate(self, request):
            result = yield
            return replace(result, logprobs=result.logprobs.with_values(result.logprobs.values * 0.5))

    with corelm.get_backend("transformers", tiny_model, dtype="float32", wrappers=[Processed()]) as liar:
        *_, last = _meaning("server", liar)
    assert last.level == "problem" and "not of the same distribution" in last.text


# ---------------------------------------------------------------- processes


def test_a_process_that_hangs_is_ended():
    with pytest.raises(ProbeError, match=r"did not end within 0\.5 seconds"):
        probe("import time; time.sleep(600)", timeout=0.5)

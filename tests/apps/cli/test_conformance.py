"""`corelm conformance` runs the kit on a backend by name: good and bad ones, and what the report says of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from corelm_testing import BackendConformance, wide_model
from corelm_testing.plugin import standard_tests
from helpers.command_line import corelm_command

#: The transformers backend with a defect: every log-prob is that of temperature 2.
FLATTENED = """
from dataclasses import replace
import corelm
from transformers_backend import TransformersBackend

class Flattened(TransformersBackend):
    @corelm.hookimpl
    def score_logprobs(self, request):
        return replace(super().score_logprobs(replace(request, temperature=2.0)), temperature=request.temperature)
"""

#: Parts of the names of tests in the kit, for one run that ends soon.
CHOSEN = ("every_sampled", "every_token", "uses_the_new_weights", "closing", "engine_kwargs")


@pytest.fixture
def kit(tmp_path):
    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "corelm_cli", "conformance", *arguments],
            env={**os.environ, **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
        )

    return run


def suite_of(path):
    (suite,) = json.loads(path.read_text())["suites"]
    return suite


@pytest.mark.process
def test_a_good_backend_keeps_its_promises(kit, tiny_model, tmp_path):
    result = kit(
        *("transformers", "--model", str(tiny_model), "--oracle", "transformers", "--option", "dtype=float32"),
        *(
            "--draws",
            "400",
            "-k",
            " or ".join(CHOSEN),
            "--quiet",
        ),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "report is in" not in result.stderr and "testing" not in result.stderr and "...." not in result.stdout
    suite = suite_of(tmp_path / "conformance.json")
    chosen = {name for name in standard_tests(BackendConformance) if any(word in name for word in CHOSEN)}
    assert chosen <= {test["test"] for test in suite["tests"]} and suite["counts"]["passed"] >= 9
    assert suite["counts"].keys() <= {"passed", "not applicable"}
    assert suite["backend"] == "transformers" and suite["model"] == str(tiny_model)
    assert re.fullmatch(r"core-transformers-backend \S+, transformers \S+", suite["software"])
    assert suite["declares"]["score"] is True and suite["declares"]["sampling"]["top_k"] is None
    assert 0 < suite["largest_difference"] <= 1e-4
    # Greedy answers are compared with an oracle, too, and those of the new weights.
    assert {test["theme"] for test in suite["tests"] if test["difference"]} >= {"logprobs", "weights"}
    page = (tmp_path / "conformance.html").read_text()
    assert "every sampled token has its log prob" in page and "transformers" in page


@pytest.mark.nightly
@pytest.mark.process
def test_a_backend_with_a_defect_fails_and_the_report_says_how_far_off_it_is(kit, tiny_model, tmp_path, fabricate):
    site = fabricate("flattened", "1", {"flattened": "flattened:Flattened"}, {"flattened": FLATTENED})
    path = os.pathsep.join([str(site), *sys.path])
    result = kit("flattened", "--model", str(tiny_model), "-k", "every_token_but_the_first", PYTHONPATH=path)
    assert result.returncode == 1, result.stdout + result.stderr
    suite = suite_of(tmp_path / "conformance.json")
    (test,) = [test for test in suite["tests"] if test["test"] == "test_every_token_but_the_first_is_scored"]
    assert test["outcome"] == "failed" and test["difference"] > 0.01 and "off by" in test["reason"]
    assert suite["largest_difference"] >= test["difference"]
    assert re.search(r"<pre>[^<]*off by", (tmp_path / "conformance.html").read_text())


@pytest.mark.process
@pytest.mark.nightly
def test_new_weights_may_be_a_folder_or_are_not_shown_for_a_reason(kit, tiny_model, tmp_path):
    other = wide_model(tmp_path / "other", seed=1)
    given = ("transformers", "--model", str(wide_model(tmp_path / "model")), "--option", "dtype=float32")
    scoring = ("-k", "scoring_uses_the_new_weights", "--output", "mine")
    for flags, outcome in (
        (("--new-weights", str(other)), "passed"),
        (("--not-shown", "update_weights=others load them"), "xfailed"),
    ):
        result = kit(*given, *scoring, *flags)
        assert result.returncode == 0, result.stdout + result.stderr
        suite = suite_of(tmp_path / "mine.json")
        assert suite["counts"] == {outcome: 1} and (outcome == "passed" or "others load" in suite["tests"][0]["reason"])


def test_what_cannot_be_run_is_refused_in_one_message(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = str(tiny_model)
    for arguments, said in (
        (("nonesuch", "--model", model), "no backend is named 'nonesuch'"),
        (("transformers",), "error: --model: expected a folder with the model"),
        (("transformers", "--model", "/nowhere/missing"), "transformers cannot load '/nowhere/missing'"),
        (("transformers", "--model", model, "--engine-sampling", "{"), "expected JSON"),
        (("transformers", "--model", model, "--engine-sampling", '{"top_k": 3}'), "engine_kwargs"),
        (("transformers", "--model", model, "--option", "python=nowhere"), "nowhere"),
    ):
        result = corelm_command("conformance", *arguments)
        assert result.exit_code == 2 and said in result.stderr, result.stderr
        assert not (tmp_path / "conformance.json").exists()


@pytest.mark.process
@pytest.mark.nightly
def test_a_selection_without_tests_is_refused_whatever_the_folder_sets(kit, tiny_model, tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --unknown-option\n")
    (tmp_path / "conftest.py").write_text("raise RuntimeError('imported')\n")
    result = kit("transformers", "--model", str(tiny_model), "-k", "nothing_like_it")
    assert result.returncode == 2 and "its themes are tokens, logprobs" in result.stderr, result.stdout + result.stderr

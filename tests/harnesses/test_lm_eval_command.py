"""lm-eval's command line with the model `corelm`, in a process, and the page about it."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from corelm_interop.lm_eval import register
from helpers.lm_eval_tasks import QUESTIONS, write_tasks
from helpers.pages import Page

PAGE = Page(Path(__file__).parents[2] / "docs" / "lm-eval.md")


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tiny-model").symlink_to(tiny_model)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*command: str) -> subprocess.CompletedProcess[str]:
    # The commands of the page say `python`, and mean the interpreter that has lm-eval.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)


def results_in(folder: Path) -> dict[str, Any]:
    (path,) = folder.rglob("results_*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_the_page(folder):
    for block in PAGE.blocks("sh"):
        done = run("bash", "-euc", block)
        assert done.returncode == 0, done.stderr
    found = results_in(folder / "results")
    assert found["config"]["corelm_backend"] == "transformers" and found["config"]["corelm_tokens"]["scored"] > 0
    assert found["config"]["corelm_engine"]["model"] == "float32 on cpu"
    assert list(folder.glob("answers*.db")) and "|names|" in done.stdout.replace(" ", "")
    (samples,) = folder.rglob("samples_names_*.jsonl")
    assert len(samples.read_text().splitlines()) == 2
    # Its Python block reads the task that the commands wrote.
    PAGE.run()


def test_the_advice_to_apply_a_chat_template_is_about_the_model(folder):
    (folder / "tiny-model").rename(folder / "tiny-instruct")
    write_tasks(folder / "tasks", ["Pip"] * len(QUESTIONS))
    command = [sys.executable, "-m", "corelm_interop.lm_eval", "--model", "corelm", "--include_path", "tasks"]
    done = run(*command, "--tasks", "choices", "--model_args", "backend=transformers,model=tiny-instruct")
    assert done.returncode == 0, done.stderr
    assert "the model appears to be an" in done.stderr and "pretrained=None" not in done.stderr


def test_other_messages_of_lm_eval_are_as_they_were(caplog):
    register()
    told = ValueError("what lm-eval logs is not always a text")
    logging.getLogger("lm_eval.evaluator").warning(told)
    assert caplog.records[-1].msg is told


def test_an_argument_that_nothing_knows_is_one_line(folder):
    write_tasks(folder / "tasks", ["Pip"] * len(QUESTIONS))
    command = [sys.executable, "-m", "corelm_interop.lm_eval", "--model", "corelm", "--include_path", "tasks"]
    done = run(*command, "--tasks", "choices", "--model_args", "backend=transformers,model=tiny-model,max_lenght=9")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: max_lenght: ")

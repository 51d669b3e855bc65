"""The settings file next to the answers: what they were made with, once, so that different ones are never mixed."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from datetime import datetime
from pathlib import Path

import pytest
import torch

import corelm
from helpers.command_line import corelm_command, generate, rows, settings_of


def saved(files: tuple[Path, Path]) -> Path:
    return files[1].with_name("answers.settings.json")


def test_settings_and_provenance_are_saved_once(files):
    generate(files, "--log-probs", "raw", "--seed", 5, "--top-k", 3)
    made = settings_of(files[1])
    assert made["corelm"] == corelm.__version__
    assert made["settings"] == {
        "command": "generate",
        "backend": "toy",
        "model": None,
        "options": {},
        "log_probs": "raw",
        "return_tokens": False,
        "copy_input": False,
        "max_new_tokens": 9,
        "temperature": 1.0,
        "top_k": 3,
        "seed": 5,
    }
    assert (made["provenance"]["backend"], made["provenance"]["weight_version"]) == ("toy", "0")
    for row in rows(files[1]):
        assert row["settings"] == made["fingerprint"] and "provenance" not in row


def test_how_the_engine_ran_is_saved(tmp_path, tiny_model):
    """No flag names the dtype: it is the checkpoint's."""
    source, target = tmp_path / "lines.jsonl", tmp_path / "answers.jsonl"
    source.write_text('{"text": "The cat"}\n')
    result = corelm_command("score", "--model", tiny_model, "--input", source, "--output", target, "--json")
    assert result.exit_code == 0, result.stderr
    engine = settings_of(target)["engine"]
    assert (engine["model"], engine["attention"]) == ("float32 on cpu", "sdpa") and "transformers" in engine["software"]
    assert json.loads(result.stdout)["engine"] == engine and "engine" not in rows(target)[0]
    piped = corelm_command("score", "--model", tiny_model, "--input", source)
    assert json.loads(piped.stdout)["engine"] == engine
    assert "model: float32 on cpu" in result.stderr and "model: float32 on cpu" in piped.stderr


def test_an_answer_of_a_run_in_another_dtype_holds_its_own(files, fabricate, monkeypatch):
    telling = """
import os
from corelm_testing.toy import ToyBackend

class Telling(ToyBackend):
    info = property(lambda self: {"model": os.environ["RUNS"]})
"""
    fabricate("telling", "1", {"telling": "telling:Telling"}, {"telling": telling})
    monkeypatch.setenv("RUNS", "float32 on cpu")
    generate(files, backend="telling")
    drop_all_but_the_first(files[1])
    monkeypatch.setenv("RUNS", "bfloat16 on cuda:0")
    assert generate(files, backend="telling").exit_code == 0
    assert settings_of(files[1])["engine"]["model"] == "float32 on cpu"
    told = [row.get("engine", {}).get("model") for row in rows(files[1])]
    assert told == [None, *["bfloat16 on cuda:0"] * 4]


OPENS_ANY_MODEL = """
import os
from corelm_testing.toy import ToyBackend

class Opening(ToyBackend):
    info = property(lambda self: {"revision": os.environ.get("COMMIT", "")})

    @classmethod
    def open(cls, model=None):
        return super().open()
"""


def drop_all_but_the_first(answers: Path) -> bytes:
    whole = answers.read_bytes()
    answers.write_bytes(whole[: whole.index(b"\n") + 1])
    return whole


@pytest.mark.parametrize("size", [100, 40_000_000])
def test_answers_of_two_models_in_one_folder_are_not_mixed(files, fabricate, tmp_path, monkeypatch, size):
    fabricate("folders", "1", {"folders": "folders:Opening"}, {"folders": OPENS_ANY_MODEL})
    weights = tmp_path / "latest" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(bytes(size))
    monkeypatch.chdir(tmp_path)
    assert generate(files, "--model", "./latest", "--seed", 1, backend="folders").exit_code == 0
    made = settings_of(files[1])
    whole = drop_all_but_the_first(files[1])
    (weights.parent / "trainer_state.json").write_text("{}")
    assert generate(files, "--model", weights.parent, "--seed", 1, backend="folders").exit_code == 0, "typed otherwise"
    assert files[1].read_bytes() == whole and settings_of(files[1]) == made
    drop_all_but_the_first(files[1])
    shutil.copytree(weights.parent, tmp_path / "copy")
    result = generate(files, "--model", "./copy", "--seed", 1, backend="folders")
    assert result.exit_code == 2 and "made with model './latest', but model is now './copy'" in result.stderr
    first = drop_all_but_the_first(files[1])
    weights.write_bytes(bytes(size // 2) + b"\1" * (size - size // 2))
    result = generate(files, "--model", "./latest", "--seed", 1, backend="folders")
    assert result.exit_code == 2 and "the files of the model changed since the answers were made" in result.stderr
    assert "Run the same command again" not in result.stderr
    assert first.startswith(files[1].read_bytes()) and len(rows(files[1])) == 1
    assert generate(files, "--model", "./latest", "--seed", 1, "--overwrite", backend="folders").exit_code == 0
    assert settings_of(files[1])["engine"]["model_files"] != made["engine"]["model_files"]


def test_answers_of_two_commits_of_a_hub_are_not_mixed(files, fabricate, monkeypatch):
    fabricate("commits", "1", {"commits": "commits:Opening"}, {"commits": OPENS_ANY_MODEL})
    monkeypatch.setenv("COMMIT", "aaa")
    assert generate(files, "--model", "name", backend="commits").exit_code == 0
    drop_all_but_the_first(files[1])
    monkeypatch.setenv("COMMIT", "bbb")
    result = generate(files, "--model", "name", backend="commits")
    assert result.exit_code == 2 and "the commit of the model changed since" in result.stderr
    assert "from aaa to bbb" in result.stderr and len(rows(files[1])) == 1


def test_the_run_is_saved(files):
    generate(files, "--batch-size", 3)
    run = settings_of(files[1])["run"]
    assert (run["batch_size"], run["python"], run["torch"]) == (3, platform.python_version(), torch.__version__)
    assert run["input"] == {"path": str(files[0]), "sha256": hashlib.sha256(files[0].read_bytes()).hexdigest()}
    assert run["defaults"].items() >= {"top_k": None, "top_p": 1.0, "stop": []}.items(), run
    assert not run["defaults"].keys() & settings_of(files[1])["settings"].keys()
    assert datetime.fromisoformat(run["started"]).tzinfo is not None
    generate((files[0], files[1].with_name("other.jsonl")), "--batch-size", 2)
    assert settings_of(files[1].with_name("other.jsonl"))["fingerprint"] == settings_of(files[1])["fingerprint"]


def test_an_answer_with_another_provenance_holds_its_own(files, fabricate):
    changing = """
import dataclasses
import corelm
from corelm_testing.toy import ToyBackend

class Changing(ToyBackend):
    @corelm.hookimpl
    def generate(self, request):
        made = super().generate(request)
        versions = ["1" if row[-3:] == [*b"sea"] else "0" for row in request.prompts.tolist()]
        return dataclasses.replace(made, weight_versions=tuple(versions))
"""
    fabricate("changing", "1", {"changing": "changing:Changing"}, {"changing": changing})
    assert generate(files, "--log-probs", "raw", backend="changing").exit_code == 0
    assert settings_of(files[1])["provenance"]["weight_version"] == "0"
    versions = [row.get("provenance", {}).get("weight_version") for row in rows(files[1])]
    assert versions == [None, None, "1", None, None]


def test_a_run_goes_on_and_keeps_the_file(files):
    generate(files, "--seed", 5)
    before = saved(files).read_bytes()
    whole = drop_all_but_the_first(files[1])
    assert generate(files, "--seed", 5).exit_code == 0
    assert (saved(files).read_bytes(), files[1].read_bytes()) == (before, whole)


@pytest.mark.parametrize("info", ['{"dtype": torch.float32, "loss": math.nan}', "1 / 0"])
def test_facts_that_are_no_texts_lose_no_answers(files, fabricate, info):
    telling = f"""
import math
import torch
from corelm_testing.toy import ToyBackend

class Telling(ToyBackend):
    info = property(lambda self: {info})
"""
    name = f"telling_{len(info)}"
    fabricate(name, "1", {name: f"{name}:Telling"}, {name: telling})
    result = generate(files, backend=name)
    assert result.exit_code == 0 and len(rows(files[1])) == 5, result.output
    told = settings_of(files[1])["engine"]
    assert told.get("dtype") == "torch.float32" or told["info"] == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize("more", [[], ["--overwrite"]])
def test_a_settings_file_of_an_earlier_version_does_not_say_how_the_engine_ran(files, more):
    generate(files)
    made = settings_of(files[1])
    engine = made.pop("engine")
    saved(files).write_text(json.dumps(made))
    drop_all_but_the_first(files[1])
    result = generate(files, *more)
    assert result.exit_code == 0 and len(rows(files[1])) == 5, result.output
    told = [row.get("engine") for row in rows(files[1])]
    assert told == ([None] * 5 if more else [None, *[engine] * 4])
    assert settings_of(files[1]).get("engine") == (engine if more else None)


def test_answers_without_their_settings_file_are_not_added_to(files):
    generate(files)
    saved(files).unlink()
    before = files[1].read_bytes()
    result = generate(files)
    assert result.exit_code == 2 and "answers.settings.json, which says how the answers were made, is missing" in (
        result.stderr
    )
    assert files[1].read_bytes() == before and not saved(files).exists()


def test_a_settings_file_of_other_answers_does_not_pass_for_theirs(files, tmp_path):
    """The names of two runs were exchanged."""
    generate(files)
    other = (files[0], tmp_path / "other.jsonl")
    generate(other, "--temperature", 0.5)
    saved(files).write_bytes((tmp_path / "other.settings.json").read_bytes())
    before = files[1].read_bytes()
    for more in ([], ["--temperature", 0.5]):
        result = generate(files, *more)
        assert result.exit_code == 2 and "answers.jsonl, line 1, was made with other settings" in result.stderr
        assert files[1].read_bytes() == before


def test_answers_of_two_runs_in_one_file_are_refused(files, tmp_path):
    generate(files)
    generate((files[0], tmp_path / "other.jsonl"), "--temperature", 0.5)
    with files[1].open("ab") as file:
        file.write((tmp_path / "other.jsonl").read_bytes())
    result = generate(files)
    assert result.exit_code == 2 and "answers.jsonl, line 6, was made with other settings" in result.stderr


def test_a_file_of_another_program_is_kept(files):
    for content in ("", "mine", "{}", "[]", '{"settings": {}}', "[" * 100_000):
        saved(files).write_text(content)
        result = generate(files)
        assert result.exit_code == 2 and "is not a settings file of corelm" in result.stderr, content[:20]
        assert saved(files).read_text() == content and not files[1].exists()


def test_the_settings_file_of_answers_that_are_gone_is_replaced(files):
    generate(files)
    files[1].unlink()
    assert generate(files, "--temperature", 0.5).exit_code == 0
    assert settings_of(files[1])["settings"]["temperature"] == 0.5


def test_a_settings_file_that_is_the_input_is_refused(tmp_path):
    source = tmp_path / "run.settings.json"
    source.write_text('{"prompt": "The cat"}\n')
    result = generate((source, tmp_path / "run.jsonl"))
    assert result.exit_code == 2 and "is both the output's settings file and the input" in result.stderr
    assert source.read_text() == '{"prompt": "The cat"}\n'


def test_no_settings_file_without_answers(files):
    files[0].write_text("not json\n")
    assert generate(files).exit_code == 1
    assert not saved(files).exists()


def test_a_settings_file_that_cannot_be_written_leaves_no_answer_without_settings(files):
    files[1].parent.chmod(0o755)
    taken = saved(files)
    taken.mkdir()
    result = generate(files)
    assert result.exit_code == 2 and "is not a regular file" in result.stderr and not files[1].exists()


def test_a_path_that_is_not_utf_8_is_saved(files, fabricate):
    opening = """
from corelm_testing.toy import ToyBackend

class Opening(ToyBackend):
    @classmethod
    def open(cls, model=None):
        return super().open()
"""
    fabricate("opening", "1", {"opening": "opening:Opening"}, {"opening": opening})
    for _ in range(2):
        assert generate(files, "--model", "a\udcff", backend="opening").exit_code == 0
    assert json.loads(saved(files).read_text())["settings"]["model"] == "a\udcff"

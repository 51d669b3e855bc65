"""The flags of sampling parameters: one for every field and alias of `SamplingParams`."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from corelm import SamplingParams
from corelm.spec.sampling import ALIASES, FIELDS
from corelm_cli.settings import recorded_sampling
from corelm_testing.usage import USAGE
from helpers.command_line import corelm_command, generate, rows, settings_of

#: A plugin that takes every parameter, and writes those of its last call next to the answers.
TAKING = """
import dataclasses, json, os
from corelm_testing.toy import ToyBackend
import corelm
from corelm.spec.sampling import EVERY_ENGINE, FIELDS

HONOURED = ("max_new_tokens", "min_new_tokens", "temperature", "top_k", "stop")

class Taking(ToyBackend):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        every = {name: None for name in FIELDS if name not in EVERY_ENGINE}
        self.capabilities = dataclasses.replace(self.capabilities, sampling=every)

    @corelm.hookimpl
    def generate(self, request):
        with open(os.environ["TAKEN"], "w") as file:
            json.dump(dataclasses.asdict(request.sampling), file)
        sampling = corelm.SamplingParams(**{name: getattr(request.sampling, name) for name in HONOURED})
        return super().generate(dataclasses.replace(request, sampling=sampling))
"""

#: What the conformance kit leaves to the engine's vocabulary, or to the temperature.
HERE = {"stop_token_ids": (3, 4), "do_sample": False}
#: A value for each field that is not its default.
GIVEN = {name: HERE[name] if name in HERE else usage.values[0] for name, usage in USAGE.items()}
NEEDS_BEAMS = ("length_penalty", "early_stopping")


def typed(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if isinstance(value, dict):
        value = tuple(f"{key}={each}" for key, each in value.items())
    return [str(word) for each in (value if isinstance(value, tuple) else (value,)) for word in (f"--{flag}", each)]


@pytest.fixture
def taken(tmp_path: Path, fabricate: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file that holds the parameters that reached the engine."""
    module = f"taking_{tmp_path.name}"
    fabricate("taking", "1", {"taking": f"{module}:Taking"}, {module: TAKING})
    monkeypatch.setenv("TAKEN", str(tmp_path / "taken.json"))
    return tmp_path / "taken.json"


def test_every_parameter_has_a_flag_that_reaches_the_engine(files, taken):
    for name in FIELDS:
        value = GIVEN[name]
        short = [] if name == "max_new_tokens" else ["--max-new-tokens", "9"]
        beams = ["--num-beams", "3"] if name in NEEDS_BEAMS else []
        target = files[1].with_name(f"{name}.jsonl")
        always = ["--input", files[0], "--output", target, "--backend", "taking"]
        result = corelm_command("generate", *always, *typed(name, value), *short, *beams)
        assert result.exit_code == 0, result.output
        if name == "num_samples":  # the toy does not sample several answers itself
            assert len(rows(target)) == 10
            continue
        reached = SamplingParams.make(rows(taken)[0])
        assert getattr(reached, name) == value, name
        expected = SamplingParams.make({"max_new_tokens": 9, name: value}, **({"num_beams": 3} if beams else {}))
        assert dataclasses.replace(reached, seed=expected.seed) == expected, name


def test_every_parameter_that_may_change_an_answer_is_a_setting():
    """Otherwise answers with different values of it would be mixed in one file."""
    for name in set(FIELDS) - {"num_samples", "do_sample"}:
        beams = {"num_beams": 2} if name in NEEDS_BEAMS else {}
        changed = SamplingParams.make({**beams, name: GIVEN[name]})
        assert recorded_sampling(SamplingParams(**beams)) != recorded_sampling(changed), name


def test_every_alias_has_a_flag(files, taken):
    for alias, name in ALIASES.items():
        target = files[1].with_name(f"{alias}.jsonl")
        always = ["--input", files[0], "--backend", "taking", "--output", target]
        assert corelm_command("generate", *always, *typed(alias, GIVEN[name])).exit_code == 0, alias
        by_alias = taken.read_text(), target.read_text()
        # The settings are the same under both names, so the run goes on.
        result = corelm_command("generate", *always, *typed(name, GIVEN[name]))
        assert result.exit_code == 0 and "0 answers written" in result.stderr, alias
        assert (taken.read_text(), target.read_text()) == by_alias, alias


def test_two_names_for_one_parameter_are_refused_as_in_python(files):
    result = generate(files, "--max-tokens", "3")  # `generate` gives --max-new-tokens 9
    assert result.exit_code == 2 and not files[1].exists()
    assert "max_tokens=3 and max_new_tokens=9 are the same parameter; give one" in result.stderr or (
        "max_new_tokens=9 and max_tokens=3 are the same parameter; give one" in result.stderr
    )


def test_an_answer_may_fill_the_context(files):
    always = ["--backend", "toy", "--input", files[0], "--output", files[1], "--option", "max_context=40"]
    assert corelm_command("generate", *always, "--max-new-tokens", "none", "--ignore-eos").exit_code == 0
    assert settings_of(files[1])["settings"]["max_new_tokens"] is None
    # A BOS and the bytes of "The cat" leave this much.
    assert rows(files[1])[0]["tokens"] == 40 - 8


def test_a_wrong_value_is_refused_before_anything_is_opened(files):
    for words, message in (
        (["--max-new-tokens", "many"], "expected an integer or none, got 'many'"),
        (["--top-k", "many"], "--top-k"),
        (["--top-p", "1.5"], "top_p: expected a number above 0 and up to 1"),
        (["--max-lenght", "5"], "No such option: --max-lenght"),
        (["--max-model-len=64"], "an option of the engine is typed --option max_model_len=64"),
        (["--hf-overrides", '{"a": 1}'], """typed --option 'hf_overrides={"a": 1}'"""),
        (["--enforce-eager", "--seed", "1"], "typed --option enforce_eager=true"),
        (["--engine-kwargs", "novalue"], "expected KEY=VALUE"),
    ):
        result = corelm_command("generate", "--backend", "toy", "--input", files[0], "--output", files[1], *words)
        assert result.exit_code == 2 and message in result.stderr and not files[1].exists(), words


def test_the_help_lists_every_parameter_once_with_its_aliases():
    text = corelm_command("generate", "--help").stdout
    for name in FIELDS:
        assert re.search(rf"^ {{4}}{name}: ", inspect.getdoc(SamplingParams) or "", re.MULTILINE), f"{name}: no help"
        assert len(re.findall(rf"^  --{name.replace('_', '-')} ", text, re.MULTILINE)) == 1, name
    flat = " ".join(text.split())
    for alias in ALIASES:
        # A long name may be continued on the next line.
        assert f"--{alias.replace('_', '-')}" in flat.replace("- ", "-")
    assert "Strings that end an answer." in flat and "Can be repeated." in flat

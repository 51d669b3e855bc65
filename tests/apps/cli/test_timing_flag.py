"""`--timing` and `corelm serve --telemetry`."""

from __future__ import annotations

import json
from pathlib import Path

from helpers.command_line import corelm_command, generate


def test_the_figures_are_on_the_standard_error_and_in_the_json(files: tuple[Path, Path]) -> None:
    result = generate(files, "--timing", "--json", "--batch-size", "2")
    assert result.exit_code == 0, result.stderr
    assert "generate: 3 calls, 5 rows; busy for " in result.stderr
    told = json.loads(result.stdout)
    made = told["timing"]["hooks"]["generate"]
    assert (made["calls"], made["rows"], made["sampled_tokens"]) == (3, 5, told["tokens"])
    assert 0 < made["busy"] <= told["timing"]["seconds"]


def test_without_the_flag_nothing_is_measured(files: tuple[Path, Path]) -> None:
    result = generate(files, "--json")
    assert "timing" not in json.loads(result.stdout) and "busy" not in result.stderr


def test_the_figures_are_no_settings_so_that_a_run_can_go_on_without_them(files: tuple[Path, Path]) -> None:
    assert generate(files, "--timing").exit_code == 0
    again = generate(files)
    assert again.exit_code == 0 and "0 answers written, 5 already present" in again.stderr


def test_scores_are_measured_as_well(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "The", "completions": [" cat", " sea"]}\n')
    options = ["--backend", "toy", "--input", str(source), "--output", str(target)]
    result = corelm_command("score", *options, "--timing", "--json")
    assert result.exit_code == 0 and "score_logprobs: 1 call, " in result.stderr
    assert json.loads(result.stdout)["timing"]["hooks"]["score_logprobs"]["given_tokens"] > 0

"""``--top-logprobs``, ``--return-support`` and ``--top-k``, compared with the toy model's table."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from corelm_cli.lines import FROM_ANSWERS
from corelm_testing.toy import Bigram, ByteTokenizer
from helpers.command_line import corelm_command, generate, rows, settings_of, write_rows

TABLE = Bigram.of_talk().table.detach().double()
CUT = ("--seed", 1, "--top-k", 3, "--temperature", 0.7, "--log-probs", "processed")
ID_KEYS = ("kept_ids", "kept_log_mass", "top_ids", "top_log_probs", "tail_log_mass")
ALL = ("--return-support", "--top-logprobs", 5, "--return-tokens")
SCORE = ("score", "--backend", "toy")


def before(prompt: str, ids: list[int]) -> list[int]:
    """Return the id before each of the ids that follow a prompt."""
    return [*prompt.encode()[-1:], *ids[:-1]]


def test_answers_have_the_ids_that_were_left_and_the_most_probable_ones(files):
    assert generate(files, *CUT, *ALL).exit_code == 0
    found = rows(files[1])
    row = next(row for row in found if row["line"] == 1)
    whole = (TABLE / 0.7).log_softmax(-1)
    for at, previous in enumerate(before("The cat", row["token_ids"])):
        best = whole[previous].topk(3)
        assert row["token_ids"][at] in row["kept_ids"][at] and len(row["kept_ids"][at]) == 3
        assert row["kept_log_mass"][at] == pytest.approx(float(best.values.logsumexp(-1)), abs=1e-5)
        assert sorted(row["top_ids"][at][:3]) == row["kept_ids"][at] and row["top_ids"][at][3:] == [-1, -1]
        log_probs = [float(whole[previous, token]) - row["kept_log_mass"][at] for token in row["top_ids"][at][:3]]
        assert row["top_log_probs"][at][:3] == pytest.approx(log_probs, abs=1e-5)
        # JSON has no minus infinity.
        assert row["top_log_probs"][at][3:] == [None, None] and row["tail_log_mass"][at] is None
    for row in found:
        assert all(len(row[key]) == row["tokens"] for key in (*ID_KEYS, "log_probs"))
    settings = settings_of(files[1])["settings"]
    assert settings["top_logprobs"] == 5 and settings["return_support"] is True


def test_the_tail_of_raw_log_probs_is_a_number(files):
    generate(files, "--seed", 1, "--log-probs", "raw", "--top-logprobs", 2, "--return-tokens")
    whole = TABLE.log_softmax(-1)
    (row,) = (row for row in rows(files[1]) if row["line"] == 1)
    for at, previous in enumerate(before("The cat", row["token_ids"])):
        rest = whole[previous].clone()
        rest[row["top_ids"][at]] = -math.inf
        assert row["tail_log_mass"][at] == pytest.approx(float(rest.logsumexp(-1)), abs=1e-4)
    assert not {"kept_ids", "kept_log_mass"} & row.keys()


def test_a_run_goes_on_with_the_same_ids_and_is_refused_with_others(files):
    whole = files[1].with_name("whole.jsonl")
    generate((files[0], whole), *CUT, *ALL)
    generate(files, *CUT, *ALL)
    kept = files[1].read_bytes().splitlines(keepends=True)
    files[1].write_bytes(b"".join(kept[:2]))
    assert generate(files, *CUT, *ALL).exit_code == 0
    assert files[1].read_bytes() == whole.read_bytes()
    for other, says in (
        (("--return-support", "--top-logprobs", 4, "--return-tokens"), "top_logprobs 5, but top_logprobs is now 4"),
        (("--top-logprobs", 5, "--return-tokens"), "return_support True, but return_support is now None"),
    ):
        result = generate(files, *CUT, *other)
        assert result.exit_code == 2 and says in result.stderr


def test_flags_that_ask_for_nothing_leave_earlier_files_as_they_are(files):
    generate(files, *CUT)
    assert generate(files, *CUT, "--top-logprobs", 0).exit_code == 0
    assert not {"top_logprobs", "return_support"} & settings_of(files[1])["settings"].keys()


def test_ids_without_log_probs_are_refused_before_an_engine_is_opened(files):
    for flag in ("--top-logprobs=2", "--return-support"):
        result = generate(files, flag, backend="no-such-engine")
        assert result.exit_code == 2 and "give --log-probs raw or processed" in " ".join(result.stderr.split())
        assert flag.partition("=")[0] in result.stderr and not files[1].exists()


def test_what_the_engine_cannot_return_ends_the_run_once_and_names_flags(files):
    for flags, says in (
        (("--log-probs", "raw", "--top-logprobs", 999), "--top-logprobs: this engine returns at most 260 ids"),
        (
            ("--log-probs", "processed", "--return-support", "--min-new-tokens", 2),
            "give --top-k, --top-p or --min-p as well, or leave out --return-support",
        ),
    ):
        result = generate(files, *flags)
        assert result.exit_code == 2 and result.stderr.count(says) == 1, result.stderr


def test_an_engine_that_returns_no_other_ids_is_named_with_the_flag(files, fabricate):
    modest = """
from dataclasses import replace
from corelm_testing.toy import ToyBackend

class Modest(ToyBackend):
    @classmethod
    def open(cls, model=None):
        engine = super().open()
        engine.capabilities = replace(engine.capabilities, top_logprobs=0, score_top_k=0)
        return engine
"""
    fabricate("modest", "1", {"modest": "modest:Modest"}, {"modest": modest})
    result = generate(files, "--log-probs", "raw", "--top-logprobs", 3, backend="modest")
    assert result.exit_code == 2 and "leave out --top-logprobs 3" in result.stderr
    write_rows(files[0], [{"text": "The cat"}])
    result = corelm_command("score", "--backend", "modest", "--input", files[0], "--output", "-", "--top-k", 3)
    assert result.exit_code == 2 and "leave out --top-k 3" in result.stderr


def test_scores_have_the_most_probable_ids_of_the_tokens_that_count(files):
    lines: list[dict[str, Any]] = [
        {"prompt": "The cat", "completion": " is"},
        {"prompt": "The cat", "completions": [" sat", " goes on"]},
    ]
    write_rows(files[0], lines)
    result = corelm_command(
        *SCORE, "--input", files[0], "--output", files[1], "--top-k", 3, "--temperature", 0.5, "--return-tokens"
    )
    assert result.exit_code == 0, result.stderr
    one, two = rows(files[1])
    whole = (TABLE / 0.5).log_softmax(-1)
    for completion, ids, log_probs, tails in (
        (" is", one["top_ids"], one["top_log_probs"], one["tail_log_mass"]),
        *zip(lines[1]["completions"], two["top_ids"], two["top_log_probs"], two["tail_log_mass"], strict=True),
    ):
        given = ByteTokenizer()([completion], add_special_tokens=False)["input_ids"][0]
        assert len(ids) == len(log_probs) == len(tails) == len(given)
        for at, previous in enumerate(before("The cat", given)):
            best = whole[previous].topk(3).values
            assert log_probs[at] == pytest.approx(best.tolist(), abs=1e-5)
            assert log_probs[at] == pytest.approx(whole[previous][ids[at]].tolist(), abs=1e-5)
            assert tails[at] == pytest.approx(float(torch.log1p(-best.exp().sum())), abs=1e-4)
    assert "log_probs" not in one and settings_of(files[1])["settings"]["top_k"] == 3


def test_answers_with_other_ids_can_be_scored(files):
    generate(files, *CUT, *ALL, "--copy-input")
    assert {*ID_KEYS} <= {*FROM_ANSWERS}
    result = corelm_command(*SCORE, "--input", files[1], "--output", "-", "--top-k", 1)
    assert result.exit_code == 0, result.stderr
    assert all(len(json.loads(line)["top_ids"][0]) == 1 for line in result.stdout.splitlines())

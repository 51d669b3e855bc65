"""``corelm score --window``: the numbers of transformers' guide, and of lm-eval's rolling log-likelihood."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from corelm_testing.tiny import DIALOGUES
from helpers.command_line import corelm_command

WINDOW, STRIDE = 48, 20


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("long") / "long.txt"
    path.write_text(DIALOGUES.read_text(encoding="utf-8")[:900], encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def score(model: Path, *more: object) -> dict[str, Any]:
    engine = ("--backend", "transformers", "--model", model, "--option", "dtype=float32")
    result = corelm_command("score", *engine, *more)
    assert result.exit_code == 0, result.stderr
    row: dict[str, Any] = json.loads(result.stdout)
    return row


@torch.no_grad()
def sliding_window(model: Any, input_ids: torch.Tensor, max_length: int, stride: int) -> float:
    """The loop of "Perplexity of fixed-length models" in the documentation of transformers, for a batch of one."""
    nll_sum, n_tokens, prev_end_loc = 0.0, 0, 0
    for begin_loc in range(0, input_ids.size(1), stride):
        end_loc = min(begin_loc + max_length, input_ids.size(1))
        trg_len = end_loc - prev_end_loc
        window = input_ids[:, begin_loc:end_loc]
        target_ids = window.clone()
        target_ids[:, :-trg_len] = -100
        loss = model(window, labels=target_ids).loss
        num_loss_tokens = int((target_ids[:, 1:] != -100).sum())
        nll_sum += float(loss) * num_loss_tokens
        n_tokens += num_loss_tokens
        prev_end_loc = end_loc
        if end_loc == input_ids.size(1):
            break
    return math.exp(nll_sum / n_tokens)


def rolling_token_windows(tokens: list[int], prefix: int, longest: int) -> Iterator[tuple[list[int], list[int]]]:
    """lm-eval's `get_rolling_token_windows` with a context of one, after `make_disjoint_window`."""
    first = min(longest, len(tokens))
    yield [prefix], tokens[:first]
    predicted = first
    while predicted < len(tokens):
        end = predicted + min(len(tokens) - predicted, longest)
        new = end - predicted
        yield tokens[end - longest - 1 : end - new], tokens[end - new : end]
        predicted = end


@torch.no_grad()
def log_likelihood(model: Any, context: list[int], continuation: list[int]) -> float:
    ids = torch.tensor([context + continuation])
    log_probs = model(ids).logits[0, :-1].double().log_softmax(-1).gather(1, ids[0, 1:, None])
    return float(log_probs[len(context) - 1 :].sum())


def test_a_stride_gives_the_number_of_transformers_guide(text, model, tiny_model):
    ids = AutoTokenizer.from_pretrained(tiny_model)(text.read_text(), return_tensors="pt").input_ids
    assert ids.size(1) > 3 * WINDOW
    row = score(tiny_model, "--window", WINDOW, "--stride", STRIDE, text)
    assert row["perplexity"] == pytest.approx(sliding_window(model, ids, WINDOW, STRIDE), rel=1e-5)
    assert row["tokens"] == ids.size(1) - 1
    assert row["perplexity"] == pytest.approx(math.exp(-row["log_prob"] / row["tokens"]))


def test_without_a_stride_it_is_the_rolling_log_likelihood_of_lm_eval(text, model, tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokens = tokenizer(text.read_text(), add_special_tokens=False).input_ids
    prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    parts = rolling_token_windows(tokens, prefix, WINDOW - 1)
    total = math.fsum(log_likelihood(model, *part) for part in parts)
    row = score(tiny_model, "--window", WINDOW, text, "--per-token", "--is-greedy", "--top-k", 2)
    assert row["log_prob"] == pytest.approx(total, rel=1e-5) and row["tokens"] == len(tokens)
    assert len(row["log_probs"]) == len(row["top_ids"]) == len(tokens)


def test_a_text_that_fits_is_scored_as_without_windows(text, tiny_model, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("Hello! How are you?")
    plain, windowed = score(tiny_model, short), score(tiny_model, "--window", 64, "--stride", 8, short)
    assert windowed["log_prob"] == pytest.approx(plain["log_prob"], abs=1e-5) and "perplexity" not in plain


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--stride", "4"], "give a --window that is larger"),
        (["--window", "4", "--stride", "4"], "give a --window that is larger"),
        (["--input", "-"], "give one of FILE and --input"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(text, flags, said):
    result = corelm_command("score", "--backend", "toy", *flags, text)
    assert result.exit_code == 2 and said in result.stderr

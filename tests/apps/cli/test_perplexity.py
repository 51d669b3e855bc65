"""``corelm score --window``: the numbers of transformers' guide, and of lm-eval's rolling log-likelihood."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import corelm
from corelm_cli.lines import read_to_score
from corelm_cli.scoring import Scorer
from corelm_testing.tiny import DIALOGUES
from corelm_testing.toy import ByteTokenizer
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
def sliding_window(model: Any, input_ids: torch.Tensor, max_length: int, stride: int, counts_all: bool) -> float:
    """The loop of "Perplexity of fixed-length models" in the documentation of transformers, for a batch of one.

    Args:
        counts_all: whether the mean over a window counts all its tokens, and not one fewer, as the documentation does.
    """
    nll_sum, n_tokens, prev_end_loc = 0.0, 0, 0
    for begin_loc in range(0, input_ids.size(1), stride):
        end_loc = min(begin_loc + max_length, input_ids.size(1))
        trg_len = end_loc - prev_end_loc
        window = input_ids[:, begin_loc:end_loc]
        target_ids = window.clone()
        target_ids[:, :-trg_len] = -100
        loss = model(window, labels=target_ids).loss
        num_valid_tokens = int((target_ids != -100).sum())
        num_loss_tokens = int((target_ids[:, 1:] != -100).sum()) if counts_all else num_valid_tokens - 1
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
    row = score(tiny_model, "--window", WINDOW, "--stride", STRIDE, "--per-token", text)
    assert row["perplexity"] == pytest.approx(sliding_window(model, ids, WINDOW, STRIDE, True), rel=1e-5)
    # The guide's own number, which gives the tokens of later windows a little less weight than those of the first.
    starts = range(WINDOW - 1, row["tokens"], STRIDE)
    counted = [row["log_probs"][: WINDOW - 1], *(row["log_probs"][start : start + STRIDE] for start in starts)]
    weights = [WINDOW - 1, *(len(part) - 1 for part in counted[1:])]
    means = [math.fsum(part) / len(part) for part in counted]
    weighed = math.exp(-math.fsum(map(operator.mul, means, weights)) / sum(weights))
    assert weighed == pytest.approx(sliding_window(model, ids, WINDOW, STRIDE, False), rel=1e-5)
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
    assert windowed["log_prob"] == pytest.approx(plain["log_prob"], abs=1e-5)
    assert plain["perplexity"] == pytest.approx(math.exp(-plain["log_prob"] / plain["tokens"]))
    assert (windowed["window"], windowed["stride"]) == (64, 8) and "window" not in plain
    assert score(tiny_model, "--window", 64, short)["stride"] is None


def test_a_perplexity_that_no_float_holds_is_null(tmp_path):
    (tmp_path / "short.txt").write_text("What is your name?")
    result = corelm_command("score", "--backend", "toy", "--temperature", 1e-3, tmp_path / "short.txt")
    row = json.loads(result.stdout)
    assert -row["log_prob"] / row["tokens"] > 710 and row["perplexity"] is None
    assert "1 text scored" in result.stderr


@pytest.mark.parametrize(
    ("text", "flags", "said"),
    [
        ("a", [], "give a longer one, or --window without --stride, which puts BOS (or EOS) before it"),
        ("a", ["--window", 8, "--stride", 4], "give a longer one, or --window without --stride"),
        ("", ["--window", 8], "text: it has no tokens to score"),
        ("a", ["--window", 8], None),
    ],
)
def test_a_text_of_one_token_is_scored_only_after_bos_and_its_error_says_how(tmp_path, text, flags, said):
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps({"text": text}))
    plain = ("--backend", "toy", "--tokenizer-kwargs", "add_special_tokens=false")
    result = corelm_command("score", *plain, *flags, path)
    if said is None:
        assert result.exit_code == 0 and json.loads(result.stdout)["tokens"] == 1
    else:
        assert result.exit_code == 1 and said in result.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--stride", "4"], "--stride: give --window as well"),
        (["--window", "4", "--stride", "4"], "for windows that do not overlap, leave --stride out"),
        (["--input", "-"], "give one of FILE and --input"),
        (["--windw", "4"], "--window"),
        (["--max-new-token", "3"], "typed --option max_new_token=3; `corelm generate` has --max-new-tokens"),
        (["--max-new-tokens", "3"], "No such option: --max-new-tokens; `corelm generate` has --max-new-tokens"),
        (["--window", "1"], "greater than or equal to 2"),
        (["--window", "4", "--stride", "0"], "greater than or equal to 1"),
        (["--window", "513"], "--window: the context of the model is 512; give --window 512 or less"),
    ],
)
def test_flags_that_are_wrong_are_refused(text, flags, said):
    result = corelm_command("score", "--backend", "toy", *flags, text)
    assert result.exit_code == 2 and said in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("missing.txt", None, "there is no file"),
        ("empty.txt", b"", "is empty; give a file with a text"),
        ("binary.txt", b"\x7fELF\xd0\xff", "is not UTF-8 text"),
        ("binary", b"\x7fELF\xd0\xff", "is no JSON Lines"),
        ("wiki.test.raw", b" = Robert Boulter = \n", "a file whose name ends in .txt is read as one text"),
        ("tokenizer.json", b'{\n  "version": "1.0"\n}', "is no JSON Lines"),
        ("wiki.txt.old", b'one\n\n[two]\n"three"\nfour\nfive\n{}\n', "is no JSON Lines"),
        ("model.safetensors", b"\0", "give the folder that holds it with --model"),
        ("pytorch_model.bin", b"{}\n", "give the folder that holds it with --model"),
    ],
)
def test_a_file_that_holds_no_text_is_refused(tmp_path, name, content, said):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    result = corelm_command("score", "--backend", "toy", "--window", 32, path)
    assert result.exit_code == 2 and said in result.stderr.splitlines()[-1] and not result.stdout


@pytest.mark.parametrize("first", ['{"text": "a"', "{'text': 'a'}", "text", '["a"]'])
def test_a_first_line_that_is_wrong_fails_alone(tmp_path, first):
    path = tmp_path / "lines.jsonl"
    path.write_text(f'{first}\n{{"text": "Hello"}}\n')
    result = corelm_command("score", "--backend", "toy", path)
    assert result.exit_code == 1 and json.loads(result.stdout)["line"] == 2 and "line 1: " in result.stderr


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_lines_has_no_answers(tmp_path, content):
    path = tmp_path / "lines.jsonl"
    path.write_text(content)
    result = corelm_command("score", "--backend", "toy", path)
    assert result.exit_code == 0 and not result.stdout


def test_a_model_that_is_a_file_is_refused(text, tiny_model):
    file = tiny_model / "config.json"
    result = corelm_command("score", "--model", file, "--window", 32, text)
    assert result.exit_code == 2 and f"is a file, and a model is a folder; give {str(tiny_model)!r}" in result.stderr


def test_a_line_without_text_fails_with_a_window(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n{"text": "Hello"}\n')
    result = corelm_command("score", "--backend", "toy", "--window", 32, path)
    assert result.exit_code == 1 and json.loads(result.stdout)["line"] == 2
    assert "line 1: --window: it splits a `text`, and this line has none" in result.stderr


def test_a_line_without_text_is_not_encoded_with_a_window():
    rendered = []

    class Rendering(ByteTokenizer):
        def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
            rendered.append(args)
            return super().apply_chat_template(*args, **kwargs)

    chat = read_to_score(1, "a", {"messages": [{"role": "assistant", "content": "Hello"}]})
    with corelm.get_backend("toy", tokenizer=Rendering()) as engine:
        answered, failed = Scorer(engine=engine, window=32).ask([chat, read_to_score(2, "b", {"text": "Hello"})])
    assert not rendered
    assert [row["id"] for row in answered] == ["b"] and failed[0].error.startswith("--window: it splits a `text`")

"""``corelm score``, compared with log-probs that are computed here without it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from corelm_testing.toy import Bigram, ByteTokenizer
from helpers.command_line import CHAT, generate, rows, score, settings_of, write_prompts, write_rows

TABLE = Bigram.of_talk().table.detach().double().log_softmax(-1)
ANSWER = {"role": "assistant", "content": "On the mat."}


def after(ids: list[int], start: int, temperature: float = 1.0) -> list[float]:
    """Return the log-probs of the ids from `start` on, read from the toy's table."""
    table = (TABLE / temperature).log_softmax(-1)
    return [float(table[ids[at - 1], ids[at]]) for at in range(start, len(ids))]


def encoded(text: str) -> list[int]:
    return ByteTokenizer()([text])["input_ids"][0]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "lines.jsonl", tmp_path / "scores.jsonl"


def test_a_completion_is_scored_given_its_prompt(files):
    write_rows(
        files[0], [{"id": "a", "prompt": "The cat", "completion": " is on"}, {"prompt": "The", "response": " sea"}]
    )
    assert score(files).exit_code == 0
    first, second = rows(files[1])
    assert first["log_prob"] == pytest.approx(sum(after(encoded("The cat is on"), 8)), abs=1e-4)
    assert second["log_prob"] == pytest.approx(sum(after(encoded("The sea"), 4)), abs=1e-4)
    assert (first["id"], first["tokens"], second["id"], second["tokens"]) == ("a", 6, 2, 4)
    assert set(first) == {"id", "line", "prompt_hash", "log_prob", "tokens", "settings"}


def test_several_completions_are_scored_one_by_one(files):
    choices = [" is on the mat.", " sings.", " goes"]
    write_rows(files[0], [{"prompt": "The cat", "completions": choices, "metadata": {"gold": 0}}])
    assert score(files, "--per-token", "--return-tokens", "--copy-input").exit_code == 0
    (row,) = rows(files[1])
    expected = [after(encoded("The cat" + choice), 8) for choice in choices]
    for log_prob, log_probs, tokens, ids, want, choice in zip(
        row["log_prob"], row["log_probs"], row["tokens"], row["token_ids"], expected, choices, strict=True
    ):
        assert log_probs == pytest.approx(want, abs=1e-4) and log_prob == pytest.approx(math.fsum(log_probs))
        assert tokens == len(want) and ids == list(choice.encode())
    assert (row["prompt"], row["completions"], row["metadata"]) == ("The cat", choices, {"gold": 0})


def test_a_list_of_one_completion_gives_lists(files):
    write_rows(files[0], [{"prompt": "The", "completions": [" cat"]}, {"prompt": "The", "completion": " cat"}])
    score(files)
    first, second = rows(files[1])
    assert first["log_prob"] == [second["log_prob"]] and first["tokens"] == [second["tokens"]]


def test_a_text_is_scored_after_its_first_token(files):
    write_rows(files[0], [{"text": "The cat"}])
    score(files)
    # The first token is the BOS.
    assert rows(files[1])[0]["log_prob"] == pytest.approx(sum(after(encoded("The cat"), 1)), abs=1e-4)
    assert rows(files[1])[0]["tokens"] == 7


@pytest.mark.parametrize("key", ["messages alone", "completion"])
def test_a_turn_of_the_assistant_is_scored_with_the_token_that_ends_it(files, key):
    asks: dict[str, Any] = {"messages": [*CHAT, ANSWER]}
    if key == "completion":
        asks = {"messages": CHAT, "completion": ANSWER["content"]}
    write_rows(files[0], [asks])
    assert score(files, "--return-tokens").exit_code == 0
    (row,) = rows(files[1])
    tokenizer = ByteTokenizer()
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)
    ids = tokenizer([f"{prompt}{ANSWER['content']}<|im_end|>"], add_special_tokens=False)["input_ids"][0]
    begin = len(tokenizer([prompt], add_special_tokens=False)["input_ids"][0])
    assert row["token_ids"] == ids[begin:]
    assert row["log_prob"] == pytest.approx(sum(after(ids, begin)), abs=1e-4)


def test_all_turns_of_the_assistant_are_scored(files):
    twice = [*CHAT, ANSWER, *CHAT, ANSWER]
    write_rows(
        files[0], [{"messages": [*CHAT, ANSWER]}, {"messages": twice}, {"messages": twice[:3], "completions": ["x"]}]
    )
    score(files)
    once, both, last = rows(files[1])
    assert both["tokens"] == 2 * once["tokens"] and last["tokens"] == [2]


def test_whitespace_at_the_end_of_a_prompt_belongs_to_the_completion(files, tiny_model):
    """As in lm-eval. A byte-level BPE joins a space to the word after it."""
    from transformers import AutoTokenizer

    pairs = [("What is", " your name?"), ("What is ", "your name?"), ("What is \n", "your name?")]
    write_rows(files[0], [{"prompt": prompt, "completion": completion} for prompt, completion in pairs])
    more = ("--model", tiny_model, "--option", "dtype=float32", "--return-tokens")
    assert score(files, *more, backend="transformers").exit_code == 0
    first, second, third = rows(files[1])
    assert first["token_ids"] == second["token_ids"] and first["log_prob"] == second["log_prob"]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for (prompt, completion), row in zip(pairs, (first, second, third), strict=True):
        whole = tokenizer(prompt + completion)["input_ids"]
        assert row["token_ids"] == whole[len(tokenizer(prompt.rstrip())["input_ids"]) :]


def test_a_real_model_gives_the_log_probs_of_its_plain_forward(files, tiny_model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    choices = [" your name?", " it?", " the weather like today in the north?"]
    write_rows(files[0], [{"prompt": "What is", "completions": choices}])
    more = ("--model", tiny_model, "--option", "dtype=float32")
    assert score(files, *more, backend="transformers").exit_code == 0
    tokenizer, model = AutoTokenizer.from_pretrained(tiny_model), AutoModelForCausalLM.from_pretrained(tiny_model)
    begin = len(tokenizer("What is")["input_ids"])
    for choice, log_prob in zip(choices, rows(files[1])[0]["log_prob"], strict=True):
        ids = torch.tensor([tokenizer("What is" + choice)["input_ids"]])
        with torch.no_grad():
            logits = model(ids).logits[0, :-1].log_softmax(-1)
        expected = logits.gather(-1, ids[0, 1:, None])[begin - 1 :].sum()
        assert log_prob == pytest.approx(float(expected), abs=1e-3)


def test_answers_of_generate_can_be_scored_and_agree(tmp_path):
    files = write_prompts(tmp_path)
    generate(files, "--log-probs", "raw", "--copy-input", "--num-samples", 2, "--seed", 5, "--ignore-eos")
    scores = tmp_path / "scores.jsonl"
    result = score((files[1], scores))
    assert result.exit_code == 0, result.output
    sampled = {(row["id"], row["sample"]): row for row in rows(files[1])}
    assert {(row["id"], row["sample"]) for row in rows(scores)} == set(sampled)
    checked = 0
    for row in rows(scores):
        answer = sampled[row["id"], row["sample"]]
        # The text of an answer has other ids than were sampled if these are not whole characters or end the turn.
        if "prompt" in answer and row["tokens"] == answer["tokens"]:
            assert row["log_prob"] == pytest.approx(sum(answer["log_probs"]), abs=1e-3)
            checked += 1
    assert checked
    before = scores.read_bytes()
    assert "0 lines scored, 10 already present" in score((files[1], scores)).stderr
    assert scores.read_bytes() == before


def test_a_temperature_divides_the_logits(files):
    write_rows(files[0], [{"prompt": "The cat", "completion": " is"}])
    score(files, "--temperature", 0.5, "--per-token")
    assert rows(files[1])[0]["log_probs"] == pytest.approx(after(encoded("The cat is"), 8, 0.5), abs=1e-4)
    made = settings_of(files[1])
    assert (made["provenance"]["mode"], made["provenance"]["temperature"]) == ("processed", 0.5)
    assert made["settings"]["command"] == "score"


BAD = {
    '{"prompt": "a"}': "prompt: nothing to score; give `completion`",
    '{"completion": "a"}': "expected one of `text`, `prompt` and `messages`, got none of them",
    '{"prompt": "a", "text": "b"}': "expected one of `text`, `prompt` and `messages`, got text and prompt",
    '{"text": "a", "completion": "b"}': "completion: a `text` is scored as a whole",
    '{"prompt": "a", "completion": "b", "completions": ["c"]}': "expected one of `completions`, `completion` and",
    '{"prompt": "a", "completions": []}': "completions: expected a list of at least one string",
    '{"prompt": "a", "completions": ["b", 3]}': "completions: expected a list of at least one string",
    '{"prompt": "a", "completions": "b"}': "completions: expected a list",
    '{"prompt": "a", "completion": 3}': "completion: expected a string, got int",
    '{"prompt": "a", "completion": ""}': "the completion is empty, so there is nothing to score",
    '{"prompt": "a", "completions": ["b", ""]}': "completions[1]: the completion is empty, so there is nothing",
    '{"text": ""}': "text: it has fewer than two tokens",
    '{"messages": [{"role": "user", "content": "a"}]}': "messages: no turn of the assistant to score",
    '{"prompt": "a", "completion": "b", "tools": []}': "tools: only a chat template reads tools",
    '{"prompt": "a", "completion": "b", "gold": 1}': "unknown keys: gold; a line may have id, text, prompt",
    '{"prompt": "a", "completion": "b", "sample": "x"}': "sample: expected an integer",
    '{"id": 1, "line": 1, "prompt_hash": "f", "log_prob": -1.0, "tokens": 1}': "this line is output of `corelm score`",
    '{"id": 2, "line": 2, "prompt_hash": "f", "response": "b", "tokens": 1}': "with `corelm generate --copy-input`",
    "not json": "not valid JSON",
}


def test_bad_lines_are_reported_and_the_rest_are_scored(files):
    good = '{"text": "The cat"}', '{"prompt": "The", "completions": [" cat", " sea"]}'
    files[0].write_text("\n".join([good[0], *BAD, good[1]]) + "\n")
    assert score(files).exit_code == 1
    faults = rows(files[1].with_name("scores.errors.jsonl"))
    assert [fault["line"] for fault in faults] == list(range(2, 2 + len(BAD)))
    for fault, (bad, said) in zip(faults, BAD.items(), strict=True):
        assert said in fault["error"], bad
    assert [row["line"] for row in rows(files[1])] == [1, 2 + len(BAD)]


def test_a_completion_that_is_too_long_fails_its_line(files):
    write_rows(files[0], [{"prompt": "a", "completions": ["b", "c" * 99]}, {"prompt": "a", "completion": "b"}])
    result = score(files, "--option", "max_context=50")
    (fault,) = rows(files[1].with_name("scores.errors.jsonl"))
    assert result.exit_code == 1 and fault["line"] == 1 and "50" in fault["error"]
    assert [row["line"] for row in rows(files[1])] == [2]


def test_lines_that_fail_for_different_reasons_are_reported_in_order(files):
    write_rows(files[0], [{"text": "c" * 99}, {"text": ""}, {"text": "cat"}, {"text": "c" * 99}])
    assert score(files, "--option", "max_context=50").exit_code == 1
    assert [row["line"] for row in rows(files[1].with_name("scores.errors.jsonl"))] == [1, 2, 4]


def test_a_line_that_makes_every_call_fail_fails_alone(files, fabricate):
    choosy = """
import corelm
from corelm_testing.toy import ToyBackend

class Choosy(ToyBackend):
    @corelm.hookimpl
    def score_logprobs(self, request):
        if any(b"poison" in bytes(min(i, 255) for i in row) for row in request.sequences.tolist()):
            raise RuntimeError("internal error")
        return super().score_logprobs(request)
"""
    fabricate("choosy", "1", {"choosy": "choosy:Choosy"}, {"choosy": choosy})
    texts = ["one", "two", "poison", "four", "five"]
    write_rows(files[0], [{"text": text} for text in texts])
    assert score(files, backend="choosy").exit_code == 1
    assert [row["line"] for row in rows(files[1])] == [1, 2, 4, 5]
    assert [row["line"] for row in rows(files[1].with_name("scores.errors.jsonl"))] == [3]


def test_scoring_goes_on_where_it_stopped(files):
    write_rows(files[0], [{"text": f"The cat {number}"} for number in range(6)])
    score(files)
    whole = files[1].read_bytes()
    files[1].write_bytes(whole[: len(whole) // 2])
    result = score(files, "--batch-size", 2)
    assert result.exit_code == 0 and files[1].read_bytes() == whole
    assert "tokens scored in" in result.stderr and "finish reasons" not in result.stderr


def test_scores_with_different_settings_are_not_mixed(files):
    write_rows(files[0], [{"text": "The cat"}])
    score(files)
    before = files[1].read_bytes()
    for more, message in (
        (["--temperature", 0], "expected a number above 0, got 0"),
        (["--temperature", 0.5], "made with temperature 1.0, but temperature is now 0.5"),
        (["--per-token"], "made with per_token False, but per_token is now True"),
        (["--option", "max_context=99"], "made with options {}"),
    ):
        result = score(files, *more)
        assert result.exit_code == 2 and message in result.stderr and files[1].read_bytes() == before, more


def test_answers_and_scores_are_not_mixed(tmp_path):
    files = write_prompts(tmp_path)
    generate(files)
    lines = tmp_path / "lines.jsonl"
    write_rows(lines, [{"text": "The cat"}])
    before = files[1].read_bytes()
    result = score((lines, files[1]))
    assert result.exit_code == 2 and "is now" in result.stderr and files[1].read_bytes() == before


def test_changed_completions_under_a_scored_id_are_an_error(files):
    write_rows(files[0], [{"id": 1, "prompt": "The", "completion": " cat"}])
    score(files)
    write_rows(files[0], [{"id": 1, "prompt": "The", "completion": " sea"}])
    assert score(files).exit_code == 2 and len(rows(files[1])) == 1


def test_scores_go_through_pipes(files):
    piped = score(("-", "-"), stdin='{"prompt": "The", "completions": [" cat", " sea"]}\n')
    assert piped.exit_code == 0 and len(json.loads(piped.stdout)["log_prob"]) == 2


def test_an_engine_that_cannot_score_is_refused(files, fabricate):
    deaf = """
import dataclasses
from corelm_testing.toy import ToyBackend

class Deaf(ToyBackend):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.capabilities = dataclasses.replace(
            self.capabilities, score=False, score_temperature=False, logits=False, argmax=False, gradients=False
        )
"""
    fabricate("deaf", "1", {"deaf": "deaf:Deaf"}, {"deaf": deaf})
    write_rows(files[0], [{"text": "The cat"}])
    result = score(files, backend="deaf")
    assert result.exit_code == 2 and "error: " in result.stderr and not files[1].exists()

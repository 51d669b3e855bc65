"""Which token completes a stop string: found step by step, in a whole answer, and in its text."""

from __future__ import annotations

import random
from typing import Any

import pytest

import corelm
from corelm import SamplingParams
from corelm.spec import StopStrings, skipped_texts, text_before_stop
from corelm_testing.toy import ByteTokenizer
from helpers.tiny_models import tiny_tokenizer, tokenizer_that_names_only_eos


def stop_strings(**sampling: Any) -> StopStrings:
    return StopStrings.of(SamplingParams(max_new_tokens=99, **sampling), tiny_tokenizer())


def steps(strings: StopStrings, ids: list[int]) -> int | None:
    """How many of `ids` a watch takes until it says stop."""
    watch = strings.watch()
    return next((step for step, token in enumerate(ids, 1) if watch.completed_by(token)), None)


def end(ids: list[int], **sampling: Any) -> int | None:
    """Where the answer ends, which both ways of looking must agree on."""
    strings = stop_strings(**sampling)
    found = strings.first_end(ids)
    assert steps(strings, ids) == found
    return found


def encode(text: str) -> list[int]:
    ids: list[int] = tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]
    return ids


def letters(text: str) -> list[int]:
    """One token for each byte, which is not how the tokenizer itself writes it."""
    return [token for character in text for token in encode(character)]


def test_an_answer_without_its_stop_string_does_not_end():
    assert end(letters("abc"), stop=("nowhere",)) is None
    assert end([], stop=("x",)) is None
    assert end(letters("abc")) is None


def test_the_token_that_completes_a_stop_string_ends_the_answer():
    ids = letters("abcdef abcdef")
    assert end(ids, stop=("cd",)) == 4
    assert end(ids, stop=("f a", "cdef a")) == 8


def test_a_stop_string_of_many_tokens_is_found():
    text = "the cat is where the sea is"
    assert len(letters(text)) == len(text)
    assert end(letters("so " + text + " and on"), stop=(text,)) == 3 + len(text)


def test_a_stop_string_counts_only_after_min_new_tokens():
    for least in range(16):
        # "ab" is complete with tokens 2, 7 and 12.
        expected = 2 if least <= 2 else 7 if least <= 7 else 12 if least <= 12 else None
        assert end(letters("ab---ab---ab---"), stop=("ab",), min_new_tokens=least) == expected, least


def test_a_character_counts_when_its_last_token_is_there():
    ids = encode("zwölf €")
    assert len(encode("ö")) == 2 and len(encode("€")) == 3
    assert end(ids, stop=("ö",)) == len(encode("zwö"))
    assert end(ids, stop=("wölf €",)) == len(ids)
    smileys = encode("😀" * 9 + "🙃")
    assert end(smileys, stop=("🙃",)) == len(smileys)


def test_special_tokens_that_are_skipped_add_no_text():
    (special,) = encode("<|im_start|>")
    ids = [*letters("moo"), *[special] * 20, *letters("n over")]
    assert end(ids, stop=("moon",)) == 24
    assert end(ids, stop=("moon",), skip_special_tokens=False) is None
    assert end(ids, stop=("<|im_start|>",), skip_special_tokens=False) == 4


def test_special_tokens_are_left_out_whether_they_have_a_name_or_not():
    tokenizer = tokenizer_that_names_only_eos()
    assert tokenizer.all_special_tokens == ["<|im_end|>"]
    assert tokenizer.decode(encode("a<|im_start|>b"), skip_special_tokens=True) == "ab"
    texts = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    assert skipped_texts(tokenizer) == texts and skipped_texts(tiny_tokenizer()) == texts
    assert skipped_texts(ByteTokenizer()) == set(ByteTokenizer.all_special_tokens) and skipped_texts(object()) == set()


@pytest.mark.parametrize(
    "prompt, answer, reasoning",
    [
        ("Ask.", "<think>\nab\n</think>\n\n", True),
        ("Ask. <think>\n", "ab</think>", True),
        ("Ask. <think>\n\n</think>\n\n", "ab ", False),
        ("Ask.", "\n <think>ab</think>", True),
        ("Ask.", "<thinks> ab ", False),
        ("Ask.", "It is <think>ab</think>", False),
    ],
)
def test_no_stop_string_counts_in_reasoning(prompt: str, answer: str, reasoning: bool):
    params = SamplingParams(stop=("ab", "never"), reasoning_marks=("<think>", "</think>"), max_new_tokens=99)
    for write in (encode, letters):
        strings = StopStrings.of(params, tiny_tokenizer()).after(write(prompt))
        ids = write(f"{answer}then ab and more")
        found = strings.first_end(ids)
        text = tiny_tokenizer().decode(ids[:found])
        assert found == steps(strings, ids) and text.count("ab") == 1 + reasoning and "more" not in text
        assert strings.occurs_in(ids[:found]) and strings.occurs_in(write(answer)) is not reasoning
        assert strings.first_end(write(answer)) == (None if reasoning else steps(strings, write(answer)))


def test_gpt_oss_may_reason_in_several_parts():
    marks = corelm.parser_named("gpt_oss").reasoning_marks
    part = "<|start|>assistant<|channel|>analysis<|message|>ab<|end|>"
    ids = letters(f"{part.removeprefix('<|start|>assistant')}{part}<|start|>assistant<|channel|>final<|message|>ab ab")
    assert tiny_tokenizer().decode(ids[: end(ids, stop=("ab",), reasoning_marks=marks)]).endswith("final<|message|>ab")


def test_half_a_character_at_the_end_is_noticed():
    strings, ids = stop_strings(stop=("x",)), encode("zwö")
    assert strings.ends_in_half_a_character(ids[:-1]) and not strings.ends_in_half_a_character(ids)


def test_both_ways_agree_with_decoding_every_beginning():
    tokenizer, random_ = ByteTokenizer(), random.Random(0)
    stops = ("b", "ä", "aä", "€a", "a€ä")
    for _ in range(300):
        text = "".join(random_.choices("abä€", k=12))
        least = random_.randrange(8)
        params = SamplingParams(stop=random_.sample(stops, 2), min_new_tokens=least, max_new_tokens=99)
        strings = StopStrings.of(params, tokenizer)
        ids = list(text.encode())
        expected = None
        for length in range(max(1, least), len(ids) + 1):
            before, now = (tokenizer.decode(ids[:n]).rstrip("\ufffd") for n in (length - 1, length))
            if any(now.endswith(stop) and len(now) > len(before) for stop in params.stop):
                expected = length
                break
        assert strings.first_end(ids) == steps(strings, ids) == expected, (text, params)


def test_the_text_ends_before_the_stop_string():
    assert text_before_stop("one, two; ", "one, two", [";", "; "]) == "one, two"
    assert text_before_stop("one, two", "one, t", ["x"]) == "one, two"
    # It was complete before the last token, so it did not end the answer.
    assert text_before_stop("a. b. c", "a. b", ["."]) == "a. b"
    # The last token completed the character.
    assert text_before_stop("zwö", "zw\ufffd", ["ö"]) == "zw"

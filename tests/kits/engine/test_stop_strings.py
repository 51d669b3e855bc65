"""Which token completes a stop string: found step by step, in a whole answer, and in its text."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import corelm
from corelm import SamplingParams
from corelm.spec import AnswerTexts, StopStrings, skipped_texts, text_before_stop
from corelm_testing.toy import ByteTokenizer
from helpers.each import examples
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


def test_a_stop_string_of_many_tokens_is_found():
    text = "the cat is where the sea is"
    assert len(letters(text)) == len(text)
    assert end(letters("so " + text + " and on"), stop=(text,)) == 3 + len(text)


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


# Text that is streamed: the pieces, joined, are the text of the whole answer ------------------------------------------


TEXT = "Où est 家族 👩‍👩‍👧‍👦? In the Café — naïve 🙂🙃, <|im_end|> and on."
BYTES = ByteTokenizer()


def pieces(ids: list[int], reason: str, tokenizer: Any, sizes: list[int] | None = None, **sampling: Any) -> list[str]:
    """Return what is said with each chunk of ids; chunks of one id unless `sizes` says otherwise.

    The reason comes with the last id, or after it if a size is 0.
    """
    answer = AnswerTexts(SamplingParams(max_new_tokens=9999, **sampling), tokenizer).answer()
    said, start = [], 0
    sizes = sizes or [1] * len(ids)
    apart = 0 in sizes
    while start < len(ids):
        size = max(1, sizes.pop(0)) if sizes else len(ids)
        last = start + size >= len(ids) and not apart
        said.append(answer.add(ids[start : start + size], reason if last else None))
        start += size
    return said if said and not apart else [*said, answer.add([], reason)]


def whole(ids: list[int], reason: str, tokenizer: Any, **sampling: Any) -> str:
    """Return the text that the policy gives for the whole answer."""
    params = SamplingParams(max_new_tokens=9999, **sampling)
    skip = params.skip_special_tokens
    text = tokenizer.decode(ids, skip_special_tokens=skip)
    before = tokenizer.decode(ids[:-1], skip_special_tokens=skip)
    return text_before_stop(text, before, params.stop) if reason == "stop" and params.stop else text


def test_a_character_of_several_tokens_is_said_when_it_is_complete():
    said = pieces(list("a🙂b".encode()), "length", BYTES)
    assert said == ["a", "", "", "", "🙂", "b"]


def test_half_a_character_at_the_end_of_an_answer_is_said_at_its_end():
    said = pieces(list("a🙂".encode())[:-1], "length", BYTES)
    assert said == ["a", "", "", "\ufffd"]


def test_what_may_begin_a_stop_string_waits():
    assert pieces(list(b"xabzab!"), "length", BYTES, stop=("abc",)) == ["x", "", "", "abz", "", "", "ab!"]
    assert pieces(list(b"xabc"), "stop", BYTES, stop=("abc",)) == ["x", "", "", ""]
    # The longest beginning waits, and a stop string may begin inside another one.
    assert pieces(list(b"aab"), "stop", BYTES, stop=("aab", "ab")) == ["", "", ""]


def test_a_stop_string_that_is_complete_waits_for_what_comes_next():
    assert pieces(list(b"xab"), "stop", BYTES, [1, 1, 1, 0], stop=("ab",)) == ["x", "", "", ""]
    assert pieces(list(b"xaby"), "length", BYTES, stop=("ab",)) == ["x", "", "", "aby"]


def test_a_stop_string_that_did_not_count_is_text():
    assert "".join(pieces(list(b"abcdef"), "length", BYTES, stop=("bc",), min_new_tokens=5)) == "abcdef"


def test_a_special_token_is_left_out_or_said_as_the_parameters_say():
    ids = [*b"a", 259, *b"b"]
    assert "".join(pieces(ids, "length", BYTES)) == "ab"
    assert "".join(pieces(ids, "length", BYTES, skip_special_tokens=False)) == "a<|im_end|>b"


def test_the_engines_own_text_of_an_answer_is_used():
    answer = AnswerTexts(SamplingParams(stop=("b",)), BYTES).answer()
    assert answer.add(list(b"ab"), "stop", "Ab") == "A"


def test_an_answer_that_failed_says_nothing_more():
    answer = AnswerTexts(SamplingParams(), BYTES).answer()
    assert (answer.add(list(b"a")), answer.add([], "error")) == ("a", "")


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_the_pieces_joined_are_the_text(data):
    tokenizer = data.draw(st.sampled_from(["bytes", "bpe", "fallback"]).map(tokenizers().__getitem__))
    text = data.draw(st.text(st.sampled_from("ab. é家🙂\n"), max_size=30) | st.just(TEXT))
    ids = encoded(text, tokenizer)
    noise = st.lists(st.integers(0, len(tokenizer) - 1), max_size=12)
    ids = data.draw(noise) + ids + data.draw(noise)
    sampling: dict[str, Any] = {
        "stop": tuple(data.draw(st.lists(st.sampled_from(["a", "ab", "b.", "é家", "🙂\n", ". "]), max_size=3))),
        "skip_special_tokens": data.draw(st.booleans()),
    }
    reason = data.draw(st.sampled_from(["stop", "length", "abort"])) if sampling["stop"] else "length"
    if reason == "stop" and ids:
        # As an engine does: the answer ends with the token that completes a stop string.
        ids = ended(ids, tokenizer, sampling)
    elif sampling["stop"]:
        ids = ended(ids, tokenizer, sampling)[:-1]
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=20))
    said = pieces(ids, reason, tokenizer, sizes, **sampling)
    assert "".join(said) == whole(ids, reason, tokenizer, **sampling)


def encoded(text: str, tokenizer: Any) -> list[int]:
    return list(tokenizer([text], add_special_tokens=False)["input_ids"][0])


@functools.cache
def tokenizers() -> dict[str, Any]:
    return {"bytes": BYTES, "bpe": tiny_tokenizer(), "fallback": ByteFallback()}


def ended(ids: list[int], tokenizer: Any, sampling: dict[str, Any]) -> list[int]:
    watch = StopStrings.of(SamplingParams(max_new_tokens=9999, **sampling), tokenizer).watch()
    for count, token in enumerate(ids, 1):
        if watch.completed_by(token):
            return ids[:count]
    return ids


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_long_answer_is_not_decoded_from_its_beginning_with_every_token(kind):
    tokenizer = tokenizers()[kind]
    decoded: list[int] = []

    class Counting:
        all_special_ids = tokenizer.all_special_ids

        def decode(self, ids, skip_special_tokens=True):
            decoded.append(len(ids))
            return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    ids = encoded(TEXT * 60, tokenizer)[:3000]
    said = pieces(ids, "length", Counting())
    assert "".join(said) == tokenizer.decode(ids, skip_special_tokens=True)
    assert sorted(decoded)[len(decoded) // 2] < 160, "most tokens are decoded together with many others"
    assert sum(decoded) < 300 * len(ids)


class ByteFallback:
    """A tokenizer that writes rare characters as the bytes ``<0x00>`` to ``<0xFF>``, as sentencepiece does.

    If a run of bytes is not UTF-8, it decodes to one U+FFFD for each byte, also for those that were a character before.
    """

    letters = "ab. "
    all_special_ids = (260,)

    def __len__(self) -> int:
        return 261

    def __call__(self, texts: list[str], add_special_tokens: bool = False) -> dict[str, list[list[int]]]:
        rows: list[list[int]] = []
        for text in texts:
            found = ((self.letters.find(character), character) for character in text)
            rows.append([i for at, c in found for i in ([256 + at] if at >= 0 else list(c.encode()))])
        return {"input_ids": rows}

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        out, run = "", bytearray()
        for token in [*ids, None]:
            if token is not None and token < 256:
                run.append(token)
                continue
            if token == 260 and skip_special_tokens:
                continue
            try:
                out += run.decode()
            except UnicodeDecodeError:
                out += "\ufffd" * len(run)
            run.clear()
            if token is not None:
                out += "<s>" if token == 260 else self.letters[token - 256]
        return out

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]:
        return [int(token[3:5], 16) for token in tokens]

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [f"<0x{token:02X}>" for token in ids]


def test_a_run_of_bytes_waits_until_it_ends():
    tokenizer = ByteFallback()
    assert pieces([*"é".encode(), *"家".encode(), 256], "length", tokenizer) == ["", "", "", "", "", "é家a"]
    assert pieces([256, *"é".encode(), 0xFF, 256], "length", tokenizer) == ["a", "", "", "", "\ufffd" * 3 + "a"]

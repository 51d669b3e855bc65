"""Where an answer ends: with the first stop id, or the token that completes a stop string, if it is long enough."""

from __future__ import annotations

from typing import Any

import pytest

from corelm import SamplingParams
from helpers.tiny_models import tiny_tokenizer
from sglang_backend.ending import first_stop

NONE: frozenset[int] = frozenset()


def letters(text: str) -> list[int]:
    """One token a byte, which is not how the tokenizer writes it."""
    return [token for character in text for token in tiny_tokenizer().encode(character, add_special_tokens=False)]


def ends(ids: list[int], stop_ids: frozenset[int] = NONE, **sampling: Any) -> int | None:
    return first_stop(ids, SamplingParams(**sampling), stop_ids, tiny_tokenizer())


def test_an_answer_without_a_stop_does_not_end():
    assert ends([5, 6, 7], frozenset({9}), stop=("nowhere",)) is None
    assert ends([], frozenset({9}), stop=("x",)) is None


def test_it_ends_with_its_first_stop_id():
    assert ends([5, 9, 7, 8], frozenset({7, 8})) == 3


def test_it_ends_with_the_token_that_completes_a_stop_string():
    ids = letters("abcdef abcdef")
    assert ends(ids, stop=("cd",)) == 4
    assert ends(ids, stop=("f a", "cdef a")) == 8


def test_a_string_that_is_spelt_in_many_tokens_is_found():
    text = "the cat is where the sea is"
    assert len(letters(text)) == len(text)
    assert ends(letters("so " + text + " and on"), stop=(text,)) == 3 + len(text)


@pytest.mark.parametrize("least", range(1, 16))
def test_a_stop_string_counts_from_the_least_length_on(least):
    # "ab" is complete with token 2, 7 and 12.
    assert ends(letters("ab---ab---ab---"), stop=("ab",), min_new_tokens=least, max_new_tokens=99) == (
        2 if least <= 2 else 7 if least <= 7 else 12 if least <= 12 else None
    )


def test_whichever_comes_first_ends_it():
    ids = letters("abcd")
    assert ends(ids, frozenset({ids[1]}), stop=("cd",)) == 2
    assert ends(ids, frozenset({ids[3]}), stop=("bc",)) == 3


def test_a_character_of_several_tokens_is_whole_before_it_counts():
    ids = letters("a→b")
    assert len(ids) == 5
    assert ends(ids, stop=("→",)) == 4


def test_special_tokens_are_no_text():
    end = tiny_tokenizer().convert_tokens_to_ids("<|im_start|>")
    ids = [*letters("ab"), end, *letters("cd")]
    assert ends(ids, stop=("bc",)) == 4
    assert ends(ids, stop=("bc",), skip_special_tokens=False) is None

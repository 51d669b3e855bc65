"""Checks of single arguments: what they return, and messages that say what was expected and what was given."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from corelm import validate
from corelm.errors import InvalidRequestError
from helpers.each import each

#: True, as Python, NumPy and torch have it.
TRUTHS = (True, np.True_, torch.tensor(True))


def refused(check: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        check("size", *arguments, **options)
    assert caught.value.field == "size"
    return str(caught.value)


@each("given", [2, 2.0, np.float32(2), torch.tensor(2.0), torch.tensor([2])])
def test_a_number_may_be_an_int_a_float_or_a_tensor_of_one(given: Any):
    assert validate.number("size", given) == 2.0 and type(validate.number("size", given)) is float


@each("given", [math.nan, math.inf, *TRUTHS, "2", None, 10**400, torch.ones(2), [2]])
def test_anything_else_is_not_a_number(given: Any):
    assert refused(validate.number, given).startswith("size: expected a finite number, got ")


def test_a_message_names_the_range_of_a_number():
    assert refused(validate.number, -1, 0) == "size: expected a finite number of at least 0, got -1"
    assert refused(validate.number, 2, high=1) == "size: expected a finite number of at most 1, got 2"
    assert refused(validate.number, 1.5, 0, 1) == "size: expected a number from 0 to 1, got 1.5"
    assert refused(validate.number, 0, 0, 1, above=True) == "size: expected a number above 0 and up to 1, got 0"
    assert refused(validate.positive, 0) == "size: expected a finite number above 0, got 0"
    assert validate.number("size", 1, 0, 1, above=True) == 1.0


@each("given", [3, 3.0, np.int64(3), torch.tensor(3)])
def test_a_count_is_a_whole_number(given: Any):
    assert validate.count("size", given, 3) == 3 and type(validate.count("size", given)) is int


@each("given", [2.5, *TRUTHS, "3", None, math.nan, math.inf, torch.ones(2), [3]])
def test_anything_else_is_not_a_count(given: Any):
    assert refused(validate.count, given).startswith("size: expected a whole number of at least 0, got ")


def test_a_count_has_a_lower_bound_unless_it_is_none():
    assert refused(validate.count, 0, 1) == "size: expected a whole number of at least 1, got 0"
    assert refused(validate.count, 0.5, None) == "size: expected a whole number, got 0.5"
    assert validate.count("size", -7, None) == -7


def test_a_count_may_have_an_upper_bound():
    assert validate.count("size", 9, 1, 9) == 9
    assert refused(validate.count, 10, 1, 9) == "size: expected a whole number of at least 1 and at most 9, got 10"


def test_a_value_whose_repr_fails_is_shown_by_its_type():
    for check in (validate.number, validate.flag):
        assert refused(check, 10**5000).endswith("got a value of type int")
    assert refused(validate.count, 10**5000, 0, 9).endswith("got a value of type int")
    assert refused(validate.one_of, torch.ones(2), ("a",)).startswith("size: expected one of 'a', got tensor(")


def test_token_ids_are_ints_below_any_vocabulary():
    for given in ([3, 4], (3, 4), torch.tensor([3, 4]), np.array([3, 4]), iter([3, 4]), [np.int64(3), torch.tensor(4)]):
        found = validate.token_ids("size", given)
        assert found == (3, 4) and set(map(type, found)) == {int}
    assert validate.token_ids("size", [2**31 - 1]) == (2**31 - 1,) and validate.token_ids("size", []) == ()
    truths = [*([truth] for truth in TRUTHS), np.array([True])]
    for given in (5, "ab", ["a"], [1.0], *truths, None, torch.tensor(3), [[1]]):
        assert refused(validate.token_ids, given).startswith("size: expected a sequence of token ids, got ")


def test_texts_that_no_tokenizer_can_encode():
    assert all(validate.unencodable(text) is None for text in ("", "a", "\x00", "é", "\U0001f600", "\uffff", "\ue000"))
    for text, at in (("\ud83d", 0), ("ab\udfff", 2), ("é\ud83d\ude00", 1)):
        assert f"at character {at} is a lone surrogate" in str(validate.unencodable(text))


def test_every_text_of_nested_values_is_found():
    given = {"a": ["b", {"c": ("d", 5, None)}], "e": {}, 7: "f"}
    assert sorted(validate.nested_texts("size", given)) == ["a", "b", "c", "d", "e", "f"]
    given["e"] = given
    assert "nested more than 100 levels deep, or hold themselves" in refused(validate.nested_texts, given)


def test_flags_choices_and_keys():
    assert validate.flag("size", True) is True
    assert refused(validate.flag, 1) == "size: expected True or False, got 1"
    validate.one_of("size", "small", ("small", "large"))
    assert refused(validate.one_of, "tiny", ("small", "large")) == "size: expected one of 'small', 'large', got 'tiny'"
    given = {"a": 1}
    assert validate.subset("size", given, ("a", "b")) == given and validate.subset("size", given, ("a",)) is not given
    assert validate.subset("size", None, ("a",)) == {}
    assert refused(validate.subset, ["a"], ("a",)) == "size: expected a mapping with keys of a; got ['a']"
    message = "size: unknown keys: 'widht'; known keys: width, height; did you mean 'width'?"
    assert refused(validate.subset, {"widht": 1}, ("width", "height")) == message


def test_a_device_is_read_by_torch():
    assert validate.device("cpu") == torch.device("cpu") and validate.device(None) is None
    with pytest.raises(InvalidRequestError, match="device: ") as caught:
        validate.device("abacus")
    assert caught.value.field == "device"


def test_the_nearest_known_name_is_suggested():
    known = ["temperature", "top_p", "top_k"]
    assert validate.did_you_mean("temprature", known) == "; did you mean 'temperature'?"
    assert validate.did_you_mean("zzz", known) == "" and validate.did_you_mean(7, known) == ""
    assert validate.nearest("topk", known) == "top_k"

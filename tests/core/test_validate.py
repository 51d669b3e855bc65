"""Checks of single arguments: what they return, and what their messages say; and how errors are printed."""

import inspect
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from corelm import errors, validate
from corelm.errors import InvalidRequestError
from helpers.each import each

#: True, as Python, NumPy and torch have it.
TRUTHS = (True, np.True_, torch.tensor(True))
NO_COUNTS = (math.nan, math.inf, *TRUTHS, "2", None, torch.ones(2), [2])


@each(
    "check, arguments, expected",
    [
        *((validate.number, (given,), 2.0) for given in (2, 2.0, np.float32(2), torch.tensor(2.0), torch.tensor([2]))),
        (validate.number, (1, 0, 1), 1.0),
        *((validate.count, (given, 3), 3) for given in (3, 3.0, np.int64(3), torch.tensor(3))),
        (validate.count, (-7, None), -7),
        (validate.count, (9, 1, 9), 9),
        *((validate.token_ids, (made([3, 4]),), (3, 4)) for made in (list, tuple, torch.tensor, np.array, iter)),
        (validate.token_ids, ([2**31 - 1],), (2**31 - 1,)),
        (validate.flag, (True,), True),
        (validate.subset, ({"a": 1}, ("a", "b")), {"a": 1}),
        (validate.subset, (None, ("a",)), {}),
    ],
)
def test_what_is_expected_comes_back_as_pythons_own(check: Any, arguments: Any, expected: Any) -> None:
    found = check("size", *arguments)
    assert found == expected and type(found) is type(expected)


@each(
    "check, arguments, says",
    [
        *((validate.number, (given,), "expected a finite number, got ") for given in (10**400, *NO_COUNTS)),
        (validate.number, (-1, 0), "expected a finite number of at least 0, got -1"),
        (validate.number, (1.5, 0, 1), "expected a number from 0 to 1, got 1.5"),
        (validate.number, (10**5000,), "got a value of type int"),
        (validate.positive, (0,), "expected a finite number above 0, got 0"),
        *((validate.count, (given,), "expected a whole number of at least 0, got ") for given in (2.5, *NO_COUNTS)),
        (validate.count, (0.5, None), "expected a whole number, got 0.5"),
        (validate.count, (10, 1, 9), "expected a whole number of at least 1 and at most 9, got 10"),
        *(
            (validate.token_ids, (given,), "expected a sequence of token ids, got ")
            for given in (5, "ab", ["a"], [1.0])
        ),
        *((validate.token_ids, ([given],), "expected a sequence of token ids, got ") for given in (*TRUTHS, [1])),
        (validate.flag, (1,), "expected True or False, got 1"),
        (validate.one_of, ("tiny", ("small", "large")), "expected one of 'small', 'large', got 'tiny'"),
        (validate.subset, ({"widht": 1}, ("width", "height")), "known keys: width, height; did you mean 'width'?"),
    ],
)
def test_anything_else_is_refused_by_the_name_of_the_argument(check: Any, arguments: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check("size", *arguments)
    assert caught.value.field == "size" and str(caught.value).startswith("size: ") and says in str(caught.value)


def test_texts_that_no_tokenizer_can_encode() -> None:
    assert all(validate.unencodable(text) is None for text in ("", "a", "\x00", "é", "\U0001f600", "\uffff", "\ue000"))
    for text, at in (("\ud83d", 0), ("ab\udfff", 2), ("é\ud83d\ude00", 1)):
        assert f"at character {at} is a lone surrogate" in str(validate.unencodable(text))


def test_every_text_of_nested_values_is_found() -> None:
    given = {"a": ["b", {"c": ("d", 5, None)}], "e": {}, 7: "f"}
    assert sorted(validate.nested_texts("size", given)) == ["a", "b", "c", "d", "e", "f"]
    given["e"] = given
    with pytest.raises(InvalidRequestError, match="nested more than 100 levels deep, or hold themselves"):
        validate.nested_texts("size", given)


def test_a_device_is_read_by_torch() -> None:
    assert validate.device("cpu") == torch.device("cpu") and validate.device(None) is None
    with pytest.raises(InvalidRequestError, match="device: "):
        validate.device("abacus")


# Messages of exceptions can be printed anywhere -----------------------------------------------------------------------


#: What a terminal obeys (title, C1 control, bell), what reorders text, a lone surrogate, a carriage return.
FOREIGN = "a\x1b]0;owned\x07b\x9b31m\u202ec\ud800\rd é 漢"
SAFE = r"a\x1b]0;owned\x07b\x9b31m\u202ec\ud800\rd é 漢"
EVERY_ERROR = [each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, errors.CoreLMError)]


@each("kind", EVERY_ERROR)
def test_the_message_of_an_error_cannot_drive_a_terminal(kind):
    error = kind(FOREIGN)
    assert str(error) == SAFE and error.args == (FOREIGN,)
    assert str(kind("two\nlines\tand a tab")) == "two\nlines\tand a tab"
    assert str(pickle.loads(pickle.dumps(error))) == SAFE


def test_printable_text_is_left_alone():
    assert errors.printable("naïve: 漢字, 🙂, {x!r}") == "naïve: 漢字, 🙂, {x!r}"
    assert errors.printable("a\nb\tc") == r"a\nb\tc" and errors.printable("a\nb\t", keep="\n") == "a\nb\\t"

"""The exceptions: their messages can be printed anywhere."""

import inspect
import pickle

from corelm import errors
from helpers.each import each

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

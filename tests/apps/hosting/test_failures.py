"""Exceptions from one process to another: type, message and details survive, whatever their class."""

from __future__ import annotations

import inspect

from corelm import errors
from corelm.errors import CoreLMError, EngineError, InvalidRequestError
from corelm_fleet.hosting.packing import Failure, HostedError, HostTraceback, pack, unpack

OURS = [each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, CoreLMError)]
OURS = [each for each in OURS if not each.__name__.startswith("_")]
VALUES = {"call": 3, "field": "top_p", "problems": {1: "odd", 3: "even"}, "usable": False, "capability": "abort"}


def crossed(error: BaseException) -> Exception:
    return unpack(*pack(Failure.of(error))).error()


def test_every_error_of_ours_keeps_type_message_and_details() -> None:
    for cls in OURS:
        names = [*inspect.signature(cls.__init__).parameters.keys() - {"self", "args", "kwargs", "message"}]
        assert {*names} <= VALUES.keys(), f"an argument of {cls.__name__} without a sample"
        error = cls("what\x1bhappened", **{name: VALUES[name] for name in names})
        found = crossed(error)
        assert type(found) is cls and str(found) == str(error) and found.args == error.args
        assert vars(found) == vars(error), cls.__name__


class Own(EngineError):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}", usable=False, problems={one: "bad"})


class Strange(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(one, two)


def test_a_plugins_own_error_becomes_the_nearest_of_ours() -> None:
    found = crossed(Own(4, 5))
    assert type(found) is EngineError and str(found) == "4 and 5"
    assert found.usable is False and found.rows == (4,)


def test_builtin_exceptions_stay_what_they_are() -> None:
    for error in (ValueError("x"), KeyError("x"), TimeoutError("slow"), ConnectionResetError("gone")):
        found = crossed(error)
        assert type(found) is type(error) and found.args == error.args, error


def test_others_keep_the_name_of_their_class() -> None:
    for error in (Strange(1, 2), SystemExit("bye"), KeyboardInterrupt()):
        found = crossed(error)
        assert type(found) is HostedError and type(error).__name__ in str(found), error


def test_an_exception_with_arguments_of_its_own_becomes_its_base() -> None:
    error = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid")
    assert type(crossed(error)) is UnicodeError or isinstance(crossed(error), ValueError)
    assert "invalid" in str(crossed(error))


def test_the_traceback_crosses_as_the_cause() -> None:
    try:
        try:
            raise InvalidRequestError("deep", field="x")
        except InvalidRequestError as error:
            raise EngineError("high") from error
    except EngineError as error:
        cause = crossed(error).__cause__
    assert isinstance(cause, HostTraceback)
    assert "test_the_traceback_crosses" in str(cause) and "deep" in str(cause)


def test_a_class_that_only_has_the_name_of_one_of_ours_is_not_ours() -> None:
    # Such as jinja2's TemplateError, or asyncio's TimeoutError before Python 3.11.
    for name in ("TemplateError", "TimeoutError"):
        foreign = type(name, (Exception,), {})
        found = crossed(foreign("odd"))
        assert type(found) is HostedError and str(found) == f"{name}: odd"

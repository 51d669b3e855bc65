"""`each` and `case`: many cases in one test. `examples`: how many examples hypothesis draws."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import settings


def each(names: str, cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test once for each case, as one item of pytest. A failure names its case.

    Written like `pytest.mark.parametrize`, for cases that check one line each, where the overhead of an item of pytest
    would cost more than the check. All cases see the same fixtures.
    """
    keys = [name.strip() for name in names.split(",")]
    listed = [case if len(keys) > 1 else (case,) for case in cases]
    assert listed, "a test without cases cannot fail"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, **fixtures: Any) -> None:
            for number, case in enumerate(listed):
                try:
                    test(*args, **fixtures, **dict(zip(keys, case, strict=True)))
                except pytest.skip.Exception as skip:
                    raise AssertionError("a case that skips would skip the others: use parametrize") from skip
                # `pytest.fail` raises a class that is not derived from Exception.
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"case {number}: " + ", ".join(map("{}={!r}".format, keys, case)))
                    raise

        signature = inspect.signature(test)
        left = [one for name, one in signature.parameters.items() if name not in keys]
        assert len(left) + len(keys) == len(signature.parameters), f"not parameters of the test: {names}"
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return run

    return decorate


@contextmanager
def case(*values: object) -> Iterator[None]:
    """Add the values of a case to the report of a failure within, for a test that loops over its cases."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        error.add_note(f"case: {', '.join(map(repr, values))}"[:500])
        raise


def examples(number: int) -> int:
    """Return how many examples hypothesis draws: `number`, or ten times as many in ``make nightly``."""
    return number * settings.default.max_examples // 100

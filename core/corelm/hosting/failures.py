"""Exceptions that cross from one process to another: as plain data, because not every exception can be pickled."""

from __future__ import annotations

import builtins
import inspect
import traceback
from dataclasses import dataclass, field
from typing import Any

from corelm import errors
from corelm.errors import CoreLMError, described, message


class HostTraceback(Exception):
    """The traceback of an exception in a host, as text. It is the cause of the exception that is raised here."""

    def __str__(self) -> str:
        return f"in the host:\n{self.args[0]}"


class HostedError(Exception):
    """An exception of the host whose class is not known here. Its message names the class."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception as plain data.

    Attributes:
        kind: the name of its class, or of the nearest one that this package or Python defines; "" if there is none.
        message: its message.
        details: its other arguments, by name.
        described: the type and the message of the original.
        trace: its traceback and those of its causes.
    """

    kind: str
    message: str
    details: dict[str, Any] = field(default_factory=dict)
    described: str = ""
    trace: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        alone = len(error.args) == 1 and isinstance(error.args[0], str)
        text = error.args[0] if alone else message(error)
        kind = next((each for each in type(error).__mro__ if type(_made(each.__name__, "")) is each), None)
        details: dict[str, Any] = {}
        if kind is not None and issubclass(kind, CoreLMError):
            names = inspect.signature(kind.__init__).parameters
            details = {name: value for name, value in vars(error).items() if name in names}
        trace = "".join(traceback.format_exception(error)).rstrip()
        return cls("" if kind is None else kind.__name__, text, details, described(error), trace)

    def error(self) -> Exception:
        """Return the exception to raise in this process."""
        error = _made(self.kind, self.message, **self.details) or HostedError(self.described)
        error.__cause__ = HostTraceback(self.trace)
        return error


def _made(name: str, text: str, **details: Any) -> Exception | None:
    """Return an exception of that class; None if no exception has the name, or if it takes more than a message."""
    found = getattr(errors, name, None) or getattr(builtins, name, None)
    # One that is merely an Exception would lose the name of its class.
    if not isinstance(found, type) or not issubclass(found, Exception) or found is Exception:
        return None
    try:
        return found(text, **details)
    except TypeError:
        return None

"""Exceptions that cross from one process to another: as plain data, because not every exception can be pickled."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Any

from corelm.errors import described, error_from, plain_error


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
        kind, text, details = plain_error(error)
        trace = "".join(traceback.format_exception(error)).rstrip()
        return cls(kind, text, details, described(error), trace)

    def error(self) -> Exception:
        """Return the exception to raise in this process."""
        error = error_from(self.kind, self.message, **self.details) or HostedError(self.described)
        error.__cause__ = HostTraceback(self.trace)
        return error

"""What cassettes raise."""

from __future__ import annotations

from collections.abc import Mapping

from corelm.errors import CoreLMError


class CassetteError(CoreLMError, ValueError):
    """A cassette cannot be written or read: damaged, made by something else, in use, or there already."""


class NotRecordedError(CoreLMError, LookupError):
    """A cassette does not hold the answer to a call. No engine was asked.

    Attributes:
        problems: the flat indices of the rows that are not recorded, ascending, each with what is wrong with it.
    """

    def __init__(self, message: str, *, problems: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.problems = dict(sorted((problems or {}).items()))

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(self.problems)

"""What cassettes raise."""

from __future__ import annotations

from collections.abc import Mapping

from corelm.errors import CoreLMError


class CassetteError(CoreLMError, ValueError):
    """A cassette cannot be written or read: damaged, made by something else, in use, or there already."""


class NotRecordedError(CoreLMError, LookupError):
    """A cassette does not hold the answer to a call. No engine was asked.

    Attributes:
        call: the number of the recorded call that should have come; None if no single one was due.
        field: the first field of the request that differs from that call; None if none was compared.
        problems: the flat indices of the rows that are not recorded, or of the first one that differs, ascending, each
            with what is wrong with it.
    """

    def __init__(
        self,
        message: str,
        *,
        call: int | None = None,
        field: str | None = None,
        problems: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.call, self.field = call, field
        self.problems = dict(sorted((problems or {}).items()))

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(self.problems)

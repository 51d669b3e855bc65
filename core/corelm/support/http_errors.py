"""What becomes of a request that a server did not answer: `TransientError` and `ABORTED`. Needs no httpx."""

from __future__ import annotations

from enum import Enum
from typing import Final

from corelm.errors import EngineError


class TransientError(EngineError):
    """A failure that may pass; callers meet it once the retries are used up.

    Attributes:
        retry_after: seconds that the server asked to wait, or 0.
    """

    def __init__(self, message: str, *, usable: bool | None = None, retry_after: float = 0.0) -> None:
        super().__init__(message, usable=usable)
        self.retry_after = retry_after


class Aborted(Enum):
    """The type of `ABORTED`."""

    ABORTED = "aborted"


#: Stands for the answer of a request that `HttpClient.abort` ended.
ABORTED: Final = Aborted.ABORTED

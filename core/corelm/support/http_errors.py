"""`TransientError`: a failure of a server that may pass."""

from __future__ import annotations

from corelm.errors import EngineError


class TransientError(EngineError):
    """A failure that may pass; callers meet it once the retries are used up.

    Attributes:
        retry_after: seconds that the server asked to wait, or 0.
    """

    def __init__(self, message: str, *, usable: bool | None = None, retry_after: float = 0.0) -> None:
        super().__init__(message, usable=usable)
        self.retry_after = retry_after

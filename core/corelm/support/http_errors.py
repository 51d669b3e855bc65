"""Errors for requests that a server did not answer, and how they are read from its response.

Importing this module does not import httpx.
"""

from __future__ import annotations

import email.utils
import json
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from corelm.errors import CoreLMError, EngineError, InvalidRequestError

if TYPE_CHECKING:
    import httpx

#: The request itself is at fault. The server may well answer another one.
_REFUSED = frozenset({400, 404, 413, 422})
#: The failure may pass, so the client sends the request again.
_RETRIED = frozenset({429, 500, 502, 503, 504})
#: The longest wait, in seconds, that a server's Retry-After is granted.
_LONGEST_WAIT = 60.0
#: How many characters of a server's message an error repeats.
_MESSAGE_LENGTH = 300


class Aborted(Enum):
    """The type of `ABORTED`."""

    ABORTED = "aborted"


#: Stands for the answer of a request that `HttpClient.abort` ended.
ABORTED: Final = Aborted.ABORTED


class TransientError(EngineError):
    """A failure that may pass. Callers see it only after the retries are used up.

    Attributes:
        retry_after: seconds that the server asked to wait, or 0.
    """

    def __init__(self, message: str, *, usable: bool | None = None, retry_after: float = 0.0) -> None:
        super().__init__(message, usable=usable)
        self.retry_after = retry_after


class ResponseReader:
    """Reads the responses of a server that did not do what it was asked.

    Args:
        secrets: texts that no message may repeat, such as the API key. A server may echo them.
    """

    def __init__(self, secrets: Sequence[str]) -> None:
        self._secrets = tuple(secrets)

    def error(self, where: str, response: httpx.Response) -> CoreLMError:
        """Return the error for a response whose status is not a success; `where` is the request, for its message."""
        status = response.status_code
        said = f"{where}: status {status}: {self.message(response) or response.reason_phrase}"
        if status in _REFUSED:
            return InvalidRequestError(said)
        if status in _RETRIED:
            return TransientError(said, retry_after=_retry_after(response.headers.get("Retry-After", "")))
        if status in (401, 403):
            return EngineError(f"{said}; check that api_key is the key of this server", usable=True)
        if response.is_redirect:
            target = self._masked(response.headers.get("Location", ""))[:_MESSAGE_LENGTH]
            return EngineError(
                f"{said}; it redirects to {target!r}. Redirects are not followed: give that address as base_url"
            )
        return EngineError(said)

    def message(self, response: httpx.Response) -> str:
        """Return the beginning of the server's own message, wherever in the body it is."""
        found: Any = response.text
        with suppress(ValueError, RecursionError):
            found = json.loads(found)
        for name in ("error", "message", "detail"):
            if isinstance(found, dict):
                found = found.get(name, found)
        text = found if isinstance(found, str) else json.dumps(found)
        return self._masked(" ".join(text.split()))[:_MESSAGE_LENGTH]

    def _masked(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def _retry_after(text: str) -> float:
    """Return the seconds to wait, from a number of seconds or a date; 0 if the text is neither."""
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except (TypeError, ValueError):
            return 0.0
    return min(max(seconds, 0.0), _LONGEST_WAIT) if math.isfinite(seconds) else 0.0

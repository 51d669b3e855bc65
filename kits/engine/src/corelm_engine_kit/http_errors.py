"""Errors for requests that a server did not answer, and how they are read from its response.

Importing this module does not import httpx2.
"""

from __future__ import annotations

import email.utils
import json
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from corelm.errors import CoreLMError, EngineError, InvalidRequestError
from corelm_engine_kit.redaction import Secrets

#: The request itself is at fault. The server may well answer another one.
REFUSED = frozenset({400, 404, 413, 422})
#: The failure may pass, so the client sends the request again.
_RETRIED = frozenset({429, 500, 502, 503, 504})
#: The longest wait, in seconds, that a server's Retry-After is granted.
_LONGEST_WAIT = 60.0
#: How many characters of a server's message an error repeats.
MESSAGE_LENGTH = 300


class Aborted(Enum):
    """The type of `ABORTED`."""

    ABORTED = "aborted"


#: Stands for the answer of a request that `HttpClient.abort` ended.
ABORTED: Final = Aborted.ABORTED


@dataclass(frozen=True, slots=True)
class PartialReply:
    """The reply to a request that `HttpClient.abort` named before the reply arrived.

    Attributes:
        reply: the decoded JSON. The server may have ended the answer early.
    """

    reply: Any


class TransientError(EngineError):
    """A failure that may pass. It stays within a plugin: after the last try, users get the `EngineError` of `final`.

    Attributes:
        retry_after: seconds that the server asked to wait, or 0.
        status: the status of the response; None if it is not the status that shows the failure.
    """

    def __init__(
        self, message: str, *, usable: bool | None = None, retry_after: float = 0.0, status: int | None = None
    ) -> None:
        super().__init__(message, usable=usable)
        self.retry_after = retry_after
        self.status = status

    def final(self) -> EngineError:
        """Return the error for users: the request is not sent again."""
        return EngineError(str(self), usable=self.usable)


class AccessError(EngineError):
    """The server does not serve this client: the key or the address is wrong. It would refuse every other request."""


class ResponseReader:
    """Reads the responses of a server that did not do what it was asked.

    Args:
        secrets: what no message may repeat. A server may echo the key.
        key_variable: the environment variable that holds the key if no ``api_key`` is given.
    """

    def __init__(self, secrets: Secrets, key_variable: str | None = None) -> None:
        self.secrets = secrets
        self._key = "api_key" + (f", or else the environment variable {key_variable}," if key_variable else "")

    def error(self, where: str, status: int, phrase: str, headers: Mapping[str, str], body: str) -> CoreLMError:
        """Return the error for a response whose status is not a success.

        Args:
            where: the request, for the message.
            status: the response's status.
            phrase: its reason phrase.
            headers: its headers, whose names are lower case.
            body: the beginning of its body.
        """
        said = f"{where}: status {status}: {self.message(body) or self._cut(phrase)}"
        if status in REFUSED:
            return InvalidRequestError(said)
        if status in _RETRIED:
            return TransientError(said, retry_after=_retry_after(headers.get("retry-after", "")), status=status)
        if status in (401, 403):
            return AccessError(f"{said}; check that {self._key} is the key of this server", usable=True)
        if 300 <= status < 400:
            target = self._cut(headers.get("location", ""))
            return AccessError(
                f"{said}; it redirects to {target!r}. Redirects are not followed: give that address as base_url"
            )
        return EngineError(said)

    def message(self, body: str) -> str:
        """Return the beginning of the server's own message, wherever in the body it is."""
        found: Any = body
        with suppress(ValueError, RecursionError):
            found = json.loads(body)
        for name in ("error", "message", "detail"):
            if isinstance(found, dict):
                found = found.get(name, found)
        with suppress(ValueError, RecursionError):
            return self._cut(found if isinstance(found, str) else json.dumps(found))
        return self._cut(body)

    def _cut(self, text: str) -> str:
        # Masked before it is cut, or half a key could be left at the end.
        return self.secrets.masked(" ".join(text.split()))[:MESSAGE_LENGTH]


def _retry_after(text: str) -> float:
    """Return the seconds to wait, from a number of seconds or a date; 0 if the text is neither."""
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except (TypeError, ValueError, OverflowError):
            return 0.0
    return min(max(seconds, 0.0), _LONGEST_WAIT) if math.isfinite(seconds) else 0.0

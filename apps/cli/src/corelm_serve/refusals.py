"""Errors as a client of the OpenAI protocol reads them: a status, a body with `error`, and headers."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from typing import Any

from corelm.errors import (
    BackendAsleepError,
    BackendClosedError,
    BackendTimeoutError,
    CapabilityError,
    CoreLMError,
    EngineError,
    InvalidRequestError,
    QueueFullError,
    TemplateError,
    brief,
    described,
)

_log = logging.getLogger(__name__)

#: Core's names, and what requests call the same.
_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "max_new_tokens": ("max_tokens", "max_completion_tokens"),
    "min_new_tokens": ("min_tokens",),
    "num_samples": ("n",),
    "top_logprobs": ("top_logprobs", "logprobs"),
    "score_top_k": ("logprobs",),
    "top_k": ("top_k", "logprobs"),
}
_NAMES = re.compile(rf"\b(?:{'|'.join(_SPELLINGS)})\b")
#: What core's messages advise that a client cannot do.
_NOT_HERE = ", or give the policy truncation='left', which drops its first tokens"
#: Core's names of what a request calls its prompt, and how its messages begin. One conversation has no rows.
_PROMPTS = ("prompts", "sequences", "texts", "history")
#: The header that names a session.
_SESSION = "X-Session-Id"
_OF_PROMPTS = re.compile(r"^(history: row 0|prompts|sequences|texts|history): ")


class Refusal(Exception):
    """A reply that says why a request is not answered.

    Attributes:
        status: the HTTP status.
        message: what was wrong and what to type.
        type: the protocol's name of the kind of error.
        code: a word for programs; None if the status says enough.
        param: the field of the request at fault.
        headers: headers of the reply.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type, self.code, self.param = status, message, type, code, param
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


#: The official client repeats a request after 429 and 5xx. A request that took too long would only take as long again.
_NOT_AGAIN = {"x-should-retry": "false"}
#: Status, type, code and headers. The first class that an error belongs to says what it is.
_KINDS: tuple[tuple[type[Exception], int, str, str | None, Mapping[str, str]], ...] = (
    (InvalidRequestError, 400, "invalid_request_error", None, {}),
    (TemplateError, 400, "invalid_request_error", "chat_template", {}),
    (CapabilityError, 400, "invalid_request_error", "unsupported", {}),
    (QueueFullError, 429, "rate_limit_error", "queue_full", {"retry-after": "1"}),
    (BackendTimeoutError, 503, "server_error", "timeout", _NOT_AGAIN),
    (BackendClosedError, 503, "server_error", "closed", {}),
    (BackendAsleepError, 503, "server_error", "asleep", {"retry-after": "1"}),
)


def refusal(error: Exception, prompt: str = "prompt", typed: Collection[str] = ()) -> Refusal:
    """Return the refusal for an error. One that core did not raise on purpose is logged, and not shown."""
    if isinstance(error, Refusal):
        return error
    for cls, status, kind, code, headers in _KINDS:
        if isinstance(error, cls):
            param = getattr(error, "field", None) or getattr(error, "capability", None)
            message = as_asked(str(error), typed)
            if param == "session":
                message, param = message.replace("session: ", f"{_SESSION}: ", 1), _SESSION
            if param in _PROMPTS:
                message, param = _OF_PROMPTS.sub(f"{prompt}: ", message), prompt
            param = None if param is None else as_asked(param, typed)
            return Refusal(status, message, type=kind, code=code, param=param, headers=headers)
    if isinstance(error, CoreLMError):
        gone = isinstance(error, EngineError) and error.usable is False
        headers = _NOT_AGAIN if gone else {}
        return Refusal(503 if gone else 500, str(error), type="server_error", code="engine", headers=headers)
    _log.error("a request failed: %s", brief(described(error)), exc_info=error)
    return Refusal(500, "the server failed; its log says why", type="server_error", code="internal")


def as_asked(message: str, typed: Collection[str] = ()) -> str:
    """Return a message of core with the protocol's names: of several, the one that the client typed.

    >>> as_asked("give max_new_tokens=7 or less"), as_asked("max_new_tokens", ["max_completion_tokens"])
    ('give max_tokens=7 or less', 'max_completion_tokens')
    """

    def spelled(name: re.Match[str]) -> str:
        spellings = _SPELLINGS[name[0]]
        return next((each for each in spellings if each in typed), spellings[0])

    return _NAMES.sub(spelled, message.replace(_NOT_HERE, ""))

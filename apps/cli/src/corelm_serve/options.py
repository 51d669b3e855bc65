"""`ServerOptions`: what a server answers, whom, and how much at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from corelm import validate
from corelm.spec import Adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """The options of a server.

    Attributes:
        api_key: the key that clients must send; None lets everyone in who reaches the port.
        model_name: the name of the model in requests and replies; None for the backend's own.
        chat_template: renders conversations; None for the tokenizer's own template.
        template_kwargs: variables for the template.
        response_parser: the name of a parser that makes tool calls and reasoning of an answer's text; None leaves it
            text.
        log_probs: which log-probs are recorded and returned: `raw`, the model's own, or `processed`, of the
            distribution that was sampled from.
        adapter: the adapter that answers, see `Backend.load_adapter`.
        sessions: whether to record what clients said and were told.
        max_body: the largest number of bytes of a request.
        max_requests: the largest number of requests that are read, wait or are answered at a time; a further one is
            told to come again.
        timeout: seconds that the engine may take for a request; None for the backend's own timeout.

    Raises:
        InvalidRequestError: an illegal value; `field` names it.
    """

    api_key: str | None = field(default=None, repr=False)
    model_name: str | None = None
    chat_template: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    response_parser: str | None = None
    log_probs: Literal["raw", "processed"] = "raw"
    adapter: Adapter = None
    sessions: bool = True
    max_body: int = 16 * 2**20
    max_requests: int = 1024
    timeout: float | None = 600.0

    def __post_init__(self) -> None:
        key = self.api_key
        if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key and key):
            # Not the key itself: the message may be logged.
            expected = "expected at least one character, only printable ASCII characters, and no spaces at the ends"
            raise validate.invalid("api_key", expected)
        validate.one_of("log_probs", self.log_probs, ("raw", "processed"))
        for name in ("max_body", "max_requests"):
            object.__setattr__(self, name, validate.count(name, getattr(self, name), 1))
        if self.timeout is not None:
            object.__setattr__(self, "timeout", validate.positive("timeout", self.timeout))

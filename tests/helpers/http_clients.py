"""Helpers of the HTTP client tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from helpers.http_server import Reply, Request, json_reply

KEY = "sk-a-secret-of-this-test"
if TYPE_CHECKING:
    # Only here: it needs httpx2, and some tests that import this module need none.
    from corelm_engine_kit.http import HttpClient

Connect: TypeAlias = "Callable[..., HttpClient]"


def echo(request: Request) -> Reply:
    return json_reply({"you said": request.body})


def is_echo(payload: Any, reply: Any) -> bool:
    """Return whether a reply of `echo` answers that payload. Other replies name no payload."""
    return not isinstance(reply, dict) or reply.get("you said", payload) == payload


class Waits(list[float]):
    """A replacement for `sleep` that records the seconds and returns at once."""

    async def __call__(self, seconds: float) -> None:
        self.append(seconds)

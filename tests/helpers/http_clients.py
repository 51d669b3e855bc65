"""What the tests of the HTTP client have in common."""

from __future__ import annotations

from collections.abc import Callable

from corelm.support.http import HttpClient
from helpers.http_server import Reply, Request, json_reply

KEY = "sk-a-secret-of-this-test"
Connect = Callable[..., HttpClient]


def echo(request: Request) -> Reply:
    return json_reply({"you said": request.body})


class Waits(list[float]):
    """Notes how long it was to sleep, and does not."""

    async def __call__(self, seconds: float) -> None:
        self.append(seconds)

"""Helpers of the HTTP client tests."""

from __future__ import annotations

from collections.abc import Callable

from corelm.support.http import HttpClient
from helpers.http_server import Reply, Request, json_reply

KEY = "sk-a-secret-of-this-test"
Connect = Callable[..., HttpClient]


def echo(request: Request) -> Reply:
    return json_reply({"you said": request.body})


class Waits(list[float]):
    """A replacement for `sleep` that records the seconds and returns at once."""

    async def __call__(self, seconds: float) -> None:
        self.append(seconds)

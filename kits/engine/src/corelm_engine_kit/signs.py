"""`SignOfWork`: how a server that has not answered yet shows that it works. Each plugin knows its own server's signs.

Importing this module does not import httpx.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SignOfWork:
    """What `HttpClient` asks a server that takes long to answer.

    Attributes:
        rows: the path of the requests that the engine works on.
        page: the page to ask while only such requests are unanswered.
        progress: ``progress(text)`` returns the part of the page that changes while the engine works, or None if the
            page has no such part. Without `progress`, the page answers only if the engine works, so its answer is the
            sign.
        alive: the page to ask while another request, such as one to load weights, is unanswered, and where `page` is
            missing or has no such part. Its answer is the sign.
    """

    rows: str
    page: str
    progress: Callable[[str], Hashable | None] | None = None
    alive: str

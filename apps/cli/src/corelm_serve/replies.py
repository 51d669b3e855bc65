"""What all replies share: names, times, usage, and the end of an answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from corelm_interop.openai_answers import Answer
from corelm_serve.exchange import Exchange


class Reply:
    """The reply to one request.

    Args:
        prefix: what the id of the reply begins with.
        turns: of sessions, one for each prompt. The reply names the session if there is only one.
        include_usage: whether a stream ends with the usage.
    """

    def __init__(self, exchange: Exchange, prefix: str, turns: Iterable[Any], *, include_usage: bool = False) -> None:
        self.exchange, self.service, self.connection = exchange, exchange.service, exchange.connection
        self._include_usage = include_usage
        self._heading = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": exchange.service.name,
            # The protocol's name of what tells one state of a server from another: here, of its weights.
            "system_fingerprint": f"weights-{exchange.service.backend.weight_version}",
        }
        names = {turn.session_id for turn in turns}
        session = names.pop() if len(names) == 1 else None
        self._headers = {} if session is None else {"x-session-id": session}

    async def whole(self, kind: str, choices: Sequence[Any], numbers: Mapping[str, int]) -> None:
        """Send all choices at once."""
        body = {**self._heading, "object": kind, "choices": choices, "usage": numbers}
        await self.connection.reply(body, headers=self._headers)

    async def begin_stream(self) -> None:
        """Begin a reply of events."""
        await self.connection.begin_stream(self._headers)

    async def event(self, kind: str, choices: Sequence[Any], numbers: Mapping[str, int] | None = None) -> None:
        """Send choices as an event; `numbers` are None except at the end, and left out if the client wants none."""
        more = {"usage": numbers} if self._include_usage else {}
        await self.connection.event({**self._heading, "object": kind, "choices": choices, **more})

    async def end_stream(self, kind: str, numbers: Mapping[str, int]) -> None:
        """End a reply of events, with the usage if the client wants it."""
        if self._include_usage:
            await self.event(kind, [], numbers)
        await self.connection.end_stream()


def usage(prompts: Iterable[Sequence[int]], answers: Iterable[Answer]) -> dict[str, int]:
    """Return how many tokens the prompts and the answers have."""
    read, sampled = sum(map(len, prompts)), sum(len(answer.ids) for answer in answers)
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}


def record(turn: Any, prompt: Sequence[int], answers: Sequence[Answer], messages: Sequence[Any] = ()) -> None:
    """Record the answers to one prompt, but not those that were aborted before the first token."""
    for choice, answer in enumerate(answers):
        if answer.finish_reason == "abort" and not answer.ids:
            continue
        turn.record(
            prompt_ids=prompt,
            ids=answer.ids,
            logprobs=answer.logprobs,
            finish_reason=answer.finish_reason,
            provenance=answer.provenance,
            message=messages[choice] if messages else None,
            choice=choice,
        )

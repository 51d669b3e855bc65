"""What the bodies of all replies share: names, times, usage, and the end of an answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from corelm_interop.openai_answers import Answer
from corelm_serve.service import Service


class Heading:
    """The fields that every part of one reply repeats."""

    def __init__(self, service: Service, prefix: str) -> None:
        self._model, self._created = service.name, int(time.time())
        self._id = f"{prefix}-{uuid.uuid4().hex}"
        # The protocol's name of what tells one state of a server from another: here, of its weights.
        self._fingerprint = f"weights-{service.backend.weight_version}"

    def body(self, kind: str, choices: Sequence[Any], **more: Any) -> dict[str, Any]:
        """Return a body with these choices."""
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
            "choices": list(choices),
            **more,
        }


def usage(prompts: Iterable[Sequence[int]], answers: Iterable[Sequence[int]]) -> dict[str, int]:
    """Return how many tokens the prompts and the answers have."""
    read, sampled = sum(map(len, prompts)), sum(map(len, answers))
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}


def session_header(session_id: str | None) -> dict[str, str]:
    """Return the header that names the session of a reply."""
    return {} if session_id is None else {"x-session-id": session_id}


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

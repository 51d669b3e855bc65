"""Decode the scores of a vLLM server without a Python object for every token's rank and text.

A decoded reply is a dict as `json` would make it, with the fields that `protocol_http` reads and no others, and with
`PromptLogprobs`. Only replies that are built as expected are decoded so; all others are decoded plainly, and
`protocol_http` says what is wrong with them. This saves two of three microseconds a token.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from corelm_engine_kit import Decode, RowError, decoded, decoder_of, id_texts

#: What stands before an id where a server labels a token with it.
LABEL = "token_id:"


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The log-probs of a prompt, of which each position but the first has exactly one.

    Attributes:
        ids: the ids that the positions name.
        logprobs: one number for each of them.
    """

    ids: list[int]
    logprobs: array[float]

    def __len__(self) -> int:
        return 1 + len(self.ids)

    def plain(self) -> list[Any]:
        """Return the positions as `json` decodes them, without their ranks and texts."""
        named = zip(id_texts(self.ids), self.logprobs, strict=True)
        return [None, *({text: {"logprob": value}} for text, value in named)]


def labels(ids: list[int]) -> list[str]:
    """Return how a server labels tokens with these ids."""
    return [f"{LABEL}{text}" for text in id_texts(ids)]


def prompt_logprobs(ids: list[int], positions: list[Any] | PromptLogprobs) -> Sequence[Any]:
    """Return the log-prob that each position of a prompt reports for its id. The first position reports none.

    Raises:
        RowError: a position does not name its id.
    """
    if isinstance(positions, PromptLogprobs):
        if positions.ids == ids:
            return positions.logprobs
        positions = positions.plain()
    positions = positions[1:]
    try:
        return [candidates[text]["logprob"] for candidates, text in zip(positions, id_texts(ids), strict=True)]
    except (KeyError, TypeError):
        pass
    found = []
    for token, candidates in zip(ids, positions, strict=True):
        if not isinstance(candidates, dict) or str(token) not in candidates:
            raise RowError(f"its prompt_logprobs do not name id {token} where the prompt has it")
        found.append(candidates[str(token)].get("logprob"))
    return found


def decoder(payloads: Sequence[Mapping[str, Any]]) -> Decode:
    """Return what decodes the replies to `payloads`: `decode` if these have one log-prob for each token of a prompt."""
    return decode if any(payload.get("prompt_logprobs") == 0 for payload in payloads) else decoded


def cached_tokens(reply: Any) -> Any:
    """Return how many ids of the prompt a completion says came from the prefix cache; None if it does not say.

    Servers say so that run with ``--enable-prompt-tokens-details``.
    """
    usage = reply.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    return details.get("cached_tokens") if isinstance(details, dict) else None


# Without `gc=False` the garbage collector would look at all of them, and at the rest of the process in between.
class _Position(msgspec.Struct, gc=False):
    logprob: float


class _Choice(msgspec.Struct):
    token_ids: list[Any]
    finish_reason: Any = None
    stop_reason: Any = None
    prompt_token_ids: Any = None
    logprobs: Any = None
    prompt_logprobs: list[dict[int, _Position] | None] | None = None


class _Completion(msgspec.Struct):
    choices: tuple[_Choice]
    id: Any = None
    usage: Any = None


_completion = msgspec.json.Decoder(_Completion)


def _compact(body: bytes | bytearray) -> dict[str, Any]:
    """Return a completion; a ValueError if it has no compact form."""
    reply = _completion.decode(body)
    found = reply.choices[0]
    names = ("token_ids", "finish_reason", "stop_reason", "prompt_token_ids", "logprobs")
    choice: dict[str, Any] = {name: getattr(found, name) for name in names}
    if found.prompt_logprobs is not None:
        choice["prompt_logprobs"] = _compact_logprobs(found.prompt_logprobs)
    return {"id": reply.id, "choices": [choice], "usage": reply.usage}


def _compact_logprobs(positions: list[Any]) -> PromptLogprobs:
    rest = positions[1:]
    if positions[:1] != [None] or None in rest:
        raise ValueError("a position after the first one has no log-prob")
    # Each of them names one id, or this raises a ValueError.
    ids = [token for (token,) in rest]
    return PromptLogprobs(ids, array("d", [found.logprob for (found,) in map(dict.values, rest)]))


decode = decoder_of(_compact)

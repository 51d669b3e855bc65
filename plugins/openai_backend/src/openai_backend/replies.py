"""What the replies of completion requests say, in the forms that servers give them.

Log-probs come as parallel lists (OpenAI's Completions, vLLM, SGLang) or as a list of tokens (its Chat Completions,
llama.cpp). Both become `Reported`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from corelm_engine_kit import RowError

#: What stands before the id in the name of a token, if a server names tokens by their ids.
BY_ID = "token_id:"


@dataclass(frozen=True, slots=True)
class Reported:
    """What a reply says of each token.

    Attributes:
        names: how the server names each token: by its text, or ``token_id:5`` if it gives the id.
        logprobs: one for each token; None where the server gives none.
        top: the log-probs of the most probable tokens by name; empty where the server gives none.
    """

    names: list[str]
    logprobs: list[Any]
    top: list[Mapping[str, Any]]

    def __len__(self) -> int:
        return len(self.names)


def reported(choice: Mapping[str, Any]) -> Reported:
    """Return what a choice says of its tokens.

    Raises:
        RowError: it has no log-probs, or their lists are not equally long.
    """
    found = choice.get("logprobs")
    if isinstance(found, dict) and isinstance(found.get("content"), list):
        entries = found["content"]
        by_content: list[Mapping[str, Any]] = [
            {_name(each): each.get("logprob") for each in entry.get("top_logprobs") or []}
            for entry in map(dict, entries)
        ]
        return Reported([_name(entry) for entry in entries], [entry.get("logprob") for entry in entries], by_content)
    if not isinstance(found, dict) or not isinstance(found.get("tokens"), list):
        raise RowError("it has no log-probs")
    names, logprobs = found["tokens"], found.get("token_logprobs")
    if not isinstance(logprobs, list) or len(logprobs) != len(names) or not {*map(type, names)} <= {str}:
        raise RowError("its log-probs are not one for each of its tokens")
    top = [each if isinstance(each, dict) else {} for each in found.get("top_logprobs") or []]
    return Reported(names, logprobs, [*top, *[{}] * (len(names) - len(top))])


def count(reply: Any, name: str) -> int | None:
    """Return a number of the reply's ``usage``, such as ``prompt_tokens``; None if it has none."""
    usage = reply.get("usage") if isinstance(reply, dict) else None
    found = usage.get(name) if isinstance(usage, dict) else None
    return found if type(found) is int else None


def _name(entry: Mapping[str, Any]) -> str:
    # llama.cpp gives the id as well.
    return f"{BY_ID}{entry['id']}" if type(entry.get("id")) is int else str(entry["token"])

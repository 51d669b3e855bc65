"""`find_value` and `InputRows`: a value of a user's TensorDict, and what was read from it, as flat rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from corelm.errors import Problems
from corelm.policy.scored_sets import ScoredSupport
from corelm.spec.capabilities import Capabilities
from corelm.spec.message import Chat, Message
from corelm.spec.records import Columns, Parts
from corelm.spec.sampling import SamplingParams
from corelm.tensors.ragged import Ragged
from corelm.validate import invalid

if TYPE_CHECKING:
    from corelm.backend.backend import Backend


def find_value(td: TensorDictBase, key: NestedKey) -> Any:
    """Return the value at the key, or None. Bare rows of different lengths, stacked lazily, come back as a list."""
    if key not in td.keys(include_nested=True):
        return None
    try:
        return td[key]
    except RuntimeError:
        return td.get(key, as_list=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InputRows:
    """The rows that were read, one per prompt or sequence, in C order of `batch_size`.

    Attributes:
        batch_size: the shape of the batch.
        ids: the prompts, or the whole sequences.
        texts: the texts that were tokenized; None where tokens were read.
        chats: the conversations that were rendered; None where no history was read.
        begun: for each conversation the assistant turn at its end that the answer continues, with its ids, or None;
            None where no answer continues a turn.
        tools: for each conversation its own tools, or None; None where no conversation has any.
        assistant: bool, as long as `ids`: tokens that the assistant said; None where this is not known.
        prompt_lengths: int64[rows], if the input tells prompt and response apart.
        columns: the dense layout that the sequences came in.
        retokenized: whether sampled turns of a row were rendered from their text and so lost their ids; None where this
            cannot happen.
        only_response: whether the input is prompts and their completions, of which only the completions are scored.
        parts: the texts of prompts and completions, if such were read.
        problems: rows that could not be read, which are empty, and rows that have nothing to score; and why.
        support: the ids over which the scores are normalised; None for the whole vocabulary.
        conflicts: rows whose ids differ from the `Tokens` in the TensorDict, and how; None if it holds no `Tokens`.
    """

    batch_size: tuple[int, ...]
    ids: Ragged
    texts: tuple[str, ...] | None = None
    chats: tuple[Chat, ...] | None = None
    begun: tuple[Message | None, ...] | None = None
    tools: tuple[Any, ...] | None = None
    assistant: Ragged | None = None
    prompt_lengths: Tensor | None = None
    columns: Columns | None = None
    retokenized: tuple[bool, ...] | None = None
    only_response: bool = False
    parts: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    problems: Mapping[int, str] = field(default_factory=dict)
    support: ScoredSupport | None = None
    conflicts: Problems | None = None

    @property
    def tokens(self) -> Parts[Ragged]:
        """The ids, split into prompt and response if the input tells them apart."""
        if self.prompt_lengths is None:
            return Parts(None, None, self.ids)
        start = torch.zeros_like(self.prompt_lengths)
        prompt = self.ids.slice(start, self.prompt_lengths)
        return Parts(prompt, self.ids.slice(self.prompt_lengths, self.ids.lengths), self.ids)

    @property
    def continued(self) -> Ragged:
        """The ids whose text each answer continues; empty where the answer is a new message."""
        if self.chats is None:
            return self.ids
        begun = [turn is not None for turn in self.begun or (None,) * len(self.ids)]
        start = torch.zeros_like(self.ids.lengths)
        return self.ids.slice(start, self.ids.lengths * torch.tensor(begun, dtype=torch.int64))

    def repeat(self, n: int) -> InputRows:
        """Return every prompt `n` times, under a new last batch dimension."""

        def each(values: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
            return None if values is None else tuple(value for value in values for _ in range(n))

        return replace(
            self,
            batch_size=(*self.batch_size, n),
            ids=self.ids.repeat(n),
            texts=each(self.texts),
            chats=each(self.chats),
            begun=each(self.begun),
            tools=each(self.tools),
            assistant=None if self.assistant is None else self.assistant.repeat(n),
            retokenized=each(self.retokenized),
        )


def room_for_prompts(sampling: SamplingParams, capabilities: Capabilities) -> int | None:
    """Return how many tokens a prompt may have; None if the engine names no limit.

    Raises:
        InvalidRequestError: the answer alone fills the context.
    """
    context = capabilities.max_context
    if context is None:
        return None
    room = context - (sampling.max_new_tokens or 1)
    if room < 1:
        raise invalid(
            "max_new_tokens",
            f"{sampling.max_new_tokens} tokens leave no room for a prompt in a context of {context}; lower it",
        )
    return room


def last_tokens(ids: Ragged, limit: int | None) -> Ragged:
    """Return the last `limit` tokens of every row; all tokens if `limit` is None."""
    return ids if limit is None else ids.slice((ids.lengths - limit).clamp_min(0), ids.lengths)


def truncate_left(rows: InputRows, limit: int | None, backend: Backend) -> InputRows:
    """Keep the last `limit` tokens of every prompt. The text of a prompt that was cut is decoded again."""
    if limit is None or not bool((cut := rows.ids.lengths > limit).any()):
        return rows
    ids, texts = last_tokens(rows.ids, limit), rows.texts
    if texts is not None:
        decoded = iter(backend.detokenize(ids.select(cut.nonzero().flatten()), skip_special_tokens=False))
        texts = tuple(next(decoded) if was else text for was, text in zip(cut.tolist(), texts, strict=True))
    assistant = None if rows.assistant is None else last_tokens(rows.assistant, limit)
    return replace(rows, ids=ids, texts=texts, assistant=assistant)

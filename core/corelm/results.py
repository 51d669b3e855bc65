"""What an engine returned, put beside the rows it was asked for: everything `to_containers` needs.

An answer's ids say two things more: its text, ended before a stop string, and the message it adds to a conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from corelm.backend import Backend
from corelm.history import Message
from corelm.inputs import InputRows
from corelm.messages import ContainerRequest, GenerationBatch, Parts, ScoreBatch
from corelm.rows import Ragged
from corelm.sampling import SamplingParams

#: Turns an answer's text into a message, given as a `Message` or a dict; its ids are added by the caller.
ResponseParser = Callable[[str], Message | Mapping[str, Any]]


def generated(
    rows: InputRows,
    batch: GenerationBatch,
    sampling: SamplingParams,
    backend: Backend,
    *,
    fields: frozenset[str],
    parser: ResponseParser | None = None,
    **layout: Any,
) -> ContainerRequest:
    """Prompts and their answers. Of a prompt nothing is scored; all of an answer is, and all of it the assistant's."""
    if sampling.num_samples is not None:
        rows = rows.repeat(sampling.num_samples)
    texts = chats = None
    if fields & {"text", "history"}:
        said = answer_texts(batch, sampling, backend)
        asked = rows.texts or tuple(backend.detokenize(rows.ids, skip_special_tokens=False))
        texts = Parts(asked, said, _joined(asked, said))
        if rows.chats is not None:
            replies = tuple((message,) for message in response_messages(said, batch, parser))
            chats = Parts(rows.chats, replies, _joined(rows.chats, replies))
    nothing = Ragged.full(rows.ids.lengths, False, torch.bool)
    everything = Ragged.full(batch.ids.lengths, True, torch.bool)
    logprobs = batch.logprobs
    return ContainerRequest(
        batch_size=rows.batch_size,
        fields=fields,
        tokens=Parts(rows.ids, batch.ids, rows.ids.join(batch.ids)),
        texts=texts,
        chats=chats,
        logprobs=None if logprobs is None else Ragged.full(rows.ids.lengths, 0.0, torch.float32).join(logprobs),
        scored=None if logprobs is None else nothing.join(everything),
        provenance=None if logprobs is None else backend.provenance(batch, sampling),
        assistant=(rows.assistant or nothing).join(everything),
        finish_reasons=batch.finish_reasons,
        errors=batch.errors or ("",) * len(batch.ids),
        retokenized=rows.retokenized,
        pad_id=backend.pad_id,
        **layout,
    )


def scored(
    rows: InputRows, batch: ScoreBatch, backend: Backend, *, fields: frozenset[str], **layout: Any
) -> ContainerRequest:
    """Whole sequences and their scores, in the columns they came in."""
    texts = None
    if "text" in fields:
        texts = Parts(None, None, rows.texts or tuple(backend.detokenize(rows.ids, skip_special_tokens=False)))
    return ContainerRequest(
        batch_size=rows.batch_size,
        fields=fields,
        tokens=rows.tokens,
        texts=texts,
        chats=None if rows.chats is None else Parts(None, None, rows.chats),
        logprobs=batch.logprobs,
        scored=batch.scored,
        provenance=backend.provenance(batch),
        assistant=rows.assistant,
        retokenized=rows.retokenized,
        pad_id=backend.pad_id,
        columns=rows.columns,
        **layout,
    )


def answer_texts(batch: GenerationBatch, sampling: SamplingParams, backend: Backend) -> tuple[str, ...]:
    """One text per answer: the engine's own, or what the ids decode to; without the stop string that ended it."""
    skip = sampling.skip_special_tokens
    texts = batch.texts or tuple(backend.detokenize(batch.ids, skip_special_tokens=skip))
    if not sampling.stop:
        return texts
    # Only the last token can have completed a stop string, so an earlier occurrence (before min_new_tokens) is text.
    before = batch.ids.slice(batch.ids.lengths * 0, (batch.ids.lengths - 1).clamp_min(0))
    reach = max(map(len, sampling.stop)) - 1
    starts = [max(0, len(text) - reach) for text in backend.detokenize(before, skip_special_tokens=skip)]
    return tuple(
        _cut(text, start, sampling.stop) if reason == "stop" else text
        for text, start, reason in zip(texts, starts, batch.finish_reasons, strict=True)
    )


def _cut(text: str, start: int, stops: tuple[str, ...]) -> str:
    found = [at for stop in stops if (at := text.find(stop, start)) >= 0]
    return text[: min(found)] if found else text


def response_messages(
    texts: tuple[str, ...], batch: GenerationBatch, parser: ResponseParser | None
) -> tuple[Message, ...]:
    """One assistant message per answer, holding the sampled ids."""
    messages = []
    for text, ids in zip(texts, batch.ids.tolist(), strict=True):
        parsed = {"role": "assistant", "content": text} if parser is None else parser(text)
        message = parsed if isinstance(parsed, Message) else Message.from_dict(parsed)
        messages.append(replace(message, token_ids=tuple(ids)))
    return tuple(messages)


def _joined(first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a + b for a, b in zip(first, second, strict=True))

"""From an engine's result and the rows it was asked about to a `ContainerRequest`.

An answer's text (cut before a stop string) and the message that it adds to a conversation are made here from its ids.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from corelm.backend.backend import Backend
from corelm.errors import Problems, spelled_out
from corelm.policy.rows import InputRows
from corelm.spec.message import Message
from corelm.spec.records import ContainerRequest, GenerateResult, Parts, ScoreResult
from corelm.spec.sampling import SamplingParams
from corelm.support.stop_strings import text_before_stop
from corelm.tensors.ragged import Ragged

#: Turns an answer's text into a message, as a `Message` or a dict. The caller adds the ids.
ResponseParser = Callable[[str], Message | Mapping[str, Any]]


def generated(
    rows: InputRows,
    batch: GenerateResult,
    sampling: SamplingParams,
    backend: Backend,
    *,
    fields: frozenset[str],
    parser: ResponseParser | None = None,
    **layout: Any,
) -> ContainerRequest:
    """Return prompts and their answers. Every token of an answer is scored and the assistant's; no prompt is scored."""
    if sampling.num_samples is not None:
        rows = rows.repeat(sampling.num_samples)
    texts = chats = None
    errors = batch.errors or ("",) * len(batch.ids)
    if fields & {"text", "history"}:
        said = answer_texts(batch, sampling, backend)
        asked = rows.texts or given_texts(rows.ids, backend)
        texts = Parts(asked, said, _joined(asked, said))
        if rows.chats is not None:
            messages, problems = response_messages(said, batch, parser, rows.begun)
            if problems:
                # Not an error: the answers have been paid for, and those of the other rows are fine.
                warnings.warn(
                    f"response_parser: {spelled_out(problems)}. The message of such an answer holds its plain text, "
                    "and 'errors' says why",
                    stacklevel=2,
                )
            errors = tuple(error or problems.get(row, "") for row, error in enumerate(errors))
            replies = tuple((message,) for message in messages)
            begun = rows.begun or (None,) * len(replies)
            asked_before = tuple(
                chat if turn is None else chat[:-1] for chat, turn in zip(rows.chats, begun, strict=True)
            )
            chats = Parts(rows.chats, replies, _joined(asked_before, replies))
    # True where the answers are: those positions are scored, and they are the assistant's.
    answered = rows.ids.join_mask(batch.ids)
    assistant = answered
    if rows.assistant is not None:
        everything = Ragged.full(batch.ids.lengths, True, torch.bool)
        assistant = rows.assistant.join(everything, answered)
    logprobs = batch.logprobs
    if logprobs is not None:
        unscored = torch.zeros_like(rows.ids.values, dtype=torch.float32)
        logprobs = rows.ids.with_values(unscored).join(logprobs, answered)
    return ContainerRequest(
        batch_size=rows.batch_size,
        fields=fields,
        tokens=Parts(rows.ids, batch.ids, rows.ids.join(batch.ids, answered)),
        texts=texts,
        chats=chats,
        logprobs=logprobs,
        scored=None if logprobs is None else answered,
        provenance=None if logprobs is None else backend.provenance(batch, sampling),
        assistant=assistant,
        finish_reasons=batch.finish_reasons,
        errors=errors,
        retokenized=rows.retokenized,
        pad_id=backend.pad_id,
        **layout,
    )


def scored(
    rows: InputRows, batch: ScoreResult, backend: Backend, *, fields: frozenset[str], **layout: Any
) -> ContainerRequest:
    """Return whole sequences and their scores, in the columns that they came in."""
    texts = None
    if "text" in fields:
        prompts, responses = rows.parts or (None, None)
        texts = Parts(prompts, responses, rows.texts or given_texts(rows.ids, backend))
    return ContainerRequest(
        batch_size=rows.batch_size,
        fields=fields,
        tokens=rows.tokens,
        texts=texts,
        chats=None if rows.chats is None else Parts(None, None, rows.chats),
        logprobs=batch.logprobs,
        scored=batch.scored,
        argmax=batch.argmax,
        greedy=None if batch.argmax is None else _greedy(rows, batch.scored, batch.argmax),
        provenance=backend.provenance(batch),
        assistant=rows.assistant,
        retokenized=rows.retokenized,
        pad_id=backend.pad_id,
        columns=rows.columns,
        **layout,
    )


def _greedy(rows: InputRows, scored: Ragged, argmax: Ragged) -> tuple[bool, ...]:
    """Return whether each row's scored tokens, those of its response if it is split, are the most probable ones."""
    ids, counted = rows.ids.values, scored.values.cpu()
    if rows.prompt_lengths is not None:
        counted = counted & (rows.ids.positions >= rows.prompt_lengths[rows.ids.row_index])
    others = counted & (argmax.values.cpu() != ids)
    number, wrong = (
        torch.zeros_like(rows.ids.lengths).index_add_(0, rows.ids.row_index, some.long()) for some in (counted, others)
    )
    return tuple(((number > 0) & (wrong == 0)).tolist())


def given_texts(ids: Ragged, backend: Backend) -> tuple[str, ...]:
    """Return the texts that prompts or sequences decode to. Illegal ids, which only skipped rows have, are left out."""
    legal = (ids.values >= 0) & (ids.values < backend.capabilities.vocab_size)
    counts = torch.zeros_like(ids.lengths).index_add_(0, ids.row_index, legal.cpu().long())
    return tuple(backend.detokenize(Ragged(ids.values[legal], counts), skip_special_tokens=False))


def answer_texts(batch: GenerateResult, sampling: SamplingParams, backend: Backend) -> tuple[str, ...]:
    """Return one text per answer: the engine's own, or the decoded ids, without the stop string that ended it."""
    skip = sampling.skip_special_tokens
    texts = batch.texts or tuple(backend.detokenize(batch.ids, skip_special_tokens=skip))
    if not sampling.stop:
        return texts
    before = batch.ids.slice(torch.zeros_like(batch.ids.lengths), batch.ids.lengths - 1)
    olds = backend.detokenize(before, skip_special_tokens=skip)
    return tuple(
        text_before_stop(text, old, sampling.stop) if reason == "stop" else text
        for text, old, reason in zip(texts, olds, batch.finish_reasons, strict=True)
    )


def response_messages(
    texts: tuple[str, ...],
    batch: GenerateResult,
    parser: ResponseParser | None,
    begun: tuple[Message | None, ...] | None = None,
) -> tuple[tuple[Message, ...], Problems]:
    """Return one assistant message per answer, with its ids, and the problems of answers that did not parse.

    The message of an answer that did not parse holds its plain text. An answer that continues a turn, of which `begun`
    holds the beginning, becomes one message with it.
    """
    messages, problems = [], {}
    for row, (text, ids) in enumerate(zip(texts, batch.ids.tolist(), strict=True)):
        message = Message("assistant", text)
        if begun is not None and (turn := begun[row]) is not None:
            text, ids = (turn.content or "") + text, [*(turn.token_ids or ()), *ids]
            message = replace(turn, content=text)
        if parser is not None:
            try:
                message = Message.from_dict(parser(text))
            except Exception as error:
                problems[row] = f"{type(error).__name__}: {error}"
        messages.append(replace(message, token_ids=tuple(ids)))
    return tuple(messages), problems


def _joined(first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a + b for a, b in zip(first, second, strict=True))

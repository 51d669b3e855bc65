"""From an engine's result and the rows it was asked about to a `ContainerRequest`."""

from __future__ import annotations

from typing import Any

import torch

from corelm.backend.backend import Backend
from corelm.errors import Problems
from corelm.policy.messages import AnswerReader, answer_texts
from corelm.policy.rows import InputRows, provenance_of_scores
from corelm.spec.left_context import HALF_CHARACTER
from corelm.spec.records import ContainerRequest, GenerateResult, Parts, ScoreResult
from corelm.spec.sampling import SamplingParams
from corelm.tensors.ragged import Ragged
from corelm.tensors.token_sets import TokenSets


def generated(
    rows: InputRows,
    batch: GenerateResult,
    sampling: SamplingParams,
    backend: Backend,
    *,
    fields: frozenset[str],
    reader: AnswerReader,
    **layout: Any,
) -> tuple[ContainerRequest, Problems]:
    """Return prompts and their answers, and the answers that the reader did not parse.

    Every token of an answer is scored and the assistant's; no prompt is scored.
    """
    if sampling.num_samples is not None:
        rows = rows.repeat(sampling.num_samples)
    texts = chats = None
    problems: Problems = {}
    errors = batch.errors or ("",) * len(batch.ids)
    if fields & {"text", "history"}:
        said = answer_texts(batch, sampling, backend, rows.continued)
        asked = rows.texts or _without_half(given_texts(rows.ids, backend), batch.ids)
        if rows.chats is not None:
            messages, problems = reader.read(rows, asked, said, batch, sampling, backend)
            errors = tuple(error or problems.get(row, "") for row, error in enumerate(errors))
            replies = tuple((message,) for message in messages)
            begun = rows.begun or (None,) * len(replies)
            asked_before = tuple(
                chat if turn is None else chat[:-1] for chat, turn in zip(rows.chats, begun, strict=True)
            )
            chats = Parts(rows.chats, replies, _joined(asked_before, replies))
        if "text" in fields:
            after = said if rows.chats is None else answer_texts(batch, sampling, backend, rows.ids)
            texts = Parts(asked, said, _joined(_without_half(asked, batch.ids), after))
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
    about_ids = {} if logprobs is None else _about_ids(rows.ids, batch, answered)
    request = ContainerRequest(
        batch_size=rows.batch_size,
        fields=fields,
        tokens=Parts(rows.ids, batch.ids, rows.ids.join(batch.ids, answered)),
        texts=texts,
        chats=chats,
        logprobs=logprobs,
        scored=None if logprobs is None else answered,
        **about_ids,
        provenance=None if logprobs is None else backend.provenance(batch),
        assistant=assistant,
        finish_reasons=batch.finish_reasons,
        errors=errors,
        retokenized=rows.retokenized,
        pad_id=backend.pad_id,
        **layout,
    )
    return request, problems


def _about_ids(prompts: Ragged, batch: GenerateResult, answered: Ragged) -> dict[str, Any]:
    """Return what the answers say about ids, as long as prompt and answer."""
    found: dict[str, Any] = {}
    if batch.kept_ids is not None:
        device = batch.kept_ids.ids.values.device
        found["kept_ids"] = TokenSets.empty(prompts.lengths).to(device).join(batch.kept_ids)
    for name, filler in (("kept_log_mass", 0.0), ("top_ids", -1), ("top_logprobs", 0.0), ("tail_log_mass", 0.0)):
        rows = getattr(batch, name)
        if rows is not None:
            shape = (prompts.values.shape[0], *rows.values.shape[1:])
            found[name] = prompts.with_values(rows.values.new_full(shape, filler)).join(rows, answered)
    return found


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
        kept_ids=None if rows.support is None else rows.support.sets,
        top_ids=batch.top_ids,
        top_logprobs=batch.top_logprobs,
        tail_log_mass=batch.tail_log_mass,
        argmax=batch.argmax,
        greedy=None if batch.argmax is None else _greedy(rows, batch.scored, batch.argmax),
        provenance=provenance_of_scores(backend.provenance(batch), rows.support),
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


def _without_half(prompts: tuple[str, ...], answers: Ragged) -> tuple[str, ...]:
    """Return the texts of prompts without an incomplete character at the end: an answer's text begins with it."""
    lengths = answers.lengths.tolist()
    return tuple(text.rstrip(HALF_CHARACTER) if length else text for text, length in zip(prompts, lengths, strict=True))


def _joined(first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a + b for a, b in zip(first, second, strict=True))

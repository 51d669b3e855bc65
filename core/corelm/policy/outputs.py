"""From an engine's result and the rows it was asked about to a `ContainerRequest`.

An answer's text (cut before a stop string) and the message that it adds to a conversation are made here from its ids.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from corelm.backend.backend import Backend
from corelm.errors import Problems, ResponseParserWarning, spelled_out
from corelm.policy.rows import InputRows
from corelm.policy.scored_sets import provenance_of_scores
from corelm.spec.message import Message
from corelm.spec.records import ContainerRequest, GenerateResult, Parts, ScoreResult
from corelm.spec.sampling import SamplingParams
from corelm.support.stop_strings import text_before_stop
from corelm.tensors.ragged import Ragged
from corelm.tensors.token_sets import TokenSets

_log = logging.getLogger(__name__)

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
) -> tuple[ContainerRequest, Problems]:
    """Return prompts and their answers, and the answers that the parser did not parse.

    Every token of an answer is scored and the assistant's; no prompt is scored.
    """
    if sampling.num_samples is not None:
        rows = rows.repeat(sampling.num_samples)
    texts = chats = None
    problems: Problems = {}
    errors = batch.errors or ("",) * len(batch.ids)
    if fields & {"text", "history"}:
        said = answer_texts(batch, sampling, backend)
        asked = rows.texts or given_texts(rows.ids, backend)
        texts = Parts(asked, said, _joined(asked, said))
        if rows.chats is not None:
            continued = continued_turns(rows.begun, said, batch, sampling, backend)
            messages, problems = response_messages(said, batch, parser, continued)
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


def warn_unparsed(problems: Problems) -> None:
    """Warn about answers that the parser did not parse. To be called when the answers are where the caller finds them.

    This never raises, not even where warnings are errors: the answers have been paid for, and `errors` says the same.
    """
    if not problems:
        return
    try:
        warnings.warn(
            f"response_parser: {spelled_out(problems)}. The message of such an answer holds its plain text, and "
            "'errors' says why",
            ResponseParserWarning,
            stacklevel=3,
        )
    except ResponseParserWarning:
        _log.warning("response_parser raised on %d answers; 'errors' says why", len(problems))


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
    continued: Mapping[int, Message] | None = None,
) -> tuple[tuple[Message, ...], Problems]:
    """Return one assistant message per answer, with its ids, and the problems of answers that did not parse.

    The message of an answer that did not parse holds its plain text.

    Args:
        continued: by row, the whole turn, if the answer continues one.
    """
    messages, problems = [], {}
    for row, (text, ids) in enumerate(zip(texts, batch.ids.tolist(), strict=True)):
        message = (continued or {}).get(row) or Message("assistant", text, token_ids=tuple(ids))
        if parser is not None:
            try:
                message = replace(Message.from_dict(parser(message.content or "")), token_ids=message.token_ids)
            except Exception as error:
                problems[row] = f"{type(error).__name__}: {error}"
        messages.append(message)
    return tuple(messages), problems


def continued_turns(
    begun: tuple[Message | None, ...] | None,
    answers: tuple[str, ...],
    batch: GenerateResult,
    sampling: SamplingParams,
    backend: Backend,
) -> dict[int, Message]:
    """Return, by row, each turn that was continued, as one message with its answer: the text and the ids of both.

    Args:
        begun: for each row the turn that the answer continues, with its ids, or None.
        answers: their texts.
    """
    made: dict[int, Message] = {}
    for row, (turn, then) in enumerate(zip(begun or (), batch.ids.tolist(), strict=False)):
        if turn is None:
            continue
        first, content = list(turn.token_ids or ()), turn.content or ""
        # The ids of a row that was skipped may be illegal, so they cannot be decoded.
        if then:
            texts = backend.detokenize([first, then, first + then], skip_special_tokens=sampling.skip_special_tokens)
            content = _continued_text(content, answers[row], *texts)
        made[row] = replace(turn, content=content, token_ids=(*first, *then))
    return made


def _continued_text(content: str, answer: str, first: str, then: str, both: str) -> str:
    """Return the text of a turn and the answer that continues it.

    Texts that are decoded apart are not always the parts of what both decode to: SentencePiece drops the first space of
    a text, and a character may have bytes on both sides.

    >>> _continued_text("I am", "Pip", "I am", "Pip", "I am Pip")
    'I am Pip'

    Args:
        content: the text of the turn.
        answer: the text of the answer, perhaps without its end, where a stop string was.
        first: what the ids of the turn decode to.
        then: what the ids of the answer decode to.
        both: what all of these ids decode to.
    """
    stop = then[len(answer) :]
    if not (then.startswith(answer) and both.endswith(stop)):
        # The engine's own text, which may have been decoded with the tokens before it.
        return content + answer
    both = both[: len(both) - len(stop)]
    if first == content:
        return both
    # The text that the user gave is kept as it is.
    return content + both[len(first) :] if both.startswith(first) else content + answer


def _joined(first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a + b for a, b in zip(first, second, strict=True))

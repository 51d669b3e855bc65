"""Check what an engine returned for one row against what the row asked for, before it is believed; sort out failures.

A server ignores fields that it does not know, cuts answers off, or replies with numbers that are none. Each row is
checked alone, so that the others of its call are served: a plugin parses a row with these functions, and `row_outcome`
turns the `RowError` that they raise into a `RowFailure`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from corelm.errors import BackendClosedError, CoreLMError, InvalidRequestError, StaleWeightsError
from corelm.spec import GenerateRequest, RowAnswer, RowFailure, StopStrings, TopIds, log_tail_mass
from corelm_engine_kit.http_errors import ABORTED, AccessError, PartialReply, TransientError

T = TypeVar("T")

#: What servers send instead of a log-prob of minus infinity, which JSON cannot hold.
_INFINITE = -9999.0
#: Rounding may put a log-prob above 0, but by no more than this.
_ABOVE_ZERO = 2.0**-10
#: How far, in nats, two log-probs of the same id may be apart. An engine may compute them in two ways.
_SAME = 2.0**-7
#: Errors of reading a reply that are not about its row alone. `EngineError.usable` tells of others.
_OF_ALL_ROWS = (AccessError, BackendClosedError, StaleWeightsError, TimeoutError, TransientError)
#: Statuses by which a server refuses any request for the moment: too many requests, or not serving.
_BUSY = frozenset({429, 503})


class RowError(Exception):
    """What an engine returned for a row cannot be the answer to it. `row_outcome` turns it into a `RowFailure`."""


def only_choice(reply: Any) -> dict[str, Any]:
    """Return the choice of a completion of OpenAI's protocol.

    Raises:
        RowError: the reply does not have exactly one choice.
    """
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise RowError("it is not a completion with one choice")
    choice: dict[str, Any] = choices[0]
    return choice


def row_failure(entry: Any) -> RowFailure | None:
    """Return why there is no answer in an entry of `HttpClient.post_each`; None if the server answered."""
    if entry is ABORTED:
        return RowFailure("the request was aborted", aborted=True)
    return RowFailure(str(entry)) if isinstance(entry, CoreLMError) else None


def row_outcome(entry: Any, parse: Callable[[Any, bool], T]) -> T | RowFailure:
    """Return what `parse` makes of a row's reply, or why there is no answer in it.

    Args:
        entry: one entry of `HttpClient.post_each`.
        parse: ``parse(reply, aborted)`` returns the row's answer. `aborted` says whether the caller aborted the
            request, so that its answer may be cut off. It may raise `RowError`, another `CoreLMError` and the errors of
            an unexpected structure.

    Raises:
        CoreLMError: `parse` raised it, and it is about the server: a timeout, a lost connection, a closed client.
    """
    failure = row_failure(entry)
    if failure is not None:
        return failure
    aborted = isinstance(entry, PartialReply)
    try:
        return parse(entry.reply if isinstance(entry, PartialReply) else entry, aborted)
    except RowError as error:
        return RowFailure(f"the server's reply does not fit the request: {error}")
    except CoreLMError as error:
        if isinstance(error, _OF_ALL_ROWS) or getattr(error, "usable", None) is False:
            raise
        return RowFailure(str(error))
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        what = f"it is not built as expected ({type(error).__name__}: {error})"
        return RowFailure(f"the server's reply does not fit the request: {what}")


def raise_if_none_was_served(entries: Sequence[Any], serves: Callable[[], bool]) -> None:
    """Raise if no row was served because the server does not serve; return if the failures are those of the rows.

    The kind of a failure decides, not how many rows have it: a call may have a single row.

    - The server refused the request (`InvalidRequestError`): the row's own failure.
    - The server refuses this client (`AccessError`): it would refuse every other row, too.
    - The server is busy (a status of 429 or 503, after all retries): this says nothing about the row. It decides if no
      row has a failure of another kind, apart from refused requests.
    - Another failure, such as a status of 500, a broken connection or silence: the row's own if the server still
      serves. A row can make a server fail each time.

    Args:
        entries: the entries of `HttpClient.post_each`.
        serves: whether the server is healthy. It is asked only if it matters.

    Raises:
        CoreLMError: the first failure that is not a row's own.
    """
    failures = [entry for entry in entries if isinstance(entry, CoreLMError)]
    others = [error for error in failures if not isinstance(error, InvalidRequestError)]
    if not others or len(failures) < len(entries):
        return
    barred = [error for error in others if isinstance(error, AccessError)]
    busy = all(isinstance(error, TransientError) and error.status in _BUSY for error in others)
    if barred or busy or not serves():
        first = (barred or others)[0]
        if isinstance(first, TransientError):
            raise first.final() from first.__cause__
        raise first


def checked_ids(ids: Any, *, vocab_size: int, limit: int) -> list[int]:
    """Return the ids of an answer.

    Args:
        ids: what the engine returned.
        vocab_size: ids are below it.
        limit: the most tokens that the answer may have.

    Raises:
        RowError: it is not a list of ids, an id is outside the vocabulary, or there are too many.
    """
    if not isinstance(ids, list) or not {*map(type, ids)} <= {int}:
        raise RowError("its token ids are not a list of integers")
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        outside = next(token for token in ids if not 0 <= token < vocab_size)
        raise RowError(f"it has the id {_short(outside)}, which is outside the vocabulary of {vocab_size}")
    if len(ids) > limit:
        raise RowError(f"it has {len(ids)} tokens, but at most {limit} were asked for")
    return ids


def checked_logprobs(values: Any, count: int) -> list[float]:
    """Return log-probs as floats.

    Args:
        values: what the engine returned: a list, a tuple or an array of numbers.
        count: how many there must be.

    Raises:
        RowError: there are more or fewer, or one is not a number, not finite, or above 0.
    """
    if not isinstance(values, (list, tuple, array)) or len(values) != count:
        raise RowError(f"it does not have one log-prob for each of its {count} tokens")
    kinds = {*map(type, values)}
    if kinds <= {int, float}:
        try:
            numbers = [*map(float, values)] if int in kinds else [*values]
        except OverflowError:
            numbers = [math.inf]
        # The sum is NaN or infinite if one of the numbers is: `min` and `max` would overlook NaN.
        if math.isfinite(sum(numbers)) and (not numbers or (min(numbers) > _INFINITE and max(numbers) <= _ABOVE_ZERO)):
            return numbers
    position, value = next((place, value) for place, value in enumerate(values) if not _is_logprob(value))
    raise RowError(f"the log-prob at position {position} is {_short(value)}, expected a finite number of at most 0")


def checked_argmax(argmax: Sequence[int], of_argmax: Any, ids: Sequence[int], logprobs: Sequence[float]) -> list[int]:
    """Return the most probable ids of scored positions, unless the log-probs contradict them.

    Args:
        argmax: what the engine named, one id per position.
        of_argmax: the log-probs of these ids, as the engine returned them.
        ids: the scored ids, one per position.
        logprobs: the log-probs of `ids`, which were checked.

    Raises:
        RowError: there are more or fewer than positions, a log-prob is not a finite number of at most 0, a scored id is
            more probable than the id that was named for its position, or the same id has two log-probs.
    """
    numbers = checked_logprobs(of_argmax, len(ids))
    for position, (best, of_best, token, of_token) in enumerate(zip(argmax, numbers, ids, logprobs, strict=True)):
        if of_best < of_token - _SAME or (best == token and of_best > of_token + _SAME):
            raise RowError(
                f"it names id {_short(best)} with the log-prob {of_best:.4g} as the most probable one at position "
                f"{position}, but id {token} has {of_token:.4g} there"
            )
    return list(argmax)


def checked_top_ids(ids: Tensor, logprobs: Tensor, k: int, vocab_size: int) -> TopIds:
    """Return the `k` most probable ids out of at least as many candidates for each position.

    Args:
        ids: int64[positions, candidates], the most probable first.
        logprobs: float[positions, candidates]; minus infinity for ids without a probability.
        k: how many to return.
        vocab_size: ids are below it.

    Raises:
        RowError: the candidates are not different ids with log-probs, most probable first.
    """
    absent = logprobs == -torch.inf
    given = ids.masked_fill(absent, -1)
    ordered = given.sort(dim=1).values
    for wrong, what in (
        # Keep the `~(...)`: NaN fails every comparison and must be refused.
        (~(logprobs <= _ABOVE_ZERO), "have a log-prob that is not a number of at most 0"),
        (absent[:, :1], "have no probability"),
        (~absent & ((ids < 0) | (ids >= vocab_size)), f"have an id outside the vocabulary of {vocab_size}"),
        (logprobs.diff(dim=1) > 0, "are not in descending order"),
        ((ordered.diff(dim=1) == 0) & (ordered[:, 1:] >= 0), "have an id twice"),
    ):
        if bool(wrong.any()):
            raise RowError(f"its {k} most probable ids at position {int(wrong.nonzero()[0, 0])} {what}")
    # Rounding would leave a mass where there is no other id with a probability.
    none_left = absent.any(dim=1) | (k == vocab_size)
    tail = log_tail_mass(logprobs[:, :k]).masked_fill(none_left, -torch.inf)
    return TopIds(given[:, :k], logprobs[:, :k].float().clamp(max=0.0), tail)


def answer_end(ids: Sequence[int], stop_ids: frozenset[int], stops: StopStrings) -> int | None:
    """Return the length of an answer up to and including the token that ends it; None if no token does.

    A server may know only some of the stop ids and stop strings, or notice one late.
    """
    by_id = next((at + 1 for at, token in enumerate(ids) if token in stop_ids), None)
    by_string = stops.first_end(list(ids[:by_id]))
    return by_id if by_string is None else by_string


def checked_finish_reason(
    reason: Any, count: int, *, limit: int, least: int, ended: bool, aborted: bool, last: int | None = None
) -> str:
    """Return the finish reason of an answer, if the answer's ids confirm it.

    Args:
        reason: what the engine returned.
        count: the tokens of the answer.
        limit: the most tokens that were asked for.
        least: the fewest tokens that were asked for.
        ended: whether the last token is a stop id or completes a stop string.
        aborted: whether the caller aborted the request.
        last: the last id, for the message.

    Raises:
        RowError: the reason is unknown, or the ids contradict it.
    """
    if reason == "abort":
        if not aborted:
            raise RowError("it was aborted, but not by this client: another client or the server itself did so")
    elif reason == "length":
        if count != limit:
            raise RowError(f"it ends for its length after {count} tokens, but {limit} were asked for")
    elif reason == "stop":
        if count < least and ended:
            raise RowError(
                f"a stop id or stop string came too early (id {last} after {count} tokens, but at least {least} were "
                "asked for)"
            )
        if count < least:
            raise RowError(f"it ends after {count} tokens, but at least {least} were asked for")
        if not ended:
            raise RowError(
                f"it stops at id {last}, which is not a stop id and completes no stop string; the server may have stop "
                "ids that this backend does not know"
            )
    else:
        raise RowError(f"its finish reason is {_short(reason)}")
    return str(reason)


def checked_answer(
    told: RowAnswer, request: GenerateRequest, *, limit: int, stops: StopStrings, vocab_size: int, aborted: bool
) -> RowAnswer:
    """Return an answer up to and including the token that ends it, if it fits the request.

    Args:
        told: the answer as the engine returned it. Its reason may be ``length``, or ``abort`` if the caller aborted the
            request, although a token ends it. Its log-probs are not looked at if none were asked for.
        request: the request.
        limit, vocab_size: see `checked_ids`.
        stops: the stop strings of the row.
        aborted: see `checked_finish_reason`.

    Raises:
        RowError: it does not fit.
    """
    ids = checked_ids(told.ids, vocab_size=vocab_size, limit=limit)
    logprobs = [] if request.logprobs == "none" else checked_logprobs(told.logprobs, len(ids))
    end = answer_end(ids, request.stop_ids, stops)
    reason, ids = told.finish_reason, ids[:end]
    if end is not None and (reason == "length" or (reason == "abort" and aborted)):
        reason = "stop"
    least, last = min(request.sampling.min_new_tokens, limit), ids[-1] if ids else None
    reason = checked_finish_reason(
        reason, len(ids), limit=limit, least=least, ended=end is not None, aborted=aborted, last=last
    )
    return replace(
        told,
        ids=ids,
        logprobs=logprobs[:end],
        finish_reason=reason,
        kept_ids=told.kept_ids[:end],
        kept_log_mass=told.kept_log_mass[:end],
        top=None if told.top is None else TopIds(*(column[:end] for column in told.top.columns)),
    )


def _is_logprob(value: Any) -> bool:
    if type(value) not in (int, float):
        return False
    try:
        return _INFINITE < float(value) <= _ABOVE_ZERO
    except OverflowError:
        return False


def _short(value: Any) -> str:
    """Return a value for a message. A number may have more digits than Python writes."""
    try:
        text = repr(value)
    except ValueError:
        text = "a number with thousands of digits"
    return text if len(text) <= 40 else f"{text[:40]}…"

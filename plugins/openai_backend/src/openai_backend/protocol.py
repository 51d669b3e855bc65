"""Build the completion requests, one for each row, and parse the server's replies.

A reply is believed only as far as it can be checked against its request. A row whose reply does not fit fails alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from corelm.errors import CapabilityError
from corelm.spec import (
    GenerateRequest,
    GenerateResult,
    RowAnswer,
    RowFailure,
    RowScores,
    ScoreRequest,
    ScoreResult,
    StopStrings,
    generate_result,
    score_result,
)
from corelm_engine_kit import RowError, checked_finish_reason, checked_ids, checked_logprobs, only_choice, row_outcome
from openai_backend.replies import Reported, count, reported
from openai_backend.sampling import check, parameters
from openai_backend.server_info import ServerInfo

Payload = dict[str, Any]

COMPLETIONS = "/v1/completions"
#: The log-probs of how many tokens to ask for at each position. With 0, some servers return none at all.
LOGPROBS = 1


# Prompts --------------------------------------------------------------------------------------------------------------


def prompt_of(ids: list[int], info: ServerInfo) -> list[int] | str | None:
    """Return a prompt in the form that the server takes; None if no text stands for these ids."""
    return ids if info.takes_ids else info.vocabulary.prompt_text(ids, info.adds_special_tokens)


def check_prompt(reply: Any, ids: list[int], info: ServerInfo) -> None:
    """Raise a `RowError` if the reply says that the server has read another prompt."""
    read = only_choice(reply).get("prompt_token_ids")
    if info.takes_ids and isinstance(read, list) and read and read != ids:
        raise RowError("it answers another prompt")
    found = count(reply, "prompt_tokens")
    if info.counts_prompts and found is not None and found != len(ids):
        raise RowError(f"the server says that it read {found} tokens, but the prompt has {len(ids)}")


def _no_text(info: ServerInfo) -> RowFailure:
    adds = ", and adds its special tokens to it" if info.adds_special_tokens else ""
    return RowFailure(
        f"the server takes prompts as text only{adds}, and no text is encoded to the ids of this prompt; give a prompt "
        "that the tokenizer itself could have made, or use a server that takes ids"
    )


# Generating -----------------------------------------------------------------------------------------------------------


def generation_requests(request: GenerateRequest, info: ServerInfo) -> dict[int, Payload]:
    """Return the payloads by row number, without the rows whose prompt cannot be sent.

    Raises:
        CapabilityError, InvalidRequestError: what the server would ignore or change; see `sampling.check`.
    """
    check(request, info)
    most = request.sampling.max_new_tokens
    context = info.capabilities.max_context
    if most is None and context is None:
        raise CapabilityError(
            "the server does not say how long its context is, so an answer cannot fill it; give max_new_tokens, or "
            "open the backend with max_context=",
            capability="max_context",
        )
    seeds = [None] * len(request.prompts) if request.seeds is None else request.seeds.tolist()
    details: Payload = {}
    if request.logprobs != "none" or (info.naming is not None and not info.states_ids):
        details["logprobs"] = LOGPROBS
    payloads = {}
    for row, (ids, seed) in enumerate(zip(request.prompts.tolist(), seeds, strict=True)):
        prompt = prompt_of(ids, info)
        if prompt is None:
            continue
        limit = (context or 0) - len(ids) if most is None else most
        payloads[row] = {**info.fields, **parameters(request, info, limit, seed), **details, "prompt": prompt}
    return payloads


def generation_result(
    request: GenerateRequest, payloads: Mapping[int, Payload], entries: Sequence[Any], info: ServerInfo
) -> GenerateResult:
    """Return the answers in `entries`, the server's replies to `payloads` as `HttpClient.post_each` returns them."""
    stops = StopStrings.of_rows(request, info.tokenizer)
    prompts = request.prompts.tolist()
    rows: list[RowAnswer | RowFailure] = [_no_text(info)] * len(prompts)
    for (row, payload), entry in zip(payloads.items(), entries, strict=True):

        def parse(reply: Any, aborted: bool, row: int = row, limit: int = payload["max_tokens"]) -> RowAnswer:
            check_prompt(reply, prompts[row], info)
            return row_answer(reply, request, limit, stops[row], info)

        rows[row] = row_outcome(entry, parse)
    return generate_result(request, rows)


def counted(on_answer: Callable[[int, int], None] | None, rows: Sequence[int]) -> Callable[[int, Any], None] | None:
    """Return a function that tells `on_answer` about request number i, which is of row ``rows[i]``, and its reply."""
    if on_answer is None:
        return None
    return lambda number, reply: on_answer(rows[number], count(reply, "completion_tokens") or 0)


def row_answer(reply: Any, request: GenerateRequest, limit: int, stops: StopStrings, info: ServerInfo) -> RowAnswer:
    """Return the answer in a reply: its ids as far as they belong to it, their log-probs, and why it ended."""
    choice = only_choice(reply)
    reason = choice.get("finish_reason")
    ids, told = answer_ids(reply, info, need_logprobs=request.logprobs != "none")
    ids = checked_ids(ids, vocab_size=info.capabilities.vocab_size, limit=limit)
    length, reason = _end(ids, reason, request, stops)
    ended = bool(length) and (ids[length - 1] in request.stop_ids or stops.occurs_in(ids[:length]))
    if reason == "stop" and not ended and _hides_eos(reply, length, info):
        ids, length = _with_eos(ids, request, info, limit), length + 1
        ended = True
    reason = checked_finish_reason(
        reason,
        length,
        limit=limit,
        least=request.sampling.min_new_tokens,
        ended=ended,
        aborted=False,
        last=ids[length - 1] if length else None,
    )
    logprobs: Sequence[float] = []
    if request.logprobs != "none":
        assert told is not None
        logprobs = checked_logprobs(told.logprobs, len(told))[:length]
        if len(logprobs) < length:
            raise RowError("it ended with EOS, of which it gives no log-prob; ask for logprobs='none'")
        if request.logprobs == "processed" and request.sampling.greedy:
            # The greedy token has probability 1. Servers return its log-prob at temperature 1.
            logprobs = [0.0] * length
    return RowAnswer(ids[:length], logprobs, reason)


def answer_ids(reply: Any, info: ServerInfo, need_logprobs: bool) -> tuple[Any, Reported | None]:
    """Return the ids of an answer, and what the reply says of its tokens, if that is needed.

    Raises:
        RowError: the ids are not known, or what the reply says contradicts itself.
    """
    choice = only_choice(reply)
    told = reported(choice) if need_logprobs or (not info.states_ids and info.naming) else None
    if info.states_ids:
        ids = choice.get("token_ids")
        if told is not None and info.naming is not None and isinstance(ids, list):
            if len(told) != len(ids):
                raise RowError(f"it has {len(told)} log-probs for {len(ids)} tokens")
            if (at := info.vocabulary.are_names(told.names, ids, info.naming)) is not None:
                raise RowError(f"its log-prob {at} is that of {told.names[at][:40]!r}, and its token has id {ids[at]}")
        return ids, told
    if info.naming is not None:
        assert told is not None
        return info.vocabulary.ids_of(told.names, info.naming), told
    return _encoded_answer(reply, info), None


def _encoded_answer(reply: Any, info: ServerInfo) -> list[int]:
    """Return the encoding of an answer's text, if it has as many tokens as the server says it has sampled."""
    text = only_choice(reply).get("text")
    if not isinstance(text, str):
        raise RowError("it has no text")
    ids = info.vocabulary.answer_ids(text)
    if info.vocabulary.text(ids, skip_special_tokens=True) != text:
        raise RowError(f"the tokenizer does not give back its text {text[:40]!r}")
    sampled = count(reply, "completion_tokens")
    if sampled is None:
        raise RowError("it has no ids, and does not count the tokens that were sampled (usage.completion_tokens)")
    # Most servers count the EOS that ended the answer.
    ended = only_choice(reply).get("finish_reason") == "stop"
    if len(ids) != sampled and not (ended and len(ids) == sampled - 1):
        raise RowError(
            f"its text is encoded to {len(ids)} tokens, but the server sampled {sampled}: which ones is not known"
        )
    return ids


def _end(ids: list[int], reason: Any, request: GenerateRequest, stops: StopStrings) -> tuple[int, Any]:
    """Return how many ids belong to the answer, and why it ended: the server may not know all that ends one."""
    first_id = next((at + 1 for at, token in enumerate(ids) if token in request.stop_ids), None)
    ends = [end for end in (first_id, stops.first_end(ids)) if end is not None]
    return (min(ends), "stop") if ends else (len(ids), reason)


def _hides_eos(reply: Any, length: int, info: ServerInfo) -> bool:
    """Return whether an answer of so many tokens ended with an EOS that is not among them.

    Where that is not known, the server has to have counted one more. Otherwise it may have ended the answer for a
    reason that this backend does not know.
    """
    if info.says_eos is None and info.knows_ids:
        return count(reply, "completion_tokens") == length + 1
    return not info.says_eos


def _with_eos(ids: list[int], request: GenerateRequest, info: ServerInfo, limit: int) -> list[int]:
    """Return the ids of an answer that the server ended at EOS without saying so in its tokens."""
    possible = request.stop_ids & info.eos_token_ids
    own = getattr(info.tokenizer, "eos_token_id", None)
    eos = own if own in possible else min(possible, default=None)
    if eos is None or len(ids) >= limit:
        raise RowError("it ends, but not at EOS, at no stop string and before its limit")
    return [*ids, eos]


# Scoring --------------------------------------------------------------------------------------------------------------


def scoring_requests(request: ScoreRequest, info: ServerInfo) -> dict[int, Payload]:
    """Return the payloads by row number, without the rows of which nothing is asked.

    Temperature 1 without truncation makes every kind of log-prob the model's own.
    """
    payloads: dict[int, Payload] = {}
    starts = request.score_from.clamp_min(1).tolist()
    for row, (ids, start) in enumerate(zip(request.sequences.tolist(), starts, strict=True)):
        if start < len(ids):
            payloads[row] = echo_request(ids, info)
    return payloads


def echo_request(ids: list[int], info: ServerInfo) -> Payload:
    """Return the request that scores these ids."""
    details = {"echo": True, "logprobs": LOGPROBS, "max_tokens": info.echo, "temperature": 1.0, "top_p": 1.0}
    return {**info.fields, **details, "prompt": prompt_of(ids, info)}


def scoring_result(
    request: ScoreRequest, payloads: Mapping[int, Payload], entries: Sequence[Any], info: ServerInfo
) -> ScoreResult:
    """Return the scores in `entries`, the server's replies to `payloads` as `HttpClient.post_each` returns them."""
    sequences = request.sequences.tolist()

    def outcome(row: int, entry: Any) -> RowScores | RowFailure:
        return row_outcome(entry, lambda reply, aborted: row_scores(reply, sequences[row], info))

    outcomes = {row: outcome(row, entry) for row, entry in zip(payloads, entries, strict=True)}
    return score_result(request, outcomes)


def row_scores(reply: Any, ids: list[int], info: ServerInfo) -> RowScores:
    """Return the scores of all ids but the first one.

    Raises:
        RowError: the reply is not about these ids.
    """
    check_prompt(reply, ids, info)
    told = reported(only_choice(reply))
    assert info.naming is not None
    if not len(ids) <= len(told) <= len(ids) + 1:
        raise RowError(f"it has log-probs of {len(told)} tokens for a prompt of {len(ids)}")
    last = info.vocabulary.size - 1
    named = [0 if token == last else token for token in ids] if info.misnames_last else ids
    if (at := info.vocabulary.are_names(told.names[: len(ids)], named, info.naming)) is not None:
        raise RowError(f"it scores {told.names[at][:40]!r} at position {at}, where the prompt has id {ids[at]}")
    if told.logprobs[0] is not None:
        raise RowError("it gives a log-prob to the first token, which has none: it counts positions differently")
    return RowScores(checked_logprobs(told.logprobs[1 : len(ids)], len(ids) - 1))

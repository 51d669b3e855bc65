"""Behind a URL: build the completion requests, one for each row, and parse the server's replies.

A server silently ignores fields that it does not know. So every reply is checked against its request, and a row whose
reply does not fit fails alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from corelm.errors import CapabilityError, InvalidRequestError
from corelm.spec import (
    GenerateRequest,
    RowAnswer,
    RowFailure,
    RowScores,
    SamplingParams,
    ScoreRequest,
    StopStrings,
)
from corelm_engine_kit import (
    Payload,
    ReplyStreams,
    RowError,
    SoFar,
    checked_finish_reason,
    checked_ids,
    checked_logprobs,
    only_choice,
    prompts_and_limits,
    refuse_settled,
)
from vllm_backend import sampling_masks
from vllm_backend.capabilities_http import ServerInfo
from vllm_backend.sampling import REPETITION, answer_end, check_raw, parameters, unspelt_stop
from vllm_backend.top_ids import (
    answer_top,
    by_id,
    by_label,
    labels,
    named_candidates,
    of_scores,
    sampled,
    wanted,
    with_top,
)

COMPLETIONS = "/v1/completions"
#: What the server puts before the id of a request to name it.
ID_PREFIX = "cmpl-"
#: Replies state their ids, and label log-probs with ids. Labels that are texts would be ambiguous.
EXPLICIT: Payload = {"n": 1, "stream": False, "return_token_ids": True, "return_tokens_as_token_ids": True}
#: Every parameter that a server may have its own default for, at the value that keeps the model's distribution.
NEUTRAL: Payload = parameters(SamplingParams(temperature=0.0, max_new_tokens=1), frozenset(), 1, None) | EXPLICIT
#: The largest bias that a server takes. With it, it samples the id that a scored row ends with.
_CERTAIN = 100.0
#: The fields that engine_kwargs may not hold, in addition to those that `parameters` refuses: the plugin sets them.
RESERVED_FIELDS = frozenset(
    {
        *EXPLICIT,
        "add_special_tokens",
        "echo",
        "model",
        "prompt",
        "prompt_embeds",
        "request_id",
        "stream_options",
        "suffix",
        "truncate_prompt_tokens",
        "use_beam_search",
    }
)


# Generating -----------------------------------------------------------------------------------------------------------


def generation_requests(request: GenerateRequest, info: ServerInfo) -> list[Payload]:
    """Return one payload for each prompt, with its own seed.

    Raises:
        CapabilityError, InvalidRequestError: parameters that the server would ignore or change silently.
    """
    sampling = request.sampling
    sampling_masks.check(request)
    _check_engine_kwargs(sampling.engine_kwargs, info)
    min_tokens = _min_tokens(request, info)
    logprobs: Payload = {} if request.logprobs == "none" else {"logprobs": wanted(request, info.candidates)}
    explicit = EXPLICIT | {"stream": request.on_tokens is not None}
    payloads = []
    for prompt, limit, seed in prompts_and_limits(request, info.max_context):
        fields = parameters(sampling, request.stop_ids, limit, seed)
        payloads.append({**fields, "min_tokens": min_tokens, **explicit, **logprobs, "prompt": prompt})
    check_raw(request)
    return payloads


class AnswerStreams(ReplyStreams):
    """The streams of a call. Each event of a server has the tokens that are new.

    Args:
        request: the call.
        payloads: what was posted, by row.
        info: what is known about the server.
        parse: ``parse(row, reply, aborted)`` returns the answer in a whole reply.
    """

    def __init__(
        self,
        request: GenerateRequest,
        payloads: Sequence[Payload],
        info: ServerInfo,
        parse: Callable[[int, Any, bool], RowAnswer],
    ) -> None:
        super().__init__(request, info.tokenizer)
        self._request, self._payloads, self._info, self._parse = request, payloads, info, parse
        self._count = wanted(request, info.candidates)
        self._checked = [0] * len(payloads)

    def joined(self, reply: Any, event: Any) -> Any:
        """Return the completion so far with one more event.

        Raises:
            RowError: the event is not part of a completion with one choice.
        """
        if isinstance(event, dict) and event.get("choices") == []:
            # The usage, which a server may be set to send.
            return {**reply, "usage": event.get("usage")} if isinstance(reply, dict) else reply
        choice = only_choice(event)
        if reply is None:
            return event
        whole = only_choice(reply)
        if "token_ids" in whole:
            whole["token_ids"] += choice.get("token_ids") or []
        if isinstance(whole.get("logprobs"), dict):
            new = choice.get("logprobs") or {}
            for name in ("tokens", "token_logprobs", *({"top_logprobs"} & whole["logprobs"].keys())):
                whole["logprobs"][name] += new.get(name) or []
        for name in ("finish_reason", "stop_reason"):
            whole[name] = choice.get(name)
        return reply

    def read(self, row: int, reply: Any) -> RowAnswer | SoFar | None:
        choice, request, size = only_choice(reply), self._request, self._info.capabilities.vocab_size
        reason = choice.get("finish_reason")
        if reason is not None:
            return self._parse(row, reply, False) if reason in ("stop", "length") else None
        # Only what is new is checked: with the whole answer, each token would cost as much as all before it.
        ids, before = choice["token_ids"], self._checked[row]
        limit = self._payloads[row]["max_tokens"] - before
        self._checked[row] += len(checked_ids(ids[before:], vocab_size=size, limit=limit))
        return SoFar(
            ids,
            lambda first, end: _logprobs_between(choice, ids, request, first, end),
            lambda told: {"top": answer_top(choice, request, ids[:told], self._count, size)},
        )


def _check_engine_kwargs(engine_kwargs: Mapping[str, Any], info: ServerInfo) -> None:
    refuse_settled(engine_kwargs, RESERVED_FIELDS)
    for name in engine_kwargs:
        if not info.has_field(name):
            raise InvalidRequestError(
                f"engine_kwargs: the server's completion requests have no field {name!r}, so it would ignore it",
                field="engine_kwargs",
            )


def _min_tokens(request: GenerateRequest, info: ServerInfo) -> int:
    """Return the value of ``min_tokens``. Until then a server forbids its model's EOS, even if EOS is to be ignored."""
    least = request.sampling.min_new_tokens
    if not least or info.eos_token_ids <= request.stop_ids:
        return least
    if request.stop_ids or request.sampling.stop:
        raise CapabilityError(
            "before min_new_tokens a vLLM server would forbid EOS as well as the stop ids; leave out ignore_eos",
            capability="min_new_tokens",
        )
    # Nothing can end the answer early.
    return 0


def row_answer(
    reply: Any, aborted: bool, payload: Payload, request: GenerateRequest, stops: StopStrings, info: ServerInfo
) -> RowAnswer:
    """Return the answer in the reply to `payload`.

    Raises:
        RowError: the reply does not fit the request.
    """
    choice = only_choice(reply)
    ids = _answer_ids(choice, payload, info)
    reason = _finish_reason(choice, ids, payload, aborted, stops)
    logprobs = _logprobs_of(choice, ids, request)
    length, reason = answer_end(ids, reason, stops)
    count = payload.get("logprobs") or 0
    top = answer_top(choice, request, ids[:length], count, info.capabilities.vocab_size)
    kept, mass = sampling_masks.kept_of(choice, ids[:length]) if request.return_support else ([], [])
    return RowAnswer(ids[:length], logprobs[:length], reason, kept, mass, top, _cached_tokens(reply))


def _logprobs_of(choice: Any, ids: list[int], request: GenerateRequest) -> Sequence[float]:
    if request.logprobs == "none":
        return []
    logprobs = _sampled_logprobs(choice, ids)
    # The greedy token has probability 1. vLLM returns its log-prob at temperature 1.
    return [0.0] * len(ids) if request.logprobs == "processed" and request.sampling.greedy else logprobs


def _logprobs_between(choice: Any, ids: list[int], request: GenerateRequest, first: int, end: int) -> Sequence[float]:
    """Return the log-probs of the tokens from number `first` to the one before number `end`."""
    if request.logprobs == "none":
        return []
    logprobs = _logprobs(choice)
    part = {"logprobs": {name: logprobs[name][first:end] for name in ("tokens", "token_logprobs")}}
    return _logprobs_of(part, ids[first:end], request)


def _answer_ids(choice: Any, payload: Payload, info: ServerInfo) -> list[int]:
    prompt = choice.get("prompt_token_ids")
    if prompt is not None and prompt != payload["prompt"]:
        raise RowError("it answers another prompt")
    if "token_ids" not in choice:
        raise RowError("it has no token_ids; is this a vLLM server that knows return_token_ids?")
    ids = checked_ids(choice["token_ids"], vocab_size=info.capabilities.vocab_size, limit=payload["max_tokens"])
    stop_ids, earlier = frozenset(payload["stop_token_ids"]), ids[:-1]
    if not stop_ids.isdisjoint(earlier):
        first = next(token for token in earlier if token in stop_ids)
        raise RowError(f"it goes on after the stop id {first}")
    return ids


def _finish_reason(choice: Any, ids: list[int], payload: Payload, aborted: bool, stops: StopStrings) -> str:
    """Return the reply's finish reason, if its ids confirm it."""
    reason, earlier = choice.get("finish_reason"), ids[:-1]
    if reason == "repetition" and payload.get(REPETITION):
        return "stop"
    # See `answer_end` for the exception.
    goes_on = stops.reasoning is None and stops.occurs_in(earlier) and not stops.ends_in_half_a_character(earlier)
    if goes_on and reason != "abort" and not payload["min_tokens"]:
        raise RowError(f"it goes on after one of the stop strings {list(stops.stops)}")
    ended = bool(ids) and (ids[-1] in payload["stop_token_ids"] or stops.occurs_in(ids))
    if reason == "stop" and not ended and isinstance(choice.get("stop_reason"), str):
        raise unspelt_stop(choice["stop_reason"])
    return checked_finish_reason(
        reason,
        len(ids),
        limit=payload["max_tokens"],
        least=payload["min_tokens"],
        ended=ended,
        aborted=aborted,
        last=ids[-1] if ids else None,
    )


def _sampled_logprobs(choice: Any, ids: list[int]) -> Sequence[float]:
    logprobs = _logprobs(choice)
    if logprobs.get("tokens") != labels(ids):
        raise RowError("its log-probs are not labelled with the ids of its tokens")
    return checked_logprobs(logprobs.get("token_logprobs"), len(ids))


# Scoring --------------------------------------------------------------------------------------------------------------


def scoring_requests(request: ScoreRequest, info: ServerInfo) -> dict[int, Payload]:
    """Return the payloads by row number, without the rows of which nothing is asked.

    A server keeps one position of the context for a sampled token, but a row may be as long as the context. So the
    prompt is all ids except the last one, and a bias makes the server sample that one. Its raw log-prob, and those of
    the most probable ids, are from before the bias. With `whole_prompts`, the prompt is all ids, and nothing is asked
    of the sampled token.
    """
    payloads: dict[int, Payload] = {}
    starts, count = request.score_from.clamp_min(1).tolist(), of_scores(request)
    for number, (ids, start) in enumerate(zip(request.sequences.tolist(), starts, strict=True)):
        if start < len(ids):
            prompt = ids if info.whole_prompts else ids[:-1]
            within: Payload = {"prompt_logprobs": count} if start < len(prompt) else {}
            bias: Payload = {"logprobs": sampled(count, info.candidates), "logit_bias": {str(ids[-1]): _CERTAIN}}
            payloads[number] = {**NEUTRAL, **within, **({} if info.whole_prompts else bias), "prompt": prompt}
    return payloads


def row_scores(
    reply: Any, payload: Payload, ids: list[int], start: int, request: ScoreRequest, info: ServerInfo
) -> RowScores | RowFailure:
    """Return the scores of a row from `start` on in the reply to `payload`.

    Raises:
        RowError: the reply does not fit the request.
    """
    choice = only_choice(reply)
    if choice.get("finish_reason") == "abort":
        return RowFailure("the request was aborted", aborted=True)
    answer, prompt, count = _answer_ids(choice, payload, info), payload["prompt"], of_scores(request)
    found: Sequence[Any] = []
    candidates = []
    if "prompt_logprobs" in payload:
        positions = _positions(choice, prompt)
        found = _prompt_logprobs(prompt[1:], positions[1:])[start - 1 :]
        if count:
            candidates.append(named_candidates(by_id(positions[start:]), count))
    if "logprobs" in payload:
        if answer != ids[-1:]:
            raise RowError(f"it samples {answer} where logit_bias makes id {ids[-1]} more probable by e^{_CERTAIN:g}")
        found = [*found, *_sampled_logprobs(choice, answer)]
        if count:
            candidates.append(named_candidates(by_label(choice, 1), payload["logprobs"]))
    logprobs = checked_logprobs(found, len(ids) - start)
    return with_top(logprobs, ids[start:], candidates, request, info.capabilities.vocab_size)


def _positions(choice: Any, prompt: list[int]) -> Any:
    """Return the ``prompt_logprobs`` of a choice, one entry for each token of the prompt."""
    positions = choice.get("prompt_logprobs")
    if not isinstance(positions, list) or len(positions) != len(prompt):
        raise RowError("it does not have prompt_logprobs for every token of the prompt")
    return positions


def _prompt_logprobs(ids: list[int], positions: list[Any]) -> list[Any]:
    """Return the log-prob that each of these positions of a prompt reports for its id.

    Raises:
        RowError: a position does not name its id.
    """
    try:
        return [candidates[str(token)]["logprob"] for token, candidates in zip(ids, positions, strict=True)]
    except (KeyError, TypeError):
        pass
    found = []
    for token, candidates in zip(ids, positions, strict=True):
        if not isinstance(candidates, dict) or str(token) not in candidates:
            raise RowError(f"its prompt_logprobs do not name id {token} where the prompt has it")
        found.append(candidates[str(token)].get("logprob"))
    return found


# Both -----------------------------------------------------------------------------------------------------------------


def _cached_tokens(reply: Any) -> Any:
    """Return how many ids of the prompt came from the prefix cache; None if the server does not say.

    Servers say so that run with ``--enable-prompt-tokens-details``.
    """
    usage = reply.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    return details.get("cached_tokens") if isinstance(details, dict) else None


def is_reply_to(payload: Payload, reply: Any) -> bool:
    """Return whether a reply names the request with `payload`. One that is not a completion is left to the parser."""
    if not isinstance(reply, dict) or "choices" not in reply:
        return True
    if sampling_masks.is_for_route(payload):
        return sampling_masks.names_request(payload, reply)
    return reply.get("id") == f"{ID_PREFIX}{payload['request_id']}"


def _logprobs(choice: Any) -> Mapping[str, Any]:
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        raise RowError("it has no log-probs")
    return logprobs

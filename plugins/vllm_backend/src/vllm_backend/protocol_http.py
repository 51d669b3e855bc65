"""Behind a URL: build the completion requests, one for each row, and parse the server's replies.

A server silently ignores fields that it does not know. So every reply is checked against its request, and a row whose
reply does not fit fails alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from corelm.errors import CapabilityError
from corelm.spec import (
    GenerateRequest,
    RowAnswer,
    RowFailure,
    RowScores,
    SamplingParams,
    ScoreRequest,
    StopStrings,
)
from corelm.validate import invalid
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
from vllm_backend.capabilities_http import ServerInfo
from vllm_backend.sampling import REPETITION, answer_end, check_raw, parameters, scored_rows, unspelt_stop
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
_ALL = slice(None)
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
            lambda first, end: _logprobs_of(choice, ids, request, slice(first, end)),
            lambda told: {"top": answer_top(choice, request, ids[:told], self._count, size)},
        )


def _check_engine_kwargs(engine_kwargs: Mapping[str, Any], info: ServerInfo) -> None:
    refuse_settled(engine_kwargs, RESERVED_FIELDS)
    for name in engine_kwargs:
        if not info.has_field(name):
            raise invalid(
                "engine_kwargs", f"the server's completion requests have no field {name!r}, so it would ignore it"
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
    return RowAnswer(ids[:length], logprobs[:length], reason, top=top, cached_tokens=_cached_tokens(reply))


def _logprobs_of(choice: Any, ids: list[int], request: GenerateRequest, part: slice = _ALL) -> Sequence[float]:
    if request.logprobs == "none":
        return []
    logprobs = _sampled_logprobs(choice, ids, part)
    # The greedy token has probability 1. vLLM returns its log-prob at temperature 1.
    return [0.0] * len(logprobs) if request.logprobs == "processed" and request.sampling.greedy else logprobs


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


def _sampled_logprobs(choice: Any, ids: list[int], part: slice = _ALL) -> Sequence[float]:
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        raise RowError("it has no log-probs")
    if (logprobs.get("tokens") or [])[part] != labels(ids[part]):
        raise RowError("its log-probs are not labelled with the ids of its tokens")
    return checked_logprobs((logprobs.get("token_logprobs") or [])[part], len(ids[part]))


# Scoring --------------------------------------------------------------------------------------------------------------


def scoring_requests(request: ScoreRequest, info: ServerInfo) -> dict[int, Payload]:
    """Return the payloads by row number; see `scored_rows`."""
    payloads: dict[int, Payload] = {}
    count = of_scores(request)
    for number, ids, prompt, is_scored in scored_rows(request, info.whole_prompts):
        within: Payload = {"prompt_logprobs": count} if is_scored else {}
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
        positions = choice.get("prompt_logprobs")
        if not isinstance(positions, list) or len(positions) != len(prompt):
            raise RowError("it does not have prompt_logprobs for every token of the prompt")
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


def _prompt_logprobs(ids: list[int], positions: list[Any]) -> list[Any]:
    """Return the log-prob that each of these positions of a prompt reports for its id.

    Raises:
        RowError: a position does not name its id.
    """
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

"""Behind a URL: build the completion requests, one for each row, and parse the server's replies.

A server silently ignores fields that it does not know. So every reply is checked against its request. A reply that
does not fit ends the whole call: such a server cannot be trusted with the other rows either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from corelm.errors import CapabilityError, EngineError, InvalidRequestError
from corelm.spec import GenerateRequest, GenerateResult, SamplingParams, ScoreRequest, ScoreResult
from corelm.support import RowAnswer, RowFailure, generate_result, row_failure, score_result
from vllm_backend.capabilities import ServerInfo
from vllm_backend.sampling import parameters

Payload = dict[str, Any]

COMPLETIONS = "/v1/completions"
#: Replies state their ids, and label log-probs with ids. Labels that are texts would be ambiguous.
EXPLICIT: Payload = {"n": 1, "stream": False, "return_token_ids": True, "return_tokens_as_token_ids": True}
#: Every parameter that a server may have its own default for, at the value that keeps the model's distribution.
NEUTRAL: Payload = parameters(SamplingParams(temperature=0.0, max_new_tokens=1), frozenset(), 1, None) | EXPLICIT
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
#: What a server sends instead of an infinite log-prob.
INFINITE = -9999.0


# Generating -----------------------------------------------------------------------------------------------------------


def generation_requests(request: GenerateRequest, info: ServerInfo) -> list[Payload]:
    """Return one payload for each prompt, with its own seed.

    Raises:
        CapabilityError, InvalidRequestError: parameters that the server would ignore or change silently.
    """
    sampling = request.sampling
    _check_engine_kwargs(sampling.engine_kwargs, info)
    min_tokens = _min_tokens(request, info)
    seeds = [None] * len(request.prompts) if request.seeds is None else request.seeds.tolist()
    logprobs: Payload = {} if request.logprobs == "none" else {"logprobs": 0}
    payloads = []
    for prompt, seed in zip(request.prompts.tolist(), seeds, strict=True):
        limit = info.max_context - len(prompt) if sampling.max_new_tokens is None else sampling.max_new_tokens
        fields = parameters(sampling, request.stop_ids, limit, seed)
        payloads.append({**fields, "min_tokens": min_tokens, **EXPLICIT, **logprobs, "prompt": prompt})
    return payloads


def generation_result(
    request: GenerateRequest, payloads: Sequence[Payload], entries: Sequence[Any], tokenizer: Any
) -> GenerateResult:
    """Return the answers in `entries`, the server's replies to `payloads` as `HttpClient.post_each` returns them.

    Raises:
        EngineError: a reply does not fit its payload.
    """
    rows = [
        row_failure(entry) or _row_answer(entry, payload, request, tokenizer)
        for payload, entry in zip(payloads, entries, strict=True)
    ]
    return generate_result(request, rows)


def _check_engine_kwargs(engine_kwargs: Mapping[str, Any], info: ServerInfo) -> None:
    for name in engine_kwargs:
        if name in RESERVED_FIELDS:
            raise InvalidRequestError(f"engine_kwargs: corelm sets {name!r} itself", field="engine_kwargs")
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


def _row_answer(reply: Any, payload: Payload, request: GenerateRequest, tokenizer: Any) -> RowAnswer:
    choice = only_choice(reply)
    ids = _answer_ids(choice, payload)
    reason = _finish_reason(choice, ids, payload, tokenizer)
    logprobs = [] if request.logprobs == "none" else _sampled_logprobs(choice, ids)
    if request.logprobs == "processed" and request.sampling.greedy:
        # The greedy token has probability 1. vLLM returns its log-prob at temperature 1.
        logprobs = [0.0] * len(ids)
    return RowAnswer(ids, logprobs, reason)


def _answer_ids(choice: Any, payload: Payload) -> list[int]:
    ids, prompt = choice.get("token_ids"), choice.get("prompt_token_ids")
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise reply_error("it has no token_ids; is this a vLLM server that knows return_token_ids?")
    if prompt is not None and prompt != payload["prompt"]:
        raise reply_error("it answers another prompt")
    if len(ids) > payload["max_tokens"]:
        raise reply_error(f"it has {len(ids)} tokens, but at most {payload['max_tokens']} were asked for")
    early = [token for token in ids[:-1] if token in payload["stop_token_ids"]]
    if early:
        raise reply_error(f"it goes on after the stop id {early[0]}")
    return ids


def _finish_reason(choice: Any, ids: list[int], payload: Payload, tokenizer: Any) -> str:
    """Return the reply's finish reason, if its ids confirm it."""
    reason, count, limit = choice.get("finish_reason"), len(ids), payload["max_tokens"]
    stops = payload["stop"]

    def has_stop_string(tokens: list[int]) -> bool:
        text = tokenizer.decode(tokens, skip_special_tokens=payload["skip_special_tokens"]) if stops else ""
        return any(stop in text for stop in stops)

    if reason == "abort":
        return "abort"
    if reason == "repetition":
        # Only engine_kwargs can have asked for it.
        return "stop"
    if reason not in ("stop", "length"):
        raise reply_error(f"its finish reason is {reason!r}")
    if not payload["min_tokens"] and has_stop_string(ids[:-1]):
        raise reply_error(f"it goes on after one of the stop strings {stops}")
    if reason == "length" and count < limit:
        raise reply_error(f"it ends for its length after {count} tokens, but {limit} were asked for")
    if reason == "stop":
        if count < payload["min_tokens"]:
            raise reply_error(f"it ends after {count} tokens, but at least {payload['min_tokens']} were asked for")
        at_stop_id = bool(ids) and ids[-1] in payload["stop_token_ids"]
        if not at_stop_id and not has_stop_string(ids):
            raise reply_error(
                f"it stops at id {ids[-1] if ids else None}, which is not a stop id and completes no stop string; a "
                "server has its own stop ids unless it is started with --generation-config vllm"
            )
    return str(reason)


def _sampled_logprobs(choice: Any, ids: list[int]) -> list[float]:
    logprobs = _logprobs(choice)
    if logprobs.get("tokens") != [_label(token) for token in ids]:
        raise reply_error("its log-probs are not labelled with the ids of its tokens")
    values = logprobs.get("token_logprobs")
    if not isinstance(values, list) or len(values) != len(ids):
        raise reply_error(f"it does not have one log-prob for each of its {len(ids)} tokens")
    return [_number(value) for value in values]


# Scoring --------------------------------------------------------------------------------------------------------------


def scoring_requests(request: ScoreRequest) -> dict[int, Payload]:
    """Return the payloads by row number, without the rows of which nothing is asked.

    A server keeps one position of the context for a sampled token, but a row may be as long as the context. So the
    prompt is all ids except the last one, whose log-prob is asked for by id at the sampled position.
    """
    payloads = {}
    starts = request.score_from.clamp_min(1).tolist()
    for number, (ids, start) in enumerate(zip(request.sequences.tolist(), starts, strict=True)):
        if start < len(ids):
            within: Payload = {"prompt_logprobs": 0} if start < len(ids) - 1 else {}
            payloads[number] = {**NEUTRAL, **within, "logprobs": 0, "logprob_token_ids": ids[-1:], "prompt": ids[:-1]}
    return payloads


def scoring_result(request: ScoreRequest, payloads: Mapping[int, Payload], entries: Sequence[Any]) -> ScoreResult:
    """Return the scores in `entries`, the server's replies to `payloads` as `HttpClient.post_each` returns them.

    Raises:
        EngineError: a reply does not fit its payload.
    """
    rows = {
        number: row_failure(entry) or _row_scores(entry, payload)
        for (number, payload), entry in zip(payloads.items(), entries, strict=True)
    }
    return score_result(request, rows)


def _row_scores(reply: Any, payload: Payload) -> list[float] | RowFailure:
    """Return the log-probs of the row's last ids: of all but the first one, or of the very last one."""
    choice = only_choice(reply)
    if choice.get("finish_reason") == "abort":
        return RowFailure("the request was aborted", aborted=True)
    prompt, (last,) = payload["prompt"], payload["logprob_token_ids"]
    _answer_ids(choice, payload)
    before_last = []
    if "prompt_logprobs" in payload:
        positions = choice.get("prompt_logprobs")
        if not isinstance(positions, list) or len(positions) != len(prompt):
            raise reply_error("it does not have prompt_logprobs for every token of the prompt")
        for token, candidates in zip(prompt[1:], positions[1:], strict=True):
            if not isinstance(candidates, dict) or str(token) not in candidates:
                raise reply_error(f"its prompt_logprobs do not name id {token} where the prompt has it")
            before_last.append(_number(candidates[str(token)].get("logprob")))
    sampled = _logprobs(choice).get("top_logprobs")
    if not isinstance(sampled, list) or len(sampled) != 1 or _label(last) not in sampled[0]:
        raise reply_error(f"it does not give the log-prob of id {last}; does the server know logprob_token_ids?")
    return [*before_last, _number(sampled[0][_label(last)])]


# Both -----------------------------------------------------------------------------------------------------------------


def only_choice(reply: Any) -> dict[str, Any]:
    """Return the choice of a completion.

    Raises:
        EngineError: the reply does not have exactly one choice.
    """
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise reply_error("it is not a completion with one choice")
    choice: dict[str, Any] = choices[0]
    return choice


def reply_error(what: str) -> EngineError:
    return EngineError(f"the server's reply does not fit the request: {what}", usable=True)


def _logprobs(choice: Any) -> Mapping[str, Any]:
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        raise reply_error("it has no log-probs")
    return logprobs


def _number(value: Any) -> float:
    if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= INFINITE:
        raise reply_error(f"a log-prob is {value!r}")
    return float(value)


def _label(token: int) -> str:
    return f"token_id:{token}"

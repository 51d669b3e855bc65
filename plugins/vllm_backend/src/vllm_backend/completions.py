"""From a request to the completion requests of a server, one a row, and from what it answers to the result.

A server ignores the fields that it does not know and says nothing. So an answer is believed only as far as it fits what
was asked; one that does not fit ends the call, since a server that does that once cannot be trusted with the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from corelm.errors import CapabilityError, EngineError, InvalidRequestError
from corelm.spec import GenerateRequest, GenerateResult, Ragged, SamplingParams, ScoreRequest, ScoreResult
from vllm_backend.outcomes import Unserved, generation_batch
from vllm_backend.sampling import parameters
from vllm_backend.served import Served

Payload = dict[str, Any]

#: Every answer says its ids, and its log-probs are labelled with ids and not with texts, several of which may be equal.
EXPLICIT: Payload = {"n": 1, "stream": False, "return_token_ids": True, "return_tokens_as_token_ids": True}
#: All that a server might have other defaults for, at the values that leave the model's distribution alone.
NEUTRAL: Payload = parameters(SamplingParams(temperature=0.0, max_new_tokens=1), frozenset(), 1, None) | EXPLICIT
#: The fields that engine_kwargs may not hold, beside those that `parameters` refuses: what they say is settled.
SETTLED = frozenset({*EXPLICIT, "add_special_tokens", "echo", "model", "prompt", "prompt_embeds", "request_id"}) | {
    "stream_options",
    "suffix",
    "truncate_prompt_tokens",
    "use_beam_search",
}
#: What a server puts in the place of an infinite log-prob.
INFINITE = -9999.0


# Generating -----------------------------------------------------------------------------------------------------------


def generation_payloads(request: GenerateRequest, served: Served) -> list[Payload]:
    """Raises:
    CapabilityError, InvalidRequestError: what the server would ignore, or take and change.
    """
    sampling = request.sampling
    _known(sampling.engine_kwargs, served)
    held = _least_length(request, served)
    seeds = [None] * len(request.prompts) if request.seeds is None else request.seeds.tolist()
    wanted: Payload = {} if request.logprobs == "none" else {"logprobs": 0}
    payloads = []
    for prompt, seed in zip(request.prompts.tolist(), seeds, strict=True):
        limit = sampling.max_new_tokens
        room = served.max_context - len(prompt) if limit is None else limit
        asked = parameters(sampling, request.stop_ids, room, seed)
        payloads.append({**asked, "min_tokens": held, **EXPLICIT, **wanted, "prompt": prompt})
    return payloads


def answers(
    request: GenerateRequest, payloads: Sequence[Payload], outcomes: Sequence[Unserved | Any], tokenizer: Any
) -> GenerateResult:
    """Raises:
    EngineError: an answer is not one to its request.
    """
    sampling = request.sampling
    processed = request.logprobs == "processed"
    ids: list[list[int]] = []
    logprobs: list[list[float]] = []
    reasons, errors = [], []
    for payload, outcome in zip(payloads, outcomes, strict=True):
        found, values = [], []
        if isinstance(outcome, Unserved):
            reason = "abort" if outcome.aborted else "error"
        else:
            found = _answer_ids(outcome, payload)
            reason = _finish_reason(outcome, found, payload, tokenizer)
            if request.logprobs != "none":
                values = _sampled_logprobs(outcome, found)
                if processed and sampling.greedy:
                    # A token drawn at temperature 0 is certain; vLLM gives its log-prob at temperature 1.
                    values = [0.0] * len(found)
        ids.append(found)
        logprobs.append(values)
        reasons.append(reason)
        errors.append(outcome.why if isinstance(outcome, Unserved) and not outcome.aborted else "")
    return generation_batch(request, ids, logprobs, reasons, errors)


def _known(names: Mapping[str, Any], served: Served) -> None:
    for name in names:
        if name in SETTLED:
            raise InvalidRequestError(f"engine_kwargs: corelm decides {name!r} itself", field="engine_kwargs")
        if not served.takes(name):
            raise InvalidRequestError(
                f"engine_kwargs: the server's completion requests have no field {name!r}, so it would be ignored",
                field="engine_kwargs",
            )


def _least_length(request: GenerateRequest, served: Served) -> int:
    """``min_tokens``. A server forbids its model's EOS until then, even where EOS is a token like any other."""
    least = request.sampling.min_new_tokens
    if not least or served.eos_token_ids <= request.stop_ids:
        return least
    if request.stop_ids or request.sampling.stop:
        raise CapabilityError(
            "a vLLM server would forbid EOS along with the stop ids before min_new_tokens; leave ignore_eos out",
            capability="min_new_tokens",
        )
    # Nothing can end the answer early.
    return 0


def _answer_ids(choice: Any, payload: Payload) -> list[int]:
    ids, prompt = choice.get("token_ids"), choice.get("prompt_token_ids")
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise unlike("it holds no token_ids; is this a vLLM server that knows return_token_ids?")
    if prompt is not None and prompt != payload["prompt"]:
        raise unlike("it answers another prompt")
    if len(ids) > payload["max_tokens"]:
        raise unlike(f"it has {len(ids)} tokens, and at most {payload['max_tokens']} were asked for")
    early = [token for token in ids[:-1] if token in payload["stop_token_ids"]]
    if early:
        raise unlike(f"it goes on after the stop id {early[0]}")
    return ids


def _finish_reason(choice: Any, ids: list[int], payload: Payload, tokenizer: Any) -> str:
    """The reason, if the answer bears it out."""
    reason, count, limit = choice.get("finish_reason"), len(ids), payload["max_tokens"]
    stops = payload["stop"]

    def completes(tokens: list[int]) -> bool:
        text = tokenizer.decode(tokens, skip_special_tokens=payload["skip_special_tokens"]) if stops else ""
        return any(stop in text for stop in stops)

    if reason == "abort":
        return "abort"
    if reason == "repetition":
        # Only engine_kwargs can have asked for it.
        return "stop"
    if reason not in ("stop", "length"):
        raise unlike(f"its finish reason is {reason!r}")
    if not payload["min_tokens"] and completes(ids[:-1]):
        raise unlike(f"it goes on after one of the stop strings {stops}")
    if reason == "length" and count < limit:
        raise unlike(f"it ends for its length after {count} tokens, and {limit} were asked for")
    if reason == "stop":
        if count < payload["min_tokens"]:
            raise unlike(f"it ends after {count} tokens, and at least {payload['min_tokens']} were asked for")
        ended = bool(ids) and ids[-1] in payload["stop_token_ids"]
        if not ended and not completes(ids):
            raise unlike(
                f"it stops at id {ids[-1] if ids else None}, which is no stop id and completes no stop string; a "
                "server has stop ids of its own unless it is started with --generation-config vllm"
            )
    return str(reason)


def _sampled_logprobs(choice: Any, ids: list[int]) -> list[float]:
    found = _logprobs(choice)
    if found.get("tokens") != [_label(token) for token in ids]:
        raise unlike("its log-probs are not labelled with the ids of its tokens")
    values = found.get("token_logprobs")
    if not isinstance(values, list) or len(values) != len(ids):
        raise unlike("its log-probs are not as many as its tokens")
    return [_number(value) for value in values]


# Scoring --------------------------------------------------------------------------------------------------------------


def scoring_payloads(request: ScoreRequest) -> dict[int, Payload]:
    """By row number, leaving out those of which nothing is asked.

    A server keeps a position of the context for an answer, but a row may be as long as the context. So all ids but the
    last are the prompt, and the last is asked for by name among the candidates for the token that follows.
    """
    payloads = {}
    starts = request.score_from.clamp_min(1).tolist()
    for number, (ids, start) in enumerate(zip(request.sequences.tolist(), starts, strict=True)):
        if start < len(ids):
            within: Payload = {"prompt_logprobs": 0} if start < len(ids) - 1 else {}
            payloads[number] = {**NEUTRAL, **within, "logprobs": 0, "logprob_token_ids": ids[-1:], "prompt": ids[:-1]}
    return payloads


def scores(
    request: ScoreRequest, payloads: Mapping[int, Payload], outcomes: Mapping[int, Unserved | Any]
) -> ScoreResult:
    """Raises:
    EngineError: an answer is not one to its request.
    """
    sequences = request.sequences
    starts = request.score_from.clamp_min(1).cpu()
    values = torch.zeros(sequences.values.shape[0])
    scored = sequences.positions >= starts[sequences.row_index]
    errors = [""] * len(sequences)
    for number, outcome in outcomes.items():
        start, end = sequences.offsets[number : number + 2].tolist()
        if isinstance(outcome, Unserved):
            errors[number] = outcome.why
            scored[start:end] = False
        else:
            found = _given_logprobs(outcome, payloads[number])
            first = start + int(starts[number])
            values[first:end] = torch.tensor(found[first - end :])
    device = request.device or sequences.values.device
    return ScoreResult(
        logprobs=Ragged(values, sequences.lengths).to(device),
        scored=Ragged(scored, sequences.lengths).to(device),
        errors=tuple(errors) if any(errors) else None,
    )


def _given_logprobs(choice: Any, payload: Payload) -> list[float]:
    """Of the ids of the prompt but the first, if they were asked for, and of the one after it."""
    prompt, (last,) = payload["prompt"], payload["logprob_token_ids"]
    _answer_ids(choice, payload)
    before = []
    if "prompt_logprobs" in payload:
        found = choice.get("prompt_logprobs")
        if not isinstance(found, list) or len(found) != len(prompt):
            raise unlike("it holds no prompt_logprobs, one for every token")
        for token, candidates in zip(prompt[1:], found[1:], strict=True):
            if not isinstance(candidates, dict) or str(token) not in candidates:
                raise unlike(f"its prompt_logprobs do not name id {token} where the prompt has it")
            before.append(_number(candidates[str(token)].get("logprob")))
    after = _logprobs(choice).get("top_logprobs")
    if not isinstance(after, list) or len(after) != 1 or _label(last) not in after[0]:
        raise unlike(f"it does not say the log-prob of id {last}; does the server know logprob_token_ids?")
    return [*before, _number(after[0][_label(last)])]


# Both -----------------------------------------------------------------------------------------------------------------


def only_choice(reply: Any) -> dict[str, Any]:
    """Raises:
    EngineError: the reply holds no choice, or several.
    """
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise unlike("it is no completion with one choice")
    choice: dict[str, Any] = choices[0]
    return choice


def unlike(what: str) -> EngineError:
    return EngineError(f"the server's answer is not one to what was asked: {what}", usable=True)


def _logprobs(choice: Any) -> Mapping[str, Any]:
    found = choice.get("logprobs")
    if not isinstance(found, dict):
        raise unlike("it holds no log-probs")
    return found


def _number(value: Any) -> float:
    if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= INFINITE:
        raise unlike(f"a log-prob is {value!r}")
    return float(value)


def _label(token: int) -> str:
    return f"token_id:{token}"

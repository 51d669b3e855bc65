"""Behind a URL: the ids that each token was drawn from, of a server that runs with ``--return-sampling-mask``.

Such a server returns them on one route only, and without their mass. The mass is the token's log-prob as part of a
prompt, which is the model's own, minus its log-prob as a sampled token, which is normalised over these ids. This is so
at temperature 1 and without penalties, and nothing else is served. The server refuses greedy decoding and requests
without top_k, whatever they ask for, so all requests get one that leaves every id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from corelm.errors import BackendTimeoutError, CapabilityError, CoreLMError, EngineError
from corelm.spec import Capabilities, GenerateRequest, Ragged, RowAnswer, RowFailure, ScoreRequest, ScoreResult
from corelm_engine_kit import Payload, RowError, checked_logprobs
from vllm_backend.sampling import COLDEST, HONOURED
from vllm_backend.top_ids import LABEL, labels

if TYPE_CHECKING:
    from corelm_engine_kit import HttpClient

#: The route whose replies have the ids, if the server was started with ``--enable-scale-out``.
ROUTE = "/inference/v1/generate"
#: What the server puts before the id of a request to this route to name it.
ID_PREFIX = "generate-tokens-"
#: The fields of a completion request that are no sampling parameters.
_OF_COMPLETIONS = frozenset({"prompt", "stream", "return_token_ids", "return_tokens_as_token_ids"})


# What the server can do ----------------------------------------------------------------------------------------------


def offered(client: HttpClient, routes: frozenset[str], model: str, prompt: list[int], timeout: float | None) -> bool:
    """Return whether a server returns the ids that a token was drawn from.

    Raises:
        BackendTimeoutError: the time is over.
    """
    if ROUTE not in routes:
        return False
    sampling = {"temperature": 1.0, "top_k": 1, "max_tokens": 1, "ignore_eos": True}
    trial = {"model": model, "token_ids": prompt, "sampling_params": sampling}
    try:
        reply = client.post(ROUTE, trial, timeout=timeout, retry=True)
        return isinstance(reply["choices"][0]["sampling_mask"], list)
    except BackendTimeoutError:
        raise
    except (CoreLMError, IndexError, KeyError, TypeError):
        return False


def narrowed(capabilities: Capabilities) -> Capabilities:
    """Return the capabilities of such a server: the sets, and no greedy decoding."""
    sampling = {name: span for name, span in capabilities.sampling.items() if name != "temperature"}
    return replace(
        capabilities,
        return_support=True,
        sampling={**sampling, "temperature": (COLDEST, HONOURED["temperature"][1])},  # type: ignore[index]
    )


def check(request: GenerateRequest) -> None:
    """Refuse a request for kept ids whose mass would not be known.

    Raises:
        CapabilityError: naming the parameter.
    """
    sampling = request.sampling
    if not request.return_support:
        return
    changed = [("temperature", sampling.temperature)] if sampling.temperature != 1.0 else []
    changed += sampling.penalties
    changed += [("min_new_tokens", sampling.min_new_tokens)] if sampling.min_new_tokens else []
    if changed:
        name, value = changed[0]
        raise CapabilityError(
            f"a vLLM server returns which ids were left, but with {name}={value} their mass would not be known; leave "
            "this or return_support out, or open the engine here: get_backend('vllm', model, return_support=True)",
            capability=name,
        )


# Requests and replies ------------------------------------------------------------------------------------------------


def accepted(payload: Payload, vocab_size: int) -> Payload:
    """Return a request in the form that such a server accepts.

    Temperature 0 is that of scores and trials, whose sampled tokens do not matter. Log-probs are the same at 1.
    """
    if is_for_route(payload):
        return {**payload, "sampling_params": accepted(payload["sampling_params"], vocab_size)}
    return {**payload, "temperature": payload["temperature"] or 1.0, "top_k": payload["top_k"] or vocab_size}


def request_of(payload: Payload) -> Payload:
    """Return the request that asks for the answer of a completion request, with the ids that its tokens are drawn from.

    It asks for the log-probs as well, from which the mass follows.
    """
    sampling = {name: value for name, value in payload.items() if name not in _OF_COMPLETIONS}
    return {"token_ids": payload["prompt"], "sampling_params": {"logprobs": 0, **sampling}, "stream": False}


def is_for_route(payload: Payload) -> bool:
    """Return whether a request is one of `request_of`, and no completion request."""
    return "sampling_params" in payload


def names_request(payload: Payload, reply: Mapping[str, Any]) -> bool:
    """Return whether a reply names the request with `payload`."""
    return bool(reply.get("request_id") == f"{ID_PREFIX}{payload['request_id']}")


def as_completion(reply: Any) -> Any:
    """Return a reply as if the completions' route had answered, with `sampling_mask`.

    What is not built as expected is left as it is: the parser of completions says what is wrong with it.
    """
    try:
        (choice,) = reply["choices"]
        content = choice["logprobs"]["content"]
        logprobs = {
            "tokens": labels([each["token_id"] for each in content]),
            "token_logprobs": [each["logprob"] for each in content],
            "top_logprobs": [
                {f"{LABEL}{one['token_id']}": one["logprob"] for one in each["top_logprobs"]} for each in content
            ],
        }
        return {**reply, "choices": [{**choice, "logprobs": logprobs}]}
    except (AttributeError, KeyError, TypeError, ValueError):
        return reply


# The mass ------------------------------------------------------------------------------------------------------------


def scores_wanted(request: GenerateRequest, answers: Mapping[int, RowAnswer], timeout: float | None) -> ScoreRequest:
    """Return the request for the model's own log-probs of the answers' tokens.

    Args:
        request: asks for the answers.
        answers: by row. None of them is empty.
        timeout: seconds for the scores.
    """
    prompts = request.prompts.tolist()
    return ScoreRequest(
        sequences=Ragged.from_list([[*prompts[row], *answer.ids] for row, answer in answers.items()]),
        score_from=torch.tensor([len(prompts[row]) for row in answers], dtype=torch.int64),
        temperature=1.0,
        return_logits=False,
        grad=False,
        device=None,
        request_ids=tuple(request.request_ids[row] for row in answers),
        timeout=timeout,
        adapter=request.adapter,
    )


def with_masses(
    answers: Mapping[int, RowAnswer], scores: ScoreResult, version: str | None
) -> dict[int, RowAnswer | RowFailure]:
    """Return the answers with the mass of their kept ids, or why that is not known.

    Args:
        answers: by row; each `kept_log_mass` is the log-prob of a token among its kept ids, as `kept_of` returns it.
        scores: what `scores_wanted` asks for.
        version: the label of the weights that the answers are of; None for the backend's own.

    Raises:
        EngineError: the scores are of other weights.
    """
    scored_with = None if scores.weight_versions is None else scores.weight_versions[0]
    if scored_with != version:
        raise EngineError(
            f"another client loaded weights between the answers and their scores ({version!r} → {scored_with!r}), so "
            "the mass of the kept ids is not known; repeat the call",
            usable=True,
        )
    found: dict[int, RowAnswer | RowFailure] = {}
    errors = scores.errors or ("",) * len(answers)
    for (row, answer), own, scored, error in zip(
        answers.items(), scores.logprobs.split(), scores.scored.split(), errors, strict=True
    ):
        if error:
            found[row] = RowFailure(f"the mass of its kept ids is not known, because it could not be scored: {error}")
            continue
        # Rounding may put a mass above 1.
        pairs = zip(own[scored].tolist(), answer.kept_log_mass, strict=True)
        found[row] = replace(answer, kept_log_mass=[min(0.0, whole - part) for whole, part in pairs])
    return found


def kept_of(choice: Mapping[str, Any], ids: Sequence[int]) -> tuple[list[list[int]], Sequence[float]]:
    """Return the ids that each of the first tokens of an answer was drawn from, and the token's log-prob among them.

    Args:
        choice: the choice of a completion, as `as_completion` leaves it.
        ids: the first tokens of the answer.

    Raises:
        RowError: the choice does not have them.
    """
    sets, count = choice.get("sampling_mask"), len(ids)
    if not isinstance(sets, list) or len(sets) < count:
        raise RowError("it does not have the ids that every token was drawn from (sampling_mask)")
    for place, (token, found) in enumerate(zip(ids, sets, strict=False)):
        if not isinstance(found, list) or not {*map(type, found)} <= {int} or token not in found:
            raise RowError(f"the sampling_mask of token {place} lacks the id {token} that was sampled")
        if len({*found}) < len(found):
            raise RowError(f"the sampling_mask of token {place} has an id twice")
    return sets[:count], checked_logprobs(choice["logprobs"]["token_logprobs"][:count], count)

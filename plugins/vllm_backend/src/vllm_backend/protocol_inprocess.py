"""In this process: build vLLM's requests, one for each row, and parse what vLLM returns for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

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
from corelm_engine_kit import RowError, RowStreams, checked_logprobs, prompts_and_limits
from vllm_backend import kept_sets_protocol, versions
from vllm_backend.capabilities import ModelInfo
from vllm_backend.kept_sets_protocol import RowSets, with_sets
from vllm_backend.sampling import (
    REPETITION,
    answer_end,
    check_fields,
    check_raw,
    parameters,
    scored_rows,
    unspelt_stop,
    with_objects,
)
from vllm_backend.top_ids import flat_candidates, of_scores, top_of_answer, wanted, with_top

T = TypeVar("T")

#: What is added to the logit of the id that a scored row ends with, so that vLLM samples it whatever the others are.
_CERTAIN = 1e9


@dataclass(frozen=True)
class VLLMRequest:
    """One row, as the engine takes it.

    Attributes:
        prompt: vLLM's own prompt object with the row's token ids.
        params: vLLM's `SamplingParams`.
        lora: vLLM's `LoRARequest`; None for the base weights.
    """

    prompt: Any
    params: Any
    lora: Any = None


#: What the engine returns for one row. Any is vLLM's `RequestOutput`.
RowOutput = RowFailure | Any


# Generating -----------------------------------------------------------------------------------------------------------


def generation_requests(
    request: GenerateRequest, info: ModelInfo, lora: Any = None, keys: Sequence[str] = ()
) -> list[VLLMRequest | RowFailure]:
    """Return one request for each prompt, with its own seed; a failure where vLLM refuses the parameters.

    Args:
        lora: vLLM's `LoRARequest` for the adapter of the request.
        keys: the names of the rows' sets of kept ids; none if they are not wanted.

    Raises:
        CapabilityError, InvalidRequestError: sampling parameters that vLLM would change silently; see `parameters`.
    """
    sampling = request.sampling
    check_fields("SamplingParams", sampling.engine_kwargs, _sampling_params_class().__struct_fields__)
    requests = []
    for row, (prompt, limit, seed) in enumerate(prompts_and_limits(request, info.max_context)):
        fields = with_objects(parameters(sampling, request.stop_ids, limit, seed))
        requests.append(
            _vllm_request(
                prompt,
                **(fields | kept_sets_protocol.parameters(keys[row], sampling) if keys else fields),
                logprobs=None if request.logprobs == "none" else wanted(request, info.candidates),
                # Decoding takes time, and only stop strings need the text.
                detokenize=bool(fields["stop"]),
                streams=request.on_tokens is not None,
                lora=lora,
            )
        )
    check_raw(request)
    return requests


def generation_result(
    request: GenerateRequest, outputs: Sequence[RowOutput], info: ModelInfo, kept: Sequence[RowSets] = ()
) -> GenerateResult:
    """Return the answers in `outputs`, which belong to `generation_requests`, in the same order.

    Args:
        kept: the sets of kept ids of each row; none if they are not wanted.
    """
    stops = StopStrings.of_rows(request, info.tokenizer)
    runs = [versions.of_no_tokens(request)] * len(outputs)

    def parse(output: Any, row: int) -> RowAnswer:
        answer, completion = _row_answer(output, request, stops[row]), output.outputs[0]
        count = wanted(request, info.candidates)
        candidates = flat_candidates(completion.logprobs, 0, len(answer.ids), count) if count else None
        top = top_of_answer(request, answer.ids, candidates, info.capabilities.vocab_size)
        answer = replace(answer, top=top)
        if kept:
            answer = with_sets(answer, kept[row])
        if info.capabilities.updates_in_flight:
            # Last, because a row that fails has no tokens, and runs of none.
            runs[row] = versions.runs_of(completion.weight_versions, request, len(answer.ids))
        return answer

    rows = [_outcome(output, functools.partial(parse, row=row)) for row, output in enumerate(outputs)]
    result = generate_result(request, rows)
    return replace(result, version_runs=tuple(runs)) if info.capabilities.updates_in_flight else result


def _row_answer(output: Any, request: GenerateRequest, stops: StopStrings) -> RowAnswer:
    completion = output.outputs[0]
    reason = str(completion.finish_reason)
    if reason == "repetition" and request.sampling.engine_kwargs.get(REPETITION):
        reason = "stop"
    if reason not in ("stop", "length", "abort"):
        raise RowError(f"vLLM ended the request for the reason {reason!r}")
    ids = list(completion.token_ids)
    ended = bool(ids) and (ids[-1] in request.stop_ids or stops.occurs_in(ids))
    if reason == "stop" and not ended and not request.sampling.engine_kwargs:
        raise unspelt_stop(completion.stop_reason)
    logprobs = _answer_logprobs(completion, request, 0, len(ids))
    length, reason = answer_end(ids, reason, stops)
    return RowAnswer(ids[:length], logprobs[:length], reason, cached_tokens=output.num_cached_tokens)


def _answer_logprobs(completion: Any, request: GenerateRequest, first: int, end: int) -> Sequence[float]:
    """Return the log-probs of the tokens from number `first` to the one before number `end`."""
    if request.logprobs == "none" or first == end:
        return []
    flat = completion.logprobs
    # Indexing `flat` itself would build a dictionary for every token.
    logprobs = checked_logprobs([flat.logprobs[start] for start in flat.start_indices[first:end]], end - first)
    if request.logprobs == "processed" and request.sampling.greedy:
        # The greedy token has probability 1. vLLM returns its log-prob at temperature 1, which shows whether the logits
        # were finite.
        return [0.0] * len(logprobs)
    return logprobs


def on_output(request: GenerateRequest, tokenizer: Any) -> Callable[[int, Any], None] | None:
    """Return a function that streams what is new in vLLM's outputs; None if nobody reads along.

    It takes the number of a row and an output, which has the row's whole answer so far. A last output that is no valid
    answer is left to `generation_result`, which says why.
    """
    if request.on_tokens is None:
        return None
    streams, stops = RowStreams(request, tokenizer), StopStrings.of_rows(request, tokenizer)

    def tell(row: int, output: Any) -> None:
        completion = output.outputs[0]
        with suppress(RowError):
            if output.finished:
                streams.end(row, _row_answer(output, request, stops[row]))
            else:
                streams.tell(row, completion.token_ids, functools.partial(_answer_logprobs, completion, request))

    return tell


# Scoring --------------------------------------------------------------------------------------------------------------


def scoring_requests(request: ScoreRequest, info: ModelInfo, lora: Any = None) -> dict[int, VLLMRequest | RowFailure]:
    """Return the requests by row number; see `scored_rows`."""
    requests: dict[int, VLLMRequest | RowFailure] = {}
    count = of_scores(request)
    for number, ids, prompt, is_scored in scored_rows(request, info.whole_prompts):
        last: dict[str, Any] = {"logprobs": count, "logit_bias": {ids[-1]: _CERTAIN}}
        requests[number] = _vllm_request(
            prompt,
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=count if is_scored else None,
            detokenize=False,
            lora=lora,
            **({} if info.whole_prompts else last),
        )
    return requests


def scoring_result(request: ScoreRequest, outputs: Mapping[int, RowOutput], info: ModelInfo) -> ScoreResult:
    """Return the scores in `outputs`, which belong to `scoring_requests`, by row number."""
    sequences, starts = request.sequences.tolist(), request.score_from.clamp_min(1).tolist()

    def parse(output: Any, row: int) -> RowScores:
        return _row_scores(output, request, sequences[row], starts[row], info)

    rows = {row: _outcome(output, functools.partial(parse, row=row)) for row, output in outputs.items()}
    return score_result(request, rows)


def _row_scores(output: Any, request: ScoreRequest, ids: list[int], start: int, info: ModelInfo) -> RowScores:
    """Return the scores of a row from `start` on."""
    completion, prompt, count = output.outputs[0], output.prompt_logprobs, of_scores(request)
    if completion.finish_reason not in ("stop", "length"):
        raise RowError(f"vLLM ended the request for the reason {completion.finish_reason!r}")
    end = len(ids) if info.whole_prompts else len(ids) - 1
    # vLLM's log-probs, and which of their positions are asked for.
    parts = []
    if start < end:
        if prompt is None or len(prompt.start_indices) != end:
            raise RowError(f"vLLM did not return log-probs for each of the {end} tokens of the prompt")
        parts.append((prompt, start, end))
    if end < len(ids):
        if list(completion.token_ids) != ids[end:] or completion.logprobs is None:
            raise RowError(f"vLLM did not return the log-prob of id {ids[-1]}, which it had to sample (logit_bias)")
        parts.append((completion.logprobs, 0, 1))
    found = [flat.logprobs[place] for flat, first, stop in parts for place in flat.start_indices[first:stop]]
    logprobs = checked_logprobs(found, len(ids) - start)
    candidates = [flat_candidates(*part, count) for part in parts] if count else []
    return with_top(logprobs, ids[start:], candidates, request, info.capabilities.vocab_size)


# Both -----------------------------------------------------------------------------------------------------------------


def _outcome(output: RowOutput, parse: Callable[[Any], T]) -> T | RowFailure:
    """Return what `parse` makes of vLLM's output for a row, or why the row has no answer."""
    if isinstance(output, RowFailure):
        return output
    try:
        return parse(output)
    except RowError as error:
        return RowFailure(str(error))


def _vllm_request(
    ids: list[int], *, streams: bool = False, lora: Any = None, **values: Any
) -> VLLMRequest | RowFailure:
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    kind = _sampling_params_class()
    output_kind = RequestOutputKind.CUMULATIVE if streams else RequestOutputKind.FINAL_ONLY
    try:
        # The parameters belong to this request alone, so vLLM need not copy them deeply.
        params = kind(**values, flat_logprobs=True, output_kind=output_kind, skip_clone=True)
    except refusals() as error:
        return RowFailure(str(error))
    return VLLMRequest(tokens_input(ids), params, lora)


@functools.cache
def refusals() -> tuple[type[Exception], ...]:
    """Return the exceptions with which vLLM refuses one request and goes on with the others."""
    from vllm.exceptions import GracefulHTTPError, VLLMClientError

    return VLLMClientError, GracefulHTTPError


@functools.cache
def _sampling_params_class() -> Any:
    """Return the class of vLLM's `SamplingParams` to use."""
    from vllm import SamplingParams

    class ExactSamplingParams(SamplingParams):
        """Keeps vLLM from adding its own EOS to the ids that `min_tokens` forbids: core has resolved the stop ids."""

        def update_from_generation_config(self, *args: Any, **kwargs: Any) -> None:
            pass

    return ExactSamplingParams

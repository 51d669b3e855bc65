"""In this process: build vLLM's requests, one for each row, and parse what vLLM returns for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy

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
from corelm_engine_kit import RowError, RowStreams, checked_argmax, checked_logprobs
from vllm_backend import engine_kwargs, kept_sets_protocol, versions
from vllm_backend.capabilities import ModelInfo
from vllm_backend.compat import refusals
from vllm_backend.kept_sets_protocol import KeptSetsOfRow
from vllm_backend.sampling import REPETITION, answer_end, check_raw, parameters, unspelt_stop
from vllm_backend.top_ids import flat_candidates, top_ids, top_of_answer, wanted

T = TypeVar("T")


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


#: What to say of a row as long as the context, whose most probable ids are asked for.
NO_ROOM = (
    "vLLM keeps one position of the context for a sampled token, so it cannot return the most probable ids of a row of "
    "{} tokens; leave out its first token, or top_k"
)

#: What the engine returns for one row. Any is vLLM's `RequestOutput`.
RowOutput = RowFailure | Any


# Generating -----------------------------------------------------------------------------------------------------------


def generation_requests(
    request: GenerateRequest, info: ModelInfo, lora: Any = None, keys: Sequence[str] = ()
) -> list[VLLMRequest | RowFailure]:
    """Return one request for each prompt, with its own seed; a failure where vLLM refuses the parameters.

    Args:
        request: the request.
        info: what is known about the model.
        lora: vLLM's `LoRARequest` for the adapter of the request.
        keys: the names of the rows' sets of kept ids; none if they are not wanted.

    Raises:
        CapabilityError, InvalidRequestError: sampling parameters that vLLM would change silently; see `parameters`.
    """
    sampling = request.sampling
    engine_kwargs.check_names(sampling.engine_kwargs, _sampling_params_class().__struct_fields__)
    seeds = [None] * len(request.prompts) if request.seeds is None else request.seeds.tolist()
    requests = []
    for row, (prompt, seed) in enumerate(zip(request.prompts.tolist(), seeds, strict=True)):
        limit = info.max_context - len(prompt) if sampling.max_new_tokens is None else sampling.max_new_tokens
        fields = engine_kwargs.with_objects(parameters(sampling, request.stop_ids, limit, seed))
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
    request: GenerateRequest, outputs: Sequence[RowOutput], info: ModelInfo, kept: Sequence[KeptSetsOfRow] = ()
) -> GenerateResult:
    """Return the answers in `outputs`, which belong to `generation_requests`, in the same order.

    Args:
        request: the request.
        outputs: what vLLM returned.
        info: what is known about the model.
        kept: the sets of kept ids of each row; none if they are not wanted.
    """
    stops = StopStrings.of_rows(request, info.tokenizer)
    runs = [versions.of_no_tokens(request)] * len(outputs)

    def parse(output: Any, row: int) -> RowAnswer:
        answer, completion = _row_answer(output, request, stops[row]), output.outputs[0]
        count = wanted(request, info.candidates)
        candidates = flat_candidates(completion.logprobs, 0, len(answer.ids), count) if count else None
        top = top_of_answer(request, answer.ids, candidates, info.capabilities.vocab_size)
        sets = kept[row].first(len(answer.ids)) if kept else KeptSetsOfRow([], [])
        if info.capabilities.updates_in_flight:
            # Last, because a row that fails has no tokens, and runs of none.
            runs[row] = versions.runs_of(completion.weight_versions, request, len(answer.ids))
        return replace(answer, top=top, kept_ids=sets.ids, kept_log_mass=sets.log_mass)

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
    """Return a function that streams what is new in vLLM's outputs, or counts the last ones; None if neither is wanted.

    It takes the number of a row and an output, which has the row's whole answer so far. A last output that is no valid
    answer is left to `generation_result`, which says why.
    """
    if request.on_tokens is None:
        return _counting(request.on_answer)
    streams, stops = RowStreams(request, tokenizer), StopStrings.of_rows(request, tokenizer)

    def tell(row: int, output: Any) -> None:
        completion = output.outputs[0]
        with suppress(RowError):
            if output.finished:
                streams.end(row, _row_answer(output, request, stops[row]))
            else:
                streams.tell(row, completion.token_ids, functools.partial(_answer_logprobs, completion, request))

    return tell


def _counting(on_answer: Callable[[int, int], None] | None) -> Callable[[int, Any], None] | None:
    if on_answer is None:
        return None

    def count(row: int, output: Any) -> None:
        if output.finished:
            on_answer(row, len(output.outputs[0].token_ids))

    return count


# Scoring --------------------------------------------------------------------------------------------------------------


def scoring_requests(request: ScoreRequest, info: ModelInfo, lora: Any = None) -> dict[int, VLLMRequest | RowFailure]:
    """Return the requests by row number, without the rows of which nothing is asked.

    vLLM keeps one position of the context for a sampled token, but a row may be as long as the context. So the prompt
    is all ids except the last one, whose log-prob is asked for by id at the sampled position. If only that one is
    asked for, no prompt log-probs are needed and vLLM may use its prefix cache.

    The most probable ids come with the prompt log-probs. At the sampled position it is the sampled token, which is
    greedy.

    Where `scores_by_id` is set, the prompt's log-probs are asked for by id, too, from the first position on that is
    asked for. The most probable ids are not known in advance, so they come in the plain way.

    With speculative decoding vLLM ignores the id that is asked for at the sampled position. The prompt is all ids then,
    and `read_model` declares a context that is one shorter. At the sampled position vLLM returns the most probable ids
    or those that were asked for, but not both: the prompt is all ids, too, if more than one most probable id is wanted.
    """
    requests: dict[int, VLLMRequest | RowFailure] = {}
    starts = request.score_from.clamp_min(1).tolist()
    for number, (ids, start) in enumerate(zip(request.sequences.tolist(), starts, strict=True)):
        if start < len(ids):
            whole = _is_whole(request, info)
            if whole and not info.speculative and len(ids) == info.max_context:
                requests[number] = RowFailure(NO_ROOM.format(len(ids)))
                continue
            prompt = ids if whole else ids[:-1]
            requests[number] = _vllm_request(
                prompt,
                max_tokens=1,
                temperature=0.0,
                **_of_prompt(prompt, start, request, info),
                logprob_token_ids=None if whole else ids[-1:],
                detokenize=False,
                lora=lora,
            )
    return requests


def _of_prompt(prompt: list[int], start: int, request: ScoreRequest, info: ModelInfo) -> dict[str, Any]:
    """Return the parameters that ask for the log-probs of a prompt from `start` on."""
    if start >= len(prompt):
        return {}
    if not _is_by_id(request, info):
        return {"prompt_logprobs": request.top_k or int(request.return_argmax)}
    # Row i of the array names the ids to score at position prompt_logprob_start + i + 1: here one, the prompt's own.
    ids = numpy.array(prompt[start:], dtype=numpy.int32)[:, None]
    return {"prompt_logprob_token_ids": ids, "prompt_logprob_start": start - 1}


def _is_by_id(request: ScoreRequest, info: ModelInfo) -> bool:
    return info.scores_by_id and not request.return_argmax and not request.top_k


def _is_whole(request: ScoreRequest, info: ModelInfo) -> bool:
    """Return whether the prompt of a scored row is the whole row."""
    return info.speculative or request.top_k > 0


def scoring_result(request: ScoreRequest, outputs: Mapping[int, RowOutput], info: ModelInfo) -> ScoreResult:
    """Return the scores in `outputs`, which belong to `scoring_requests`, by row number."""
    sequences, starts = request.sequences.tolist(), request.score_from.clamp_min(1).tolist()

    def outcome(number: int, output: RowOutput) -> RowScores | RowFailure:
        ids, sampled = sequences[number], None if _is_whole(request, info) else sequences[number][-1]
        if request.top_k:
            return _outcome(output, lambda found: _row_top(found, request, starts[number], len(ids), info))
        by_id = None
        if _is_by_id(request, info):
            by_id = len(ids) - starts[number] - (sampled is not None)
        return _outcome(output, lambda found: _row_scores(found, request.return_argmax, sampled, by_id))

    return score_result(request, {number: outcome(number, output) for number, output in outputs.items()})


def _row_scores(output: Any, with_argmax: bool, asked: int | None, by_id: int | None = None) -> RowScores:
    """Return the scores of the row's last ids: of all but the first one, or of the very last one.

    Args:
        output: vLLM's output for the row.
        with_argmax: return the most probable ids, too.
        asked: the id whose log-prob was asked for at the sampled position; None if the prompt is the whole row.
        by_id: for how many positions of the prompt log-probs were asked for by id; None for all, in the plain way.
    """
    completion = output.outputs[0]
    if completion.finish_reason not in ("stop", "length"):
        raise RowError(f"vLLM ended the request for the reason {completion.finish_reason!r}")
    prompt = output.prompt_logprobs
    found = [] if prompt is None else [prompt.logprobs[start] for start in prompt.start_indices[1:]]
    if by_id:
        scores = output.prompt_token_id_logprobs
        if scores is None or scores.shape != (by_id, 1):
            raise RowError(f"vLLM did not return the log-probs of {by_id} ids of the prompt (prompt_logprob_token_ids)")
        found = scores[:, 0].tolist()
    last = completion.logprobs
    if asked is not None:
        # The first candidate is the sampled token, the second is the id that was asked for.
        if last is None or list(last.token_ids[1:2]) != [asked]:
            raise RowError(f"vLLM did not return the log-prob of id {asked}, which was asked for (logprob_token_ids)")
        found.append(last.logprobs[1])
    logprobs = checked_logprobs(found, len(found))
    if not with_argmax:
        return RowScores(logprobs)
    argmax: list[int] = []
    of_argmax: list[float] = []
    ids: list[int] = []
    if asked is not None:
        argmax, of_argmax, ids = [last.token_ids[0]], [last.logprobs[0]], [asked]
    if prompt is not None:
        starts, ends = prompt.start_indices[1:], prompt.end_indices[1:]
        # The first candidate is the prompt's own id, the second is the most probable one.
        if any(end - start != 2 for start, end in zip(starts, ends, strict=True)):
            raise RowError("vLLM did not return the most probable ids; leave out return_argmax=True")
        argmax = [prompt.token_ids[start + 1] for start in starts] + argmax
        of_argmax = [prompt.logprobs[start + 1] for start in starts] + of_argmax
        ids = [prompt.token_ids[start] for start in starts] + ids
    return RowScores(logprobs, checked_argmax(argmax, of_argmax, ids, logprobs))


def _row_top(output: Any, request: ScoreRequest, start: int, end: int, info: ModelInfo) -> RowScores:
    """Return the scores of a row from `start` on, with the most probable ids. Its prompt is the whole row."""
    completion, prompt, k = output.outputs[0], output.prompt_logprobs, request.top_k
    if completion.finish_reason not in ("stop", "length"):
        raise RowError(f"vLLM ended the request for the reason {completion.finish_reason!r}")
    if prompt is None or len(prompt.start_indices) != end:
        raise RowError(f"vLLM did not return log-probs for each of the {end} tokens of the prompt")
    logprobs = checked_logprobs([prompt.logprobs[place] for place in prompt.start_indices[start:]], end - start)
    top = top_ids(*flat_candidates(prompt, start, end, k), k, info.capabilities.vocab_size)
    return RowScores(logprobs, top.ids[:, 0].tolist() if request.return_argmax else (), top)


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
def _sampling_params_class() -> Any:
    """Return the class of vLLM's `SamplingParams` to use."""
    from vllm import SamplingParams

    class ExactSamplingParams(SamplingParams):
        """Keeps vLLM from adding its own EOS to the ids that `min_tokens` forbids: core has resolved the stop ids."""

        def update_from_generation_config(self, *args: Any, **kwargs: Any) -> None:
            pass

    return ExactSamplingParams

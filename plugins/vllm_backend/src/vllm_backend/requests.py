"""From a request to vLLM's own, one a row, and from what vLLM answers to the result."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from corelm.errors import InvalidRequestError
from corelm.spec import GenerateRequest, GenerateResult, Ragged, ScoreRequest, ScoreResult
from vllm_backend.outcomes import Unserved, generation_batch
from vllm_backend.sampling import parameters


@dataclass(frozen=True)
class Row:
    """One request to the engine: vLLM's prompt and its `SamplingParams`."""

    prompt: Any
    params: Any


#: What becomes of a row; Any is vLLM's `RequestOutput`.
Outcome = Unserved | Any

ABORTED = Unserved("aborted before it began", aborted=True)


# Generating -----------------------------------------------------------------------------------------------------------


def generation_rows(request: GenerateRequest, max_context: int) -> list[Row | Unserved]:
    """One row per prompt, each with a seed of its own.

    Raises:
        CapabilityError, InvalidRequestError: sampling parameters that vLLM would take and change; see `parameters`.
    """
    sampling = request.sampling
    _known(sampling.engine_kwargs)
    seeds = [None] * len(request.prompts) if request.seeds is None else request.seeds.tolist()
    rows = []
    for prompt, seed in zip(request.prompts.tolist(), seeds, strict=True):
        limit = sampling.max_new_tokens
        rows.append(
            _row(
                prompt,
                **parameters(sampling, request.stop_ids, max_context - len(prompt) if limit is None else limit, seed),
                logprobs=None if request.logprobs == "none" else 0,
                # Text costs time, and is needed only to find a stop string in.
                detokenize=bool(sampling.stop),
            )
        )
    return rows


def answers(request: GenerateRequest, outcomes: Sequence[Outcome]) -> GenerateResult:
    sampling = request.sampling
    processed = request.logprobs == "processed"
    ids: list[list[int]] = []
    logprobs: list[list[float]] = []
    reasons, errors = [], []
    for outcome in outcomes:
        error, reason = _verdict(outcome)
        found = [] if isinstance(outcome, Unserved) or error else list(outcome.outputs[0].token_ids)
        ids.append(found)
        reasons.append(reason)
        errors.append("" if reason == "abort" else error)
        if request.logprobs != "none" and found:
            # A token drawn at temperature 0 is certain; vLLM would give its log-prob at temperature 1.
            certain = processed and sampling.greedy
            logprobs.append([0.0] * len(found) if certain else _sampled(outcome, len(found)))
        else:
            logprobs.append([])
    return generation_batch(request, ids, logprobs, reasons, errors)


def _sampled(outcome: Any, count: int) -> list[float]:
    flat = outcome.outputs[0].logprobs
    # Indexing the object itself would build a dictionary for every token.
    return [flat.logprobs[start] for start in flat.start_indices[:count]]


# Scoring --------------------------------------------------------------------------------------------------------------


def scoring_rows(request: ScoreRequest) -> dict[int, Row | Unserved]:
    """By row number, leaving out those of which nothing is asked.

    vLLM keeps a position of the context for an answer, but a row may be as long as the context. So all ids but the last
    are the prompt, and the last is asked for by name among the candidates for the token that follows. A row of which
    only that is wanted needs no prompt log-probs, and may use the prefix cache.
    """
    rows = {}
    for number, (ids, start) in enumerate(
        zip(request.sequences.tolist(), request.score_from.clamp_min(1).tolist(), strict=True)
    ):
        if start < len(ids):
            rows[number] = _row(
                ids[:-1],
                max_tokens=1,
                temperature=0.0,
                prompt_logprobs=0 if start < len(ids) - 1 else None,
                logprob_token_ids=ids[-1:],
                detokenize=False,
            )
    return rows


def scores(request: ScoreRequest, outcomes: Mapping[int, Outcome]) -> ScoreResult:
    sequences = request.sequences
    starts = request.score_from.clamp_min(1).cpu()
    values = torch.zeros(sequences.values.shape[0])
    scored = sequences.positions >= starts[sequences.row_index]
    errors = [""] * len(sequences)
    for number, outcome in outcomes.items():
        start, end = sequences.offsets[number : number + 2].tolist()
        error, reason = _verdict(outcome)
        errors[number] = error or ("aborted" if reason == "abort" else "")
        if errors[number]:
            scored[start:end] = False
        else:
            first = start + int(starts[number])
            values[first:end] = torch.tensor(_last(outcome, end - first))
    device = request.device or sequences.values.device
    return ScoreResult(
        logprobs=Ragged(values, sequences.lengths).to(device),
        scored=Ragged(scored, sequences.lengths).to(device),
        errors=tuple(errors) if any(errors) else None,
    )


def _last(outcome: Any, count: int) -> list[float]:
    """The log-probs of the last `count` ids of a row."""
    prompt, after = outcome.prompt_logprobs, outcome.outputs[0].logprobs
    before = [] if prompt is None else [prompt.logprobs[start] for start in prompt.start_indices[1:]]
    # The first candidate is the token that was sampled, the second the one that was asked for.
    return [*before, after.logprobs[1]][-count:]


# Both -----------------------------------------------------------------------------------------------------------------


def _verdict(outcome: Outcome) -> tuple[str, str]:
    """Why a row was not served, or "", and its finish reason."""
    if isinstance(outcome, Unserved):
        return outcome.why, "abort" if outcome.aborted else "error"
    reason = str(outcome.outputs[0].finish_reason)
    if reason == "error":
        return "vLLM ended it with an error of its own", reason
    # "repetition" is an ending that engine_kwargs asked for.
    return "", reason if reason in ("stop", "length", "abort") else "stop"


def _row(ids: list[int], **values: Any) -> Row | Unserved:
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    kind, refused = _vllm_params()
    try:
        # Nobody else holds these parameters, so vLLM need not copy them deeply.
        params = kind(**values, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY, skip_clone=True)
    except refused as error:
        return Unserved(str(error))
    return Row(tokens_input(ids), params)


@functools.cache
def _vllm_params() -> tuple[Any, type[Exception]]:
    """vLLM's `SamplingParams` as used here, and what it raises for a value that it does not take."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMClientError

    class Exactly(SamplingParams):
        """Core has settled which ids end an answer. vLLM would add its own EOS to those that `min_tokens` forbids."""

        def update_from_generation_config(self, *args: Any, **kwargs: Any) -> None:
            pass

    return Exactly, VLLMClientError


def _known(names: Collection[str]) -> None:
    known = [name for name in _vllm_params()[0].__struct_fields__ if not name.startswith("_")]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidRequestError(
                f"engine_kwargs: {name!r} is no field of vLLM's SamplingParams{hint}", field="engine_kwargs"
            )

"""What the engine is asked to run for a request, and how the result is made of what it returned."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from corelm.errors import CapabilityError, refuse
from corelm.spec import (
    GenerateRequest,
    GenerateResult,
    Provenance,
    Ragged,
    RowFailure,
    ScoreRequest,
    TokenSets,
    TopIds,
    generate_result,
)
from corelm_engine_kit.ending import answer_limits
from corelm_engine_kit.sampling import NOT_NUMBERS
from transformers_backend.batches import Grouping, groups_of, micro_batches, rows_of_one_encoding
from transformers_backend.engine import CausalLM
from transformers_backend.memory import DecodingLimits


@dataclass(frozen=True, eq=False)
class PromptBatch:
    """Prompts to decode together.

    Attributes:
        rows: int64[n], their row numbers in the request.
        prompts: their ids.
        limits: int64[n], the longest answer each may get.
        seeds: int64[n], one for each answer.
    """

    rows: Tensor
    prompts: Ragged
    limits: Tensor
    seeds: Tensor

    def select(self, rows: Tensor) -> PromptBatch:
        """Return the prompts with these numbers, int64[k]."""
        return PromptBatch(self.rows[rows], self.prompts.select(rows), self.limits[rows], self.seeds[rows])


@dataclass(frozen=True, eq=False)
class SampledAnswers:
    """The answers to a `PromptBatch`.

    Attributes:
        ids: the sampled ids of each answer.
        logprobs: float32, as long as `ids`.
        stopped: bool[n]; False for an answer that reached its length limit.
        aborted: bool[n]; True for an answer that was aborted.
        raw: float32 ``[total, 2]``, as long as `ids`: the model's own log-probs of the ids that `trials.with_others`
            makes of them, whatever `logprobs` are; None if they were not kept.
        kept_ids: as long as `ids`: what truncation left; None unless requested.
        kept_log_mass: float32, as long as `ids`; None unless requested.
        top: the most probable ids, one position for each of `ids`, row after row; None unless requested.
    """

    ids: Ragged
    logprobs: Ragged
    stopped: Tensor
    aborted: Tensor
    raw: Ragged | None = None
    kept_ids: TokenSets | None = None
    kept_log_mass: Ragged | None = None
    top: TopIds | None = None


def no_answers(request: GenerateRequest, count: int) -> SampledAnswers:
    """Return the answers of prompts of a request that were aborted before they were begun."""
    nothing = torch.zeros(count, dtype=torch.int64)
    aborted = torch.ones(count, dtype=torch.bool)
    ids, numbers = Ragged.full(nothing, 0, torch.int64), Ragged.full(nothing, 0.0, torch.float32)
    return SampledAnswers(
        ids,
        numbers,
        ~aborted,
        aborted,
        kept_ids=TokenSets.empty(nothing) if request.return_support else None,
        kept_log_mass=numbers if request.return_support else None,
        top=TopIds.nothing(0, request.top_logprobs) if request.top_logprobs else None,
    )


def aborted_result(request: GenerateRequest) -> GenerateResult:
    """Return the result of a request whose rows were all aborted before they were begun."""
    return generate_result(request, [RowFailure("aborted", aborted=True)] * len(request.prompts))


def generation_prompts(request: GenerateRequest, engine: CausalLM) -> PromptBatch:
    """Return all prompts of a request, with their limits and seeds.

    Raises:
        CapabilityError: there are `engine_kwargs`.
        InvalidRequestError: `max_new_tokens` is None and the model states no context to fill, or an answer might cross
            the length at which the model changes its position encoding.
    """
    sampling, prompts = request.sampling, request.prompts
    if sampling.engine_kwargs:
        raise CapabilityError(
            "engine_kwargs go to the generate method of transformers, which this backend uses for beam search only; "
            "drop them or give num_beams",
            capability="engine_kwargs",
        )
    limits = answer_limits(request, engine.max_context)
    _refuse_crossing(prompts.lengths, limits, engine.rope_switch)
    # Without seeds the answers follow torch's global generator, like any other sampling in torch.
    seeds = torch.randint(2**63 - 1, (len(prompts),)) if request.seeds is None else request.seeds.cpu()
    return PromptBatch(torch.arange(len(prompts)), prompts, limits, seeds)


def batches_of(
    prompts: PromptBatch, grouping: Grouping, engine: CausalLM, limits: DecodingLimits, expected: int | None = None
) -> Iterator[PromptBatch]:
    """Yield the prompts in as few batches as `grouping` and `limits` allow.

    Args:
        prompts: the prompts.
        grouping: which of them may share a batch.
        engine: drives the model.
        limits: how many tokens of prompts and answers may be in a batch.
        expected: how many tokens an answer counts at most; None for its limit.
    """
    lengths = prompts.prompts.lengths
    answers = prompts.limits if expected is None else prompts.limits.clamp_max(expected)
    for side in rows_of_one_encoding(lengths, engine.rope_switch):
        for group in groups_of(lengths[side], grouping):
            some = side[group]
            for part in micro_batches((lengths + answers + limits.row_tokens)[some], limits.tokens):
                yield prompts.select(some[part])


def _refuse_crossing(lengths: Tensor, limits: Tensor, rope_switch: int | None) -> None:
    """Refuse prompts below `rope_switch` whose answers may end above it."""
    if rope_switch is None:
        return
    # The model never reads the last token of an answer.
    crossing = ((lengths <= rope_switch) & (lengths + limits - 1 > rope_switch)).nonzero()[:, 0].tolist()
    problem = (
        f"its prompt is within {rope_switch} tokens and its answer may go beyond; there the model changes how it "
        "encodes all positions, so ask for a shorter answer"
    )
    refuse(dict.fromkeys(crossing, problem), "max_new_tokens")


def generation_result(
    request: GenerateRequest, answers: Sequence[tuple[PromptBatch, SampledAnswers]]
) -> GenerateResult:
    """Return the answers of all batches in the order of the prompts, and an error for each whose logits were NaN."""
    order = torch.cat([batch.rows for batch, _ in answers]).argsort()
    found = [each for _, each in answers]
    device = request.prompts.values.device
    logprobs = Ragged.cat([each.logprobs for each in found]).select(order)
    result = GenerateResult(
        ids=Ragged.cat([each.ids for each in found]).select(order).to(device),
        logprobs=None if request.logprobs == "none" else logprobs.to(device),
        finish_reasons=tuple(
            "abort" if aborted else "stop" if stopped else "length"
            for aborted, stopped in zip(
                torch.cat([each.aborted for each in found])[order].tolist(),
                torch.cat([each.stopped for each in found])[order].tolist(),
                strict=True,
            )
        ),
        **_kept(request, found, order),
        **_top(request, found, order),
        **Provenance.label(request.logprobs, request.sampling),
    )
    odd = logprobs.values.isnan()
    return without_answers(result, set(logprobs.row_index[odd].tolist())) if bool(odd.any()) else result


def without_answers(result: GenerateResult, rows: Collection[int]) -> GenerateResult:
    """Return the result with the error `NOT_NUMBERS` in place of the answers of these rows."""
    failed = [row in rows for row in range(len(result.ids))]
    stop = result.ids.lengths * ~torch.tensor(failed)
    names = ("ids", "logprobs", "kept_ids", "kept_log_mass", "top_ids", "top_logprobs", "tail_log_mass")
    columns = {name: getattr(result, name) for name in names}
    return replace(
        result,
        **{name: each.slice(torch.zeros_like(stop), stop) for name, each in columns.items() if each is not None},
        finish_reasons=tuple("error" if bad else why for bad, why in zip(failed, result.finish_reasons, strict=True)),
        errors=tuple(NOT_NUMBERS if bad else "" for bad in failed),
    )


def _kept(request: GenerateRequest, found: Sequence[SampledAnswers], order: Tensor) -> dict[str, Any]:
    """Return the fields of a `GenerateResult` about the ids that truncation left; none unless requested."""
    if not request.return_support:
        return {}
    device = request.prompts.values.device
    sets = [each.kept_ids for each in found if each.kept_ids is not None]
    masses = [each.kept_log_mass for each in found if each.kept_log_mass is not None]
    return {
        "kept_ids": TokenSets.cat(sets).select(order).to(device),
        "kept_log_mass": Ragged.cat(masses).select(order).to(device),
    }


def _top(request: GenerateRequest, found: Sequence[SampledAnswers], order: Tensor) -> dict[str, Any]:
    """Return the fields of a `GenerateResult` about the most probable ids; none unless requested."""
    if not request.top_logprobs:
        return {}
    top = TopIds.cat([each.top for each in found if each.top is not None], request.top_logprobs)
    lengths = torch.cat([each.ids.lengths for each in found])
    columns = {"top_ids": top.ids, "top_logprobs": top.logprobs, "tail_log_mass": top.tail}
    device = request.prompts.values.device
    return {name: Ragged(values, lengths).select(order).to(device) for name, values in columns.items()}


@dataclass(frozen=True, eq=False)
class SequenceBatch:
    """Sequences to score. The last token of a sequence is only predicted, never read.

    Sequence ``[5, 6, 7]``, scored from position 2, as the first of a request::

        rows     [0]
        inputs   [5, 6]
        targets  [6, 7]
        wanted   [False, True]
        index    [1, 2]

    Attributes:
        rows: int64[n], their row numbers in the request.
        inputs: the ids that the model reads.
        targets: int64[total], the id that follows each of them.
        wanted: bool[total], whether the log-prob of that id is wanted.
        index: int64[total], where that id stands in ``request.sequences.values``.
    """

    rows: Tensor
    inputs: Ragged
    targets: Tensor
    wanted: Tensor
    index: Tensor

    def wanted_of(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return which positions of these rows are wanted, bool[n], and the target and index of each that is."""
        positions = self.inputs.with_values(torch.arange(len(self.targets))).select(rows).values
        wanted = self.wanted[positions]
        picked = positions[wanted]
        return wanted, self.targets[picked], self.index[picked]


def scoring_requests(request: ScoreRequest, scored: Ragged, rope_switch: int | None) -> Iterator[SequenceBatch]:
    """Yield the sequences that have a position to score, in batches whose positions the model encodes alike.

    Args:
        scored: `scored_positions` of the request.
    """
    sequences = request.sequences.to("cpu")
    numbers = sequences.row_index[scored.values].unique()
    lengths = sequences.lengths[numbers] - 1
    for side in rows_of_one_encoding(lengths, rope_switch) if len(numbers) else ():
        rows = Ragged.full(lengths[side], 0, torch.int64)
        read = sequences.offsets[numbers[side]][rows.row_index] + rows.positions
        index = read + 1
        yield SequenceBatch(
            rows=numbers[side],
            inputs=rows.with_values(sequences.values[read]),
            targets=sequences.values[index],
            wanted=scored.values[index],
            index=index,
        )

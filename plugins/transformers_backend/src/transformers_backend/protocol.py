"""What the engine is asked to run for a request, and which rows of it share a forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from corelm.errors import CapabilityError, refuse
from corelm.spec import GenerateRequest, Ragged, ScoreRequest
from corelm_engine_kit.answers import answer_seeds
from corelm_engine_kit.ending import answer_limits
from transformers_backend.engine import CausalLM
from transformers_backend.memory import DecodingLimits

#: Which rows may share a forward pass: rows of any length, with padding; rows of the same length; or none.
Grouping = Literal["padded", "equal", "alone"]


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
    if engine.rope_switch is not None:
        # The model never reads the last token of an answer.
        crossing = (prompts.lengths <= engine.rope_switch) & (prompts.lengths + limits - 1 > engine.rope_switch)
        problem = (
            f"its prompt is within {engine.rope_switch} tokens and its answer may go beyond; there the model changes "
            "how it encodes all positions, so ask for a shorter answer"
        )
        refuse(dict.fromkeys(crossing.nonzero()[:, 0].tolist(), problem), "max_new_tokens")
    return PromptBatch(torch.arange(len(prompts)), prompts, limits, answer_seeds(request))


def batches_of(
    prompts: PromptBatch, grouping: Grouping, engine: CausalLM, limits: DecodingLimits, expected: int | None = None
) -> Iterator[PromptBatch]:
    """Yield the prompts in as few batches as `grouping` and `limits` allow.

    Args:
        prompts, grouping, engine: which prompts, and which of them may share a batch.
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
    """Yield the sequences that have a position to score, in batches whose positions the model encodes alike."""
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


# Which rows share a forward pass ------------------------------------------------------------------------------------


def micro_batches(lengths: Tensor, max_tokens: int) -> Iterator[Tensor]:
    """Yield the row numbers, int64[n], that share a forward pass: similar lengths together, longest first.

    Padding counts towards `max_tokens`. Lengths ``[2, 9, 3, 9]`` with 18 tokens give ``[1, 3]`` and ``[2, 0]``. A row
    longer than `max_tokens` goes alone.
    """
    order = lengths.argsort(descending=True, stable=True)
    while len(order):
        # The longest rows come first, so that a batch that does not fit into memory fails immediately.
        rows = max(1, max_tokens // max(1, int(lengths[order[0]])))
        yield order[:rows]
        order = order[rows:]


def rows_of_one_encoding(lengths: Tensor, rope_switch: int | None) -> Iterator[Tensor]:
    """Yield the numbers of the rows, int64[n], that may share a forward pass and be encoded as each alone would be."""
    if rope_switch is None:
        yield torch.arange(len(lengths))
        return
    for side in (lengths <= rope_switch, lengths > rope_switch):
        if bool(side.any()):
            yield side.nonzero()[:, 0]


def groups_of(lengths: Tensor, grouping: Grouping) -> Iterator[Tensor]:
    """Yield the row numbers, int64[n], that may share a forward pass, longest first."""
    if grouping == "padded":
        yield torch.arange(len(lengths))
        return
    order = lengths.argsort(descending=True, stable=True)
    if grouping == "alone":
        yield from order.split(1)
        return
    _, counts = lengths[order].unique_consecutive(return_counts=True)
    yield from order.split(counts.tolist())

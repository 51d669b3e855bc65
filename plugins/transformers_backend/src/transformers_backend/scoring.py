"""`Scorer`: the log-probability of given tokens, from the model's own forward on padded rows."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from corelm.errors import level_of_caller
from corelm.spec import Ragged, ScoreRequest, ScoreResult
from corelm.validate import invalid
from corelm_engine_kit.loop import Aborted, Call
from corelm_engine_kit.token_scores import (
    ScoredTokens,
    TokenQuery,
    TokenScores,
    scored_positions,
    scores_of_logits,
    scoring_result,
)
from corelm_engine_kit.transfer import to_device
from transformers_backend.engine import CausalLM, runs_layers_again
from transformers_backend.protocol import SequenceBatch, groups_of, micro_batches, scoring_requests
from transformers_backend.self_test import TAIL, OwnRow, SelfTest

_log = logging.getLogger(__name__)

#: How log-probs are made of the model's last hidden states: see `transformers_backend.fast.head`. The plain way is
#: "whole": the model's own forward makes all logits of a batch.
HeadPath = Literal["tiled", "sliced", "whole"]
#: How rows share a forward pass, fastest first: one after another (see `transformers_backend.fast.scoring`), attending
#: many at once or each by itself; padded to the longest; with rows of the same length only; or not at all.
RowLayout = Literal["fused", "packed", "padded", "equal", "alone"]

#: The layouts without padding.
PACKED: tuple[RowLayout, ...] = ("fused", "packed")

#: The layouts of the plain backend.
PLAIN_LAYOUTS: tuple[RowLayout, ...] = ("padded", "equal", "alone")

#: What the warning says is done in the slower ones.
_SLOWER: dict[RowLayout, str] = {
    "equal": "only rows of the same length are scored together",
    "alone": "each row is scored by itself",
}
#: On a CPU a forward pass over more tokens takes more memory and saves no time.
_CPU_TOKENS = 4096
#: Number of float32 logits that a softmax sees at a time: 128 MiB.
_SLICE_ELEMENTS = 2**25
_DROPOUT = (
    "the model is in train mode and has dropout, so scores with gradients are those of a model with parts left out at "
    "random, and differ from those of sampling; call model.eval(), which keeps gradients, or set the dropout to 0"
)
#: Rows of fewer tokens show little of how they were read.
_ENOUGH = 8


@dataclass(frozen=True)
class ScoringPath:
    """How a call was computed.

    Attributes:
        head: how the logits were made.
        layout: how rows were laid out for the model's body.
        shared: number of positions that were not read because another row starts with the same ids.
    """

    head: HeadPath
    layout: RowLayout
    shared: int


@dataclass(frozen=True, eq=False)
class ReadBatch:
    """Rows that are read together, padded on the right unless they are `PackedRows`.

    Attributes:
        rows: int64[k], their numbers.
        index: for every position of each of them, its slot in the flat result.
        columns: the width of the forward pass.
        shared: number of positions that are not read because another row has read them.
    """

    rows: Tensor
    index: Ragged
    columns: int
    shared: int = 0


def padded_batch(lengths: Tensor, rows: Tensor) -> ReadBatch:
    """Return rows padded on the right to the longest of them. Position t of row r is in slot ``r * width + t``.

    Args:
        lengths: int64[all], of all rows.
        rows: int64[n], the numbers of these.
    """
    own = lengths[rows]
    index, columns = Ragged.full(own, 0, torch.int64), int(own.max())
    return ReadBatch(rows, index.with_values(index.row_index * columns + index.positions), columns)


class Scorer:
    """Scores one request at a time.

    Attributes:
        path: how the latest call was computed; None if it did not run the model.
    """

    def __init__(self, engine: CausalLM, self_test: SelfTest, max_batch_tokens: int) -> None:
        self.path: ScoringPath | None = None
        self._engine = engine
        self._self_test = self_test
        self._max_batch_tokens = max_batch_tokens
        self._warned = False

    @property
    def info(self) -> str:
        """How it laid out the rows of its latest call, with the cause if that is a slower way; "" before the first."""
        return "" if self.path is None else self._self_test.explained(self.path.layout, _SLOWER.get(self.path.layout))

    def score(self, request: ScoreRequest, call: Call) -> ScoreResult:
        """Score every position of every sequence from `score_from` on. Rows that are aborted before their turn are not.

        With ``request.grad`` the model runs in its own train/eval mode, and results carry gradients; otherwise it runs
        without dropout.

        Raises:
            CapabilityError: the model is not causal.
            InvalidRequestError: a gradient was asked for, and none reaches a parameter.
            TimeoutError: the request's timeout has passed.
        """
        self.path = None
        if request.grad and not self._warned and any(map(_drops_out, self._engine.module.modules())):
            try:
                warnings.warn(_DROPOUT, stacklevel=level_of_caller())
            except UserWarning:  # the call is not lost where warnings are errors
                _log.warning(_DROPOUT)
            self._warned = True
        scored = scored_positions(request)
        batches = list(scoring_requests(request, scored, self._engine.rope_switch))
        parts: list[ScoredTokens] = []
        device = request.device or request.sequences.values.device
        # A copy of one number a token waits until all passes are given to the GPU. Wider results would fill its memory.
        wide = request.return_logits or request.top_k > 0 or request.top_ids is not None
        mode: AbstractContextManager[Any] = torch.enable_grad() if request.grad else self._engine.evaluating()
        with mode:
            with suppress(Aborted):
                if batches:
                    self._self_test.begin(call.check_wanted)
                for batch in batches:
                    for part in self._score_batch(batch, request, call, self._head_path(batch, request)):
                        parts.append(part.to(device) if wide else part)
            result = scoring_result(request, scored, [part.to(device) for part in parts], self._engine.vocab_size)
        if request.grad and parts and not result.logprobs.values.requires_grad:
            raise invalid("grad", f"the log-probs have no gradient: {_why_no_gradient(self._engine.module)}")
        return result

    def _head_path(self, batch: SequenceBatch, request: ScoreRequest) -> HeadPath:
        """Return how the logits of a batch are made."""
        return "whole"

    def _score_batch(
        self, batch: SequenceBatch, request: ScoreRequest, call: Call, head: HeadPath
    ) -> Iterator[ScoredTokens]:
        """Yield the wanted log-probs of `batch`, one forward pass after another."""

        @cache
        def parts(layout: RowLayout) -> list[ReadBatch]:
            # The widest first: it is compared with the plain forward before anything is handed over. One that is the
            # plain forward itself shows nothing of the others.
            found = self._read_batches(batch.inputs, layout, head)
            return sorted(found, key=lambda part: (_is_plain(part, head), -part.columns))

        layouts = self._layouts(head)
        if head == "whole" and len(batch.rows) == 1:
            # Trial rows are padded to one length, which hides a model whose numbers depend on it. A pack shows it.
            packed = any(self._self_test.now.records[way].tried for way in PACKED)
            layouts = ["alone"] if packed else [layout for layout in layouts if layout != "padded"]
        layout = self._choose(layouts, head, lambda layout: parts(layout)[0].columns)
        if layout == "alone" and head != "whole":
            yield from self._score_batch(batch, request, call, "whole")
            return
        if head == "whole" and layout in _SLOWER and len(batch.rows) > 1:
            self._self_test.warn_once(_SLOWER[layout], "about twice as long for short rows")
        shared = 0 if self.path is None else self.path.shared
        for part in parts(layout):
            call.deadline.check()
            if len(call.aborted_among(batch.rows[part.rows])) == len(part.rows):
                continue
            states = self._read(batch.inputs, part, layout, head)
            if not self._confirmed(batch.inputs, part, layout, head, states, grad=request.grad):
                del states
                yield from self._score_batch(batch, request, call, head)
                return
            shared += part.shared
            wanted, targets, index = batch.wanted_of(part.rows)
            query = TokenQuery.of(request, targets, index)
            yield ScoredTokens(index, self._scores(head, states, part.index.values[wanted], query, part.shared > 0))
        self.path = ScoringPath(head, layout, shared)

    def _choose(self, layouts: Sequence[RowLayout], head: HeadPath, columns: Callable[[RowLayout], int]) -> RowLayout:
        test = self._self_test

        def may_run(layout: RowLayout) -> bool:
            way = _name(layout, head)
            return test.may_run(way, partial(self._tails, layout, head)) and not test.is_refuted(way, columns(layout))

        return test.choose(layouts, may_run)

    def _layouts(self, head: HeadPath) -> Sequence[RowLayout]:
        return PLAIN_LAYOUTS

    def _read_batches(
        self, rows: Ragged, layout: RowLayout, head: HeadPath, *, trial: bool = False
    ) -> Iterator[ReadBatch]:
        """Yield the rows that share a forward pass; `trial` says whether they are trial rows."""
        limit = tokens_per_pass(self._engine, self._max_batch_tokens)
        for group in groups_of(rows.lengths, "padded" if layout == "fused" or layout == "packed" else layout):
            for some in micro_batches(rows.lengths[group], limit):
                yield padded_batch(rows.lengths, group[some])

    def _read(self, rows: Ragged, part: ReadBatch, layout: RowLayout, head: HeadPath) -> Tensor:
        """Return ``[slots, vocab]`` logits, or hidden states if the head is apart."""
        return self._engine.padded_logits(rows.select(part.rows)).flatten(0, 1)

    def _logits(self, states: Tensor, head: HeadPath) -> Tensor:
        """Return the logits of what `_read` returned."""
        return states

    def _last_logits(self, part: ReadBatch, head: HeadPath, states: Tensor, place: int) -> Tensor:
        """Return the logits of the last positions of a row of `part`, given what was read."""
        return self._logits(states[part.index.split()[place][-TAIL:].to(states.device)], head)

    def _tails(self, layout: RowLayout, head: HeadPath, rows: Ragged) -> Iterator[tuple[int, Tensor]]:
        """Yield the numbers of trial rows and the logits of their last positions in that layout."""
        for part in self._read_batches(rows, layout, head, trial=True):
            states = self._read(rows, part, layout, head)
            for place, number in enumerate(part.rows.tolist()):
                yield number, self._last_logits(part, head, states, place)

    def _confirmed(
        self, inputs: Ragged, part: ReadBatch, layout: RowLayout, head: HeadPath, states: Tensor, *, grad: bool
    ) -> bool:
        """Return whether the longest row of `part` and the last of some length have the numbers of the plain forward.

        Args:
            inputs, part, layout, head: see `_read`, which returned `states`.
            grad: whether they carry gradients, so that the model was read in its own train/eval mode.
        """
        way = _name(layout, head)
        if way == "alone" or _is_plain(part, head) or self._self_test.is_confirmed(way, part.columns):
            return True
        if grad and any(module.training for module in self._engine.module.modules()):
            # Dropout may be on: other numbers would be right.
            with self._engine.evaluating():
                states = self._read(inputs, part, layout, head)
        rows = inputs.select(part.rows).split()
        longest = max(range(len(rows)), key=lambda number: len(rows[number]))
        others = [number for number in range(len(rows)) if number != longest]
        enough = [number for number in others if len(rows[number]) >= _ENOUGH]
        numbers = [longest, *(enough or sorted(others, key=lambda number: len(rows[number])))[-1:]]
        ends = (OwnRow(rows[number], self._last_logits(part, head, states, number)) for number in numbers)
        return self._self_test.confirm(way, part.columns, ends)

    def _scores(self, head: HeadPath, states: Tensor, slots: Tensor, query: TokenQuery, repeated: bool) -> TokenScores:
        """Answer `query` from all logits of the positions in question, a slice of positions at a time.

        Args:
            head, states: see `_read`.
            slots: int64[n], which of the states predict the targets.
            query: what is asked of n targets.
            repeated: whether rows that share their start may want some targets more than once.
        """
        # Two more tables like the logits are made where the tail is summed.
        elements = _SLICE_ELEMENTS // 4 if query.wants_top else _SLICE_ELEMENTS
        size, parts = max(1, elements // self._engine.vocab_size), []
        for some, asked in zip(slots.split(size), query.split(size), strict=True):
            logits = self._logits(states_at(states, some), head).float()
            # The layers of a model may be on several devices, and its head on another than its last states.
            parts.append(scores_of_logits(logits, asked.to(logits.device)))
        return TokenScores.cat(parts)


def _is_plain(part: ReadBatch, head: HeadPath) -> bool:
    """Return whether `part` is one row in the plain forward, with which any model agrees."""
    return head == "whole" and len(part.rows) == 1


def _name(layout: RowLayout, head: HeadPath) -> str:
    """Return the name under which the self test remembers a layout: by itself if body and head are run apart."""
    return layout if head == "whole" or layout in PACKED else f"{layout} (body and head apart)"


def states_at(states: Tensor, slots: Tensor) -> Tensor:
    """Return ``states[slots]``, as a view if the slots follow one another.

    Those of a row alone do. Gradients would need a copy of all its states.
    """
    first = int(slots[0]) if len(slots) else 0
    if torch.equal(slots, torch.arange(first, first + len(slots), device=slots.device)):
        return states[first : first + len(slots)]
    return states[to_device(slots, states.device)]


def tokens_per_pass(engine: CausalLM, max_batch_tokens: int) -> int:
    """Return how many tokens, padding included, share a forward pass that scores."""
    return min(max_batch_tokens, _CPU_TOKENS) if engine.device.type == "cpu" else max_batch_tokens


def _drops_out(module: nn.Module) -> bool:
    """Return whether a module drops something at random: a layer of dropout, or one with a number of such a name."""
    named = "Dropout" in type(module).__name__
    rates = [value for name, value in vars(module).items() if named or "drop" in name] if module.training else []
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def _why_no_gradient(module: nn.Module) -> str:
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return "no parameter of the model requires one; call model.requires_grad_(), or wrap it in an adapter to train"
    if runs_layers_again(module):
        return (
            "reentrant gradient checkpointing passes none on where the embeddings are frozen, as with LoRA; call "
            "model.enable_input_require_grads(), or enable checkpointing with "
            "gradient_checkpointing_kwargs={'use_reentrant': False}"
        )
    return "no parameter that requires one is in use; make the adapter that is trained the active one"

"""`FastScorer`: the log-probability of every wanted token, without logits for the rest.

The model's body reads rows without padding, and a start that rows have in common once. The head then sees only the
positions that are scored, and computes log-probabilities without their logits. If the model does not allow one of these
steps, that step runs as in the plain `Scorer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from corelm.spec import Ragged, ScoreRequest
from corelm_engine_kit.loop import Call
from corelm_engine_kit.token_scores import ScoredTokens, TokenQuery, TokenScores
from corelm_engine_kit.transfer import to_device
from transformers_backend.engine import CausalLM
from transformers_backend.fast.attention import VarlenAttention, attention_per_segment, may_pack, torch_varlen
from transformers_backend.fast.head import ScoringHead
from transformers_backend.fast.layouts import ReadBatch, SharingPays, packed_batches, padded_batches
from transformers_backend.fast.onednn import quick_products
from transformers_backend.fast.split import SplitForward
from transformers_backend.protocol import SequenceBatch
from transformers_backend.scoring import (
    PACKED,
    PLAIN_LAYOUTS,
    HeadPath,
    RowLayout,
    Scorer,
    ScoringPath,
    tokens_per_pass,
)
from transformers_backend.self_test import TAIL, SelfTest, TailLogits

#: On a CPU, tokens that share a forward pass of packed rows. More of them take more memory and save no time, except
#: those that share a start.
_CPU_PACK = 1024
#: A shorter common start is not worth the bookkeeping.
_SHORTEST_START = 16


class FastScorer(Scorer):
    """
    Args:
        engine, self_test, max_batch_tokens: see `Scorer`.
        joint: returns what attends in many rows of a pack at once on a device, for a model that runs with PyTorch's own
            attention; None where there is nothing.
    """

    def __init__(
        self,
        engine: CausalLM,
        self_test: SelfTest,
        max_batch_tokens: int,
        joint: Callable[[torch.device], VarlenAttention | None] = torch_varlen,
    ) -> None:
        super().__init__(engine, self_test, max_batch_tokens)
        # The object remembers what became of its trials.
        self._joint = cache(joint)
        self._split = SplitForward(engine)
        # The head is tried on states of the forward that the self test makes anyway.
        self_test.read = self._split.plain_logits
        self._head = ScoringHead(engine, self._split, self_test)

    def weights_changed(self) -> None:
        self._head.forget()

    def _score_batch(self, batch: SequenceBatch, request: ScoreRequest, call: Call) -> Iterator[ScoredTokens]:
        head = self._head.path(int(batch.wanted.sum()), grad=request.grad)
        if head == "whole":
            yield from super()._score_batch(batch, request, call)
            return
        if head == "tiled" and request.return_logits:
            head = "sliced"
        packs = self._engine.passes_positions and may_pack(self._engine.base)
        joint = self._joint(self._engine.device) if packs else None
        may: dict[RowLayout, bool] = {"fused": joint is not None, "packed": packs}
        layouts: tuple[RowLayout, ...] = (*(layout for layout in PACKED if may[layout]), *PLAIN_LAYOUTS)

        @cache
        def parts(layout: RowLayout) -> list[ReadBatch]:
            # Rows that share their start would also share its dropout.
            drops_out = layout in PACKED and self._drops_out()
            pays = _never if drops_out else self._sharing_pays
            # The widest first: it is compared with the plain forward before anything is handed over.
            return sorted(self._read_batches(batch.inputs, layout, pays), key=lambda part: -part.columns)

        layout = self._self_test.choose(
            layouts,
            lambda layout: self._self_test.may_run(_name(layout), self._tails(layout, joint)),
            lambda layout: parts(layout)[0].columns,
            _name,
        )
        if layout == "alone":
            yield from super()._score_batch(batch, request, call)
            return
        shared = 0 if self.path is None else self.path.shared
        for part in parts(layout):
            call.deadline.check()
            if len(call.aborted_among(batch.rows[part.rows])) == len(part.rows):
                continue
            read = partial(self._read, batch.inputs, part, joint if layout == "fused" else None)
            states = read()
            rows = batch.inputs.select(part.rows)
            ends = partial(self._last_logits, part)
            if not self._confirmed(_name(layout), part.columns, rows, request, states, read, ends):
                yield from self._score_batch(batch, request, call)
                return
            shared += part.shared
            wanted, targets, index = batch.wanted_of(part.rows)
            slots = part.index.values[wanted]
            query = TokenQuery.of(request, targets, index)
            yield ScoredTokens(index, self._scores_of_states(head, states, slots, query, part.shared > 0))
        self.path = ScoringPath(head, layout, shared)

    def _scores_of_states(
        self, head: HeadPath, states: Tensor, slots: Tensor, query: TokenQuery, repeated: bool
    ) -> TokenScores:
        """Answer `query` given ``states[slots]``.

        Args:
            repeated: whether some targets are wanted more than once, because rows share their start.
        """
        inverse = None
        if repeated and not query.depends_on_row:
            vocab_size = self._engine.vocab_size
            pairs, inverse = (slots * vocab_size + query.targets).unique(return_inverse=True)
            slots, query = pairs // vocab_size, replace(query, targets=pairs % vocab_size)
        if head == "tiled":
            scores = self._head.tiled().scores(_states_at(states, slots), query.to(states.device))
        else:
            scores = self._scores(states, slots, query, self._split.logits)
        return scores if inverse is None else scores.select(inverse)

    # Packed or padded -------------------------------------------------------------------------------------------------

    def _read(self, rows: Ragged, batch: ReadBatch, joint: VarlenAttention | None = None) -> Tensor:
        """Return the last hidden states of the body, ``[slots, hidden]``; ``batch.index`` says in which slots those of
        its rows are.

        Args:
            rows: the ids of all rows.
            batch: those to read.
            joint: attends in many rows of a pack at once, where it fits; None for one after another.
        """
        device, packed = self._engine.device, batch.packed
        with quick_products(self._split.body()):
            if packed is None:
                return self._split.hidden(**self._engine.inputs(rows.select(batch.rows), "right")).flatten(0, 1)
            with attention_per_segment(self._engine.base, packed.segments, joint):
                ids, positions = (to_device(each[None], device) for each in (packed.ids, packed.positions))
                return self._split.hidden(input_ids=ids, position_ids=positions, attention_mask=None)[0]

    def _drops_out(self) -> bool:
        """Return whether the model, in its present mode, reads the same ids twice with different results.

        Dropout has a different name in every family, so reading twice is the only test.
        """
        if not (torch.is_grad_enabled() and any(part.training for part in self._engine.module.modules())):
            return False
        rows = Ragged(torch.arange(16) % self._engine.readable, torch.tensor([16]))
        (batch,) = padded_batches(rows.lengths, [torch.tensor([0])])
        device = self._engine.device
        with (
            torch.no_grad(),
            torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type),
        ):
            return not torch.equal(self._read(rows, batch), self._read(rows, batch))

    def _tails(self, layout: RowLayout, joint: VarlenAttention | None) -> TailLogits:
        """Return a function that makes the logits of short rows in that layout, from the body's hidden states."""

        def tails(rows: Ragged) -> Iterator[tuple[int, Tensor]]:
            # A row shares its start with a longer one, and equal rows are read twice.
            for part in self._read_batches(rows, layout, lambda shared, rest: rest > 0):
                states = self._read(rows, part, joint if layout == "fused" else None)
                for place, number in enumerate(part.rows.tolist()):
                    yield number, self._last_logits(part, states, place)

        return tails

    def _last_logits(self, part: ReadBatch, states: Tensor, place: int) -> Tensor:
        """Return the logits of the last positions of a row of `part`, given the states of all."""
        return self._split.logits(states[part.index.split()[place][-TAIL:].to(states.device)])

    def _read_batches(self, rows: Ragged, layout: RowLayout, pays: SharingPays) -> Iterator[ReadBatch]:
        with_shared = limit = tokens_per_pass(self._engine, self._max_batch_tokens)
        if layout not in PACKED:
            return padded_batches(rows.lengths, self._row_batches(rows.lengths, layout))
        if self._engine.device.type == "cpu":
            limit = min(limit, _CPU_PACK)
        return packed_batches(rows, limit, with_shared, pays)

    def _sharing_pays(self, shared: int, rest: int) -> bool:
        """Return whether to read a common start only once.

        That saves about 24 · hidden² operations a layer for each of its tokens. But the rest then needs a mask, and
        attention without a mask skips half of its 4 · rest² · hidden.
        """
        hidden: int = self._engine.base.config.get_text_config().hidden_size
        return shared >= _SHORTEST_START and 12 * hidden * shared >= rest**2


def _name(layout: RowLayout) -> str:
    """Return the name under which the self test remembers a layout whose logits are made apart from the body."""
    return layout if layout in PACKED else f"{layout} (body and head apart)"


def _never(shared: int, rest: int) -> bool:
    return False


def _states_at(states: Tensor, slots: Tensor) -> Tensor:
    """Return ``states[slots]``, as a view if the slots follow one another.

    Those of a long row alone do. Gradients would need a copy of all its states.
    """
    first = int(slots[0]) if len(slots) else 0
    if torch.equal(slots, torch.arange(first, first + len(slots), device=slots.device)):
        return states[first : first + len(slots)]
    return states[to_device(slots, states.device)]

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
from transformers_backend.engine import CausalLM
from transformers_backend.fast import onednn
from transformers_backend.fast.head import ScoringHead
from transformers_backend.fast.layouts import ReadBatch, SharingPays, packed_batches, padded_batches
from transformers_backend.fast.packing import may_pack
from transformers_backend.fast.probing import body_drops_out
from transformers_backend.fast.reading import BodyReader
from transformers_backend.fast.split import SplitForward
from transformers_backend.fast.tiled_scores import tiled_scores
from transformers_backend.fast.varlen import JointAttention, TransformersFlash, torch_varlen
from transformers_backend.protocol import SequenceBatch
from transformers_backend.scoring import (
    PACKED,
    PLAIN_LAYOUTS,
    HeadPath,
    RowLayout,
    Scorer,
    ScoringPath,
    states_at,
    tokens_per_pass,
)
from transformers_backend.self_test import TAIL, SelfTest, TailLogits

#: On a CPU, tokens that share a forward pass of packed rows. More of them take more memory and save no time, except
#: those that share a start.
_CPU_PACK = 1024
#: The model's own forward takes no longer for one row of so few tokens.
_SHORT_ROW = 64
#: A shorter common start is not worth the bookkeeping.
_SHORTEST_START = 16
#: Where transformers runs the model with one of these, rows are packed for it, and for nothing else.
_FLASH = ("flash_attention_2", "flash_attention_3")


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
        joint: Callable[[torch.device], JointAttention | None] = torch_varlen,
    ) -> None:
        super().__init__(engine, self_test, max_batch_tokens)
        # The object remembers what became of its trials.
        self._joint = cache(joint)
        self._split = SplitForward(engine)
        # The head is tried on states of the forward that the self test makes anyway.
        self_test.read = self._split.plain_logits
        self._head = ScoringHead(engine, self._split, self_test)
        self._reader = BodyReader(engine, self._split)

    def weights_changed(self) -> None:
        self._head.forget()

    def _score_batch(self, batch: SequenceBatch, request: ScoreRequest, call: Call) -> Iterator[ScoredTokens]:
        if not request.grad and self._is_short_row(batch):
            yield from self._score_whole("alone", batch, request, call)
            return
        several = request.support is not None or request.top_k > 0 or request.top_ids is not None
        head = self._head.path(int(batch.wanted.sum()), grad=request.grad, several=several)
        if head == "whole":
            yield from super()._score_batch(batch, request, call)
            return
        if head == "tiled" and request.return_logits:
            head = "sliced"
        joint = self._joint_attention()
        may = {"fused": joint is not None, "packed": self._packs_one_by_one()}
        layouts: tuple[RowLayout, ...] = (*(layout for layout in PACKED if may[layout]), *PLAIN_LAYOUTS)

        @cache
        def parts(layout: RowLayout) -> list[ReadBatch]:
            # Rows that share their start would also share its dropout.
            drops_out = layout in PACKED and body_drops_out(self._engine, self._reader)
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
            read = partial(self._reader.read, batch.inputs, part, joint if layout == "fused" else None)
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
            scores = tiled_scores(self._head.tiled(), states_at(states, slots), query.to(states.device))
        else:
            scores = self._scores(states, slots, query, self._split.logits)
        return scores if inverse is None else scores.select(inverse)

    def _is_short_row(self, batch: SequenceBatch) -> bool:
        """Return whether it is one row of few tokens, most of them scored, and oneDNN would not save more."""
        if len(batch.rows) > 1 or not len(batch.wanted) / 2 <= batch.wanted.sum() <= len(batch.wanted) <= _SHORT_ROW:
            return False
        if not self._self_test.is_causal:
            # The trial of another way tells it.
            return False
        weight = getattr(self._engine.base.get_output_embeddings(), "weight", None)
        return not (isinstance(weight, Tensor) and onednn.is_quicker(weight))

    # Packed or padded -------------------------------------------------------------------------------------------------

    def _packs_one_by_one(self) -> bool:
        return self._engine.passes_positions and may_pack(self._engine.base) == "sdpa"

    def _joint_attention(self) -> JointAttention | None:
        """Return what attends in many rows of a pack at once; None if nothing does in this model, on this device."""
        if not self._engine.passes_positions:
            return None
        name = may_pack(self._engine.base)
        if name in _FLASH:
            return TransformersFlash(name)
        return self._joint(self._engine.device) if name == "sdpa" else None

    def _tails(self, layout: RowLayout, joint: JointAttention | None) -> TailLogits:
        """Return a function that makes the logits of short rows in that layout, from the body's hidden states."""

        def tails(rows: Ragged) -> Iterator[tuple[int, Tensor]]:
            # A row shares its start with a longer one, and equal rows are read twice.
            for part in self._read_batches(rows, layout, lambda shared, rest: rest > 0):
                states = self._reader.read(rows, part, joint if layout == "fused" else None)
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

"""`FastScorer`: the log-probability of every wanted token, without logits for the rest.

The model's body reads rows without padding, and a start that rows have in common once. The head then sees only the
positions that are scored, and computes log-probabilities without their logits. If the model does not allow one of these
steps, that step runs as in the plain `Scorer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from corelm.spec import Ragged, ScoreRequest
from corelm_engine_kit.token_scores import TokenQuery, TokenScores
from corelm_engine_kit.transfer import to_device
from transformers_backend.engine import CausalLM
from transformers_backend.fast import onednn
from transformers_backend.fast.attention import (
    PackedSegment,
    VarlenAttention,
    attention_per_segment,
    may_pack,
    torch_varlen,
)
from transformers_backend.fast.head import ScoringHead, SplitForward
from transformers_backend.fast.onednn import quick_products
from transformers_backend.protocol import SequenceBatch
from transformers_backend.scoring import (
    PACKED,
    PLAIN_LAYOUTS,
    HeadPath,
    ReadBatch,
    RowLayout,
    Scorer,
    padded_batch,
    states_at,
    tokens_per_pass,
)
from transformers_backend.self_test import SelfTest

#: On a CPU, tokens that share a forward pass of packed rows. More of them take more memory and save no time, except
#: those that share a start.
_CPU_PACK = 1024
#: The model's own forward takes no longer for one row of so few tokens.
_SHORT_ROW = 64
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
        self._head = ScoringHead(engine, self._split, self_test)

    def _head_path(self, batch: SequenceBatch, request: ScoreRequest) -> HeadPath:
        if not request.grad and self._is_short_row(batch):
            return "whole"
        path = self._head.path(int(batch.wanted.sum()), grad=request.grad)
        return "sliced" if path == "tiled" and request.return_logits else path

    def _scores(self, head: HeadPath, states: Tensor, slots: Tensor, query: TokenQuery, repeated: bool) -> TokenScores:
        inverse = None
        if repeated and not query.depends_on_row:
            vocab_size = self._engine.vocab_size
            pairs, inverse = (slots * vocab_size + query.targets).unique(return_inverse=True)
            slots, query = pairs // vocab_size, replace(query, targets=pairs % vocab_size)
        if head == "tiled":
            scores = self._head.tiled().scores(states_at(states, slots), query.to(states.device))
        else:
            scores = super()._scores(head, states, slots, query, repeated)
        return scores if inverse is None else scores.select(inverse)

    def _logits(self, states: Tensor, head: HeadPath) -> Tensor:
        return states if head == "whole" else self._split.logits(states)

    def _is_short_row(self, batch: SequenceBatch) -> bool:
        """Return whether it is one row of few tokens, most of them scored, and oneDNN would not save more."""
        few = len(batch.rows) == 1 and len(batch.wanted) <= min(_SHORT_ROW, 2 * int(batch.wanted.sum()))
        if not few or self._self_test.is_short:
            # Rounded to short floats in between, a scaled head would give other numbers.
            return False
        weight = getattr(self._engine.base.get_output_embeddings(), "weight", None)
        return not (isinstance(weight, Tensor) and onednn.is_quicker(weight))

    # Packed or padded -------------------------------------------------------------------------------------------------

    def _layouts(self, head: HeadPath) -> Sequence[RowLayout]:
        if head == "whole" or not (self._engine.passes_positions and may_pack(self._engine.base)):
            return PLAIN_LAYOUTS
        fuses = self._joint(self._engine.device) is not None
        return *(PACKED if fuses else PACKED[1:]), *PLAIN_LAYOUTS

    def _read_batches(
        self, rows: Ragged, layout: RowLayout, head: HeadPath, *, trial: bool = False
    ) -> Iterator[ReadBatch]:
        if layout not in PACKED:
            return super()._read_batches(rows, layout, head)
        with_shared = limit = tokens_per_pass(self._engine, self._max_batch_tokens)
        if self._engine.device.type == "cpu":
            limit = min(limit, _CPU_PACK)
        if trial:
            # A row shares its start with a longer one, and equal rows are read twice.
            return packed_batches(rows, limit, with_shared, lambda shared, rest: rest > 0)
        # Rows that share their start would also share its dropout.
        drops_out = self._drops_out()
        return packed_batches(
            rows, limit, with_shared, lambda shared, rest: not drops_out and self._sharing_pays(shared, rest)
        )

    def _read(self, rows: Ragged, part: ReadBatch, layout: RowLayout, head: HeadPath) -> Tensor:
        if head == "whole":
            return super()._read(rows, part, layout, head)
        device = self._engine.device
        with quick_products(self._split.body()):
            if not isinstance(part, PackedRows):
                return self._split.hidden(**self._engine.inputs(rows.select(part.rows), "right")).flatten(0, 1)
            joint = self._joint(device) if layout == "fused" else None
            with attention_per_segment(self._engine.base, part.segments, joint):
                ids, positions = (to_device(each[None], device) for each in (part.ids, part.positions))
                return self._split.hidden(input_ids=ids, position_ids=positions, attention_mask=None)[0]

    def _drops_out(self) -> bool:
        """Return whether the model, in its present mode, reads the same ids twice with different results.

        Dropout has a different name in every family, so reading twice is the only test.
        """
        if not (torch.is_grad_enabled() and any(part.training for part in self._engine.module.modules())):
            return False
        rows = Ragged(torch.arange(16) % self._engine.readable, torch.tensor([16]))
        part = padded_batch(rows.lengths, torch.tensor([0]))
        device = self._engine.device
        with (
            torch.no_grad(),
            torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type),
        ):
            once, again = (self._read(rows, part, "padded", "tiled") for _ in range(2))
            return not torch.equal(once, again)

    def _sharing_pays(self, shared: int, rest: int) -> bool:
        """Return whether to read a common start only once.

        That saves about 24 · hidden² operations a layer for each of its tokens. But the rest then needs a mask, and
        attention without a mask skips half of its 4 · rest² · hidden.
        """
        hidden: int = self._engine.base.config.get_text_config().hidden_size
        return shared >= _SHORTEST_START and 12 * hidden * shared >= rest**2


# Rows without padding -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedRows(ReadBatch):
    """Rows one after another in one row of slots.

    Attributes:
        ids: int64[slots].
        positions: int64[slots].
        segments: which slots attend to which.
    """

    ids: Tensor
    positions: Tensor
    segments: Sequence[PackedSegment]


def packed_batches(
    rows: Ragged, max_tokens: int, max_shared: int, pays: Callable[[int, int], bool]
) -> Iterator[ReadBatch]:
    """Yield rows packed one after another, up to `max_tokens` of them, or one row that is longer.

    Rows are sorted by their ids. If a row starts like the one before it and `pays` says so, the start is not read
    again: the row becomes a segment that begins after it. Such rows stay together up to `max_shared` tokens.
    ``[[5, 6, 7], [5, 6, 8]]`` become ids ``[5, 6, 7, 8]`` with the segments 0–3 and 3–4, the second after 0–2.
    """
    pack: list[tuple[int, int]] = []
    total, lengths = 0, rows.lengths.tolist()
    for row, common in zip(*_in_order(rows), strict=True):
        shared = common if common and pays(common, lengths[row] - common) else 0
        if pack and total + lengths[row] - shared > (max_shared if shared else max_tokens):
            yield _packed(rows, pack)
            pack, total, shared = [], 0, 0
        pack.append((row, shared))
        total += lengths[row] - shared
    if pack:
        yield _packed(rows, pack)


def _packed(rows: Ragged, pack: Sequence[tuple[int, int]]) -> ReadBatch:
    """Return the rows of these numbers in one pack, each with how many first positions the one before it has too."""
    chosen, total = torch.tensor([row for row, _ in pack]), 0
    picked, segments, slots = rows.select(chosen), list[PackedSegment](), list[Tensor]()
    for length, (_, shared) in zip(picked.lengths.tolist(), pack, strict=True):
        start, total = total, total + length - shared
        own = torch.arange(start, total)
        slots.append(torch.cat([slots[-1][:shared], own]) if shared else own)
        if total > start:
            segments.append(PackedSegment(start, total, slots[-1] if shared else None))
    index = Ragged.from_list(slots)
    ids, positions = (torch.empty(total, dtype=torch.int64) for _ in range(2))
    # The slots of a shared start are written more than once, each time with the same values.
    ids[index.values], positions[index.values] = picked.values.cpu(), picked.positions
    shared = len(index.values) - total
    return PackedRows(chosen, index, total, shared, ids=ids, positions=positions, segments=segments)


def _in_order(rows: Ragged) -> tuple[list[int], list[int]]:
    """Return row numbers sorted by ids, and how many first ids each row has in common with the one before it."""
    values = rows.values.cpu().numpy()
    bounds = list(pairwise(rows.offsets.tolist()))
    # In big-endian order, bytes compare as the numbers do.
    keys = [values[start:stop].astype(">i8").tobytes() for start, stop in bounds]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    common = [0]
    for one, other in pairwise(order):
        a, b = values[slice(*bounds[one])], values[slice(*bounds[other])]
        shorter = min(len(a), len(b))
        differs = a[:shorter] != b[:shorter]
        common.append(int(differs.argmax()) if differs.any() else shorter)
    return order, common[: len(order)]

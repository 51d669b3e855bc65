"""`BodyReader`: rows of ids in, the last hidden states of the model's body out.

packed   rows one after another in one row, without padding; rows that start alike share that start
padded   rows padded on the right, as the plain forward reads them
"""

from __future__ import annotations

from torch import Tensor

from corelm.spec import Ragged
from corelm_engine_kit.transfer import to_device
from transformers_backend.engine import CausalLM
from transformers_backend.fast.layouts import ReadBatch
from transformers_backend.fast.onednn import quick_products
from transformers_backend.fast.packing import attention_per_segment
from transformers_backend.fast.split import SplitForward
from transformers_backend.fast.varlen import JointAttention


class BodyReader:
    def __init__(self, engine: CausalLM, split: SplitForward) -> None:
        self._engine = engine
        self._split = split

    def read(self, rows: Ragged, batch: ReadBatch, joint: JointAttention | None = None) -> Tensor:
        """Return ``[slots, hidden]``; ``batch.index`` says in which slots the states of its rows are.

        Args:
            rows: the ids of all rows.
            batch: those to read.
            joint: attends in many rows of a pack at once, where it fits; None for one after another.
        """
        with quick_products(self._split.body()):
            return self._read(rows, batch, joint)

    def _read(self, rows: Ragged, batch: ReadBatch, joint: JointAttention | None) -> Tensor:
        if batch.packed is None:
            return self._split.hidden(**self._engine.inputs(rows.select(batch.rows), "right")).flatten(0, 1)
        device, packed = self._engine.device, batch.packed
        with attention_per_segment(self._engine.base, packed.segments, joint):
            states = self._split.hidden(
                input_ids=to_device(packed.ids[None], device),
                position_ids=to_device(packed.positions[None], device),
                attention_mask=None,
            )
        return states[0]

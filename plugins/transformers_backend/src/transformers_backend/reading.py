"""`Reader`: rows of ids in, the body's last hidden states out; packed where that gives what padding gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from corelm.spec import Ragged
from transformers_backend.batches import Batch, packed_batches, padded_batches
from transformers_backend.model import CausalLM
from transformers_backend.packing import attention_per_segment, may_pack
from transformers_backend.split import SplitForward

Layout = Literal["packed", "padded"]

#: On a CPU, tokens that share a forward pass: more of them take memory and save no time, but for what they share.
_CPU_TOKENS, _CPU_FAMILY = 1024, 4096
#: A shorter beginning is not worth the bookkeeping.
_SHORTEST = 16


class Reader:
    def __init__(self, model: CausalLM, split: SplitForward, max_batch_tokens: int) -> None:
        self._model = model
        self._split = split
        self._max_batch_tokens = max_batch_tokens
        self._tried: tuple[Any, bool] | None = None

    def layout(self) -> Layout:
        """How rows are read now. The model may have changed since packing was tried, so this is asked each time."""
        model = self._model
        if not (model.accepts_positions and may_pack(model.base)):
            return "padded"
        state = vars(model.base).get("forward"), tuple(model.base._forward_hooks)
        if self._tried is None or self._tried[0] != state:
            with model.evaluating(), torch.autocast(model.device.type, enabled=False):
                self._tried = (state, self._packing_works())
        return "packed" if self._tried[1] else "padded"

    def batches(self, rows: Ragged, layout: Layout) -> Iterator[Batch]:
        limit = family = self._max_batch_tokens
        if self._model.device.type == "cpu":
            limit, family = min(limit, _CPU_TOKENS), min(family, _CPU_FAMILY)
        if layout == "padded":
            return padded_batches(rows.lengths, family)
        # Rows that share a beginning would share its dropout as well.
        return packed_batches(rows, limit, family, _never if self._drops_out() else self._pays)

    def read(self, rows: Ragged, batch: Batch) -> Tensor:
        """``[slots, hidden]``, where `batch.index` finds the states of its rows."""
        if batch.packed is None:
            return self._split.hidden(**self._model.inputs(rows.select(batch.rows), "right")).flatten(0, 1)
        return self._read_packed(batch)[0]

    def logits(self, rows: Ragged, batch: Batch) -> Tensor:
        """``[slots, vocab]``: what the plain forward gives for a batch that is padded."""
        inputs = self._model.inputs(rows.select(batch.rows), "right")
        logits: Tensor = self._model.forward(use_cache=False, **inputs).logits
        return logits.flatten(0, 1)

    def _read_packed(self, batch: Batch) -> tuple[Tensor, int]:
        assert batch.packed is not None
        ids, positions, segments = batch.packed
        device = self._model.device
        with attention_per_segment(self._model.base, segments) as attention:
            states = self._split.hidden(
                input_ids=ids[None].to(device),
                position_ids=positions[None].to(device),
                attention_mask=torch.ones_like(ids)[None],
            )
        return states[0], attention.layers

    def _packing_works(self) -> bool:
        """Whether packed rows, some with a beginning in common, have the states that they have padded."""
        if (self._model.max_context or 12) < 12:
            return False
        ids = torch.randint(self._model.vocab_size, (4, 12), generator=torch.Generator().manual_seed(0))
        ids[1:3, :7] = ids[0, :7]
        ids[2, 7:9] = ids[1, 7:9]
        rows = Ragged.from_list([ids[0], ids[1, :11], ids[2], ids[3, :5]])
        (padded,) = padded_batches(rows.lengths, 64)
        (packed,) = packed_batches(rows, 64, 64, lambda shared, rest: True)
        try:
            found, layers = self._read_packed(packed)
        except Exception:
            # Whatever a model's code says to inputs that it does not expect: rows can still be padded.
            return False
        expected = self.read(rows, padded)
        # A layer that mixes positions in another way would see the rows as one.
        if layers != self._model.base.config.get_text_config().num_hidden_layers:
            return False
        there = _by_row(found, packed), _by_row(expected, padded)
        precision = torch.finfo(expected.dtype)
        tolerance = min(256 * precision.eps, precision.eps**0.5) * float(expected.abs().max())
        return torch.allclose(*there, rtol=0.0, atol=tolerance)

    def _drops_out(self) -> bool:
        """Whether the model in its present mode reads the same ids in two ways. Dropout goes by many names."""
        model = self._model
        if not (torch.is_grad_enabled() and any(part.training for part in model.module.modules())):
            return False
        rows = Ragged(torch.arange(16) % model.vocab_size, torch.tensor([16]))
        (batch,) = padded_batches(rows.lengths, 16)
        devices = [] if model.device.type == "cpu" else [model.device]
        with torch.no_grad(), torch.random.fork_rng(devices, device_type=model.device.type):
            return not torch.equal(self.read(rows, batch), self.read(rows, batch))

    def _pays(self, shared: int, rest: int) -> bool:
        """Whether to read a beginning once. That saves about 24 · hidden² operations a layer for each of its tokens;
        but the rest then needs a mask, and attention without one skips half of its 4 · rest² · hidden.
        """
        hidden: int = self._model.base.config.get_text_config().hidden_size
        return shared >= _SHORTEST and 12 * hidden * shared >= rest**2


def _by_row(states: Tensor, batch: Batch) -> Tensor:
    """The states of every position, rows in the order of their numbers."""
    return states[batch.index.select(batch.rows.argsort()).values.to(states.device)].float()


def _never(shared: int, rest: int) -> bool:
    return False

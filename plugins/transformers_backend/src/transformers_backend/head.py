"""`Head`: how this model's logits come about, found out by trying, so that they can be made in parts.

tiled    one matrix product, scaled and capped at most: log-probabilities without logits (`tiles`)
sliced   the model's own forward turns hidden states into logits, a slice of positions at a time
whole    a slice is not what the plain forward gives: all logits at once
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from corelm.rows import Ragged
from transformers_backend.model import CausalLM
from transformers_backend.split import CannotSplit, SplitForward
from transformers_backend.tiles import LinearHead

Way = Literal["tiled", "sliced", "whole"]

#: Largest logits of the hidden states that the head is tried with: a cap bends the last ones, a scale shows in all.
_MAGNITUDES = (1.0, 30.0, 1000.0)
#: Positions tried at each magnitude.
_TRIED = 2


@dataclass(frozen=True)
class _Found:
    way: Way
    scale: float = 1.0
    cap: float | None = None


class Head:
    """Attributes:
    split: the model's forward in two halves; of no use where `way` is "whole".
    """

    def __init__(self, model: CausalLM) -> None:
        self.split = SplitForward(model)
        self._model = model
        self._tried: tuple[Any, _Found] | None = None

    def forget(self) -> None:
        """Try again before the next use: with other weights another formula may show."""
        self._tried = None

    def way(self) -> Way:
        """How to make log-probabilities now: the module may have got a hook since it was tried."""
        found = self._found()
        return "sliced" if found.way == "tiled" and not self._bare() else found.way

    def linear(self) -> LinearHead:
        """The head as one matrix product; for the way "tiled" alone."""
        found, module = self._found(), self._module()
        assert module is not None
        return LinearHead(module.weight, module.bias, found.scale, found.cap)

    def _module(self) -> nn.Linear | None:
        """The head's module if it is a linear layer as torch has it: no adapter, no quantisation, weights in place."""
        head = self._model.base.get_output_embeddings()
        if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter or head.weight.device.type == "meta":
            return None
        return head

    def _bare(self) -> bool:
        """Whether calling the module is a matrix product in the dtype of its weights, and nothing else."""
        head = self._module()
        if head is None or "forward" in vars(head) or torch.is_autocast_enabled(head.weight.device.type):
            return False
        return not any((head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks))

    def _found(self) -> _Found:
        model = self._model
        # What may stand between body and logits without being a part of the head.
        around = [(tuple(part._forward_hooks), vars(part).get("forward")) for part in (model.module, model.base)]
        state = (around, model.base.get_output_embeddings(), _cap(model))
        if self._tried is None or self._tried[0] != state:
            with model.evaluating(), torch.autocast(model.device.type, enabled=False):
                self._tried = (state, self._try())
        return self._tried[1]

    def _try(self) -> _Found:
        hidden = self._hidden_if_it_works_on_slices()
        if hidden is None:
            return _Found("whole")
        module = self._module()
        if module is None or module.weight.dtype != hidden.dtype:
            return _Found("sliced")
        return self._formula(module, hidden[:_TRIED]) or _Found("sliced")

    def _hidden_if_it_works_on_slices(self) -> Tensor | None:
        """Hidden states ``[n, hidden]``, or None where slices that do not line up with rows give other logits."""
        model = self._model
        generator = torch.Generator().manual_seed(0)
        rows = Ragged(torch.randint(model.vocab_size, (15,), generator=generator), torch.tensor([8, 7]))
        at, column = rows.row_index, rows.positions
        inputs = model.inputs(rows, "right")
        whole = model.forward(use_cache=False, **inputs).logits[at, column].float()
        try:
            hidden = self.split.hidden(**inputs)[at, column]
            parts = torch.cat([self.split.logits(part).float() for part in hidden.split(5)])
        except CannotSplit:
            return None
        tolerance = torch.finfo(model.base.dtype).eps ** 0.5 * float(whole.abs().max())
        return hidden if torch.allclose(parts, whole, rtol=0.0, atol=tolerance) else None

    def _formula(self, module: nn.Linear, hidden: Tensor) -> _Found | None:
        """Scale and cap with which the matrix product is what the model's own forward makes of it, or None."""
        weight, bias = module.weight, module.bias
        largest = float(functional.linear(hidden, weight, bias).abs().max())
        if not 0.0 < largest < float("inf"):
            # All zero, say: whatever the formula, it would fit.
            return None
        states = torch.cat([hidden * (magnitude / largest) for magnitude in _MAGNITUDES])
        products, logits = functional.linear(states, weight, bias).double(), self.split.logits(states).double()
        for cap in dict.fromkeys((_cap(self._model), None)):
            flat = logits[:_TRIED] if cap is None else torch.atanh(logits[:_TRIED] / cap) * cap
            scale = float((flat * products[:_TRIED]).sum() / products[:_TRIED].square().sum())
            scale = 1.0 if abs(scale - 1.0) < 1e-4 else scale
            expected = scale * products if cap is None else cap * torch.tanh(scale * products / cap)
            if all(
                _equal(found, wanted, hidden.dtype)
                for found, wanted in zip(expected.split(_TRIED), logits.split(_TRIED), strict=True)
            ):
                return _Found("tiled", scale, cap)
        return None


def _cap(model: CausalLM) -> float | None:
    cap = getattr(model.base.config.get_text_config(), "final_logit_softcapping", None)
    return float(cap) if cap else None


def _equal(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    """Equal but for rounding, which is that of sums in float32 and of one logit in anything shorter."""
    steps = 64 if dtype.itemsize >= 4 else 4
    tolerance = steps * torch.finfo(dtype).eps * float(wanted.abs().max())
    return torch.allclose(found, wanted, rtol=0.0, atol=tolerance)

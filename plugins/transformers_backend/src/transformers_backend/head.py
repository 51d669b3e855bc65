"""`Head`: how this model's logits come about, found out by trying, so that they can be made in parts.

tiled    one matrix product, scaled and capped at most: log-probabilities without logits (`tiles`)
sliced   the model's own forward turns hidden states into logits, a slice of positions at a time
whole    a slice is not what the plain forward gives: all logits at once
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from corelm.spec import Ragged
from transformers_backend.model import CausalLM
from transformers_backend.split import CannotSplit, SplitForward
from transformers_backend.tiles import LinearHead

Way = Literal["tiled", "sliced", "whole"]

#: Largest logits of the hidden states that the head is tried with: a cap bends the last ones, a scale shows in all.
_MAGNITUDES = (1.0, 30.0, 1000.0)
#: Positions tried at each magnitude.
_TRIED = 2

#: Ids by which the products of an earlier call are known again. All of them would read the whole head.
_SAMPLED = 8192
#: Holding a formula against a head of more weights than this takes a millisecond and more, as much as one position
#: does. A call for so few positions had better ask the model for them.
_LARGE, _FEW = 2**21, 64


@dataclass(frozen=True)
class _Found:
    way: Way
    scale: float = 1.0
    cap: float | None = None

    def of(self, products: Tensor) -> Tensor:
        """The logits that the bare products of a tiled head stand for."""
        scaled = self.scale * products
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)


class Head:
    """Attributes:
    split: the model's forward in two halves; of no use where `way` is "whole".
    """

    def __init__(self, model: CausalLM) -> None:
        self.split = SplitForward(model)
        self._model = model
        self._tried: tuple[Any, _Found] | None = None
        # A hidden state that shows a scale, and bends at a cap; and its products with the head, float64[1, V].
        self._witness = torch.empty(0)
        self._products: Tensor | None = None

    def forget(self) -> None:
        """Try again before the next use: with other weights another formula may show."""
        self._tried = None

    def way(self, positions: int, *, grad: bool = False) -> Way:
        """How to make log-probabilities of so many positions now, with gradients or without.

        A formula is held against the model's own forward every time, on one state: since it was found a scale may have
        been learned, or a hook put on the body. That costs what one position costs.
        """
        for _ in range(2):
            found = self._found()
            if found.way != "tiled":
                return found.way
            if not self._bare() or (not grad and positions <= _FEW and self._is_large(found)):
                return "sliced"
            if self._holds(found, grad):
                return "tiled"
            self.forget()
        return "sliced"

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

    def _is_large(self, found: _Found) -> bool:
        """Whether few positions are better left to the model's own forward: the head is large, and either way is
        rounded alike. (A short float is rounded once more by the model, after a scale or a cap.)
        """
        module = self._module()
        assert module is not None
        alike = module.weight.dtype.itemsize >= 4 or (found.scale == 1.0 and found.cap is None)
        return alike and module.weight.numel() > _LARGE

    def _holds(self, found: _Found, grad: bool) -> bool:
        """Whether the formula is what the model does now; with `grad` also that its gradients go nowhere else."""
        model, module = self._model, self._module()
        assert module is not None
        state = self._witness.to(module.weight)
        with model.evaluating(), torch.autocast(model.device.type, enabled=False):
            with torch.set_grad_enabled(grad):
                state = state.requires_grad_(grad)
                logits = self.split.logits(state)
            known = (state, module.weight, module.bias)
            if grad and not all(any(leaf is one for one in known) for leaf in _leaves(logits)):
                return False
            return _equal(found.of(self._products_of(state, module)), logits.double(), state.dtype)

    def _products_of(self, state: Tensor, module: nn.Linear) -> Tensor:
        """The bare products of the witness with the head, float64[1, V]: those of an earlier call, if they are still
        the same where that is looked at. Elsewhere the model's own logits would not fit them any more.
        """

        def products(some: slice) -> Tensor:
            bias = None if module.bias is None else module.bias[some]
            return functional.linear(state, module.weight[some], bias).double()

        known, some = self._products, slice(None, None, max(1, len(module.weight) // _SAMPLED))
        if (
            known is None
            or known.shape[-1] != len(module.weight)
            or known.device != state.device
            or not _equal(known[..., some], products(some), state.dtype)
        ):
            known = self._products = products(slice(None))
        return known

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
        self._witness, self._products = states[_TRIED : _TRIED + 1], None
        products, logits = functional.linear(states, weight, bias).double(), self.split.logits(states).double()
        for cap in dict.fromkeys((_cap(self._model), None)):
            flat = logits[:_TRIED] if cap is None else torch.atanh(logits[:_TRIED] / cap) * cap
            scale = float((flat * products[:_TRIED]).sum() / products[:_TRIED].square().sum())
            scale = 1.0 if abs(scale - 1.0) < 1e-4 else scale
            found = _Found("tiled", scale, cap)
            if all(
                _equal(made, wanted, hidden.dtype)
                for made, wanted in zip(found.of(products).split(_TRIED), logits.split(_TRIED), strict=True)
            ):
                return found
        return None


def _cap(model: CausalLM) -> float | None:
    cap = getattr(model.base.config.get_text_config(), "final_logit_softcapping", None)
    return float(cap) if cap else None


def _leaves(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that gradients of this one end in."""
    nodes, seen = [tensor.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        nodes += [earlier for earlier, _ in node.next_functions]


def _equal(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    """Equal but for rounding, which is that of sums in float32 and of one logit in anything shorter."""
    steps = 64 if dtype.itemsize >= 4 else 4
    # With an id that is ruled out by minus infinity everything would be equal.
    finite = found[found.isfinite()].abs()
    tolerance = steps * torch.finfo(dtype).eps * float(finite.max() if len(finite) else 0.0)
    return torch.allclose(found, wanted, rtol=0.0, atol=tolerance)

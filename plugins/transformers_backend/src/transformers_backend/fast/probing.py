"""What has to be tried on a model before its scoring is accelerated, each compared with the model's own forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from corelm.spec import Ragged
from transformers_backend.engine import CausalLM, is_device_failure
from transformers_backend.fast.layouts import padded_batches
from transformers_backend.fast.reading import BodyReader
from transformers_backend.fast.split import SplitForward
from transformers_backend.scoring import HeadPath

#: Largest logits of the hidden states with which a head is tried. A cap bends the last ones; a scale shows in all.
_MAGNITUDES = (1.0, 30.0, 1000.0)
#: Number of positions tried at each magnitude.
_TRIED = 2


@dataclass(frozen=True, eq=False)
class HeadFormula:
    """How a model makes logits of its last hidden states.

    Attributes:
        path: see `transformers_backend.fast.head`; the other attributes are of use for "tiled" only.
        dtype: of the head's matrix product; under autocast, hidden states and weights are cast to it.
        scale: factor of the head's matrix product.
        cap: logits are ``cap · tanh(scaled / cap)``; None without one.
        witness: ``[1, hidden]``, a hidden state that shows the scale and bends at the cap.
    """

    path: HeadPath
    dtype: torch.dtype = torch.float32
    scale: float = 1.0
    cap: float | None = None
    witness: Tensor | None = None

    def logits(self, products: Tensor) -> Tensor:
        """Return the logits for the bare products of hidden states with the head."""
        scaled = self.scale * products
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)


def probe_head(
    engine: CausalLM, split: SplitForward, module: nn.Linear | None, row: Tensor, known: Tensor | None
) -> HeadFormula:
    """Return how this model's logits can be computed in parts.

    Args:
        module: the head if it is a plain linear layer, else None.
        row: int64[n], ids to try.
        known: see `SplitForward.whole`.
    """
    hidden = _hidden_if_sliceable(engine, split, row, known)
    if hidden is None:
        return HeadFormula("whole")
    if module is None or module.weight.shape[1] != hidden.shape[1]:
        return HeadFormula("sliced")
    # The model's own forward brings the states to the head if its layers are on several devices.
    if module.weight.device != hidden.device:
        return HeadFormula("sliced")
    dtype = _product_dtype(hidden, module.weight, split.autocast)
    return (dtype and _tiled_formula(engine, split, module, hidden[:_TRIED], dtype)) or HeadFormula("sliced")


def head_products(states: Tensor, module: nn.Linear, dtype: torch.dtype, some: slice = slice(None)) -> Tensor:
    """Return float64[n, V]: the products of `states` with these rows of the head, rounded to `dtype`."""
    bias = None if module.bias is None else module.bias[some].to(dtype)
    return functional.linear(states.to(dtype), module.weight[some].to(dtype), bias).double()


def _product_dtype(hidden: Tensor, weight: Tensor, autocast: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype in which the model multiplies these two; None if it cannot. Autocast leaves float64 alone."""
    if autocast is not None and torch.float64 not in (hidden.dtype, weight.dtype):
        return autocast
    return hidden.dtype if hidden.dtype == weight.dtype else None


def _hidden_if_sliceable(engine: CausalLM, split: SplitForward, row: Tensor, known: Tensor | None) -> Tensor | None:
    """Return the hidden states ``[n, hidden]`` of `row`, or None if slices of them give other logits than the whole."""
    try:
        hidden, whole = split.whole(row, known)
        parts, whole = torch.cat([split.logits(part).float() for part in hidden.split(5)]), whole.float()
    except Exception as error:
        if is_device_failure(error):
            raise
        # A forward that is not a body and a head may fail in any way when it is cut in two.
        return None
    eps = max(torch.finfo(dtype).eps for dtype in (engine.base.dtype, split.autocast) if dtype is not None)
    # Neither ids that the model rules out nor logits that are no numbers say how large a difference may be.
    finite = whole[whole.isfinite()].abs()
    tolerance = eps**0.5 * float(finite.max() if len(finite) else 0.0)
    return hidden if torch.allclose(parts, whole, rtol=0.0, atol=tolerance) else None


def _tiled_formula(
    engine: CausalLM, split: SplitForward, module: nn.Linear, hidden: Tensor, dtype: torch.dtype
) -> HeadFormula | None:
    """Return the scale and cap that turn the head's matrix product into the model's own logits, or None."""
    largest = float(head_products(hidden, module, dtype).abs().max())
    if not 0.0 < largest < float("inf"):
        # If all products are zero, for example, every formula would fit.
        return None
    states = torch.cat([hidden * (magnitude / largest) for magnitude in _MAGNITUDES])
    products, logits = head_products(states, module, dtype), split.logits(states).double()
    if products.shape != logits.shape:
        # The model cuts its logits, for example to the vocabulary without padding.
        return None
    for cap in dict.fromkeys((softcap(engine), None)):
        flat = logits[:_TRIED] if cap is None else torch.atanh(logits[:_TRIED] / cap) * cap
        scale = float((flat * products[:_TRIED]).sum() / products[:_TRIED].square().sum())
        scale = 1.0 if abs(scale - 1.0) < 1e-4 else scale
        formula = HeadFormula("tiled", dtype, scale, cap, witness=states[_TRIED : _TRIED + 1])
        if all(
            equal_but_for_rounding(made, wanted, dtype)
            for made, wanted in zip(formula.logits(products).split(_TRIED), logits.split(_TRIED), strict=True)
        ):
            return formula
    return None


def softcap(engine: CausalLM) -> float | None:
    """Return the cap of the logits that the model's configuration states."""
    cap = getattr(engine.base.config.get_text_config(), "final_logit_softcapping", None)
    return float(cap) if cap else None


def equal_but_for_rounding(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    """Return whether two sets of logits differ by rounding only.

    In float32 that is the rounding of sums, in anything shorter the rounding of one logit.
    """
    steps = 64 if dtype.itemsize >= 4 else 4
    # If an id is ruled out by minus infinity, a tolerance taken from it would let everything pass.
    finite = found[found.isfinite()].abs()
    tolerance = steps * torch.finfo(dtype).eps * float(finite.max() if len(finite) else 0.0)
    return torch.allclose(found, wanted, rtol=0.0, atol=tolerance)


def body_drops_out(engine: CausalLM, reader: BodyReader) -> bool:
    """Return whether the model, in its present mode, reads the same ids twice with different results.

    Dropout has a different name in every family, so reading twice is the only test.
    """
    if not (torch.is_grad_enabled() and any(part.training for part in engine.module.modules())):
        return False
    rows = Ragged(torch.arange(16) % engine.readable, torch.tensor([16]))
    (batch,) = padded_batches(rows.lengths, [torch.tensor([0])])
    devices: list[Any] = [] if engine.device.type == "cpu" else [engine.device]
    with torch.no_grad(), torch.random.fork_rng(devices, device_type=engine.device.type):
        return not torch.equal(reader.read(rows, batch), reader.read(rows, batch))

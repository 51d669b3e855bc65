"""Masks as bool, from the forms in which users have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from corelm.tensors.ragged import unreadable
from corelm.validate import invalid


def not_a_mask(given: Any) -> str:
    """Return why a value cannot be read as a mask; "" if it can.

    An additive mask, 0 for tokens and −inf for pads, would mean the opposite as bool, and NaN would be True.

    >>> not_a_mask(torch.tensor([1, 0])), not_a_mask(torch.tensor([0.0, -torch.inf]))
    ('', 'a mask that holds -inf')
    """
    why = unreadable(given)
    if why or given.dtype == torch.bool:
        return why
    odd = given[(given != 0) & (given != 1)]
    return f"a mask that holds {odd[0].item()}" if odd.numel() else ""


def as_mask(given: Any, field: str) -> Tensor:
    """Return a mask as bool. It may hold zeros and ones, as transformers writes masks.

    Raises:
        InvalidRequestError: it is not a plain tensor, has no values, or holds something else; the error names `field`.
    """
    if why := not_a_mask(given):
        raise invalid(field, f"expected True and False, or 1 and 0; got {why}")
    mask: Tensor = given.to(torch.bool)
    return mask

"""Torch modes that core sets for its callers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_inference_mode() -> Iterator[None]:
    """What is made inside a caller's ``inference_mode`` could not be used outside it. In here it can; gradients stay as
    they were, on or off.
    """
    grad = torch.is_grad_enabled()
    try:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.set_grad_enabled(grad):
                yield
        else:
            yield
    finally:
        # An engine may have left it otherwise.
        if torch.is_grad_enabled() != grad:
            torch.set_grad_enabled(grad)

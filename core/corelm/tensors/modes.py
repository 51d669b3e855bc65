"""The torch mode in which core runs, independent of the mode of its caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_inference_mode() -> Iterator[None]:
    """Leave the caller's ``inference_mode``, so that the tensors made here can be used outside it.

    Gradients stay on or off, as the caller has them.
    """
    grad = torch.is_grad_enabled()
    try:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.set_grad_enabled(grad):
                yield
        else:
            yield
    finally:
        # An engine may have switched gradients on or off.
        if torch.is_grad_enabled() != grad:
            torch.set_grad_enabled(grad)

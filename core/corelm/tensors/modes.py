"""The torch modes in which core runs: independent of its caller's, or its caller's on another thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

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


class CallerModes:
    """The torch modes of the thread that makes this; ``with`` sets them on another thread.

    They are: whether gradients are recorded, autocast on a CPU and on a GPU, and the current CUDA device. The default
    dtype and the number of threads hold for the whole process. Not carried over: inference mode, the current CUDA
    stream, and the modes of `torch.overrides`, such as ``torch.device`` used as a context manager.
    """

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._autocast = [
            torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=torch.is_autocast_cache_enabled())
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        ]
        self._cuda = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(torch.set_grad_enabled(self._grad))
        for autocast in self._autocast:
            self._stack.enter_context(autocast)
        if self._cuda is not None:
            self._stack.enter_context(torch.cuda.device(self._cuda))

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

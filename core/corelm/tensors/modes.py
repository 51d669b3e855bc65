"""The torch modes in which core runs: independent of its caller's, or its caller's on another thread."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


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
    """The torch modes of the thread that makes this; ``with`` sets them on another thread, or on several at once.

    They are: whether gradients are recorded, autocast on a CPU and on a GPU, and the current CUDA device. The default
    dtype and the number of threads hold for the whole process. Not carried over: inference mode, the current CUDA
    stream, and the modes of `torch.overrides`, such as ``torch.device`` used as a context manager.

    Attributes:
        key: equal for two threads whose modes are equal.
    """

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._autocast = tuple(
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        )
        self._cuda = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._here = threading.local()
        self.key: Hashable = (self._grad, self._autocast, self._cuda)

    def __enter__(self) -> None:
        self._here.stack = stack = ExitStack()
        stack.enter_context(torch.set_grad_enabled(self._grad))
        for kind, dtype, cached in self._autocast:
            stack.enter_context(torch.autocast(kind, dtype, cache_enabled=cached))
        if self._cuda is not None:
            stack.enter_context(torch.cuda.device(self._cuda))

    def __exit__(self, *exc: object) -> None:
        self._here.stack.close()


def in_caller_modes(function: Callable[[], T]) -> Callable[[], T]:
    """Return what another thread can call once to run the function as this one would.

    It sets this thread's context variables and torch modes.
    """
    modes, context = CallerModes(), contextvars.copy_context()

    def run() -> T:
        with modes:
            return function()

    return lambda: context.run(run)

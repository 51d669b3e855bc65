"""`SleepingWeights`: moves a model's weights off the accelerator, or drops them, and brings them back."""

from __future__ import annotations

import torch
from torch import nn

from corelm.spec import SLEEP_LEVELS


class SleepingWeights:
    """Where the weights of a model were before it fell asleep.

    Level 2 leaves them without memory. After it they are NaN until an update writes them, so that a weight which no
    update has written cannot make a number.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._devices: dict[nn.Parameter, torch.device] = {}
        self._buffers: dict[torch.Tensor, torch.device] = {}

    def sleep(self, level: int) -> None:
        """Free the memory of the accelerator. Buffers, which no update brings back, are kept at every level."""
        self._devices = {weight: weight.device for weight in self._module.parameters()}
        self._buffers = {buffer: buffer.device for buffer in self._module.buffers()}
        for weight in self._devices:
            # One element that stands for all of them keeps the shape.
            weight.data = weight.data.cpu() if level == 1 else weight.data.new_full((), torch.nan).expand(weight.shape)
        for buffer in self._buffers:
            buffer.data = buffer.data.cpu()

    def wake(self) -> None:
        """Take the memory again."""
        for weight, device in self._devices.items():
            weight.data = weight.data.to(device).contiguous()
        for buffer, device in self._buffers.items():
            buffer.data = buffer.data.to(device)
        self._devices, self._buffers = {}, {}


def sleep_levels(module: nn.Module, owns_model: bool) -> frozenset[int]:
    """Return the levels at which a model can sleep: none if its owner holds it, or if its weights are not plain ones.

    The program that made a model moves it by itself. Weights that are quantized hold more than their data, and those
    that are offloaded are elsewhere already.
    """
    weights = list(module.parameters())
    plain = all(type(each) is nn.Parameter and each.is_floating_point() and not each.is_meta for each in weights)
    if not (owns_model and weights and plain):
        return frozenset()
    # An update of the base weights would leave the adapters of a PEFT model without theirs.
    return frozenset({1} if getattr(module, "peft_config", None) else SLEEP_LEVELS)

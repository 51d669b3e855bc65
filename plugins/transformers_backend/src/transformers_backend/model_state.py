"""`WeightsState` and `fingerprint`: by what core and the self test notice that somebody has changed the model."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_code

#: Attributes of PEFT's layers: which adapters are active or merged into the weights, and how strongly. PEFT merges into
#: ``weight.data``, which no version counter sees.
_OF_ADAPTERS = ("merged_adapters", "_active_adapter", "_disable_adapters", "scaling")
#: Number of weights that are looked into, and of elements that are read of each. A step of an optimizer may change one
#: bfloat16 element in 250; of 4,096 elements, it then changes none once in ten million steps.
_SAMPLED, _ELEMENTS = 4, 1024
#: What a module's own dictionary may hold that changes what its forward does, besides hooks: a replaced or compiled
#: forward, and the adapters of PEFT that are switched on; X-LoRA as a whole is "disabled".
_WATCHED = ("forward", "_compiled_call_impl", "is_causal", "_active_adapter", "_disable_adapters", "disabled")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class WeightsState:
    """Call it for the state of a model's weights. Where it is equal, the weights are.

    It tells where each parameter is stored and how often it was modified, and samples a few elements: a change through
    ``weight.data`` is seen in nothing else. It also tells which adapters are in force. It does not read buffers: some
    models write to them in their forward.

    A forward of the model pushes all that is read here out of the caches, so few and alike operations are used.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # The parts at the latest call, and the numbers of the weights that are sampled.
        self._parts: list[Any] = []
        self._sampled: list[int] = []
        # What is told of the adapters while a call runs with another, and how often that has begun or ended.
        self._told: Hashable | None = None
        self._switches = 0

    @contextmanager
    def switching(self) -> Iterator[None]:
        """Tell of the adapters that are in force now, as long as a call runs with others inside."""
        outer = self._told
        _, told, _ = self()
        self._switches += 1
        self._told = told
        try:
            yield
        finally:
            self._told = outer
            self._switches += 1

    def __call__(self) -> tuple[Hashable, Hashable, int | None]:
        parts = parts_of(self._module)
        weights = _weights_of(parts)
        if parts != self._parts:
            self._parts, self._sampled = parts, _sampled(weights)
        where = tuple(map(_where, weights))
        while True:
            switches, told = self._switches, self._told
            adapters = _adapters(parts) if told is None else told
            # Otherwise another thread has switched them meanwhile.
            if switches == self._switches:
                return hash(where), adapters, self._sample(weights)

    def _sample(self, weights: Sequence[Tensor]) -> int | None:
        """Return a hash of elements of a few weights; None if they cannot be read, because they are offloaded."""
        try:
            few = [_spread(weights[number].detach()) for number in self._sampled]
            return hash(torch.cat(few).view(torch.uint8).cpu().numpy().tobytes()) if few else None
        except (RuntimeError, IndexError):
            return None


def parts_of(module: nn.Module) -> list[Any]:
    """Return all parts of a model; what it has in two places, twice."""
    parts: list[Any] = [module]
    for part in parts:
        # The list is extended while it is read.
        if children := vars(part)["_modules"]:
            parts += [child for child in children.values() if child is not None]
    return parts


def _weights_of(parts: Sequence[Any]) -> list[Any]:
    return [
        weight for part in parts if (own := vars(part)["_parameters"]) for weight in own.values() if weight is not None
    ]


def _adapters(parts: Sequence[Any]) -> Hashable:
    # PEFT's layers have an active one from the beginning, and some have nothing else until they are switched.
    owners = [own for own in map(vars, parts) if not own.keys().isdisjoint(_OF_ADAPTERS[:3])]
    return tuple([_frozen(own.get(name)) for own in owners for name in _OF_ADAPTERS])


def _frozen(value: Any) -> Hashable:
    # PEFT writes one name or a list of it, and keeps a switch that was never used on the class.
    if not value or isinstance(value, str):
        return (value,) if value else ()
    if isinstance(value, dict):
        return tuple(value.items())
    return tuple(value) if isinstance(value, list) else value


def _spread(weight: Tensor) -> Tensor:
    """Return elements of a weight, of one dimension, from all over it."""
    if not weight.is_contiguous():
        return weight.as_strided((min(_ELEMENTS, weight.shape[-1]),), (weight.stride(-1),))
    count = min(_ELEMENTS, weight.numel())
    # An odd step visits all columns of a matrix whose width is a power of two.
    step = weight.numel() // count
    return weight.as_strided((count,), (step - (step > 1 and step % 2 == 0),))


def _where(weight: Tensor) -> tuple[int, int]:
    """Return what a weight tells: inference tensors count no versions, and wrappers of several tensors have no
    address.
    """
    version = 0 if weight.is_inference() else weight._version
    try:
        return version, weight.data_ptr()
    except RuntimeError:
        return version, 0


def _sampled(weights: Sequence[Tensor]) -> list[int]:
    """Return the numbers of the weights to look into: of one kind, spread over those that are trained, if any are."""
    kinds = [
        (weight.device, weight.dtype)
        if type(weight) is nn.Parameter and weight.ndim and weight.numel() and weight.is_floating_point()
        else None
        for weight in weights
    ]
    kind = next((kind for kind in kinds if kind is not None), None)
    alike = [number for number, other in enumerate(kinds) if kind is not None and other == kind]
    alike = [number for number in alike if weights[number].requires_grad] or alike
    count = min(_SAMPLED, len(alike))
    return [alike[(2 * place + 1) * len(alike) // (2 * count)] for place in range(count)]


def fingerprint(module: nn.Module) -> tuple[Any, int]:
    """Return the structure of a model, and a number that grows when one of its weights is changed in place.

    The structure differs from an earlier one if a part of the model was replaced, hooked, patched or switched since.
    Every call of the backend computes this, so it reads attributes only.
    """
    parts = parts_of(module)
    special: list[Any] = []
    attention: set[Any] = set()
    for number, own in enumerate(map(vars, parts)):
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or not own.keys().isdisjoint(_WATCHED):
            found = [(name, value) for name in (*_HOOKS, *_WATCHED) if (value := own.get(name))]
            # Hooks are known by their numbers, which torch never gives twice.
            special += [(number, name, tuple(each) if isinstance(each, (dict, list)) else each) for name, each in found]
        if "config" in own:
            attention.add(getattr(own["config"], "_attn_implementation", None))
    classes: set[Any] = set(map(type, parts))
    kinds = {kind: kind.forward for kind in classes}
    everywhere = tuple(module_code._global_forward_hooks), tuple(module_code._global_forward_pre_hooks)
    changes = sum(weight._version for weight in _weights_of(parts) if not weight.is_inference())
    return (hash(tuple(map(id, parts))), special, kinds, attention, everywhere), changes

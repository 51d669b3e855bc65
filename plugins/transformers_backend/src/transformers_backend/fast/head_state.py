"""`HeadState`: what decides how a model makes logits of its last hidden states, read without running it.

The forward of a model of transformers depends, after its body, on its head and on what it reads of itself, of its body
and of its configuration. The names that it reads are in its code. Where all of them are plain values, and no other code
has a say, a formula that was found earlier still holds as long as these values are the same.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Hashable, Iterator
from functools import cache
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as module_code

from transformers_backend.engine import CausalLM
from transformers_backend.fast.split import HOOKS

#: The libraries whose forwards read no more than the names in their code.
_LIBRARIES = ("transformers", "peft")
#: A tensor that a forward reads besides the head is read here, too, if it has at most so many elements.
_FEW = 16
_PLAIN = (bool, int, float, str, type(None))
#: What a forward may name without reading a value: the configuration, and the loss, which comes after the logits.
_NO_VALUES = frozenset({"config", "loss_function"})


class HeadState:
    """Call it with the body and the head for the present state: where it is equal, the formula is the same. None if
    something else has a say, and only running the head tells.
    """

    def __init__(self, engine: CausalLM) -> None:
        self._engine = engine
        # The names that lead from the module that is called to its body.
        self._names: tuple[str, ...] = ()

    def __call__(self, body: nn.Module, head: nn.Linear) -> Hashable | None:
        around = self._around(body)
        if around is None or not all(_is_plain_call(part) for part in (*around, body, head)) or _is_hooked_everywhere():
            return None
        config = self._engine.base.config
        configs = {id(each): each for each in (config, config.get_text_config(), getattr(body, "config", config))}
        state: list[Hashable] = [id(body), id(head)]
        for part, child in zip(around, (*around[1:], body), strict=True):
            names = _names_read(type(part).forward)
            if names is None:
                return None
            state += [id(part), type(part).forward]
            if type(part).__module__.startswith("peft."):
                # What PEFT wraps around a model hands its logits on.
                continue
            # Another part with weights could come between body and head.
            if any(_has_weights(each) for each in part.children() if each not in (child, head)):
                return None
            for owner in (part, body, *configs.values()):
                values = _values(owner, names, (child, head))
                if values is None:
                    return None
                state += values
        return tuple(state)

    def _around(self, body: nn.Module) -> list[nn.Module] | None:
        """Return the modules around the body, from the one that is called inwards; None if it is not inside."""
        for _ in range(2):
            around: list[Any] = [self._engine.module]
            for name in self._names:
                around.append(getattr(around[-1], name, None))
            if around[-1] is body:
                return around[:-1]
            found = (name for name, part in self._engine.module.named_modules() if part is body)
            self._names = tuple(next(found, "").split("."))
        return None


def _values(owner: Any, names: frozenset[str], parts: tuple[nn.Module, ...]) -> list[Hashable] | None:
    """Return the plain values that `owner` has under these names; None if it has others.

    Args:
        owner: a module or a configuration.
        names: what is read.
        parts: modules that may be read as well.
    """
    own = vars(owner)
    values: list[Hashable] = []
    for name in names:
        if name in own:
            value = own[name]
        elif isinstance(owner, nn.Module) and not hasattr(type(owner), name):
            value = getattr(owner, name, None)
        else:
            # A method may read anything, and a property, too.
            value = getattr(type(owner), name, None)
        if isinstance(value, _PLAIN):
            values.append((name, value))
        elif isinstance(value, Tensor) and value.numel() <= _FEW and not value.is_meta:
            values.append((name, value.requires_grad, *value.flatten().tolist()))
        elif name not in _NO_VALUES and not any(value is part for part in parts):
            return None
    return values


@cache
def _names_read(forward: Any) -> frozenset[str] | None:
    """Return the names of attributes in a forward; None if some of its code is not of a known library."""
    files = [sys.modules[name].__file__ for name in _LIBRARIES if name in sys.modules]
    places = tuple(os.path.dirname(file) + os.sep for file in files if file)
    while True:
        if not isinstance(forward, FunctionType) or not forward.__code__.co_filename.startswith(places):
            return None
        # Decorators of the libraries read options of the call only.
        if not hasattr(forward, "__wrapped__"):
            return frozenset(_names(forward.__code__))
        forward = forward.__wrapped__


def _names(code: Any) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, type(code)):
            yield from _names(constant)


def _is_plain_call(part: nn.Module) -> bool:
    """Return whether calling a module runs the forward of its class, which is a library's, and nothing else."""
    own, kind = vars(part), type(part)
    known = kind.__module__.split(".")[0] in (*_LIBRARIES, "torch") and kind.__call__ is nn.Module.__call__
    return known and "forward" not in own and not any(own.get(name) for name in HOOKS)


def _is_hooked_everywhere() -> bool:
    return bool(module_code._global_forward_hooks or module_code._global_forward_pre_hooks)


def _has_weights(part: nn.Module) -> bool:
    return next(part.parameters(), None) is not None or next(part.buffers(), None) is not None

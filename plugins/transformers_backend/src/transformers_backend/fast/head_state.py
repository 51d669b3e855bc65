"""`HeadState`: what decides how a model makes logits of its last hidden states, read without running it.

The forward of a model of transformers itself depends, after its body, on its head, on its own attributes and on its
configuration. Where nothing else has a say, these are enough to know that a formula found earlier still holds.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as module_code

from transformers_backend.engine import CausalLM
from transformers_backend.fast.split import HOOKS

#: Packages whose forwards depend on nothing but what is read here.
_KNOWN_CODE = ("transformers.models.", "peft.")
#: A tensor of a module around the body is read at every call, if it has at most so many elements.
_FEW = 16
#: The head is always tried without dropout.
_UNREAD = frozenset({"training"})
_PLAIN = (bool, int, float, str, type(None))


class HeadState:
    """Call it with the body and the head for the present state: where it is equal, the formula is the same. None if
    something else has a say, and only running the head tells.
    """

    def __init__(self, engine: CausalLM) -> None:
        self._engine = engine
        # The names that lead from the module that is called to its body.
        self._names: tuple[str, ...] = ()

    def __call__(self, body: nn.Module, head: Any) -> Hashable | None:
        around = self._around(body)
        if around is None or any(_is_hooked(part) for part in (*around, body, head)) or _is_hooked_everywhere():
            return None
        state: list[Hashable] = [id(body), id(head)]
        for part, child in zip(around, (*around[1:], body), strict=True):
            # Another part with weights could come between body and head.
            others = (each for each in part.children() if each not in (child, head))
            forward = type(part).forward
            if not forward.__module__.startswith(_KNOWN_CODE) or any(_has_weights(each) for each in others):
                return None
            own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
            if any(each.numel() > _FEW for each in own):
                return None
            # Neither a parameter nor a buffer: nothing tells what it is there for.
            if any(isinstance(value, Tensor) for value in vars(part).values()):
                return None
            numbers = [(each.requires_grad, *each.flatten().tolist()) for each in own]
            state += [id(part), forward, *_plain_items(part), *numbers]
        for config in _configs(self._engine.base.config):
            state += _plain_items(config)
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


def _is_hooked(part: Any) -> bool:
    own = vars(part)
    return "forward" in own or any(own.get(name) for name in HOOKS)


def _is_hooked_everywhere() -> bool:
    return bool(module_code._global_forward_hooks or module_code._global_forward_pre_hooks)


def _has_weights(part: nn.Module) -> bool:
    return next(part.parameters(), None) is not None or next(part.buffers(), None) is not None


def _plain_items(owner: Any) -> Iterator[Hashable]:
    return ((name, value) for name, value in vars(owner).items() if isinstance(value, _PLAIN) and name not in _UNREAD)


def _configs(config: Any) -> Iterator[Any]:
    yield config
    text = config.get_text_config()
    if text is not config:
        yield text

"""`ScoringHead`: how this model's log-probabilities can be made of its last hidden states, found out by trying.

tiled    one matrix product, at most scaled and capped: log-probabilities without logits (`tiles`)
sliced   the model's own forward turns hidden states into logits, a slice of positions at a time
whole    a slice gives other logits than the plain forward, so all logits are made at once
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from transformers_backend.engine import CausalLM
from transformers_backend.fast.head_state import HeadState
from transformers_backend.fast.probing import HeadFormula, equal_but_for_rounding, head_products, probe_head, softcap
from transformers_backend.fast.probing_queries import answers_alike
from transformers_backend.fast.split import CannotSplit, SplitForward, autocast_dtype, is_bare
from transformers_backend.fast.tiles import TiledHead
from transformers_backend.scoring import HeadPath
from transformers_backend.self_test import SelfTest

#: Number of ids on which products kept from an earlier call are compared. Comparing all would read the whole head.
_SAMPLED = 8192
#: Where the formula is compared at every call. With more than `_LARGE` weights that takes a millisecond or more. For
#: `_FEW` positions or fewer, the model's own forward is cheaper.
_LARGE, _FEW = 2**21, 64
#: How many states of the head are remembered.
_REMEMBERED = 32


class ScoringHead:
    def __init__(self, engine: CausalLM, split: SplitForward, self_test: SelfTest) -> None:
        self._engine = engine
        self._split = split
        self._self_test = self_test
        self._state = HeadState(engine)
        # By the dtype of the caller's autocast, None without: one may train under it and sample without.
        self._probed: dict[torch.dtype | None, tuple[Any, HeadFormula]] = {}
        # The products of each formula's witness with the head, float64[1, V].
        self._products: dict[torch.dtype | None, Tensor] = {}
        # Whether tiles give the numbers of the model's own logits. The keys are autocast, whether several ids are
        # asked for, and the layout of the head.
        self._answers: dict[tuple[Any, ...], bool] = {}
        # The states of the head, under which autocast, in which each formula held, without gradients and with them.
        self._held: set[tuple[torch.dtype | None, bool, Hashable]] = set()

    def forget(self) -> None:
        """Probe again before the next use: with other weights another formula may show."""
        self._split.forget()
        self._probed.clear()
        self._products.clear()
        self._answers.clear()
        self._held.clear()

    def path(self, positions: int, *, grad: bool = False, several: bool = False) -> HeadPath:
        """Return how to make the log-probabilities of so many positions now.

        A formula is compared with the model's own forward, on one state, before it is used: since it was found, a scale
        may have been learned or a hook put on the body. The comparison costs as much as one position. It is made once
        for each `HeadState`, and at every call where there is none.

        Args:
            positions: how many positions are scored.
            grad: whether gradients are wanted.
            several: whether log-probs over a set of ids, or of several ids at a position, are wanted.
        """
        for _ in range(2):
            formula = self._formula()
            if formula.path != "tiled":
                return formula.path
            module = self._module()
            if module is None or not is_bare(module):
                return "sliced"
            state = self._present_state(module)
            known = (autocast_dtype(self._engine.device), grad, state)
            few = state is None and not grad and positions <= _FEW
            if few and self._is_large(formula):
                return "sliced"
            if known in self._held or self._holds(formula, grad):
                if state is not None:
                    self._remember(known)
                right = self._tiles_answer(module, formula) and (
                    not several or self._tiles_answer(module, formula, several=True)
                )
                return "tiled" if right else "sliced"
            self.forget()
        return "sliced"

    def tiled(self) -> TiledHead:
        """Return the head as one matrix product. Only for the path "tiled"."""
        formula, module = self._formula(), self._module()
        assert module is not None
        return TiledHead(module.weight, module.bias, formula.scale, formula.cap, formula.dtype)

    def _module(self) -> nn.Linear | None:
        """Return the head if it is torch's own linear layer: no adapter, no quantization, weights not offloaded."""
        head = self._engine.base.get_output_embeddings()
        if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter or head.weight.device.type == "meta":
            return None
        return head

    def _remember(self, known: tuple[torch.dtype | None, bool, Hashable]) -> None:
        # A scale that is learned has another value at every call.
        if len(self._held) >= _REMEMBERED:
            self._held.clear()
        self._held.add(known)

    def _present_state(self, head: nn.Linear) -> Hashable | None:
        try:
            return self._state(self._split.body(), head)
        except CannotSplit:
            return None

    def _is_large(self, formula: HeadFormula) -> bool:
        """Return whether few positions are better left to the model's own forward.

        The head must be large, and both ways must round alike: after a scale or a cap, the model rounds short floats
        once more.
        """
        module = self._module()
        assert module is not None
        alike = formula.dtype.itemsize >= 4 or (formula.scale == 1.0 and formula.cap is None)
        return alike and module.weight.numel() > _LARGE

    def _holds(self, formula: HeadFormula, grad: bool) -> bool:
        """Return whether the formula gives what the model gives now; with `grad`, also whether gradients reach nothing
        but the hidden states and the head.
        """
        engine, module = self._engine, self._module()
        assert module is not None and formula.witness is not None
        state = formula.witness.to(module.weight.device)
        with engine.evaluating(), self._without_cache():
            with torch.set_grad_enabled(grad):
                state = state.requires_grad_(grad)
                logits = self._split.logits(state)
            known = (state, module.weight, module.bias)
            if grad and not all(any(leaf is one for one in known) for leaf in _leaves(logits)):
                return False
            made = formula.logits(self._products_of(state, module, formula.dtype))
            return equal_but_for_rounding(made, logits.double(), formula.dtype)

    def _tiles_answer(self, head: nn.Linear, formula: HeadFormula, *, several: bool = False) -> bool:
        """Return whether tiles answer as the model's own logits do, found out once for each layout of the head.

        Args:
            several: whether several ids are asked for at a position.
        """
        layouts = [(each.dtype, each.shape, each.stride()) for each in (head.weight, head.bias) if each is not None]
        key = (autocast_dtype(self._engine.device), several, *layouts)
        if key not in self._answers:
            with self._engine.evaluating(), self._without_cache():
                self._answers[key] = answers_alike(self.tiled(), self._split, formula, several=several)
        return self._answers[key]

    def _products_of(self, state: Tensor, module: nn.Linear, dtype: torch.dtype) -> Tensor:
        """Return the bare products of the witness with the head, float64[1, V].

        Those of an earlier call are used if a sample of them is still right. If any of the rest is wrong, the model's
        own logits do not fit them either.
        """
        autocast, some = autocast_dtype(self._engine.device), slice(None, None, max(1, len(module.weight) // _SAMPLED))
        known = self._products.get(autocast)
        if (
            known is None
            or known.shape[-1] != len(module.weight)
            or known.device != state.device
            or not equal_but_for_rounding(known[..., some], head_products(state, module, dtype, some), dtype)
        ):
            known = self._products[autocast] = head_products(state, module, dtype)
        return known

    def _formula(self) -> HeadFormula:
        engine = self._engine
        # What may come between body and logits without being part of the head.
        around = [(tuple(part._forward_hooks), vars(part).get("forward")) for part in (engine.module, engine.base)]
        head, autocast = engine.base.get_output_embeddings(), autocast_dtype(engine.device)
        state = (around, head, getattr(getattr(head, "weight", None), "dtype", None), softcap(engine))
        known = self._probed.get(autocast)
        if known is None or known[0] != state:
            self._products.pop(autocast, None)
            self._answers = {key: each for key, each in self._answers.items() if key[0] != autocast}
            self._held = {each for each in self._held if each[0] != autocast}
            with engine.evaluating(), self._without_cache():
                row, plain = self._self_test.row, None if autocast else self._self_test.plain
                known = self._probed[autocast] = (state, probe_head(engine, self._split, self._module(), row, plain))
        return known[1]

    def _without_cache(self) -> torch.autocast:
        """Keep the caller's autocast, but not the copies that it makes of weights here.

        They are made without gradients, and would stay in memory until the caller's autocast ends.
        """
        kind = self._engine.device.type
        return torch.autocast(
            kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False
        )


def _leaves(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors in which the gradients of this one end."""
    nodes, seen = [tensor.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        nodes += [earlier for earlier, _ in node.next_functions]

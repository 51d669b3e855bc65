"""`Oracle`: the truth about a model's log-probabilities, from its plain forward and nothing else.

One row at a time, ``model(input_ids=row).logits``: no mask, no positions, no cache, no code of ours.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

#: Two forwards of a causal model over the same ids differ by less, in nats; those of another model by far more.
_CAUSAL = 1e-2
#: Short enough to lie on one side of longrope's switch.
_PROBE = 60


class Oracle:
    """The log-probabilities of a model, in the model's own precision and in float64.

    Args:
        model: called in eval mode, which is restored afterwards.
        vocab: ids lie below it.
    """

    def __init__(self, model: nn.Module, vocab: int) -> None:
        self.model = model
        self._vocab = vocab
        self._tables: dict[tuple[int, ...], Tensor] = {}
        self._precise_tables: dict[tuple[int, ...], Tensor] = {}

    def table(self, ids: Sequence[int]) -> Tensor:
        """Return float64[len(ids), V]: row t holds the log-probabilities of what follows ``ids[: t + 1]``."""
        return self._cached(self._tables, self.model, ids)

    def precise_table(self, ids: Sequence[int]) -> Tensor:
        """Return the same, from the model in float64."""
        return self._cached(self._precise_tables, self._precise, ids)

    def forget(self) -> None:
        """Drop what was computed, because the model has changed."""
        self._tables.clear()
        self._precise_tables.clear()
        for name in ("_precise", "_is_causal"):
            self.__dict__.pop(name, None)

    def _cached(self, tables: dict[tuple[int, ...], Tensor], model: nn.Module, ids: Sequence[int]) -> Tensor:
        key = tuple(ids)
        if key not in tables:
            # A model that looks ahead has no log p(token | earlier tokens) in one forward.
            tables[key] = plain(model, key) if self._is_causal else _by_prefixes(model, key)
        return tables[key]

    @functools.cached_property
    def _precise(self) -> nn.Module:
        precise = copy.deepcopy(self.model).double()
        for module in precise.modules():
            # The grouped product of experts does not exist in float64.
            if isinstance(module, PreTrainedModel) and getattr(module.config, "_experts_implementation", None):
                module.set_experts_implementation("eager")
        return precise

    @functools.cached_property
    def _is_causal(self) -> bool:
        ids = torch.randint(3, self._vocab, (_PROBE,), generator=torch.Generator().manual_seed(5)).tolist()
        whole = plain(self.model, ids)
        ends = (0, 1, 16, 40, _PROBE - 2)
        return all(bool((plain(self.model, ids[: end + 1])[-1] - whole[end]).abs().max() < _CAUSAL) for end in ends)


def plain(model: nn.Module, ids: Sequence[int]) -> Tensor:
    """Return float64[len(ids), V], the log-probabilities of one forward in eval mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([list(ids)])).logits
    for module in training:
        module.training = True
    return logits[0].double().log_softmax(-1)


def _by_prefixes(model: nn.Module, ids: Sequence[int]) -> Tensor:
    return torch.stack([plain(model, ids[: end + 1])[-1] for end in range(len(ids))])

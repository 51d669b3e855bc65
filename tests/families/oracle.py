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
        self._known: dict[tuple[bool, int, tuple[int, ...]], Tensor] = {}

    def after(self, ids: Sequence[int], first: int, *, precise: bool = False) -> Tensor:
        """Return float64[len(ids) - first, V]: the log-probabilities of what follows ``ids[: first + 1]``, and so on.

        Args:
            precise: from the model in float64.
        """
        key = (precise, first, tuple(ids))
        if key not in self._known:
            model = self._precise if precise else self.model
            # A model that looks ahead has no log p(token | earlier tokens) in one forward.
            if self._is_causal:
                self._known[key] = plain(model, ids)[first:]
            else:
                ends = range(first + 1, len(ids) + 1)
                self._known[key] = torch.stack([plain(model, ids[:end])[-1] for end in ends])
        return self._known[key]

    def forget(self) -> None:
        """Drop what was computed, because the model has changed."""
        self._known.clear()
        for name in ("_precise", "_is_causal"):
            self.__dict__.pop(name, None)

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

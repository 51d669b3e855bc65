"""`Oracle`: the truth about a model's log-probabilities, from its plain forward and nothing else.

One row at a time, ``model(input_ids=row).logits``: no mask, no positions, no cache, no code of ours.
"""

import copy
import functools
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

#: Two forwards of a causal model over the same ids differ by less, in nats; those of another model by far more.
_CAUSAL = 1e-2
#: Short enough to lie on one side of longrope's switch.
_PROBE = 60


#: Which model computes: see `Oracle.after`.
Variant = Literal["plain", "precise"] | int


class Oracle:
    """The log-probabilities of a model, in the model's own precision and in float64.

    Args:
        model: called in eval mode, which is restored afterwards.
        vocab: ids lie below it.
    """

    def __init__(self, model: nn.Module, vocab: int) -> None:
        self.model = model
        self._vocab = vocab
        self._known: dict[tuple[Variant, int, tuple[int, ...]], Tensor] = {}
        self._variants: dict[Variant, nn.Module] = {}

    def after(self, ids: Sequence[int], first: int, variant: Variant = "plain") -> Tensor:
        """Return float64[len(ids) - first, V]: the log-probabilities of what follows ``ids[: first + 1]``, and so on.

        Args:
            variant: "plain" for the model itself, "precise" for the model in float64, or a number: that of a model in
                float64 whose weights are rounded otherwise, each by half of what float32 rounds to.
        """
        key = (variant, first, tuple(ids))
        if key not in self._known:
            model = self._model(variant)
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
        self._variants.clear()
        self.__dict__.pop("_is_causal", None)

    def _model(self, variant: Variant) -> nn.Module:
        if variant == "plain":
            return self.model
        if variant not in self._variants:
            model = copy.deepcopy(self.model).double()
            for module in model.modules():
                # The grouped product of experts does not exist in float64.
                if isinstance(module, PreTrainedModel) and getattr(module.config, "_experts_implementation", None):
                    module.set_experts_implementation("eager")
            if isinstance(variant, int):
                _nudge(model, variant)
            self._variants[variant] = model
        return self._variants[variant]

    @functools.cached_property
    def _is_causal(self) -> bool:
        ids = torch.randint(3, self._vocab, (_PROBE,), generator=torch.Generator().manual_seed(5)).tolist()
        whole = plain(self.model, ids)
        ends = (0, 1, 16, 40, _PROBE - 2)
        return all(bool((plain(self.model, ids[: end + 1])[-1] - whole[end]).abs().max() < _CAUSAL) for end in ends)


@torch.no_grad()
def _nudge(model: nn.Module, seed: int) -> None:
    """Move each weight up or down by half of the distance to its neighbour in float32, at random."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        signs = torch.randint(2, parameter.shape, generator=generator, dtype=parameter.dtype).mul_(2).sub_(1)
        parameter *= (1 + torch.finfo(torch.float32).eps / 2 * signs).to(parameter.device)


def plain(model: nn.Module, ids: Sequence[int]) -> Tensor:
    """Return float64[len(ids), V], the log-probabilities of one forward in eval mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    with torch.no_grad():
        given = torch.tensor([list(ids)], device=next(model.parameters()).device)
        logits: Tensor = model(input_ids=given).logits
    for module in training:
        module.training = True
    return logits[0].cpu().double().log_softmax(-1)

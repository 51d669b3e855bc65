"""`widen`: random weights with which an error is visible in the logits."""

import torch
from torch import nn

#: The standard deviation of the logits lies between these. The log-probs of a flat distribution hide errors.
FLAT, STEEP = 2.0, 4.0


@torch.no_grad()
def widen(model: nn.Module) -> None:
    """Move biases and gains away from 0 and 1, and scale the head until the logits vary by 2 to 4.

    Raises:
        ArithmeticError: the logits are not finite, or the head does not scale them.
    """
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter += 0.25 * torch.randn_like(parameter)
    for _ in range(6):
        spread = _spread(model)
        if FLAT <= spread <= STEEP:
            return
        head = model.get_output_embeddings()
        if head is None:
            break
        for parameter in head.parameters():
            parameter *= min(10.0, (FLAT + STEEP) / 2 / spread)
    if not 0.5 <= _spread(model) <= 10.0:
        raise ArithmeticError(f"the logits vary by {_spread(model):.3g}")


def _spread(model: nn.Module) -> float:
    logits = model(input_ids=torch.arange(3, 43).unsqueeze(0)).logits
    if not bool(logits.isfinite().all()):
        raise ArithmeticError("the logits are not finite")
    return max(1e-6, float(logits.std(-1).mean()))

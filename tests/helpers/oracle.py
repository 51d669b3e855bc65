"""The oracle: a model's log-probs, computed in the simplest way and without any code of core.

One sequence at a time, no padding, no cache, every position, all logits, and a log-softmax in float64: in float32 it is
off by up to 4e-5 over a large vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def next_logits(model: nn.Module, ids: Sequence[int]) -> Tensor:
    """Return float32[len(ids), V]: row t holds the logits after ``ids[: t + 1]``, without dropout."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    with torch.no_grad():
        logits = own_logits(model, ids).float()
    for module, training in modes:
        module.training = training
    return logits


def own_logits(model: nn.Module, ids: Sequence[int]) -> Tensor:
    """Return [len(ids), V] on the CPU: the model's logits of one row, as they come, with gradients if they are on."""
    logits: Tensor = model(input_ids=torch.tensor([list(ids)], device=next(model.parameters()).device)).logits
    return logits[0].cpu()


def logprobs(model: nn.Module, ids: Sequence[int], temperature: float = 1.0) -> Tensor:
    """Return float32[len(ids)]: the log-probability of every token given those before it; entry 0 is 0."""
    out = torch.zeros(len(ids))
    if len(ids) > 1:
        table = (next_logits(model, ids[:-1]).double() / temperature).log_softmax(-1)
        out[1:] = table[torch.arange(len(ids) - 1), torch.tensor(list(ids[1:]))].float()
    return out


def answer_logprobs(model: nn.Module, prompt: Sequence[int], answer: Sequence[int], temperature: float = 1.0) -> Tensor:
    """Return float32[len(answer)]: the log-probability of every answer token given the tokens before it."""
    return logprobs(model, [*prompt, *answer], temperature)[len(prompt) :]


def close(found: Tensor, expected: Tensor) -> None:
    """Assert that two tensors of log-probs differ by at most 1e-5."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def first_greedy_id(model: nn.Module, prompts: Sequence[Sequence[int]]) -> int:
    """Return the id that greedy decoding samples first after the first prompt."""
    return int(next_logits(model, prompts[0])[-1].argmax())

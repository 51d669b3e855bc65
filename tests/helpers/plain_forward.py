"""Checks of a backend against the plain forward of its model, and models that make a mistake visible."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from corelm import Backend
from corelm.spec import GenerateResult, ScoreResult
from helpers import oracle
from helpers.tiny_models import random_rows

Open = Callable[..., Backend]
Rows = Sequence[Sequence[int]]
ROWS = random_rows(30, 7, 19, 2, 30)
PROMPTS = random_rows(20, 3, 9, 20)
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


class Forwards(TorchDispatchMode):
    """Counts forward passes, without a hook that the verdict would know of."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.embedding.default
        return func(*args, **(kwargs or {}))


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a forward: transformers 5.24 renamed past_key_values to cache."""
    return arguments.get("cache", arguments.get("past_key_values"))


def wide(model: PreTrainedModel) -> Any:
    """Give the model weights that make a mistake visible."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and "norm" not in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    return model.eval()


def assert_scores(
    backend: Backend, model: nn.Module, rows: Rows = ROWS, *, atol: float = 1e-5, **options: Any
) -> ScoreResult:
    """Score these rows, compare every log-prob that was asked for with the oracle, and return the result."""
    out = backend.score_logprobs(rows, **options)
    parts = zip(rows, out.logprobs.split(), out.scored.split(), strict=True)
    for number, (row, found, scored) in enumerate(parts):
        expected = oracle.logprobs(model, row, options.get("temperature", 1.0)) * scored
        # Float32 has steps of 8e-6 where a log-prob is below -64.
        torch.testing.assert_close(
            found.detach(), expected, rtol=1e-7, atol=atol, msg=lambda m, n=number: f"row {n}: {m}"
        )
    return out


def assert_answers(made: GenerateResult, model: nn.Module, prompts: Rows, *, atol: float = 2e-5) -> None:
    """Compare the raw log-probs of answers with the oracle, which reads at once what decoding adds token by token."""
    assert made.logprobs is not None
    parts = zip(prompts, made.ids.tolist(), made.logprobs.split(), strict=True)
    for number, (prompt, answer, found) in enumerate(parts):
        expected = oracle.answer_logprobs(model, prompt, answer)
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=atol, msg=lambda m, n=number: f"row {n}: {m}")


def check(backend: Backend, model: nn.Module) -> None:
    """Compare scores and generated log-probs with the oracle."""
    assert_scores(backend, model, atol=2e-5)
    made = backend.generate(PROMPTS, {"max_new_tokens": 12}, seeds=list(range(len(PROMPTS))))
    assert_answers(made, model, PROMPTS, atol=3e-5)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradients of `loss` by the names of the model's parameters, and remove them from the model."""
    model.zero_grad()
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def own_loss(model: nn.Module, rows: Rows, temperature: float = 1.0) -> Tensor:
    """Return the sum of the log-probs of all tokens but the first of each row, from the model's own logits."""
    loss = torch.zeros(())
    for row in rows:
        if len(row) > 1:
            table = (oracle.own_logits(model, row)[:-1].double() / temperature).log_softmax(-1)
            loss = loss + table.gather(-1, torch.tensor(row[1:])[:, None]).sum()
    return loss


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        atol = 1e-4 * float(gradient.abs().max() + 1)
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


class ForwardPasses(list[tuple[int, int]]):
    """The rows and columns of each forward pass of a model's body from now on."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        model.get_input_embeddings().register_forward_hook(lambda _, args, out: self.append(tuple(args[0].shape)))


def spoil_cache_after(model: Any, length: int) -> None:
    """Change what the model's body returns if its cache already holds more than `length` tokens."""
    plain = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        past = cache_in(kwargs)
        if past is not None and past.get_seq_length() > length:
            out.last_hidden_state = -out.last_hidden_state
        return out

    model.model.forward = forward

"""A model object that its owner trains: every row carries the version of the weights that it came from."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from corelm import Backend, LLMPolicy
from corelm.errors import EngineError
from helpers.peft_models import with_lora
from helpers.plain_forward import Open
from helpers.tiny_models import DEVICE, random_rows, tiny_model

ROWS = random_rows(6, 9)


def version(backend: Backend) -> str:
    (found,) = {*backend.score_logprobs(ROWS).weight_versions}
    return found


def test_a_policy_trained_in_place_says_so(open_model: Open) -> None:
    model = tiny_model()
    backend = open_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    policy = LLMPolicy(backend, input_mode="text", sampling_params={"max_new_tokens": 4})
    found = []
    for step in range(3):
        rollout = policy(TensorDict(text=["Hello", "The cat"]), seed=step)
        found.append(rollout["log_probs"].provenance.weight_version)
        loss = -policy.replace(input_mode="tokens", generate=False).log_prob(rollout)[0].sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert found == ["0", "1", "2"]


def step(model: Any, **options: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(model.parameters(), **options).step()


def replace_data(model: Any) -> None:
    model.lm_head.weight.data = model.lm_head.weight.data + 1


def replace_data_twice(model: Any) -> None:
    # The second tensor may be stored where the first one was.
    for parameter in model.parameters():
        parameter.data = parameter.data + 1
    for parameter in model.parameters():
        parameter.data = parameter.data + 1


def add_to_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.add_(1.0)


def in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        model.lm_head.weight.add_(1.0)


CHANGES: dict[str, Callable[[Any], object]] = {
    "an optimizer": step,
    "an optimizer, foreach": lambda model: step(model, foreach=True),
    "an optimizer, fused": lambda model: step(model, fused=True),
    "under no_grad": torch.no_grad()(lambda model: model.lm_head.weight.mul_(2)),
    "under inference_mode": in_inference_mode,
    "load_state_dict": lambda model: model.load_state_dict(tiny_model(seed=1).state_dict()),
    "load_state_dict, assigned": lambda model: model.load_state_dict(tiny_model(seed=1).state_dict(), assign=True),
    "another parameter": lambda model: setattr(
        model.lm_head, "weight", nn.Parameter(torch.randn(512, 64, device=DEVICE))
    ),
    "another module": lambda model: setattr(model, "lm_head", nn.Linear(64, 512, bias=False, device=DEVICE)),
    "data of one": replace_data,
    "data of all, twice": replace_data_twice,
    "data of all, in place": add_to_data,
    "another dtype": lambda model: model.bfloat16(),
}


def test_a_change_is_noticed(open_model: Open) -> None:
    for name, change in CHANGES.items():
        model = tiny_model()
        backend = open_model(model)
        assert version(backend) == version(backend) == "0", name
        change(model)
        assert version(backend) == version(backend) == "1", name


def test_steps_of_an_optimizer_with_masters_are_noticed(open_model: Open) -> None:
    """Mixed-precision optimizers copy float32 masters into ``data``: few bfloat16 elements change, and no counter."""
    model = tiny_model().bfloat16()
    backend = open_model(model)
    generator = torch.Generator().manual_seed(0)
    masters = [parameter.data.float() for parameter in model.parameters()]
    found, steps = [version(backend)], 6
    for _ in range(steps):
        before = [parameter.data.clone() for parameter in model.parameters()]
        for parameter, master in zip(model.parameters(), masters, strict=True):
            master += (torch.randn(master.shape, generator=generator) * 3e-6).to(master.device)
            parameter.data.copy_(master)
        pairs = zip(model.parameters(), before, strict=True)
        changed = sum(int((parameter != old).sum()) for parameter, old in pairs)
        assert 0 < changed < 0.02 * model.num_parameters()
        found.append(version(backend))
    assert found == [str(number) for number in range(steps + 1)]


NO_CHANGES: dict[str, Callable[[Any], object]] = {
    "train": lambda model: model.train(),
    "gradients": lambda model: model(torch.tensor([[3, 4]], device=model.device)).logits.sum().backward(),
    "a hook": lambda model: model.lm_head.register_forward_hook(lambda *_: None),
    "the same dtype": lambda model: model.float(),
    "a state dict": lambda model: model.state_dict(),
    "requires_grad": lambda model: model.requires_grad_(False),
}


def test_what_leaves_the_weights_alone_is_no_change(open_model: Open) -> None:
    model = tiny_model()
    backend = open_model(model)
    assert version(backend) == "0"
    for name, action in NO_CHANGES.items():
        action(model)
        assert version(backend) == "0", name
        backend.generate(ROWS, {"max_new_tokens": 3, "seed": 1})
        backend.score_logprobs(ROWS, grad=name != "requires_grad")
        assert version(backend) == "0", name


def test_inference_tensors_can_be_sampled_from(open_model: Open) -> None:
    with torch.inference_mode():
        model = tiny_model()
    backend = open_model(model)
    assert version(backend) == "0"
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert version(backend) == "1"


def test_adapters_have_versions_of_their_own(open_model: Open) -> None:
    model = with_lora(tiny_model())
    backend = open_model(model)
    assert version(backend) == "0"
    for _ in range(2):
        with model.disable_adapter():
            assert version(backend) == "1"
        assert version(backend) == "0"
    model.merge_adapter()
    assert version(backend) == "2"
    model.unmerge_adapter()
    # Merging and unmerging leaves rounding behind, so the weights may differ from the first ones.
    assert version(backend) in ("0", "3")
    step(model)
    assert version(backend) not in ("0", "1", "2")


def test_training_on_another_thread_during_a_call_is_an_error(open_model: Open) -> None:
    model = tiny_model()
    backend = open_model(model)
    armed, generating, stepped = (threading.Event() for _ in range(3))

    def hold(*_: Any) -> None:
        if armed.is_set() and not stepped.is_set():
            generating.set()
            assert stepped.wait(60)

    def train() -> None:
        assert generating.wait(60)
        step(model)
        stepped.set()

    model.lm_head.register_forward_hook(hold)
    options = {"max_new_tokens": 20, "ignore_eos": True, "seed": 1}
    backend.generate(ROWS, options)
    trainer = threading.Thread(target=train)
    trainer.start()
    armed.set()
    with pytest.raises(EngineError, match="the weights of the model were changed during the call"):
        backend.generate(ROWS, options)
    trainer.join()
    assert backend.generate(ROWS, options).weight_versions == ("1", "1")


def test_the_owner_may_say_what_cannot_be_noticed(open_model: Open) -> None:
    model = tiny_model()
    backend = open_model(model)
    before = backend.score_logprobs(ROWS).logprobs.values
    # A single element, through `data`: no counter moves, and the elements that are sampled stay as they are.
    model.lm_head.weight.data[5, 9] += 100.0
    assert backend.weights_changed("patched") == "patched"
    after = backend.score_logprobs(ROWS)
    assert after.weight_versions == ("patched", "patched") and not torch.equal(before, after.logprobs.values)

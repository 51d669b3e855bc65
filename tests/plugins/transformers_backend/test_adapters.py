"""Adapters by name: each call runs with the one that it names, and the model is then what it was."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from corelm import Backend
from corelm.errors import CapabilityError, EngineError, InvalidRequestError
from helpers import oracle
from helpers.peft_models import lora_config, with_lora
from helpers.plain_forward import (
    Open,
    assert_answers,
    assert_same_gradients,
    assert_scores,
    gradients,
    own_loss,
)
from helpers.tiny_models import random_rows, tiny_model, tiny_tokenizer
from transformers_backend import TransformersBackend

ROWS = random_rows(1, 40, 9)


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.nightly)], ids=["fast", "plain"])
def fast(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def wrapped(name: str = "default", seed: int = 0, targets: Sequence[str] = (), **options: Any) -> peft.PeftModel:
    return with_lora(tiny_model(), *targets, name=name, seed=seed, **options)


@pytest.fixture
def owned(tmp_path: Path, fast: bool) -> Any:
    """The tiny model, loaded by the backend."""
    tiny_model().save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    engine = TransformersBackend.open(tmp_path / "base", fast=fast)
    with Backend.from_plugin(engine, "transformers") as backend:
        yield backend


def assert_is(backend: Backend, adapter: Any, model: Any) -> None:
    """Assert that scores and answers are those of a plain forward of this model, one row at a time."""
    assert_scores(backend, model, ROWS, adapter=adapter)
    out = backend.generate(ROWS, {"max_new_tokens": 8, "seed": 0, "ignore_eos": True}, adapter=adapter)
    assert_answers(out, model, ROWS)


def test_a_model_that_was_loaded_here_takes_adapters(owned: Backend, tmp_path: Path) -> None:
    one, two = wrapped(targets=["q_proj", "lm_head"]), wrapped(seed=1, targets=["k_proj"], rank=8)
    two.save_pretrained(tmp_path / "two")
    before = oracle.logprobs(owned.engine.plugin.engine.base, ROWS[1])
    assert owned.load_adapter("one", one) == "1" and owned.load_adapter("two", tmp_path / "two", version="b") == "b"
    for adapter, model in (("one", one), ("two", two), (None, tiny_model()), (False, tiny_model()), ("one", one)):
        assert_is(owned, adapter, model)
    apart = owned.score_logprobs(ROWS, adapter="one").logprobs.split()[1] - before
    assert float(apart.abs().max()) > 0.1
    assert owned.score_logprobs(ROWS, adapter="two").weight_versions == ("0+two@b",) * 3
    assert owned.weight_version == "0" and owned.score_logprobs(ROWS).weight_versions == ("0",) * 3


def test_an_adapter_is_replaced_and_unloaded(owned: Backend) -> None:
    one, two = wrapped(), wrapped(seed=1)
    owned.load_adapter("policy", one)
    assert_is(owned, "policy", one)
    assert owned.load_adapter("policy", peft.get_peft_model_state_dict(two)) == "2"
    assert_is(owned, "policy", two)
    # Another kind of adapter under the same name.
    three = wrapped(seed=2, targets=["o_proj", "lm_head"], rank=2, use_dora=True)
    owned.load_adapter("policy", three)
    assert_is(owned, "policy", three)
    owned.unload_adapter("policy")
    assert_is(owned, None, tiny_model())
    with pytest.raises(InvalidRequestError, match="there is no 'policy'; no adapter is loaded"):
        owned.generate(ROWS, adapter="policy")
    assert not any("lora" in name for name, _ in owned.engine.plugin.engine.module.named_parameters())
    owned.load_adapter("policy", one)
    assert_is(owned, "policy", one)


def test_new_base_weights_leave_the_adapters(owned: Backend) -> None:
    one = wrapped()
    owned.load_adapter("one", one)
    other = tiny_model(seed=1)
    owned.update_weights(other.state_dict())
    assert_is(owned, False, other)
    inside = {re.sub("([qv]_proj)", r"\1.base_layer", name): tensor for name, tensor in other.state_dict().items()}
    assert not one.get_base_model().load_state_dict(inside, strict=False).unexpected_keys
    assert_is(owned, "one", one)


@pytest.mark.parametrize("active", ["second", pytest.param("default", marks=pytest.mark.nightly)])
def test_a_peft_model_of_the_caller_is_what_it_was(open_model: Open, active: str) -> None:
    model, one, two, third = wrapped(), wrapped(), wrapped("second", seed=1), wrapped(seed=2, targets=["down_proj"])
    model.add_adapter("second", lora_config())
    peft.set_peft_model_state_dict(model, peft.get_peft_model_state_dict(two, adapter_name="second"), "second")
    model.set_adapter(active)
    model.train()
    frozen = next(each for name, each in model.named_parameters() if f"lora_A.{active}" in name)
    frozen.requires_grad_(False)
    before, own = _switches(model), dict(model.named_parameters())
    backend = open_model(model)
    backend.load_adapter("third", third)
    assert not [name for name, each in model.named_parameters() if each.requires_grad and name not in own]
    wanted = [("default", one), ("second", two), ("third", third), (False, tiny_model())]
    for adapter, alone in [*wanted, (None, dict(wanted)[active])]:
        assert_is(backend, adapter, alone)
        assert {name: value for name, value in _switches(model).items() if name in before} == before
    assert backend.weight_version == "0"
    with model.disable_adapter():
        assert_is(backend, None, tiny_model())
        assert_is(backend, "second", two)
        assert_is(backend, None, tiny_model())
    # PEFT has made all of the active adapter trainable.
    before = _switches(model)
    for name in ("default", "second"):
        with pytest.raises(InvalidRequestError, match="belongs to the model object"):
            backend.load_adapter(name, one)
    backend.close()
    assert set(model.peft_config) == {"default", "second"} and _base(before) == _base(_switches(model))


def _base(switches: dict[str, Any]) -> dict[str, Any]:
    # PEFT leaves the layers of an adapter that was removed.
    return {name: value for name, value in switches.items() if "down_proj" not in name}


def _switches(model: Any) -> dict[str, Any]:
    """What is active, trained and in training mode, by name."""
    # A layer that gets its first adapter is put one level deeper.
    parameters = {name.replace(".base_layer", ""): each for name, each in model.named_parameters()}
    found: dict[str, Any] = {name: each.requires_grad for name, each in parameters.items()}
    for name, part in model.named_modules():
        found[f"{name}:training"] = part.training
        for switch in ("_active_adapter", "_disable_adapters", "active_adapter"):
            if switch in vars(part):
                found[f"{name}:{switch}"] = vars(part)[switch]
    return found


def test_gradients_are_those_of_the_adapter(open_model: Open) -> None:
    model, two = wrapped(targets=["q_proj", "lm_head"]), wrapped("second", seed=1)
    model.add_adapter("second", lora_config())
    peft.set_peft_model_state_dict(model, peft.get_peft_model_state_dict(two, adapter_name="second"), "second")
    model.set_requires_grad("second")
    out = open_model(model).score_logprobs(ROWS, grad=True, adapter="second")
    found = gradients(model, out.logprobs.values.sum())
    wanted = gradients(two, own_loss(two, ROWS))
    assert_same_gradients({name: each for name, each in found.items() if ".second." in name}, wanted)
    assert not any(".default." in name for name in found)


def test_gradient_checkpointing_runs_layers_when_the_adapter_is_switched_back(open_model: Open) -> None:
    model = wrapped().train()
    model.get_base_model().gradient_checkpointing_enable()
    backend = open_model(model)
    with pytest.raises(CapabilityError, match="gradient checkpointing"):
        backend.score_logprobs(ROWS, grad=True, adapter=False)
    assert_is(backend, False, tiny_model())


def test_log_probs_without_a_gradient_are_refused_with_the_cause(open_model: Open) -> None:
    model = wrapped().train()
    backend = open_model(model)

    def score() -> Tensor:
        return backend.score_logprobs(ROWS, grad=True).logprobs.values.sum()

    wanted = gradients(model, score())
    model.get_base_model().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    # This release of transformers enables it with checkpointing; a trainer that wraps layers itself does not.
    model.disable_input_require_grads()
    with pytest.raises(InvalidRequestError, match=r"reentrant.*enable_input_require_grads") as caught:
        score()
    assert caught.value.field == "grad"
    model.enable_input_require_grads()
    assert_same_gradients(gradients(model, score()), wanted)
    model.requires_grad_(False)
    model.disable_input_require_grads()
    with pytest.raises(InvalidRequestError, match="no parameter of the model requires one"):
        score()
    model.get_input_embeddings().weight.requires_grad_()
    score().backward()


def test_merged_adapters_cannot_be_switched(open_model: Open) -> None:
    model = wrapped()
    backend = open_model(model)
    model.merge_adapter()
    with pytest.raises(InvalidRequestError, match="unmerge_adapter"):
        backend.score_logprobs(ROWS, adapter=False)
    model.unmerge_adapter()
    assert_is(backend, False, tiny_model())


def test_a_plain_model_of_the_caller_takes_no_adapters(open_model: Open) -> None:
    backend = open_model(tiny_model())
    for attempt in (lambda: backend.load_adapter("one", wrapped()), lambda: backend.generate(ROWS, adapter=False)):
        with pytest.raises(CapabilityError) as caught:
            attempt()
        assert caught.value.capability == "adapters"


def bad_adapters(folder: Path) -> dict[str, tuple[Any, Any, str]]:
    """What cannot be loaded: the weights, their configuration, and what the error says."""
    state = peft.get_peft_model_state_dict(wrapped())
    larger = peft.get_peft_model(tiny_model(hidden_size=32, num_attention_heads=2), lora_config())
    deeper = peft.get_peft_model(tiny_model(num_hidden_layers=3), lora_config())
    empty = folder / "empty"
    empty.mkdir()
    broken = folder / "broken"
    wrapped().save_pretrained(broken)
    (broken / "adapter_model.safetensors").write_bytes(b"no")
    half = folder / "half"
    half.mkdir()
    (half / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    return {
        "another width": (larger, None, "size mismatch"),
        "more layers": (deeper, None, "unexpected 'base_model.model.model.layers.2"),
        "no tensors": ({}, lora_config(), "missing 'base_model.model.model.layers.0"),
        "another rank": (state, lora_config(rank=2), "size mismatch"),
        "other modules": (state, lora_config("no_such_module"), "no_such_module"),
        "no folder": (folder / "nothing", None, "no readable adapter"),
        "an empty folder": (empty, None, "no readable adapter"),
        "a broken file": (broken, None, "no readable adapter"),
        "no file": (half, None, "no readable adapter"),
        "no type": (state, {"r": 4}, "does not fit"),
    }


@pytest.mark.parametrize("loaded", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["first", "again"])
def test_what_does_not_fit_changes_nothing(owned: Backend, tmp_path: Path, loaded: bool) -> None:
    one = wrapped()
    if loaded:
        owned.load_adapter("policy", one)
    for name, (weights, given, says) in bad_adapters(tmp_path).items():
        with pytest.raises((InvalidRequestError, CapabilityError), match=says):
            owned.load_adapter("policy", weights, config=given)
        assert owned.adapters == ({"policy": "1"} if loaded else {}), name
        oracle.close(owned.score_logprobs(ROWS).logprobs.split()[1], oracle.logprobs(tiny_model(), ROWS[1]))
    if loaded:
        assert_is(owned, "policy", one)
    assert owned.weight_version == "0"


class OnAFullDevice(Tensor):
    """A tensor that cannot be copied, because the device has no memory for it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("loaded", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["first", "again"])
def test_a_load_that_failed_half_way_leaves_the_label_of_the_base_weights(owned: Backend, loaded: bool) -> None:
    one = wrapped()
    if loaded:
        owned.load_adapter("other", wrapped(seed=1))
    state = peft.get_peft_model_state_dict(one)
    last = [*state][-1]
    broken = {**state, last: state[last].as_subclass(OnAFullDevice)}
    assert owned.score_logprobs(ROWS).weight_versions == ("0",) * 3
    with pytest.raises(EngineError, match="out of memory"):
        owned.load_adapter("one", broken, config=one.peft_config["default"])
    assert_is(owned, False, tiny_model())
    assert owned.score_logprobs(ROWS, adapter=False).weight_versions == ("0+none",) * 3
    assert owned.weight_version == "0"
    # What failed has had a version.
    assert owned.load_adapter("one", one) == "2"
    assert_is(owned, "one", one)


def test_loading_draws_nothing_from_the_callers_generator_and_freezes_nothing(owned: Backend) -> None:
    one, model = wrapped(), owned.engine.plugin.engine.base
    state, trained = torch.get_rng_state(), {each: each.requires_grad for each in model.parameters()}
    owned.load_adapter("one", one)
    assert torch.equal(state, torch.get_rng_state())
    assert any(trained.values()) and {each: each.requires_grad for each in trained} == trained
    owned.unload_adapter("one")
    assert {each: each.requires_grad for each in model.parameters()} == trained


def test_beams_and_streams_use_the_adapter(owned: Backend) -> None:
    one = wrapped()
    owned.load_adapter("one", one)
    sampling = {"num_beams": 4, "max_new_tokens": 5, "temperature": 0, "ignore_eos": True}
    wanted = one.generate(
        input_ids=torch.tensor([ROWS[2]]), num_beams=4, max_new_tokens=5, do_sample=False, eos_token_id=None
    )
    (answer,) = owned.generate([ROWS[2]], sampling, logprobs="none", adapter="one").ids.tolist()
    assert answer == wanted[0, len(ROWS[2]) :].tolist()
    with owned.stream([ROWS[2]], {"max_new_tokens": 5, "ignore_eos": True}, adapter="one") as stream:
        found = [value for chunk in stream for value in chunk.logprobs]
    ids = stream.result.ids.tolist()[0]
    oracle.close(torch.tensor(found), oracle.answer_logprobs(one, ROWS[2], ids))


def test_the_adapters_of_a_peft_model_take_effect_and_only_they_are_trained(open_model: Open) -> None:
    model = with_lora(tiny_model(), "q_proj", "v_proj", "lm_head").train()
    backend = open_model(model)
    assert_is(backend, None, model)
    with model.disable_adapter():
        assert_scores(backend, model, ROWS)
    assert model.training
    backend.score_logprobs(ROWS, grad=True).logprobs.values.sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad == ("lora_" in name), name


def test_beams_use_the_adapters_and_ignore_generation_configs(open_model: Open) -> None:
    model = with_lora(tiny_model(), "q_proj", "v_proj", "lm_head")
    sampling = {"num_beams": 4, "max_new_tokens": 5, "temperature": 0, "ignore_eos": True}
    ids = torch.tensor([ROWS[2]])
    wanted = model.generate(input_ids=ids, num_beams=4, max_new_tokens=5, do_sample=False, eos_token_id=None)
    model.generation_config = copy.deepcopy(model.generation_config)
    model.generation_config.repetition_penalty = 9.0
    (answer,) = open_model(model).generate(ids, sampling, logprobs="none").ids.tolist()
    assert answer == wanted[0, ids.shape[1] :].tolist()

"""The weights of a model object get the names and values that `save_pretrained` gives them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from corelm.errors import InvalidRequestError
from helpers.each import each
from helpers.fakes import fake, sent
from helpers.refusals import refused
from helpers.tiny_models import tiny_model

LORA: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}


def given(model: nn.Module) -> dict[str, Tensor]:
    """What an engine is sent."""
    backend = fake()
    assert backend.update_weights(model) == "1"
    return sent(backend)[-1].state_dict


def saved(model: Any, folder: Path) -> dict[str, Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def adapted(family: str = "qwen2", **config: Any) -> peft.PeftModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = peft.get_peft_model(tiny_model(family), peft.LoraConfig(**(LORA | config)))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def same(found: dict[str, Tensor], expected: dict[str, Tensor], *, tied: tuple[str, ...] = ()) -> None:
    assert found.keys() - set(tied) == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["qwen2", "mixtral", "qwen3-moe"])
def test_the_names_are_those_of_the_checkpoint(family: str, tmp_path: Path):
    model = tiny_model(family)
    if family != "qwen2":
        assert model.state_dict().keys() != saved(model, tmp_path).keys(), "this test needs fused experts"
    same(given(model), saved(model, tmp_path))


def test_a_model_that_was_loaded_gets_the_names_that_it_was_loaded_from(tmp_path: Path):
    checkpoint = saved(tiny_model("mixtral"), tmp_path)
    same(given(type(tiny_model("mixtral")).from_pretrained(tmp_path)), checkpoint)


def test_a_tied_head_keeps_both_names(tmp_path: Path):
    model = tiny_model("qwen2-tied")
    found = given(model)
    same(found, saved(model, tmp_path), tied=("lm_head.weight",))
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])


class Wrapper(nn.Module):
    """A wrapper like DDP, which needs a process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_wrappers_leave_no_mark_on_the_names(tmp_path: Path):
    model = tiny_model("mixtral")
    expected = saved(model, tmp_path)
    same(given(torch.compile(model)), expected)
    same(given(Wrapper(torch.compile(model))), expected)
    model.model.layers[0] = torch.compile(model.model.layers[0])
    assert any("_orig_mod" in name for name in model.state_dict())
    same(given(model), expected)


def test_another_module_gives_its_state_dict():
    model = nn.Linear(2, 3)
    same(given(model), dict(model.state_dict()))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": [1, 5]},
        {"target_modules": ["q_proj", "embed_tokens"]},
    ],
    ids=["lora", "dora", "saved module", "tokens", "embeddings"],
)
@pytest.mark.parametrize("wrap", [lambda model: model, torch.compile], ids=["plain", "compiled"])
def test_adapters_are_merged_without_touching_the_model(config: dict[str, Any], wrap: Any, tmp_path: Path):
    model = adapted(**config)
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    found = given(wrap(model))
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(
        after[name].data_ptr() == place and torch.equal(after[name], was) for name, (place, was) in before.items()
    )
    same(found, saved(adapted(**config).merge_and_unload(), tmp_path))


def test_adapters_of_fused_experts_are_merged(tmp_path: Path):
    config = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    model = adapted("mixtral", **config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = given(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    same(found, saved(adapted("mixtral", **config).merge_and_unload(), tmp_path))


def test_merged_adapters_are_not_merged_again(tmp_path: Path):
    model = adapted()
    model.merge_adapter()
    same(given(model), saved(adapted().merge_and_unload(), tmp_path))


def test_a_head_tied_to_embeddings_with_an_adapter_stays_without_it():
    """The forward pass of such a model adds the adapter to the embeddings only."""
    model = adapted("qwen2-tied", target_modules=["embed_tokens"])
    found = given(model)
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(
        found["model.embed_tokens.weight"][ids], model.get_input_embeddings()(ids), rtol=0, atol=1e-6
    )
    assert torch.equal(found["lm_head.weight"], tiny_model("qwen2-tied").lm_head.weight)


def test_models_whose_weights_cannot_be_read_are_refused():
    backend = fake()
    prompts = peft.get_peft_model(tiny_model(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with refused(InvalidRequestError, field="weights"):
        backend.update_weights(prompts)
    native = tiny_model()
    native.add_adapter(peft.LoraConfig(**LORA))
    with refused(InvalidRequestError, field="weights"):
        backend.update_weights(native)
    model = adapted()
    with model.disable_adapter(), refused(InvalidRequestError, field="weights"):
        backend.update_weights(model)
    with refused(InvalidRequestError, field="weights"):
        empty = tiny_model()
        empty.model.norm.to("meta")
        backend.update_weights(empty)
    assert backend.weight_version == "0" and not sent(backend)


def test_an_iterator_may_use_the_same_memory_for_each_tensor():
    memory = torch.empty(3)
    backend = fake()
    assert backend.update_weights((str(number), memory.fill_(number)) for number in range(4)) == "1"
    found = sent(backend)[-1].state_dict
    assert {name: tensor.tolist() for name, tensor in found.items()} == {str(n): [n] * 3 for n in range(4)}


def test_an_engine_that_streams_gets_the_iterator_unread():
    taken = []

    def pairs() -> Iterator[tuple[str, Tensor]]:
        for number in range(3):
            taken.append(number)
            yield str(number), torch.zeros(number)

    backend = fake(weight_stream=True)
    backend.update_weights(pairs())
    update = sent(backend)[-1]
    assert not taken and update.state_dict is None and not update.by_owner
    assert [name for name, _ in update.stream] == ["0", "1", "2"] and taken == [0, 1, 2]


def broken() -> Iterator[tuple[str, Tensor]]:
    yield "embed", torch.zeros(2)
    raise ValueError("a rank is gone")


@each(
    "pairs",
    [
        lambda: iter([("a", torch.zeros(1)), ("a", torch.zeros(1))]),
        lambda: iter([("a", [1.0])]),
        lambda: iter([("a", torch.zeros(1)), torch.zeros(1)]),
        lambda: torch.zeros(2),
        broken,
    ],
)
def test_an_iterator_that_goes_wrong_changes_nothing(pairs: Callable[[], Any]):
    backend = fake()
    with refused(InvalidRequestError, field="weights"):
        backend.update_weights(pairs())
    assert backend.weight_version == "0" and not sent(backend)

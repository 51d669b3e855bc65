"""New weights from a state dict, a model or a path: all are loaded or none."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from corelm import Backend
from corelm.errors import CoreLMError, InvalidRequestError
from helpers import oracle
from helpers.peft_models import with_lora
from helpers.plain_forward import Open
from helpers.tiny_models import random_rows, tiny_model

(IDS,) = random_rows(20)
FAMILIES = [
    "qwen2-tied",
    "mixtral",
    *(pytest.param(name, marks=pytest.mark.nightly) for name in ("qwen2", "phi-biased")),
]


def scores(backend: Backend) -> Tensor:
    return backend.score_logprobs([IDS]).logprobs.values


def scores_like(backend: Backend, model: torch.nn.Module) -> bool:
    return torch.allclose(scores(backend), oracle.logprobs(model, IDS), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_state_dict_replaces_every_weight_and_nothing_else(open_model: Open, family: str) -> None:
    model, new = tiny_model(family), tiny_model(family, seed=1)
    model.get_input_embeddings().weight.requires_grad_(False)
    frozen = [p.requires_grad for p in model.parameters()]
    identities = [id(p) for p in model.parameters()]
    backend = open_model(model)
    assert not scores_like(backend, new)
    assert backend.update_weights(new.state_dict(), version="7") == "7"
    assert scores_like(backend, new)
    answer = backend.generate([IDS], {"max_new_tokens": 4, "seed": 0})
    assert answer.weight_versions == ("7",)
    expected = oracle.answer_logprobs(new, IDS, answer.ids.tolist()[0])
    torch.testing.assert_close(answer.logprobs.values, expected, rtol=0, atol=1e-5)
    assert [p.requires_grad for p in model.parameters()] == frozen
    assert [id(p) for p in model.parameters()] == identities


def test_the_model_keeps_its_dtype(open_model: Open) -> None:
    model, new = tiny_model().bfloat16(), tiny_model(seed=1)
    open_model(model).update_weights(new.state_dict())
    for name, value in model.state_dict().items():
        assert value.dtype == torch.bfloat16 and torch.equal(value, new.state_dict()[name].bfloat16())


def test_a_state_dict_that_does_not_fit_changes_nothing(open_model: Open) -> None:
    backend, good = open_model(tiny_model()), dict(tiny_model(seed=1).state_dict())
    before, name = scores(backend), "model.layers.1.mlp.up_proj.weight"
    faults = {
        name: {key: value for key, value in good.items() if key != name},
        "model.layers.9.bias": {**good, "model.layers.9.bias": torch.zeros(1)},
        name + ": ": {**good, name: good[name].T},
    }
    for says, state in faults.items():
        with pytest.raises(InvalidRequestError, match=re.escape(says.removesuffix(": "))) as caught:
            backend.update_weights(state)
        assert caught.value.field == "state_dict" and torch.equal(scores(backend), before), says


def test_tied_weights_need_one_name_and_two_must_agree(open_model: Open) -> None:
    backend, new = open_model(tiny_model("qwen2-tied")), tiny_model("qwen2-tied", seed=1)
    state = dict(new.state_dict())
    del state["lm_head.weight"]
    backend.update_weights(state)
    assert scores_like(backend, new)
    with pytest.raises(InvalidRequestError, match=r"lm_head\.weight"):
        backend.update_weights({**state, "lm_head.weight": torch.zeros_like(new.lm_head.weight)})
    assert scores_like(backend, new)


def saved(new: Any, folder: Path, kind: str) -> Path:
    if kind == "safetensors folder":
        new.save_pretrained(folder)
    if kind == "sharded folder":
        new.save_pretrained(folder, max_shard_size="100KB")
        assert len(list(folder.glob("*.safetensors"))) > 1
    if kind == "pytorch folder":
        new.config.save_pretrained(folder)
        torch.save(new.state_dict(), folder / "pytorch_model.bin")
    if kind == "safetensors file":
        folder = folder / "weights.safetensors"
        save_file({name: value.clone() for name, value in new.state_dict().items()}, folder)
    if kind == "pytorch file":
        folder = folder / "weights.pt"
        torch.save(new.state_dict(), folder)
    return folder


@pytest.mark.parametrize("family", ["mixtral", pytest.param("qwen2-tied", marks=pytest.mark.nightly)])
def test_weights_are_read_from_a_path(open_model: Open, tmp_path: Path, family: str) -> None:
    backend, kinds = open_model(tiny_model(family)), ("safetensors", "pytorch")
    for seed, kind in enumerate(
        ["sharded folder", *(f"{kind} {what}" for kind in kinds for what in ("folder", "file"))]
    ):
        new, folder = tiny_model(family, seed=seed + 1), tmp_path / kind
        folder.mkdir()
        backend.update_weights(saved(new, folder, kind))
        assert scores_like(backend, new), kind


class _Planted:
    """Unpickling it calls something that leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.trace,))


@pytest.mark.parametrize("name", ["weights.pt", "pytorch_model.bin"])
def test_a_pickle_is_not_run(open_model: Open, tmp_path: Path, name: str) -> None:
    model, trace, folder = tiny_model(), tmp_path / "trace", tmp_path / "weights"
    folder.mkdir()
    model.config.save_pretrained(folder)
    torch.save({**model.state_dict(), "model.norm.weight": _Planted(trace)}, folder / name)
    backend = open_model(model)
    before = scores(backend)
    with pytest.raises(CoreLMError):
        backend.update_weights(folder / name if name == "weights.pt" else folder)
    assert not trace.exists() and torch.equal(scores(backend), before)
    # Without a guard, the trap works.
    with (folder / "plain").open("wb") as file:
        pickle.dump(_Planted(trace), file)
    pickle.loads((folder / "plain").read_bytes())
    assert trace.exists()


def test_a_missing_path_or_another_model_changes_nothing(open_model: Open, tmp_path: Path) -> None:
    backend = open_model(tiny_model())
    before = scores(backend)
    with pytest.raises(InvalidRequestError, match="nothing at"):
        backend.update_weights(tmp_path / "absent")
    deeper = tiny_model(num_hidden_layers=3, seed=1)
    deeper.save_pretrained(tmp_path / "deeper")
    with pytest.raises(InvalidRequestError, match=r"layers\.2"):
        backend.update_weights(tmp_path / "deeper")
    shallow = tiny_model(num_hidden_layers=1, seed=1)
    shallow.save_pretrained(tmp_path / "shallow")
    with pytest.raises(InvalidRequestError, match=r"layers\.1"):
        backend.update_weights(tmp_path / "shallow")
    tiny_model(intermediate_size=48, seed=1).save_pretrained(tmp_path / "narrow")
    with pytest.raises(CoreLMError):
        backend.update_weights(tmp_path / "narrow")
    assert torch.equal(scores(backend), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_object_is_loaded(open_model: Open, family: str) -> None:
    backend, new = open_model(tiny_model(family)), tiny_model(family, seed=1)
    assert backend.update_weights(torch.compile(new)) == "1"
    assert scores_like(backend, new)
    with_adapters = lora(2, family)
    backend.update_weights(with_adapters)
    assert scores_like(backend, with_adapters)


def test_names_of_a_checkpoint_that_do_not_fit_change_nothing(open_model: Open, tmp_path: Path) -> None:
    tiny_model("mixtral", seed=1).save_pretrained(tmp_path)
    good = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
    other = name.replace("3", "4")
    backend = open_model(tiny_model("mixtral"))
    before = scores(backend)
    for says, state in (
        (name, {key: value for key, value in good.items() if key != name}),
        (other, {**good, other: torch.zeros(96, 64)}),
        (name, {**good, name: good[name].T.contiguous()}),
    ):
        with pytest.raises(InvalidRequestError, match=re.escape(says)) as caught:
            backend.update_weights(state)
        assert caught.value.field == "state_dict" and torch.equal(scores(backend), before)


def lora(seed: int, family: str = "qwen2") -> Any:
    return with_lora(tiny_model(family, seed=seed), seed=seed)


def test_a_wrapped_model_accepts_its_own_names_or_those_of_the_inner_model(open_model: Open, tmp_path: Path) -> None:
    model, other = lora(0), lora(1)
    backend = open_model(model)
    backend.update_weights(other.state_dict())
    assert scores_like(backend, other)

    plain = tiny_model(seed=2)
    adapters = {name: value.clone() for name, value in model.state_dict().items() if "lora_" in name}
    backend.update_weights(plain.state_dict())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in adapters.items())
    with model.disable_adapter():
        assert scores_like(backend, plain)
    assert not scores_like(backend, plain)

    tiny_model(seed=3).save_pretrained(tmp_path)
    backend.update_weights(tmp_path)
    with model.disable_adapter():
        assert scores_like(backend, tiny_model(seed=3))

    # The experts have other names in a checkpoint.
    moe = lora(4, "mixtral")
    backend = open_model(moe)
    backend.update_weights(tiny_model("mixtral", seed=5))
    with moe.disable_adapter():
        assert scores_like(backend, tiny_model("mixtral", seed=5))

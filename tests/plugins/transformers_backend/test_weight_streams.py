"""New weights from an iterator: copied into the model as they come, and labelled if only some came."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import peft
import pytest
import torch
from torch import Tensor, nn

from corelm import Backend
from corelm.errors import EngineError, InvalidRequestError
from helpers import oracle
from helpers.plain_forward import Open
from helpers.tiny_models import random_rows, tiny_model

Pairs = Iterator[tuple[str, Tensor]]
(IDS,) = random_rows(20)


def scores_like(backend: Backend, model: nn.Module) -> bool:
    found = backend.score_logprobs([IDS]).logprobs.values
    return torch.allclose(found, oracle.logprobs(model, IDS), rtol=0, atol=1e-5)


def in_one_memory(model: nn.Module) -> Pairs:
    """Yield the weights of a model, each in the memory of the one before, as a trainer that gathers shards does."""
    memory = torch.empty(max(tensor.numel() for tensor in model.state_dict().values()))
    for name, tensor in model.state_dict().items():
        yield name, memory[: tensor.numel()].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("family", ["qwen2-tied", pytest.param("mixtral", marks=pytest.mark.nightly)])
def test_every_weight_is_replaced(open_model: Open, family: str) -> None:
    model, new = tiny_model(family), tiny_model(family, seed=1)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    backend = open_model(model)
    assert backend.update_weights(in_one_memory(new)) == "1"
    assert scores_like(backend, new) and not scores_like(backend, tiny_model(family))
    assert [parameter.data_ptr() for parameter in model.parameters()] == places


def test_the_names_of_a_checkpoint_are_taken(open_model: Open) -> None:
    """transformers fuses the experts of Mixtral, so its checkpoint has other names than the module."""
    from corelm.backend.given_weights import weights_of

    new = tiny_model("mixtral", seed=1)
    backend = open_model(tiny_model("mixtral"))
    backend.update_weights(iter(weights_of(new).items()))
    assert scores_like(backend, new)


def test_each_tensor_is_in_the_model_before_the_next_is_taken(open_model: Open) -> None:
    model, new = tiny_model(), tiny_model(seed=1).state_dict()
    copied: list[str] = []

    def pairs() -> Pairs:
        for name, tensor in new.items():
            assert all(torch.equal(model.state_dict()[each], new[each]) for each in copied)
            yield name, tensor
            copied.append(name)

    open_model(model).update_weights(pairs())
    assert copied == list(new)


def test_the_base_of_adapters_is_replaced(open_model: Open) -> None:
    new = tiny_model(seed=1)
    wrapped = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    backend = open_model(wrapped)
    backend.update_weights(in_one_memory(new))
    assert scores_like(backend, new)


def without_the_norm(state: dict[str, Tensor]) -> Pairs:
    return ((name, tensor) for name, tensor in state.items() if name != "model.norm.weight")


def with_a_short_norm(state: dict[str, Tensor]) -> Pairs:
    return iter({**state, "model.norm.weight": torch.zeros(3)}.items())


def with_another_name(state: dict[str, Tensor]) -> Pairs:
    return iter({**state, "model.nrom.weight": torch.zeros(3)}.items())


def that_ends_early(state: dict[str, Tensor]) -> Pairs:
    yield from list(state.items())[:3]
    raise RuntimeError("model.norm.weight: a rank is gone")


def test_weights_that_are_partly_new_say_so(open_model: Open) -> None:
    for wrong in (without_the_norm, with_a_short_norm, with_another_name, that_ends_early):
        _check_partly_new(open_model(tiny_model()), wrong)


def _check_partly_new(backend: Backend, wrong: Callable[[dict[str, Tensor]], Pairs]) -> None:
    new = tiny_model(seed=1)
    with pytest.raises(EngineError, match=r"partly new: .*model\.n(or|ro)m\.weight"):
        backend.update_weights(wrong(dict(new.state_dict())), version="new")
    assert backend.weight_version not in ("0", "new")
    # What was kept about the old weights is forgotten, and a complete update heals.
    assert not scores_like(backend, tiny_model())
    backend.update_weights(in_one_memory(new), version="new")
    assert scores_like(backend, new) and backend.weight_version == "new"


def test_what_is_wrong_from_the_first_tensor_on_changes_nothing(open_model: Open) -> None:
    backend = open_model(tiny_model())
    for pairs in (
        [("model.nrom.weight", torch.zeros(3))],
        [("model.embed_tokens.weight", torch.zeros(3))],
        [],
        [torch.zeros(3)],
    ):
        with pytest.raises(InvalidRequestError) as caught:
            backend.update_weights(iter(pairs))
        assert caught.value.field == "weights" and backend.weight_version == "0", pairs
        assert scores_like(backend, tiny_model()), pairs


def test_tied_weights_that_differ_are_refused(open_model: Open) -> None:
    state = dict(tiny_model("qwen2-tied", seed=1).state_dict())
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    with pytest.raises(EngineError, match=r"are the same tensor in this model, but differ here"):
        open_model(tiny_model("qwen2-tied")).update_weights(iter(state.items()))

"""Which weights fit a checkpoint, and what is handed to vLLM if they do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from corelm.errors import InvalidRequestError
from corelm.spec.records import WeightUpdate
from vllm_backend.weights import fitting

CHECKPOINT = {"embed": torch.zeros(4, 2), "norm": torch.zeros(2)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The folder of the model that is open."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(CHECKPOINT, folder / "model.safetensors")
    return folder


def handed_over(state: dict[str, Tensor], checkpoint: Path) -> dict[str, Tensor]:
    with fitting(WeightUpdate(version="1", drain=True, state_dict=state), checkpoint) as folder:
        (file,) = folder.iterdir()
        found = load_file(file)
    assert not folder.exists(), "the copy outlives its use"
    return found


def test_a_state_dict_is_written_as_it_is(checkpoint: Path) -> None:
    # Transposed, of another dtype, part of a larger tensor, and with a gradient.
    flat = torch.arange(10.0)
    state = {"embed": flat[:8].reshape(2, 4).T.bfloat16(), "norm": flat[8:].requires_grad_()}
    found = handed_over(state, checkpoint)
    assert all(torch.equal(found[name], state[name]) and found[name].dtype == state[name].dtype for name in state)


def test_the_second_name_of_a_tied_tensor_is_left_out(checkpoint: Path) -> None:
    embed = torch.ones(4, 2)
    for head in (embed, embed.clone()):
        assert handed_over({"embed": embed, "norm": torch.ones(2), "head": head}, checkpoint).keys() == {*CHECKPOINT}
    with pytest.raises(InvalidRequestError, match="unexpected 'head'"):
        handed_over({"embed": embed, "norm": torch.ones(2), "head": embed + 1}, checkpoint)


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"embed": torch.ones(4, 2)}, "missing 'norm'"),
        ({**CHECKPOINT, "nrom": torch.ones(3)}, "unexpected 'nrom'"),
        ({**CHECKPOINT, "norm": torch.ones(3)}, r"'norm' is \(3,\), expected \(2,\)"),
        ({}, "missing 'embed'; missing 'norm'"),
    ],
)
def test_what_does_not_fit_is_told_by_name(
    checkpoint: Path, tmp_path: Path, state: dict[str, Tensor], problem: str
) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        handed_over(state, checkpoint)
    assert caught.value.field == "state_dict"
    save_file(state, tmp_path / "model.safetensors")
    update = WeightUpdate(version="1", drain=True, path=tmp_path)
    with pytest.raises(InvalidRequestError, match=problem) as caught, fitting(update, checkpoint):
        pass
    assert caught.value.field == "path"


def test_a_folder_that_fits_is_used_as_it_is(checkpoint: Path) -> None:
    with fitting(WeightUpdate(version="1", drain=True, path=checkpoint), checkpoint) as folder:
        assert folder == checkpoint.resolve()
    assert (checkpoint / "model.safetensors").is_file()

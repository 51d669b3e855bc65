"""`weights.load`: an engine gets only weights that fit its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from corelm.errors import CapabilityError, InvalidRequestError
from corelm.spec import WeightUpdate
from corelm.support import LoadedWeights
from vllm_backend import weights

CHECKPOINT = {"embed": torch.zeros(4, 2), "norm": torch.zeros(2)}
NEW = {"embed": torch.ones(4, 2), "norm": torch.ones(2)}


class FakeEngine:
    """Reads the folder that it is given, as vLLM does.

    Attributes:
        loaded: the folders and their tensors, in order.
    """

    def __init__(self, checkpoint: Path, takes_state_dict: bool = True) -> None:
        self.checkpoint = checkpoint
        self.takes_state_dict = takes_state_dict
        self.weights = LoadedWeights()
        self.loaded: list[tuple[Path, dict[str, Tensor]]] = []

    def reload(self, folder: Path, request: WeightUpdate) -> None:
        (file,) = folder.glob("*.safetensors")
        self.loaded.append((folder, load_file(file)))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(CHECKPOINT, folder / "model.safetensors")
    return folder


def load(engine: Any, source: dict[str, Tensor] | Path) -> None:
    given: dict[str, Any] = {"path": source} if isinstance(source, Path) else {"state_dict": source}
    weights.load(engine, WeightUpdate(version="1", drain=True, **given))


def test_a_state_dict_is_handed_over_in_a_temporary_folder(checkpoint: Path) -> None:
    engine = FakeEngine(checkpoint)
    load(engine, NEW)
    ((folder, found),) = engine.loaded
    assert found.keys() == NEW.keys() and all(torch.equal(found[name], NEW[name]) for name in NEW)
    assert not folder.exists()


def test_a_folder_is_handed_over_as_it_is(checkpoint: Path, tmp_path: Path) -> None:
    save_file(NEW, tmp_path / "model.safetensors")
    engine = FakeEngine(checkpoint)
    load(engine, tmp_path)
    assert [folder for folder, _ in engine.loaded] == [tmp_path.resolve()]


@pytest.mark.parametrize("where", ["state_dict", "path"])
def test_weights_that_do_not_fit_never_reach_the_engine(checkpoint: Path, tmp_path: Path, where: str) -> None:
    unfit = {"embed": torch.ones(4, 2), "nrom": torch.ones(3)}
    save_file(unfit, tmp_path / "model.safetensors")
    engine = FakeEngine(checkpoint)
    with pytest.raises(InvalidRequestError, match="unexpected 'nrom'; missing 'norm'") as caught:
        load(engine, tmp_path if where == "path" else unfit)
    assert caught.value.field == where and engine.loaded == []


def test_a_state_dict_is_refused_where_the_engine_takes_none(checkpoint: Path) -> None:
    engine = FakeEngine(checkpoint, takes_state_dict=False)
    with pytest.raises(CapabilityError, match="path"):
        load(engine, NEW)
    assert engine.loaded == []

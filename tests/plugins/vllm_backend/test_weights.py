"""`update_weights`: an engine gets only weights that fit its checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from corelm.errors import EngineError, InvalidRequestError
from corelm.spec import Capabilities, WeightUpdate
from vllm_backend.capabilities import ModelInfo
from vllm_backend.engine import InProcessEngine

CHECKPOINT = {"embed": torch.zeros(4, 2), "norm": torch.zeros(2)}
NEW = {"embed": torch.ones(4, 2), "norm": torch.ones(2)}


class FakeEngine(InProcessEngine):
    """Reads the folder that it is given, as vLLM does, or takes tensors as they are.

    Attributes:
        loaded: the folders and their tensors, in order.
        handed_over: the names and values of tensors that did not go through a file, as they came.
        largest: the bytes of the largest one, as announced.
        why: what `needs_file` returns.
    """

    def __init__(self, checkpoint: Path, why: str = "it is a fake", streams: bool = True):
        can = Capabilities(vocab_size=7, max_context=64)
        super().__init__(None, ModelInfo(capabilities=can, tokenizer=None, checkpoint=checkpoint))
        self.why, self.streams_tensors = why, streams
        self.handed_over: list[tuple[str, list[Any]]] = []
        self.largest = 0
        self.loaded: list[tuple[Path, dict[str, Tensor]]] = []

    def needs_file(self, tensors: Iterable[Tensor]) -> str:
        self.asked_about = [tuple(tensor.shape) for tensor in tensors]
        return self.why

    def _hand_over(self, tensors: Iterable[tuple[str, Tensor]], largest: int) -> None:
        self.largest = largest
        for name, tensor in tensors:
            self.handed_over.append((name, tensor.tolist()))

    def _load_folder(self, folder: Path) -> None:
        (file,) = folder.glob("*.safetensors")
        self.loaded.append((folder, load_file(file)))

    @contextmanager
    def _while_idle(self, request: WeightUpdate) -> Iterator[None]:
        yield

    def run(self, *args: Any, **options: Any) -> list[Any]:
        raise NotImplementedError

    def _ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(CHECKPOINT, folder / "model.safetensors")
    return folder


def load(engine: Any, source: dict[str, Tensor] | Path) -> None:
    given: dict[str, Any] = {"path": source} if isinstance(source, Path) else {"state_dict": source}
    engine.update_weights(WeightUpdate(version="1", when="drain", **given))


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


# Without a file -------------------------------------------------------------------------------------------------------

VALUES = [(name, tensor.tolist()) for name, tensor in NEW.items()]


def pairs(*others: tuple[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors in the same memory, as a trainer that gathers shards does."""
    memory = torch.empty(9)
    for name, tensor in [*NEW.items(), *others]:
        yield name, memory[: tensor.numel()].view(tensor.shape).copy_(tensor)


def stream(engine: Any, given: Iterator[tuple[str, Tensor]]) -> None:
    engine.update_weights(WeightUpdate(version="1", when="drain", stream=given))


def test_tensors_are_handed_over_if_the_engine_takes_them(checkpoint: Path) -> None:
    engine = FakeEngine(checkpoint, why="")
    load(engine, {**NEW, "head": NEW["embed"]})
    assert engine.handed_over == VALUES and engine.largest == 32 and not engine.loaded
    assert engine.asked_about == [(4, 2), (2,), (4, 2)]


@pytest.mark.parametrize("streams", [True, False])
def test_a_stream_is_handed_over(checkpoint: Path, streams: bool) -> None:
    engine = FakeEngine(checkpoint, why="", streams=streams)
    stream(engine, pairs())
    assert engine.handed_over == VALUES and engine.largest == 32 and not engine.loaded


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"embed": torch.ones(4, 3), "norm": torch.ones(2)}, r"'embed' is \(4, 3\)"),
        ({"nrom": torch.ones(2)}, "unexpected 'nrom'"),
        ({}, "missing"),
    ],
)
@pytest.mark.parametrize("streams", [True, False, None])
def test_what_is_wrong_from_the_first_tensor_on_never_reaches_the_engine(
    checkpoint: Path, streams: bool | None, given: dict[str, Tensor], problem: str
) -> None:
    engine = FakeEngine(checkpoint, why="", streams=bool(streams))
    with pytest.raises(InvalidRequestError, match=problem):
        load(engine, given) if streams is None else stream(engine, iter(given.items()))
    assert not engine.handed_over and not engine.loaded


def test_a_stream_is_compared_as_it_is_handed_over(checkpoint: Path) -> None:
    engine = FakeEngine(checkpoint, why="")
    with pytest.raises(EngineError, match="missing 'norm'"):
        stream(engine, iter([("embed", NEW["embed"])]))
    assert engine.handed_over == VALUES[:1]
    with pytest.raises(EngineError, match="unexpected 'head'"):
        stream(FakeEngine(checkpoint, why=""), pairs(("head", NEW["embed"])))


def test_a_stream_that_needs_a_file_is_written(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(checkpoint, why="no GPU in this test")
    with caplog.at_level(logging.INFO, "corelm_engine_kit"):
        stream(engine, pairs())
        load(engine, NEW)
    for _, found in engine.loaded:
        assert all(torch.equal(found[name], NEW[name]) for name in NEW)
    assert [record.getMessage() for record in caplog.records] == [
        "new weights go to vLLM through files, in memory if there is room: no GPU in this test"
    ]

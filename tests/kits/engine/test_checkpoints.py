"""Which weights fit a checkpoint, and the folder that an engine loads them from."""

from __future__ import annotations

import copy
import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from corelm.errors import InvalidRequestError
from corelm.spec import WeightUpdate, saved_shapes
from corelm_engine_kit import buckets, local_checkpoint, tensor_shapes, weights_folder
from helpers.tiny_models import tiny_model

CHECKPOINT = {"embed": torch.zeros(4, 2), "norm": torch.zeros(2)}
SHAPES = {"embed": (4, 2), "norm": (2,)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The folder that the engine was opened on."""
    return saved(tmp_path / "checkpoint", CHECKPOINT)


def saved(folder: Path, tensors: dict[str, Tensor], name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / name)
    return folder


def update(source: dict[str, Tensor] | Path) -> WeightUpdate:
    if isinstance(source, Path):
        return WeightUpdate(version="1", when="drain", path=source)
    return WeightUpdate(version="1", when="drain", state_dict=source)


def written(state: dict[str, Tensor], checkpoint: Path) -> dict[str, Tensor]:
    """What the engine finds in the folder."""
    with weights_folder(update(state), checkpoint) as folder:
        (file,) = folder.iterdir()
        found = load_file(file)
    assert not folder.exists(), "the temporary folder was not deleted"
    return found


# A checkpoint ---------------------------------------------------------------------------------------------------------


def test_the_index_decides_which_files_belong_to_a_checkpoint(checkpoint: Path):
    assert tensor_shapes(checkpoint) == SHAPES
    saved(checkpoint, {"head": torch.zeros(4, 2)}, "consolidated.safetensors")
    assert tensor_shapes(checkpoint) == {**SHAPES, "head": (4, 2)}
    index = {"weight_map": dict.fromkeys(SHAPES, "model.safetensors")}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    assert tensor_shapes(checkpoint) == SHAPES


@pytest.mark.parametrize("fault", ["no folder", "a file", "empty", "cut off", "index without its file", "odd index"])
def test_a_folder_without_a_readable_checkpoint_is_refused(tmp_path: Path, fault: str):
    folder = tmp_path / "weights"
    if fault == "a file":
        folder.write_bytes(b"")
    elif fault != "no folder":
        folder.mkdir()
    if fault == "cut off":
        file = saved(folder, CHECKPOINT) / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
    if fault == "index without its file":
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"norm": "model-1.safetensors"}}')
    if fault == "odd index":
        (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(InvalidRequestError, match=r"path: .*weights.*folder") as caught:
        tensor_shapes(folder)
    assert caught.value.field == "path"


def test_the_checkpoint_of_a_model_is_its_folder_if_that_holds_safetensors(checkpoint: Path, tmp_path: Path):
    assert local_checkpoint(checkpoint) == local_checkpoint(str(checkpoint)) == checkpoint
    (tmp_path / "pickles").mkdir()
    assert local_checkpoint(tmp_path / "pickles") is None
    for name in ("nobody/has-downloaded-this", "s3://bucket/model"):
        assert local_checkpoint(name, cache_dir=str(tmp_path / "cache")) is None


def test_the_temporary_folder_is_where_the_user_says_it_must_be(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with weights_folder(update(CHECKPOINT), checkpoint) as folder:
        assert folder.parent == tmp_path
    monkeypatch.delenv("TMPDIR")
    with weights_folder(update(CHECKPOINT), checkpoint) as folder:
        assert not Path("/dev/shm").is_dir() or folder.parent == Path("/dev/shm")


# New weights ----------------------------------------------------------------------------------------------------------


def test_a_state_dict_is_written_with_its_values_and_dtypes(checkpoint: Path):
    # Transposed, of another dtype, part of a larger tensor, and with a gradient.
    flat = torch.arange(10.0)
    state = {"embed": flat[:8].reshape(2, 4).T.bfloat16(), "norm": flat[8:].requires_grad_()}
    found = written(state, checkpoint)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) and found[name].dtype == state[name].dtype for name in state)


def test_a_large_state_dict_is_written_to_several_files(checkpoint: Path):
    with weights_folder(update(CHECKPOINT), checkpoint, file_size=8) as folder:
        assert sorted(load_file(file).popitem()[0] for file in folder.iterdir()) == ["embed", "norm"]
        assert tensor_shapes(folder) == SHAPES


def test_the_second_name_of_a_tied_tensor_is_left_out(checkpoint: Path):
    embed = torch.ones(4, 2)
    for head in (embed, embed.clone()):
        assert written({"embed": embed, "norm": torch.ones(2), "head": head}, checkpoint).keys() == {*CHECKPOINT}
    with pytest.raises(InvalidRequestError, match="unexpected 'head'"):
        written({"embed": embed, "norm": torch.ones(2), "head": embed + 1}, checkpoint)


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"embed": torch.ones(4, 2)}, "missing 'norm'"),
        ({**CHECKPOINT, "nrom": torch.ones(3)}, "unexpected 'nrom'"),
        ({**CHECKPOINT, "norm": torch.ones(3)}, r"'norm' is \(3,\), expected \(2,\)"),
        ({}, "missing 'embed'; missing 'norm'"),
    ],
)
def test_tensors_that_do_not_fit_are_named(checkpoint: Path, tmp_path: Path, state: dict[str, Tensor], problem: str):
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        written(state, checkpoint)
    assert caught.value.field == "state_dict" and "backend.update_weights(model)" in str(caught.value)
    with (
        pytest.raises(InvalidRequestError, match=problem) as caught,
        weights_folder(update(saved(tmp_path / "new", state)), checkpoint),
    ):
        pass
    assert caught.value.field == "path"


def test_a_folder_that_fits_is_given_as_it_is(checkpoint: Path):
    with weights_folder(update(checkpoint), checkpoint) as folder:
        assert folder == checkpoint.resolve()
    assert (checkpoint / "model.safetensors").is_file()


def test_without_a_checkpoint_to_compare_with_a_path_is_only_read(checkpoint: Path, tmp_path: Path):
    with weights_folder(update(checkpoint), None) as folder:
        assert folder == checkpoint.resolve()
    with pytest.raises(InvalidRequestError, match="no folder"), weights_folder(update(tmp_path / "absent"), None):
        pass
    with pytest.raises(InvalidRequestError, match="pass the path"), weights_folder(update(CHECKPOINT), None):
        pass


# A stream -------------------------------------------------------------------------------------------------------------


def stream(*pairs: tuple[str, Tensor]) -> WeightUpdate:
    return WeightUpdate(version="1", when="drain", stream=iter(pairs))


TIED = {"embed": torch.ones(4, 2), "head": torch.ones(4, 2), "norm": torch.full((2,), 5.0)}


@pytest.mark.parametrize("names", [("embed", "head", "norm"), ("head", "norm", "embed")])
def test_a_stream_is_written_without_second_names(checkpoint: Path, names: tuple[str, ...]) -> None:
    memory = torch.empty(8)
    pairs = ((name, memory[: TIED[name].numel()].view(TIED[name].shape).copy_(TIED[name])) for name in names)
    update = WeightUpdate(version="1", when="drain", stream=pairs)
    with weights_folder(update, checkpoint, file_size=1) as folder:
        assert tensor_shapes(folder) == SHAPES
        for file in folder.glob("*.safetensors"):
            assert all(torch.equal(tensor, TIED[name]) for name, tensor in load_file(file).items())
    assert not folder.exists()


def test_a_stream_is_written_as_it_comes(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    memory, written = torch.empty(8), []

    def pairs() -> Iterator[tuple[str, Tensor]]:
        for name, shape in SHAPES.items():
            written.append(len([*tmp_path.glob("corelm-weights-*/*.safetensors")]))
            yield name, memory[: math.prod(shape)].view(shape).fill_(len(written))

    update = WeightUpdate(version="1", when="drain", stream=pairs())
    with weights_folder(update, checkpoint, file_size=1) as folder:
        found = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert written == [0, 1]
    assert torch.equal(found["embed"], torch.full((4, 2), 1.0)) and torch.equal(found["norm"], torch.full((2,), 2.0))


@pytest.mark.parametrize(
    ("pairs", "problem"),
    [
        ([], "missing 'embed'; missing 'norm'"),
        ([("embed", torch.ones(4, 2))], "missing 'norm'"),
        ([("embed", torch.ones(4, 3))], r"'embed' is \(4, 3\), expected \(4, 2\)"),
        ([*CHECKPOINT.items(), ("head", torch.ones(4, 2))], "unexpected 'head'"),
        ([*CHECKPOINT.items(), ("nrom", torch.zeros(3))], "unexpected 'nrom'"),
    ],
)
def test_a_stream_that_does_not_fit_is_refused(checkpoint: Path, pairs: list[tuple[str, Tensor]], problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as caught, weights_folder(stream(*pairs), checkpoint):
        raise AssertionError("it was accepted")
    assert caught.value.field == "weights"


def test_a_stream_needs_something_to_be_compared_with() -> None:
    with pytest.raises(InvalidRequestError, match="pass the path"), weights_folder(stream(), None):
        pass
    with weights_folder(stream(*TIED.items()), SHAPES) as folder:
        assert tensor_shapes(folder) == SHAPES


def test_buckets_hold_all_tensors_in_order() -> None:
    tensors = [("a", torch.arange(6.0)), ("b", torch.arange(4).to(torch.bfloat16)), ("c", torch.zeros(0))]
    assert [[name for name, _ in bucket] for bucket in buckets(tensors, 1)] == [["a"], ["b"], ["c"]]
    assert [[name for name, _ in bucket] for bucket in buckets(tensors, 25)] == [["a", "b"], ["c"]]
    assert not list(buckets([], 1))


# The names and shapes of a checkpoint, known without any weights ------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2", "qwen2-tied", "mixtral", "qwen3-moe"])
def test_a_model_on_the_meta_device_has_the_names_and_shapes_of_its_checkpoint(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = type(model)(copy.deepcopy(model.config))
    assert saved_shapes(empty) == tensor_shapes(tmp_path)


def test_another_module_has_its_own_names() -> None:
    assert saved_shapes(nn.Linear(2, 3)) == {"weight": (3, 2), "bias": (3,)}

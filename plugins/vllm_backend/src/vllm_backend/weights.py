"""New weights for an engine that is open: all of them are compared with the model's checkpoint before one is loaded.

vLLM loads what it is given name by name and in place. A name that it does not know stops it half way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from corelm.errors import InvalidRequestError
from corelm.spec import WeightUpdate

Shapes = Mapping[str, tuple[int, ...]]

#: How many names a message spells out.
_SPELLED_OUT = 5


@contextmanager
def fitting(request: WeightUpdate, checkpoint: Path) -> Iterator[Path]:
    """A folder of safetensors with the weights of `request`, which fit the model whose `checkpoint` that is.

    A state dict is written to a temporary folder: the engine is another process, and reads safetensors.

    Raises:
        InvalidRequestError: missing or unknown names, other shapes, or no safetensors at the path.
    """
    expected = _shapes(checkpoint)
    if request.state_dict is not None:
        given = _without_twins(request.state_dict, expected)
        _compare({name: tuple(tensor.shape) for name, tensor in given.items()}, expected, "state_dict")
        with TemporaryDirectory(prefix="corelm-weights-") as folder:
            # Copies, since safetensors refuses tensors that share memory.
            tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in given.items()}
            save_file(tensors, Path(folder, "model.safetensors"))
            yield Path(folder)
        return
    assert request.path is not None
    if not request.path.is_dir() or not any(request.path.glob("*.safetensors")):
        raise InvalidRequestError(
            f"path: expected a folder with .safetensors files, and {request.path} is none", field="path"
        )
    _compare(_shapes(request.path), expected, "path")
    yield request.path.resolve()


def _compare(given: Shapes, expected: Shapes, field: str) -> None:
    problems = [f"unexpected {name!r}" for name in sorted(given.keys() - expected.keys())]
    problems += [f"missing {name!r}" for name in sorted(expected.keys() - given.keys())]
    problems += [
        f"{name!r} is {given[name]}, expected {expected[name]}"
        for name in sorted(given.keys() & expected.keys())
        if given[name] != expected[name]
    ]
    if problems:
        more = f"; and {len(problems) - _SPELLED_OUT} more" if len(problems) > _SPELLED_OUT else ""
        raise InvalidRequestError(
            f"{field} does not fit the model, which keeps its weights: {'; '.join(problems[:_SPELLED_OUT])}{more}",
            field=field,
        )


def _without_twins(given: Mapping[str, Tensor], expected: Shapes) -> Mapping[str, Tensor]:
    """Without the second name of a tied tensor: a state dict has both, a checkpoint one."""

    def is_twin(name: str) -> bool:
        tensor = given[name]
        alike = (given[other] for other in expected if other in given and given[other].shape == tensor.shape)
        return any(tensor.data_ptr() == other.data_ptr() or torch.equal(tensor, other) for other in alike)

    return {name: tensor for name, tensor in given.items() if name in expected or not is_twin(name)}


def _shapes(folder: Path) -> Shapes:
    """The tensors of a checkpoint, from the headers of its files: those its index names, or all there are."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    shapes = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            shapes.update({name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()})
    return shapes

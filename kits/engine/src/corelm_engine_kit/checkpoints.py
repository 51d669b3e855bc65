"""Compare new weights with the open model by name and shape, before the engine sees any of them.

Many engines load what they are given name by name and in place: a tensor that does not fit stops them half way, and the
model is then part old and part new. So a plugin compares first.

- The engine reads a folder (another process, a server): `weights_folder` does all of it.
- The model is in this process: compare the shapes with `shape_problems`, add other problems, then `refuse_weights`.

Only headers are read, never tensors. This module needs safetensors, which a plugin that uses it has to require.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from corelm.errors import InvalidRequestError, first_few
from corelm.spec import WeightUpdate, whole_tensor
from corelm.validate import invalid

_log = logging.getLogger(__name__)

#: Tensor names with their shapes.
Shapes = Mapping[str, tuple[int, ...]]
#: What new weights are compared with: the folder of a checkpoint, or what one would hold (see `saved_shapes`).
Expected = Path | Shapes

#: A folder that is kept in memory, on Linux.
_SHARED_MEMORY = "/dev/shm"


@contextmanager
def weights_folder(request: WeightUpdate, checkpoint: Expected | None, *, file_size: int = 1 << 30) -> Iterator[Path]:
    """Yield the folder with the safetensors of `request`, once they have been found to fit.

    A state dict or a stream is written to a temporary folder, in shared memory if it has room and ``TMPDIR`` is not
    set. It is deleted at the end of the ``with`` block. The second name of a tied tensor is left out, as in a
    checkpoint. The tensors of a stream are compared and written as they come: they are in memory once.

    Args:
        checkpoint: the folder of the checkpoint that the engine was opened on (see `local_checkpoint`), or its names
            and shapes. None if it cannot be read on this machine: then the weights are only read and not compared, and
            must be a path.
        file_size: bytes after which the next tensor goes to another file. About as much is copied at a
            time.

    Raises:
        InvalidRequestError: there is no readable checkpoint at the path, or the tensors have other names or shapes.
            `field` is ``path``, ``state_dict`` or, for a stream, ``weights``.
    """
    if request.path is not None:
        found = tensor_shapes(request.path)
        if checkpoint is not None:
            refuse_weights(shape_problems(found, expected_shapes(checkpoint)), "path")
        yield request.path.resolve()
        return
    if checkpoint is None:
        raise invalid(
            "weights" if request.state_dict is None else "state_dict",
            "there is no checkpoint on this machine to compare it with; save it to a folder with "
            "save_pretrained and pass the path",
        )
    expected = expected_shapes(checkpoint)
    tensors: Iterable[tuple[str, Tensor]]
    if request.state_dict is not None:
        given = fitting(request.state_dict, expected)
        tensors, size = given.items(), sum(tensor.nbytes for tensor in given.values())
    else:
        assert request.stream is not None
        first = list(itertools.islice(request.stream, 1))
        tensors = itertools.chain(first, request.stream)
        size = sum(tensor.element_size() for _, tensor in first) * sum(map(math.prod, expected.values()))
    with TemporaryDirectory(prefix="corelm-weights-", dir=_room_for(size)) as name:
        save = _save if request.stream is None else functools.partial(_save_stream, expected)
        save(tensors, Path(name), file_size)
        yield Path(name)


@functools.cache
def say_why_files(engine: str, why: str) -> None:
    """Log once for each reason why tensors of new weights go to an engine through files."""
    _log.info("new weights go to %s through files, in memory if there is room: %s", engine, why)


def local_checkpoint(model: str | Path, *, revision: str | None = None, cache_dir: str | None = None) -> Path | None:
    """Return the folder on this machine that holds the safetensors of `model`; None if there is none.

    Nothing is downloaded.

    Args:
        model: a folder, or the name of a model on the Hugging Face hub that has been downloaded before.
        revision: the version on the hub. cache_dir: where downloads were put; None for the hub client's default.
    """
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(str(model), revision=revision, cache_dir=cache_dir, local_files_only=True))
        except (OSError, ValueError):
            # Not downloaded, or not the name of a model: engines also load from buckets, for example.
            return None
    return folder if any(folder.glob("*.safetensors")) else None


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of the safetensors checkpoint in `folder`.

    An index (``model.safetensors.index.json``) decides which files belong to it; without one all do.

    Raises:
        InvalidRequestError: no such folder, no checkpoint in it, or a broken one; the field is ``path``.
    """
    from safetensors import SafetensorError, safe_open

    if not folder.is_dir():
        raise invalid("path", f"there is no folder {folder} on this machine; give a folder with .safetensors files")
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        for file in _files(folder):
            with safe_open(file, framework="pt") as tensors:
                shapes.update({name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise invalid(
            "path",
            f"found no readable safetensors checkpoint in {folder} ({type(error).__name__}: {error}); "
            "save the model with save_pretrained and give that folder",
        ) from error
    return shapes


def expected_shapes(checkpoint: Expected) -> Shapes:
    """Return name and shape of every tensor that new weights must have. Errors are those of `tensor_shapes`."""
    return tensor_shapes(checkpoint) if isinstance(checkpoint, Path) else checkpoint


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of a state dict."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def shape_problems(given: Shapes, expected: Shapes) -> list[str]:
    """Return what is wrong with the tensors given, one text for each: unexpected, missing, or of another shape.

    >>> shape_problems({"embed": (4, 2), "head": (4, 2)}, {"embed": (5, 2), "norm": (2,)})
    ["unexpected 'head'", "missing 'norm'", "'embed' is (4, 2), expected (5, 2)"]
    """
    return [
        *(f"unexpected {name!r}" for name in sorted(given.keys() - expected.keys())),
        *(f"missing {name!r}" for name in sorted(expected.keys() - given.keys())),
        *(
            f"{name!r} is {given[name]}, expected {expected[name]}"
            for name in sorted(given.keys() & expected.keys())
            if given[name] != expected[name]
        ),
    ]


def refuse_weights(problems: Sequence[str], field: str) -> None:
    """Raise one `InvalidRequestError` for all `problems`; return if there are none.

    Args:
        field: what the caller gave: ``state_dict``, ``path``, or ``weights`` for a stream.
    """
    if problems:
        # The names inside a module may be others: of fused experts, adapters and wrappers, for example.
        cure = "; backend.update_weights(model) finds them for a model object" if field != "path" else ""
        raise InvalidRequestError(
            f"{field} does not fit the model, which keeps its weights: {first_few(problems)}. "
            f"Give every tensor of this model, under the names of its checkpoint{cure}",
            field=field,
        )


def fitting(given: Mapping[str, Tensor], checkpoint: Expected, field: str = "state_dict") -> dict[str, Tensor]:
    """Return a state dict without the second names of tied tensors, once its names and shapes are those expected.

    Raises:
        InvalidRequestError: they are not; `field` is the one given.
    """
    expected = expected_shapes(checkpoint)
    found = without_tied_copies(given, expected)
    refuse_weights(shape_problems(shapes_of(found), expected), field)
    return found


def fitting_stream(stream: Iterable[tuple[str, Tensor]], checkpoint: Expected) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a stream, each once it fits. At the end, all of them must have come.

    For an engine that loads each as it comes. Second names of tied tensors are refused: the first may be gone already.

    Raises:
        InvalidRequestError: a tensor does not fit, or is missing at the end; `field` is ``weights``.
    """
    expected = expected_shapes(checkpoint)
    missing = dict(expected)
    for name, tensor in stream:
        known = {name: expected[name]} if name in expected else {}
        refuse_weights(shape_problems({name: tuple(tensor.shape)}, known), "weights")
        missing.pop(name, None)
        yield name, tensor
    refuse_weights(shape_problems({}, missing), "weights")


def without_tied_copies(given: Mapping[str, Tensor], expected: Shapes) -> dict[str, Tensor]:
    """Return `given` without the second name of a tied tensor.

    A state dict has both names of weights that are tied (input embeddings and head, for example), a checkpoint one. A
    name that is not `expected` is left out if an expected one holds the same tensor or an equal one.
    """

    def is_copy(name: str) -> bool:
        alike = [given[other] for other in expected if other in given and given[other].shape == given[name].shape]
        # Nothing is gathered to be compared with nothing.
        tensor = whole_tensor(given[name]).to("cpu") if alike else given[name]
        return any(torch.equal(tensor, whole_tensor(other).to("cpu")) for other in alike)

    return {name: tensor for name, tensor in given.items() if name in expected or not is_copy(name)}


def buckets(tensors: Iterable[tuple[str, Tensor]], size: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield tensors with their names in lists of at least `size` bytes, but for the last."""
    bucket: list[tuple[str, Tensor]] = []
    for pair in tensors:
        bucket.append(pair)
        if sum(tensor.nbytes for _, tensor in bucket) >= size:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError("it holds no .safetensors files")
    return files


def _save_stream(expected: Shapes, stream: Iterable[tuple[str, Tensor]], folder: Path, file_size: int) -> None:
    """Write the tensors of a stream to files in `folder`, and refuse them if they do not fit."""
    shapes: dict[str, tuple[int, ...]] = {}
    # Few: second names of tied tensors, or mistakes.
    others: dict[str, Tensor] = {}

    def known() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in stream:
            shapes[name] = tuple(tensor.shape)
            if name in expected:
                refuse_weights(shape_problems({name: shapes[name]}, {name: expected[name]}), "weights")
                yield name, tensor
            else:
                others[name] = tensor.to("cpu", copy=True)

    _save(known(), folder, file_size)
    for name, tensor in others.items():
        if any(torch.equal(tensor, other) for other in _saved_like(tensor, folder)):
            del shapes[name]
    refuse_weights(shape_problems(shapes, expected), "weights")


def _saved_like(tensor: Tensor, folder: Path) -> Iterator[Tensor]:
    """Yield the tensors in `folder` that have the shape of `tensor`."""
    from safetensors import safe_open

    for file in _files(folder):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                if tuple(tensors.get_slice(name).get_shape()) == tuple(tensor.shape):
                    yield tensors.get_tensor(name)


def _save(tensors: Iterable[tuple[str, Tensor]], folder: Path, file_size: int) -> None:
    """Write `tensors` to files in `folder`, and copy no more of them at a time than one file holds."""
    from safetensors.torch import save_file

    copies: dict[str, Tensor] = {}
    held, files = 0, 0

    def write() -> None:
        nonlocal held, files
        save_file(copies, folder / f"model-{files:05}.safetensors", metadata={"format": "pt"})
        copies.clear()
        held, files = 0, files + 1

    for name, tensor in tensors:
        # Copies, since safetensors refuses tensors that share memory.
        copies[name] = whole_tensor(tensor).to("cpu", copy=True).contiguous()
        held += copies[name].nbytes
        if held >= file_size:
            write()
    if copies or not files:
        write()
    if files == 1:
        # The name that every reader of checkpoints knows.
        (folder / "model-00000.safetensors").rename(folder / "model.safetensors")


def _room_for(size: int) -> str | None:
    """Return where to make a temporary folder of `size` bytes: in shared memory if they fit; None for the default.

    ``TMPDIR`` says where it must be, if the workers of an engine are on several machines, for example.
    """
    if "TMPDIR" in os.environ or not os.access(_SHARED_MEMORY, os.W_OK):
        return None
    # What is left there is memory that the engine may need itself.
    return _SHARED_MEMORY if 2 * size < shutil.disk_usage(_SHARED_MEMORY).free else None

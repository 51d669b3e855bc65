"""New weights: read and compared with the model's own before the server hears of them.

SGLang loads what it knows by name and keeps the rest as it was; a shape that does not fit takes the server down.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from corelm.errors import CapabilityError, EngineError, InvalidRequestError
from corelm.spec import WeightUpdate
from sglang_backend.server import Server

Shapes = dict[str, tuple[int, ...]]

#: How many names a message spells out.
_SPELLED_OUT = 5


def update(server: Server, request: WeightUpdate, model: str, launched: bool) -> None:
    """Load `request` into the server. Every later answer names these weights, or is an error.

    Args:
        model: the folder or hub name that the server was started with. launched: the server is ours, on this machine.

    Raises:
        InvalidRequestError: the weights are not there or do not fit. Nothing has changed.
        CapabilityError: a state dict for a server that somebody else has started.
        EngineError: the server could not load them.
    """
    if request.path is not None:
        if not request.path.is_dir():
            # A server elsewhere may see it, but then nobody could say whether it fits.
            raise InvalidRequestError(f"path: there is no folder {request.path} on this machine", field="path")
        _must_fit(shapes_of(request.path), shapes_of(_folder(model)), "path")
        _load(server, request.path.resolve(), request.version)
    elif request.state_dict is not None:
        if not launched:
            raise CapabilityError(
                "a state dict cannot be sent to a server behind a URL; save it where the server can read it, and give "
                "that path",
                capability="update_weights",
            )
        _load_tensors(server, request.state_dict, shapes_of(_folder(model)), request.version)


def _load_tensors(server: Server, given: Mapping[str, Tensor], own: Shapes, version: str) -> None:
    from safetensors.torch import save_file

    # Tied weights have two names, of which a checkpoint has one.
    extra = {name for name in given.keys() - own.keys() if any(_same(given[name], given.get(other)) for other in own)}
    kept = {name: tensor for name, tensor in given.items() if name not in extra}
    _must_fit({name: tuple(tensor.shape) for name, tensor in kept.items()}, own, "state_dict")
    with tempfile.TemporaryDirectory(prefix="corelm-weights-") as folder:
        # Two names of one storage are more than the format can say.
        copies = {name: tensor.detach().to("cpu").clone().contiguous() for name, tensor in kept.items()}
        save_file(copies, Path(folder, "model.safetensors"), metadata={"format": "pt"})
        _load(server, Path(folder), version)


def _same(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and torch.equal(one.to("cpu"), other.to("cpu"))


def _load(server: Server, folder: Path, version: str) -> None:
    label = server.new_label(version)
    payload = {"model_path": str(folder), "weight_version": label, "flush_cache": True}
    # Not repeated: the first try may have succeeded, and only its answer been lost.
    answer = server.client.post("/update_weights_from_disk", payload)
    if not isinstance(answer, dict) or answer.get("success") is not True:
        raise EngineError(f"the server did not load the weights: {answer}")
    server.label = label


def _must_fit(given: Shapes, own: Shapes, field: str) -> None:
    problems = [f"unexpected {name!r}" for name in sorted(given.keys() - own.keys())]
    problems += [f"missing {name!r}" for name in sorted(own.keys() - given.keys())]
    problems += [
        f"{name!r} is {given[name]}, expected {own[name]}"
        for name in sorted(given.keys() & own.keys())
        if given[name] != own[name]
    ]
    if problems:
        more = f"; and {len(problems) - _SPELLED_OUT} more" if len(problems) > _SPELLED_OUT else ""
        raise InvalidRequestError(
            f"{field}: these are not this model's weights, which stay in force: "
            f"{'; '.join(problems[:_SPELLED_OUT])}{more}",
            field=field,
        )


def shapes_of(folder: Path) -> Shapes:
    """Name and shape of every tensor of a checkpoint; none of them is read.

    Raises:
        InvalidRequestError: there is no checkpoint in `folder`, or a broken one.
    """
    try:
        return dict(_shapes(folder))
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InvalidRequestError(
            f"path: {folder} holds no checkpoint that can be read: {error}", field="path"
        ) from error


def _shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            yield from ((name, tuple(tensors.get_slice(name).get_shape())) for name in tensors.keys())
    if not files:
        raise ValueError("no *.safetensors in it")


def _folder(model: str) -> Path:
    """Where the model's own checkpoint lies: its folder, or the hub's copy of it on this machine."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, local_files_only=True, allow_patterns="*.safetensors"))
    except (OSError, ValueError) as error:
        raise InvalidRequestError(
            f"path: the server's model {model!r} is not on this machine, so nobody can say whether new weights fit",
            field="path",
        ) from error

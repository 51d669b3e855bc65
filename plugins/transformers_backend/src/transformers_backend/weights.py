"""New weights for a model that is in use: everything is checked before the first tensor is written."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from corelm.errors import InvalidRequestError
from transformers_backend.model import CausalLM

#: How many names a message spells out.
_SPELLED_OUT = 5


def update(model: CausalLM, given: Mapping[str, Tensor]) -> None:
    """Copy `given` into the model, by name. Device, dtype and requires_grad stay the model's.

    A PEFT-wrapped model takes its own names, or the plain names of the model inside; its adapters then stay.

    Raises:
        InvalidRequestError: missing or unknown names, other shapes, tied weights that differ. Nothing has changed.
    """
    own = max(_namings(model), key=lambda names: len(names.keys() & given.keys()))
    problems = [f"unexpected {name!r}" for name in sorted(given.keys() - own.keys())]
    by_storage: dict[tuple[int, torch.Size], str] = {}
    for name in sorted(own.keys() & given.keys()):
        if given[name].shape != own[name].shape:
            problems.append(f"{name!r} is {tuple(given[name].shape)}, expected {tuple(own[name].shape)}")
        twin = by_storage.setdefault(_storage(own[name]), name)
        if twin != name and not torch.equal(given[twin].to("cpu"), given[name].to("cpu")):
            problems.append(f"{twin!r} and {name!r} are one tensor in this model, but differ")
    # One name is enough for weights that are tied.
    problems += [
        f"missing {name!r}" for name in sorted(own.keys() - given.keys()) if _storage(own[name]) not in by_storage
    ]
    if problems:
        more = f"; and {len(problems) - _SPELLED_OUT} more" if len(problems) > _SPELLED_OUT else ""
        raise InvalidRequestError(
            f"state_dict does not fit the model, which keeps its weights: {'; '.join(problems[:_SPELLED_OUT])}{more}",
            field="state_dict",
        )
    with torch.no_grad():
        for name, value in given.items():
            own[name].copy_(value)


def update_from_path(model: CausalLM, path: Path) -> None:
    """From a folder that `save_pretrained` wrote (shards included), or one file of tensors by the model's own names.

    Raises:
        InvalidRequestError: there is nothing at `path`, or it holds other weights. Nothing has changed.
    """
    if not path.exists():
        raise InvalidRequestError(f"path: there is nothing at {path}", field="path")
    if path.is_file():
        return update(model, _read_file(path))
    # A checkpoint's names need not be the model's (experts are stored one by one, say): transformers translates.
    fresh, report = type(model.base).from_pretrained(
        path,
        config=copy.deepcopy(model.base.config),
        dtype=model.base.dtype,
        weights_only=True,
        local_files_only=True,
        output_loading_info=True,
    )
    wrong = [f"{kind[:-5]} {name!r}" for kind in ("missing_keys", "unexpected_keys") for name in sorted(report[kind])]
    if wrong:
        raise InvalidRequestError(
            f"path: {path} does not hold this model's weights: {'; '.join(wrong[:_SPELLED_OUT])}", field="path"
        )
    return update(model, fresh.state_dict())


def _read_file(path: Path) -> Mapping[str, Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    tensors: Mapping[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return tensors


def _namings(model: CausalLM) -> list[dict[str, Tensor]]:
    """The complete sets of names the model's tensors go by."""
    own: dict[str, Tensor] = dict(model.module.state_dict())
    if model.module is model.base:
        return [own]
    wrapper: Any = model.module
    plain = {
        name.removeprefix("base_model.model.").replace(".base_layer.", "."): tensor
        for name, tensor in own.items()
        if wrapper.base_model.prefix not in name
    }
    return [own, plain]


def _storage(tensor: Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape

"""Adapters (LoRA, for example): which one a call asks for, where one is loaded from, and the labels of its versions.

An adapter has a version of its own, which counts up when it is loaded again. The label of a row that it made names the
base weights, the adapter and its version: ``"3+policy@12"``. A row made without adapters says ``"3+none"``.

Core does not import PEFT. If an adapter comes in a PEFT model, the caller has imported it already.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from corelm.backend.hooks import EngineHooks
from corelm.backend.trained_model import unwrapped
from corelm.backend.weights import Weights
from corelm.errors import CapabilityError, CoreLMError, InvalidRequestError, brief
from corelm.spec.provenance import Adapter
from corelm.spec.records import WeightUpdate
from corelm.validate import invalid, shown

_log = logging.getLogger(__name__)

#: What `load_adapter` takes.
NewAdapter: TypeAlias = Mapping[str, Tensor] | nn.Module | str | os.PathLike[str]

#: Ends the name of an adapter in labels and in paths of HTTP servers.
_NOT_IN_NAMES = frozenset("@+/\\")


def checked_adapter(given: Any) -> Adapter:
    """Return the adapter of a call.

    Raises:
        InvalidRequestError: it is neither a name, False nor None; `field` is ``adapter``.
    """
    if given is None or given is False:
        return given
    if given is True or not isinstance(given, str):
        raise invalid(
            "adapter",
            f"expected the name of an adapter, False for the base weights or None, got {shown(given)}; "
            "load_adapter(name, …) loads one",
        )
    return checked_name(given)


def checked_name(given: Any) -> str:
    """Return the name of an adapter.

    Raises:
        InvalidRequestError: it is not one; `field` is ``adapter``.
    """
    if not isinstance(given, str) or not given.strip() or not given.isprintable() or _NOT_IN_NAMES & {*given}:
        raise invalid("adapter", f"expected a name without any of @ + / \\, got {shown(given)}")
    return given


class Adapters:
    """The adapters that were loaded into an engine, and the labels of their versions.

    An adapter that the engine was opened with has the version "0". The first that is loaded under a new name has "1".
    """

    def __init__(self) -> None:
        self._labels: dict[str, Weights] = {}
        self._configs: dict[str, Mapping[str, Any]] = {}
        self._loaded: set[str] = set()

    @property
    def versions(self) -> dict[str, str]:
        """The version of each adapter that is loaded, by name."""
        return {name: self._labels[name].label for name in sorted(self._loaded)}

    def labels(self, name: str) -> Weights:
        """Return the labels of an adapter."""
        return self._labels.setdefault(name, Weights(lambda: None))

    def version_with(self, adapter: Adapter, weights: str) -> str:
        """Return the label of rows that were made with this adapter and these base weights."""
        if adapter is None:
            return weights
        if adapter is False:
            return f"{weights}+none"
        known = self._labels.get(adapter)
        return f"{weights}+{adapter}@{'0' if known is None else known.label}"

    def note(self, update: WeightUpdate) -> None:
        """Remember what was loaded or unloaded. A later state dict of the same name has the same configuration.

        Versions go on counting if an adapter is loaded again after it was unloaded.
        """
        assert update.adapter is not None
        self._configs.pop(update.adapter, None)
        if update.unloads:
            self._loaded.discard(update.adapter)
            return
        self._loaded.add(update.adapter)
        config = update.adapter_config if update.path is None else _read_config(update.path)
        if config is not None:
            self._configs[update.adapter] = config

    def source(self, name: str, weights: NewAdapter, config: Any) -> dict[str, Any]:
        """Return the fields of a `WeightUpdate` that say where the adapter comes from.

        Args:
            name: its name.
            weights: a folder that PEFT's `save_pretrained` wrote, a PEFT model, or a state dict with the names that
                ``peft.get_peft_model_state_dict`` gives.
            config: the configuration of a state dict; None for that of the last adapter of this name.

        Raises:
            InvalidRequestError: there is nothing to load, or its configuration is not known; `field` is ``weights`` or
                ``config``.
        """
        if isinstance(weights, (str, os.PathLike)):
            _refuse_config(config, "the folder")
            return {"path": Path(weights)}
        if isinstance(weights, nn.Module):
            _refuse_config(config, "the model")
            state, own = _of_peft_model(name, weights)
            return {"state_dict": state, "adapter_config": own}
        if not isinstance(weights, Mapping):
            raise invalid("weights", f"expected a folder, a PEFT model or a state dict, got {type(weights).__name__}")
        found = self._configs.get(name) if config is None else _plain_config(config)
        if found is None:
            raise invalid(
                "config",
                "a state dict does not say what its adapter is; give config=, as in config=peft_model.peft_config"
                "['default'], or give the PEFT model or its folder",
            )
        return {"state_dict": weights, "adapter_config": found}


def update_adapter(hooks: EngineHooks, adapters: Adapters, request: WeightUpdate, version: str | None) -> str:
    """Load or unload an adapter, and return its version. The base weights keep their label.

    Args:
        hooks: the engine's.
        adapters: the adapters of the engine.
        request: the adapter, without a version.
        version: the version; None counts up from the last one.

    Raises:
        InvalidRequestError: the engine refused it, and what was loaded before is still in force, with its version.
        CapabilityError: as above.
        EngineError: it failed half-way: the adapter has a version that none had before.
    """
    assert request.adapter is not None
    base, labels = hooks.weights, adapters.labels(request.adapter)
    before, of_base, unused, label = labels.saved(), "", "", ""

    def fill(request: WeightUpdate) -> WeightUpdate:
        nonlocal before, of_base, unused, label
        base.look()
        before, of_base, unused = labels.saved(), base.label, labels.next_label(version)
        label = unused if version is None else version
        labels.put(unused)
        return replace(request, version=label)

    def finish(done: Any) -> str:
        if done is not True:
            raise hooks.fault("update_weights")(f"returned {shown(done)}: the adapter is not in force")
        if request.unloads:
            labels.restore(before)
        else:
            labels.put(label)
            if label != unused:
                labels.release(unused)
        adapters.note(request)
        # The engine may tell another state now, but its base weights are what they were.
        base.put(of_base)
        return label

    def failed(error: CoreLMError) -> CoreLMError:
        if isinstance(error, (InvalidRequestError, CapabilityError)):
            labels.restore(before)
        if of_base:
            # As above, also if the load failed half-way: it is the adapter that may be partly new.
            base.put(of_base)
        return error

    loaded: str = hooks.call("update_weights", request, finish, fill, failed=failed)
    _log.info(
        "adapter %s: version %s is %s",
        brief(request.adapter),
        brief(loaded),
        "unloaded" if request.unloads else "in force",
    )
    return loaded


def _read_config(folder: Path) -> Mapping[str, Any] | None:
    """Return the configuration of the adapter in a folder; None if another machine has the folder."""
    try:
        found = json.loads((folder / "adapter_config.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _plain_config(config: Any) -> dict[str, Any]:
    """Return PEFT's configuration of an adapter, or what its ``to_dict()`` returned, in plain JSON values.

    Raises:
        InvalidRequestError: it is neither; `field` is ``config``.
    """
    values = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(values, Mapping):
        raise invalid("config", f"expected a LoraConfig, or a mapping of its fields, got {shown(config)}")
    return {str(name): _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def _refuse_config(config: Any, where: str) -> None:
    if config is not None:
        raise invalid("config", f"leave it out: {where} has the adapter's configuration")


def _of_peft_model(name: str, model: Any) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
    """Return the state dict and the configuration of an adapter of a PEFT model.

    That is the adapter of this name, or the active one if the model has no such adapter.
    """
    model = unwrapped(model)
    peft = sys.modules.get("peft")
    known = getattr(model, "peft_config", None)
    if peft is None or not isinstance(known, Mapping) or not hasattr(model, "active_adapter"):
        raise invalid("weights", f"a {type(model).__name__} has no adapter; give a model of peft.get_peft_model")
    if name in known:
        chosen = name
    else:
        active = model.active_adapter
        chosen = active() if callable(active) else active
        if isinstance(chosen, (list, tuple)):
            if len(chosen) != 1:
                raise invalid("weights", f"the model has {len(chosen)} active adapters and none called {name!r}")
            (chosen,) = chosen
    with torch.no_grad():
        state: Mapping[str, Tensor] = peft.get_peft_model_state_dict(
            model, adapter_name=chosen, save_embedding_layers=False
        )
    return state, _plain_config(known[chosen])

"""LoRA adapters of a server: each version is loaded under a name of its own, and the old one is unloaded then.

SGLang silently leaves out tensors of an adapter that it does not know, and others end the server. So names and shapes
are compared with the model's checkpoint before the server gets a folder. It may read the folder again, so a copy is
kept while it is loaded.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from corelm.errors import CapabilityError, EngineError, InvalidRequestError
from corelm.spec import Adapter, WeightUpdate
from corelm_engine_kit import HttpClient, adapter_folder, checked_adapter
from sglang_backend.capabilities import ServerInfo


class Adapters:
    """The adapters of a server: those that it was started with, and those that are loaded here.

    Args:
        client: the connection to the server.
        info: what is known about the server.
        reads_files_here: the server reads files of this machine.
    """

    def __init__(self, client: HttpClient, info: ServerInfo, *, reads_files_here: bool) -> None:
        self._client, self._info, self._reads_files_here = client, info, reads_files_here
        # By the name that the caller gave: the server's name, and the folder that was made for it.
        self._loaded: dict[str, tuple[str, TemporaryDirectory[str] | None]] = {}

    def fields(self, adapter: Adapter) -> dict[str, str]:
        """Return the fields of a payload that name the adapter of a request.

        Raises:
            InvalidRequestError: there is no such adapter.
        """
        if not adapter:
            return {}
        if adapter in self._loaded:
            return {"lora_path": self._loaded[adapter][0]}
        if adapter not in self._info.adapters:
            raise self._unknown(adapter)
        return {"lora_path": adapter}

    def update(self, request: WeightUpdate, checkpoint: Path | None) -> None:
        """Load, replace or unload an adapter.

        Args:
            checkpoint: the folder of the base model; None if it is not on this machine.

        Raises:
            InvalidRequestError: it does not fit, or is not there. Nothing has changed.
            CapabilityError: it is a state dict for a server that reads no files of this machine, or it is not LoRA.
                Nothing has changed.
            EngineError: the server failed.
        """
        name = request.adapter
        assert name is not None
        old = self._loaded.get(name)
        if old is None and name in self._info.adapters:
            raise InvalidRequestError(
                f"adapter: the server was started with {name!r}; load this one under another name", field="adapter"
            )
        if not request.unloads:
            self._loaded[name] = self._load(name, request, checkpoint)
        elif old is None:
            raise self._unknown(name)
        else:
            del self._loaded[name]
        if old is not None:
            self._post("unload", {"lora_name": old[0]})
            if old[1] is not None:
                old[1].cleanup()

    def close(self) -> None:
        """Delete the folders."""
        while self._loaded:
            folder = self._loaded.popitem()[1][1]
            if folder is not None:
                folder.cleanup()

    def _load(
        self, name: str, request: WeightUpdate, checkpoint: Path | None
    ) -> tuple[str, TemporaryDirectory[str] | None]:
        """Load an adapter, and return the server's name for it and the folder that was made."""
        limits: dict[str, Any] = {
            "largest_rank": self._info.largest_rank,
            "option": "max_lora_rank",
            "problems": _problems,
        }
        folder = None
        if self._reads_files_here:
            folder = adapter_folder(request, checkpoint, **limits)
        elif request.path is None:
            raise CapabilityError(
                "a state dict cannot be sent to a server behind a URL; save the adapter where the server can read it, "
                "and pass that path",
                capability="adapters",
            )
        elif request.path.is_dir():
            checked_adapter(request, checkpoint, **limits)
        # A name that no version had, here or in another client.
        new = f"{name}.{uuid.uuid4().hex[:12]}"
        try:
            self._post("load", {"lora_name": new, "lora_path": str(request.path if folder is None else folder.name)})
        except BaseException:
            if folder is not None:
                folder.cleanup()
            raise
        return new, folder

    def _post(self, what: str, payload: Mapping[str, str]) -> None:
        reply = self._client.post(f"/{what}_lora_adapter", payload)
        if not isinstance(reply, dict) or reply.get("success") is not True:
            raise EngineError(self._client.secrets.masked(f"the server did not {what} the adapter: {reply}"))

    def _unknown(self, name: str) -> InvalidRequestError:
        known = sorted({*self._loaded, *self._info.adapters})
        others = f"there are {', '.join(map(repr, known))}" if known else "no adapter is loaded"
        return InvalidRequestError(
            f"adapter: there is no {name!r}; {others}. Call load_adapter({name!r}, …) first", field="adapter"
        )


def _problems(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield which layers SGLang cannot join to one: it ends when it runs an adapter of keys alone, for example."""
    joined: dict[str, set[str]] = {}
    for name in shapes:
        layer, _, module = name.removesuffix(".lora_A.weight").rpartition(".")
        if name.endswith(".lora_A.weight") and module in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            joined.setdefault(layer, set()).add(module)
    with_keys = any("k_proj" in modules for modules in joined.values())
    for layer, modules in sorted(joined.items()):
        needed = {"gate_proj"} if "up_proj" in modules else set()
        if modules & {"q_proj", "k_proj", "v_proj"}:
            needed |= {"q_proj", "v_proj", *(["k_proj"] if with_keys else [])}
        if missing := sorted(needed - modules):
            trained, also = ", ".join(sorted(modules)), ", ".join(missing)
            yield f"{layer} has {trained} and SGLang also needs {also}; train these as well"

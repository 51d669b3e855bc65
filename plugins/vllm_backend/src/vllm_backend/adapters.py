"""LoRA adapters of vLLM, in this process and behind a URL: each version has an id and a name of its own.

vLLM finds adapters by their id, and cached blocks by their name and folder. So no version is ever taken for another.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from corelm.errors import CapabilityError, CoreLMError, EngineError, InvalidRequestError, described, message
from corelm.spec import Adapter, WeightUpdate
from corelm_engine_kit import adapter_folder, checked_adapter
from vllm_backend.capabilities_http import ADAPTER_ROUTES
from vllm_backend.compat import honoured_in_adapters

if TYPE_CHECKING:
    from corelm_engine_kit import HttpClient
    from vllm_backend.capabilities import ModelInfo
    from vllm_backend.capabilities_http import ServerInfo


class Adapters:
    """The adapters of an engine in this process.

    Args:
        info: the engine's model.
    """

    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        # vLLM reads a folder again if it has forgotten the adapter for others.
        self._loaded: dict[str, tuple[Any, TemporaryDirectory[str]]] = {}
        self._ids = 0

    def named(self, adapter: Adapter) -> Any:
        """Return vLLM's `LoRARequest` for the adapter of a request; None for the base weights.

        Raises:
            InvalidRequestError: there is no such adapter.
        """
        if not adapter:
            return None
        if adapter not in self._loaded:
            raise unknown(adapter, self._loaded)
        return self._loaded[adapter][0]

    def update(self, request: WeightUpdate, replace: Callable[[Any, Any], None]) -> None:
        """Load, replace or unload an adapter.

        Args:
            replace: has vLLM load an adapter and forget another one; either may be None.

        Raises:
            InvalidRequestError: it does not fit, or is not there. Nothing has changed.
            CapabilityError: it is not a LoRA adapter. Nothing has changed.
        """
        from vllm.lora.request import LoRARequest

        name = request.adapter
        assert name is not None
        old = self._loaded.get(name)
        if request.unloads:
            replace(None, self.named(name))
            self._loaded.pop(name)[1].cleanup()
            return
        folder = adapter_folder(
            request,
            self._info.files,
            largest_rank=self._info.largest_rank,
            option="max_lora_rank",
            honoured=honoured_in_adapters(),
        )
        self._ids += 1
        new = LoRARequest(f"{name}@{self._ids}", self._ids, folder.name)
        try:
            replace(new, None if old is None else old[0])
        except BaseException as error:
            folder.cleanup()
            if not isinstance(error, Exception) or isinstance(error, CoreLMError):
                raise
            raise InvalidRequestError(
                f"adapter: vLLM does not take {name!r}: {described(error)}", field="adapter"
            ) from error
        self._loaded[name] = new, folder
        if old is not None:
            old[1].cleanup()

    def close(self) -> None:
        """Delete the folders."""
        while self._loaded:
            self._loaded.popitem()[1][1].cleanup()


class ServerAdapters:
    """The adapters of a server: those that it was started with, and those that are loaded here.

    Args:
        client: the connection to the server.
        info: what is known about the server.
        healthy: returns whether the server answers.
    """

    def __init__(self, client: HttpClient, info: ServerInfo, healthy: Callable[[], bool]) -> None:
        self._client, self._info, self._healthy = client, info, healthy
        # By the name that the caller gave: the server's name. Other clients may load adapters of the same name.
        self._loaded: dict[str, str] = {}

    def model(self, adapter: Adapter) -> str:
        """Return the name of the model that answers requests with this adapter.

        Raises:
            InvalidRequestError: there is no such adapter.
        """
        if adapter is None:
            return self._info.name
        if adapter is False:
            return self._info.base_name
        if adapter not in self._loaded and adapter not in self._info.adapters:
            raise unknown(adapter, {*self._loaded, *self._info.adapters})
        return self._loaded.get(adapter, adapter)

    def update(self, request: WeightUpdate, checkpoint: Path | None) -> None:
        """Load, replace or unload an adapter. The server reads it from the folder of the request.

        Args:
            checkpoint: the folder of the base model; None if it is not on this machine.

        Raises:
            InvalidRequestError: it does not fit, or is not there. Nothing has changed.
            CapabilityError: it is a state dict, or the server loads no adapters. Nothing has changed.
        """
        name = request.adapter
        assert name is not None
        if not self._info.routes >= ADAPTER_ROUTES:
            raise CapabilityError(
                "the server loads no adapters; start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
                capability="adapters",
            )
        old = self._loaded.get(name)
        if old is None and name in self._info.adapters:
            raise InvalidRequestError(
                f"adapter: the server was started with {name!r}; load this one under another name", field="adapter"
            )
        if not request.unloads:
            if request.path is None:
                raise CapabilityError(
                    "a server loads an adapter from a folder that it can read; save it there and give the path",
                    capability="adapters",
                )
            if request.path.is_dir():
                # Not every version knows ranks and scales of single layers, and a server does not say whether it does.
                checked_adapter(
                    request, checkpoint, largest_rank=None, option="--max-lora-rank", honoured={"use_rslora"}
                )
            # A name that no version had: the server keeps what it has cached for a name.
            new = f"{name}.{uuid.uuid4().hex[:12]}"
            self._post("load", {"lora_name": new, "lora_path": str(request.path)})
            self._loaded[name] = new
        elif old is None:
            raise unknown(name, self._loaded)
        else:
            del self._loaded[name]
        if old is not None:
            self._post("unload", {"lora_name": old})

    def _post(self, what: str, payload: dict[str, str]) -> None:
        try:
            self._client.post(f"/v1/{what}_lora_adapter", payload, expect_json=False)
        except EngineError as error:
            if not self._healthy():
                raise
            # The server says so, of an adapter that it could not read, with the status of its own failures.
            raise InvalidRequestError(
                f"adapter: the server did not {what} it: {message(error)}", field="adapter"
            ) from error


def unknown(name: str, known: Any) -> InvalidRequestError:
    """Return the error for a request with an adapter that is not there."""
    others = f"there are {', '.join(map(repr, sorted(known)))}" if known else "no adapter is loaded"
    return InvalidRequestError(
        f"adapter: there is no {name!r}; {others}. Call load_adapter({name!r}, …) first", field="adapter"
    )

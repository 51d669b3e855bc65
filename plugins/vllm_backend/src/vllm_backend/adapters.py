"""LoRA adapters of vLLM, in this process and behind a URL: each version has an id and a name of its own.

vLLM finds adapters by their id, and cached blocks by their name and folder. So no version is ever taken for another.
"""

from __future__ import annotations

from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from corelm.errors import CapabilityError, CoreLMError, EngineError, InvalidRequestError, described, message
from corelm.spec import Adapter, WeightUpdate
from corelm_engine_kit import ServerAdapters, adapter_folder, checked_adapter, local_checkpoint, unknown_adapter
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
            raise unknown_adapter(adapter, self._loaded)
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


def server_adapters(client: HttpClient, info: ServerInfo, healthy: Callable[[], bool]) -> ServerAdapters:
    """Return the adapters of a server, which reads them from folders.

    Args:
        client: the connection to the server.
        info: what is known about the server.
        healthy: returns whether the server answers.
    """

    def load(name: str, request: WeightUpdate) -> None:
        if not info.routes >= ADAPTER_ROUTES:
            raise CapabilityError(
                "the server loads no adapters; start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
                capability="adapters",
            )
        if request.path is None:
            raise CapabilityError(
                "a server loads an adapter from a folder that it can read; save it there and give the path",
                capability="adapters",
            )
        if request.path.is_dir():
            # Not every version knows ranks and scales of single layers, and a server does not say whether it does.
            checkpoint, honoured = local_checkpoint(info.files), {"use_rslora"}
            checked_adapter(request, checkpoint, largest_rank=None, option="--max-lora-rank", honoured=honoured)
        post("load", {"lora_name": name, "lora_path": str(request.path)})

    def unload(name: str) -> None:
        post("unload", {"lora_name": name})

    def post(what: str, payload: dict[str, str]) -> None:
        try:
            client.post(f"/v1/{what}_lora_adapter", payload, expect_json=False)
        except EngineError as error:
            if not healthy():
                raise
            # The server says so, of an adapter that it could not read, with the status of its own failures.
            raise InvalidRequestError(
                f"adapter: the server did not {what} it: {message(error)}", field="adapter"
            ) from error

    return ServerAdapters(info.adapters, load, unload)

"""LoRA adapters of vLLM, in this process and behind a URL: each version has an id and a name of its own.

vLLM finds adapters by their id, and cached blocks by their name and folder. So no version is ever taken for another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from corelm.errors import CapabilityError, CoreLMError, EngineError, InvalidRequestError, described, message
from corelm.spec import WeightUpdate
from corelm.validate import invalid
from corelm_engine_kit import ServerAdapters, adapter_folder, checked_adapter, local_checkpoint
from vllm_backend.capabilities_http import ADAPTER_ROUTES

if TYPE_CHECKING:
    from corelm_engine_kit import HttpClient
    from vllm_backend.capabilities import ModelInfo
    from vllm_backend.capabilities_http import ServerInfo

#: The fields of PEFT's configuration, beyond those of a plain LoRA, that vLLM honours.
_HONOURED = frozenset({"use_rslora", "rank_pattern", "alpha_pattern"})


def local_adapters(
    info: ModelInfo, loras: dict[str, Any], add: Callable[[Any], None], remove: Callable[[int], None]
) -> ServerAdapters:
    """Return the adapters of an engine in this process.

    Args:
        loras: gets vLLM's `LoRARequest` of each adapter by the name that it is loaded under.
    """
    ids = itertools.count(1)

    def folder(request: WeightUpdate) -> TemporaryDirectory[str]:
        rank, option = info.largest_rank, "max_lora_rank"
        return adapter_folder(request, info.files, largest_rank=rank, option=option, honoured=_HONOURED)

    def load(name: str, path: str) -> None:
        from vllm.lora.request import LoRARequest

        lora = LoRARequest(name, next(ids), path)
        try:
            add(lora)
        except CoreLMError:
            raise
        except Exception as error:
            why = f"adapter: vLLM does not take {name!r}: {described(error)}"
            raise InvalidRequestError(why, field="adapter") from error
        loras[name] = lora

    return ServerAdapters((), folder, load, lambda name: remove(loras.pop(name).lora_int_id))


def server_adapters(client: HttpClient, info: ServerInfo, healthy: Callable[[], bool]) -> ServerAdapters:
    """Return the adapters of a server, which reads them from folders."""

    def folder(request: WeightUpdate) -> None:
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
            checkpoint = local_checkpoint(info.files)
            # A server may be an older one, which leaves out the ranks and scales of single layers without a word.
            honoured = _HONOURED - {"rank_pattern", "alpha_pattern"}
            checked_adapter(request, checkpoint, largest_rank=None, option="--max-lora-rank", honoured=honoured)

    def post(what: str, **payload: str) -> None:
        try:
            client.post(f"/v1/{what}_lora_adapter", payload, expect_json=False)
        except EngineError as error:
            if not healthy():
                raise
            # The server says so, of an adapter that it could not read, with the status of its own failures.
            raise invalid("adapter", f"the server did not {what} it: {message(error)}") from error

    return ServerAdapters(
        info.adapters,
        folder,
        lambda name, path: post("load", lora_name=name, lora_path=path),
        lambda name: post("unload", lora_name=name),
    )

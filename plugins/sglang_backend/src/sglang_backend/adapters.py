"""LoRA adapters for a server: found to fit first, then loaded from a folder that it can read.

SGLang silently leaves out tensors of an adapter that it does not know, and others end the server. So names and shapes
are compared with the model's checkpoint before the server gets a folder. It may read the folder again, so a copy is
kept while it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from tempfile import TemporaryDirectory
from typing import Any

from corelm.errors import CapabilityError
from corelm.spec import WeightUpdate
from corelm_engine_kit import HttpClient, ServerAdapters, adapter_folder, checked_adapter, local_checkpoint
from sglang_backend.capabilities import ServerInfo
from sglang_backend.weights import tell


def adapters_of(client: HttpClient, info: ServerInfo, *, reads_files_here: bool) -> ServerAdapters:
    """Return the adapters of a server."""

    def folder(request: WeightUpdate) -> TemporaryDirectory[str] | None:
        checkpoint = local_checkpoint(info.model)
        limits: dict[str, Any] = {"largest_rank": info.largest_rank, "option": "max_lora_rank", "problems": _problems}
        if reads_files_here:
            return adapter_folder(request, checkpoint, **limits)
        if request.path is None:
            raise CapabilityError(
                "a state dict cannot be sent to a server behind a URL; save the adapter where the server can read it, "
                "and pass that path",
                capability="adapters",
            )
        if request.path.is_dir():
            checked_adapter(request, checkpoint, **limits)
        return None

    def load(name: str, path: str) -> None:
        tell(client, "/load_lora_adapter", {"lora_name": name, "lora_path": path}, failure="did not load the adapter")

    def unload(name: str) -> None:
        tell(client, "/unload_lora_adapter", {"lora_name": name}, failure="did not unload the adapter")

    return ServerAdapters(info.adapters, folder, load, unload)


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

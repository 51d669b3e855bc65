"""What differs between the versions of vLLM that the plugin supports, 0.26 to 0.33."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from corelm.errors import CapabilityError, how_to_install


@functools.cache
def refusals() -> tuple[type[Exception], ...]:
    """Return the exceptions with which vLLM refuses one request and goes on with the others.

    vLLM 0.26 has no class for them: it raises ValueError, or a subclass.
    """
    from vllm import exceptions

    names = ("VLLMClientError", "GracefulHTTPError")
    found = tuple(getattr(exceptions, name) for name in names if hasattr(exceptions, name))
    return found or (ValueError,)


def packer() -> Any:
    """Return what packs tensors into GPU memory that other processes can open; None if vLLM has nothing for it."""
    try:
        from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer
    except ImportError:
        return None
    return packed_ipc_producer


def honoured_in_adapters() -> frozenset[str]:
    """Return the fields of PEFT's configuration, beyond those of a plain LoRA, that vLLM honours.

    Versions that do not know ranks and scales of single layers leave them out without a word.
    """
    try:
        from vllm.lora.peft_helper import PEFTHelper
    except ImportError:
        return frozenset()
    known = {each.name for each in dataclasses.fields(PEFTHelper)}
    return frozenset(known & {"use_rslora", "rank_pattern", "alpha_pattern"})


def says_versions() -> bool:
    """Return whether vLLM says which weights sampled which tokens of an answer."""
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    names = {each.name for each in dataclasses.fields(CompletionOutput)}
    return "weight_versions" in names and hasattr(AsyncLLM, "update_weight_version")


def nccl_trainer() -> tuple[Any, Any, Any]:
    """Return what vLLM has for a trainer that sends weights over NCCL: the class of its settings, its class, and the
    class that describes a tensor.

    Raises:
        CapabilityError: there is no vLLM in this process, or one without them.
    """
    try:
        from vllm.distributed.weight_transfer.base import ParamMeta
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine
    except ImportError as error:
        raise CapabilityError(
            f"weight_group: this process needs vLLM 0.32 or newer as well, to send tensors over NCCL ({error}); "
            f"install it here: {how_to_install('core-vllm-backend[engine]')}",
            capability="update_weights",
        ) from error
    return NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine, ParamMeta

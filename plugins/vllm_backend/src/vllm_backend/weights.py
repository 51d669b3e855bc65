"""New weights for an open engine: compared with the model's checkpoint first, then loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from corelm.errors import CapabilityError
from corelm.spec import WeightUpdate
from corelm.support import weights_folder

if TYPE_CHECKING:
    from vllm_backend.engine import InProcessEngine
    from vllm_backend.server import VLLMServer


def load(engine: InProcessEngine | VLLMServer, request: WeightUpdate) -> None:
    """Load the weights of `request` into the engine. If its owner has changed them, only drop what is cached.

    vLLM loads tensors in place, one by one, and an unknown name stops it half way. So all names and shapes are compared
    with those of the checkpoint that the engine was opened on, before vLLM gets anything.

    Raises:
        InvalidRequestError: the weights cannot be read or do not fit the model. Nothing has changed.
        CapabilityError: a state dict for a server. Nothing has changed.
        EngineError: the weights fit, but were not loaded. The engine has no usable weights.
    """
    if request.adapter is not None:
        engine.load_adapter(request)
        return
    if request.by_owner:
        engine.forget(request)
        return
    if request.state_dict is not None and not engine.takes_state_dict:
        raise CapabilityError(
            "a server loads weights from a folder that it can read; save the state dict there and give the path",
            capability="update_weights",
        )
    with weights_folder(request, engine.checkpoint) as folder:
        engine.reload(folder, request)

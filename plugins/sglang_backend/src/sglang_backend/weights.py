"""New weights for an open engine: compared with the model's checkpoint first, then loaded.

SGLang loads the tensors whose names it knows and silently keeps its own for the rest. A tensor of another shape ends
the server.
"""

from __future__ import annotations

from corelm.errors import CapabilityError, InvalidRequestError
from corelm.spec import WeightUpdate
from corelm.support import weights_folder
from sglang_backend.server import SGLangServer


def load(engine: SGLangServer, request: WeightUpdate) -> None:
    """Load the weights of `request` into the server. If its owner has changed them, only drop what is cached.

    Every later reply names these weights, or its row is an error.

    Raises:
        InvalidRequestError: the weights cannot be read, do not fit, or cannot be compared. Nothing has changed.
        CapabilityError: a state dict for a server that this backend did not launch.
        EngineError: the server did not load them.
    """
    if request.adapter is not None:
        engine.load_adapter(request)
        return
    if request.by_owner:
        engine.forget(request)
        return
    if request.state_dict is not None and not engine.takes_state_dict:
        raise CapabilityError(
            "a state dict cannot be sent to a server behind a URL; save it where the server can read it, and pass that "
            "path",
            capability="update_weights",
        )
    checkpoint = engine.checkpoint
    if checkpoint is None:
        field = "path" if request.state_dict is None else "state_dict"
        raise InvalidRequestError(
            f"{field}: the checkpoint of the server's model {engine.info.model!r} is not on this machine, so new "
            "weights cannot be compared with it, and weights that do not fit would end the server; open the backend on "
            "a machine that has the checkpoint",
            field=field,
        )
    with weights_folder(request, checkpoint) as folder:
        engine.reload(folder, request)

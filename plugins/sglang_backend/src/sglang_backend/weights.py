"""New weights for an open engine: compared with the model's checkpoint first, then loaded.

SGLang loads the tensors whose names it knows and silently keeps its own for the rest. A tensor of another shape ends
the server.
"""

from __future__ import annotations

from corelm.errors import CapabilityError, InvalidRequestError
from corelm.spec import WeightUpdate
from corelm.support import Deadline, weights_folder
from sglang_backend.server import SGLangServer

#: Seconds for the first answers of a server that was launched without weights. They may make it compile.
_CONFIRM_TIMEOUT = 300.0


def load(engine: SGLangServer, request: WeightUpdate) -> None:
    """Load the weights of `request` into the server. If its owner has changed or loaded them, only drop what is cached.

    Every later reply names these weights, or its row is an error.

    Raises:
        InvalidRequestError: the weights cannot be read, do not fit, or cannot be compared. Nothing has changed.
        CapabilityError: tensors for a server that this backend did not launch.
        EngineError: the server did not load them.
    """
    if request.by_owner:
        engine.forget(request)
        engine.weights.absent = ""
        return
    if request.path is None and not engine.takes_state_dict:
        raise CapabilityError(
            "tensors cannot be sent to a server behind a URL; save them where the server can read them, and pass that "
            "path",
            capability="update_weights",
        )
    checkpoint = engine.checkpoint
    if checkpoint is None:
        field = "path" if request.path is not None else "state_dict" if request.state_dict is not None else "weights"
        raise InvalidRequestError(
            f"{field}: the checkpoint of the server's model {engine.info.model!r} is not on this machine, so new "
            "weights cannot be compared with it, and weights that do not fit would end the server; open the backend on "
            "a machine that has the checkpoint",
            field=field,
        )
    with weights_folder(request, checkpoint) as folder:
        engine.reload(folder, request)
    if engine.weights.absent:
        engine.confirm_modes(Deadline(_CONFIRM_TIMEOUT))
        engine.weights.absent = ""

"""New weights for an open engine: compared with the model's checkpoint first, then loaded.

SGLang loads the tensors whose names it knows and silently keeps its own for the rest. A tensor of another shape ends
the server.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from corelm.errors import CapabilityError, InvalidRequestError
from corelm.spec import WeightUpdate, whole_tensor
from corelm_engine_kit import fitting, weights_folder
from sglang_backend.server import SGLangServer

if TYPE_CHECKING:
    from corelm_engine_kit import Expected

_log = logging.getLogger(__name__)


def load(engine: SGLangServer, request: WeightUpdate) -> None:
    """Load the weights of `request` into the server. If its owner has changed or loaded them, only drop what is cached.

    Every later reply names these weights, or its row is an error.

    Raises:
        InvalidRequestError: the weights cannot be read, do not fit, or cannot be compared. Nothing has changed.
        CapabilityError: tensors for a server that this backend did not launch, without ``weight_group``.
        EngineError: the server did not load them.
    """
    if request.adapter is not None:
        engine.load_adapter(request)
        return
    if request.by_owner:
        engine.forget(request)
        engine.weights_came()
        return
    if request.path is None and not engine.takes_state_dict and not engine.is_sent_tensors:
        raise CapabilityError(
            "to send tensors to a server behind a URL, open the backend with weight_group='HOST', the host by which "
            "the server reaches this process; or save them where the server can read them, and pass that path",
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
    _load(engine, request, checkpoint)
    engine.weights_came()


def _load(engine: SGLangServer, request: WeightUpdate, checkpoint: Expected) -> None:
    """Hand a state dict to the server in memory if it takes it; else write it, or a stream, to a folder that it loads.

    A stream is written, because a server that got half of one would have half of its weights. A server on another
    machine is sent what was written.
    """
    if engine.is_sent_tensors and request.state_dict is not None:
        given = fitting(request.state_dict, checkpoint)
        engine.broadcast(((name, whole_tensor(tensor)) for name, tensor in given.items()), request)
        return
    if request.state_dict is not None:
        given = fitting(request.state_dict, checkpoint)
        why = engine.needs_file(given.values())
        if not why:
            engine.reload_tensors(_own(given), request)
            return
        _say_why(why)
    with weights_folder(request, checkpoint) as folder:
        if engine.is_sent_tensors and request.path is None:
            engine.broadcast(_saved(folder), request)
        else:
            engine.reload(folder, request)


def _saved(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that were written to `folder`, one at a time."""
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                yield name, tensors.get_tensor(name)


def _own(given: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors, gathered if they are sharded. Those on the CPU are copied: a caller's own stay where they are."""
    for name, tensor in given.items():
        whole = whole_tensor(tensor)
        yield name, whole if whole.is_cuda else whole.clone()


@functools.cache
def _say_why(why: str) -> None:
    """Log once why weights go through files."""
    _log.info("new weights go to SGLang through files, in memory if there is room: %s", why)

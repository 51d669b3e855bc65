"""New weights for an open engine: compared with the model's checkpoint first, then loaded."""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from corelm.spec import WeightUpdate, whole_tensor
from corelm_engine_kit import expected_shapes, fitting, fitting_stream, weights_folder

if TYPE_CHECKING:
    from corelm_engine_kit import Expected

_log = logging.getLogger(__name__)


def load(engine: Any, request: WeightUpdate) -> None:
    """Load the weights of `request` into the engine. If its owner has changed or loaded them, only drop what is cached.

    vLLM loads tensors in place, one by one, and an unknown name stops it half way. So all names and shapes are compared
    with those of the checkpoint that the engine was opened on, before vLLM gets anything.

    Args:
        engine: the `InProcessEngine`, whose module imports this one.
        request: the update.

    Raises:
        InvalidRequestError: the weights cannot be read or do not fit the model. Nothing has changed.
        EngineError: the weights fit, but were not loaded; or a tensor of a stream that was handed over one by one did
            not fit. The engine has no usable weights.
    """
    if request.adapter is not None:
        engine.load_adapter(request)
    elif request.by_owner:
        engine.forget(request)
    elif request.path is not None:
        _reload(engine, request)
    else:
        _load_tensors(engine, request)


def _load_tensors(engine: Any, request: WeightUpdate) -> None:
    """Hand tensors to vLLM if it can take them as they are; else write them to a folder that it loads."""
    checkpoint, stream = engine.checkpoint, request.stream
    assert checkpoint is not None, "without one, nothing can be loaded"
    tensors: Iterable[Tensor] = (request.state_dict or {}).values()
    if stream is not None:
        # Nothing is known of a stream but its first tensor.
        first = list(itertools.islice(stream, 1))
        tensors, stream = [tensor for _, tensor in first], itertools.chain(first, stream)
        request = replace(request, stream=stream)
    if why := engine.needs_file(tensors):
        _say_why(why)
        _reload(engine, request)
    elif stream is not None and engine.streams_tensors:
        checked = fitting_stream(stream, checkpoint)
        # What is wrong with the first one is found before vLLM begins.
        first = list(itertools.islice(checked, 1))
        engine.reload_tensors(itertools.chain(first, checked), _largest(checkpoint, first), request)
    else:
        # vLLM keeps tensors until a layer is complete, and the memory of one may be used for the next.
        given = request.state_dict or {name: tensor.to("cpu", copy=True) for name, tensor in stream or ()}
        given = fitting(given, checkpoint, "state_dict" if stream is None else "weights")
        pairs = ((name, whole_tensor(tensor)) for name, tensor in given.items())
        engine.reload_tensors(pairs, max((tensor.nbytes for tensor in given.values()), default=0), request)


def _reload(engine: Any, request: WeightUpdate) -> None:
    with weights_folder(request, engine.checkpoint) as folder:
        engine.reload(folder, request)


def _largest(checkpoint: Expected, first: list[tuple[str, Tensor]]) -> int:
    """Return how many bytes the largest tensor of a checkpoint has in the dtype of the first one, or in float32."""
    shapes = expected_shapes(checkpoint)
    size = max((tensor.element_size() for _, tensor in first), default=4)
    return max(4, size) * max(map(math.prod, shapes.values()), default=0)


@functools.cache
def _say_why(why: str) -> None:
    """Log once why weights do not stay in memory."""
    _log.info("new weights go to vLLM through files, in memory if there is room: %s", why)

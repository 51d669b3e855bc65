"""`StreamCopy`: new weights that come one by one are copied into the model as they come, so none is held twice."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from corelm.spec import saved_shapes
from corelm_engine_kit import refuse_weights, shape_problems
from transformers_backend.engine import CausalLM
from transformers_backend.weight_names import namings, storage


def same_names(engine: CausalLM) -> bool:
    """Return whether the model's checkpoint has the names of the module. If not, tensors are converted together."""
    return saved_shapes(engine.base).keys() <= namings(engine)[-1].keys()


class StreamCopy:
    """Copies tensors into a model, each as it comes.

    Attributes:
        copied: the names of the tensors that were copied.
    """

    def __init__(self, engine: CausalLM) -> None:
        self.copied: set[str] = set()
        self._namings = namings(engine)
        self._own: dict[str, Tensor] = {}
        self._by_storage: dict[tuple[int, torch.Size], str] = {}

    def run(self, stream: Iterator[tuple[str, Tensor]]) -> None:
        """Copy all tensors of `stream`.

        Raises:
            InvalidRequestError: a tensor is unknown, missing or does not fit, or the stream failed.
        """
        for name, tensor in stream:
            self._copy(name, tensor)
        own = self._own or self._namings[0]
        # Of weights that are tied, one name is enough.
        missing = [name for name in own if name not in self.copied and storage(own[name]) not in self._by_storage]
        refuse_weights([f"missing {name!r}" for name in sorted(missing)], "weights")

    def _copy(self, name: str, tensor: Tensor) -> None:
        # The first name tells which names they are: those of a PEFT model, or those of the model inside.
        self._own = self._own or next((names for names in self._namings if name in names), self._namings[0])
        known = {name: tuple(self._own[name].shape)} if name in self._own else {}
        refuse_weights(shape_problems({name: tuple(tensor.shape)}, known), "weights")
        own = self._own[name]
        twin = self._by_storage.setdefault(storage(own), name)
        if twin != name and not torch.equal(own, tensor.to(own)):
            refuse_weights([f"{twin!r} and {name!r} are the same tensor in this model, but differ here"], "weights")
        with torch.no_grad():
            own.copy_(tensor)
        self.copied.add(name)

"""`KeptWeights`: what brings an engine that is started later, or missed an update, to the weights in force."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from corelm.errors import EngineError
from corelm.spec import WeightUpdate, whole_tensor


class KeptWeights:
    """The updates that lead from the weights that every engine is opened with to those of an epoch.

    A state dict may hold only some of the parameters. So the state dicts since the last path are kept as one, with the
    latest tensor of each name. A path holds all base weights: the updates before it are forgotten, except those of
    adapters. Of each adapter, the last is kept.
    """

    def __init__(self) -> None:
        self._all: dict[int, tuple[WeightUpdate, ...]] = {0: ()}
        # The last step to an epoch: the epoch before it, and the update.
        self._steps: dict[int, tuple[int, WeightUpdate]] = {}
        self._were_in_force = {0}

    def begin(self, epoch: int, before: int, update: WeightUpdate) -> None:
        """Keep an update from the epoch in force to another one, in tensors that only we change; see `own_copy`."""
        self._steps[epoch] = before, update
        self._all[epoch] = _joined(self._all[before], update)

    def end(self, epoch: int) -> None:
        """Note which epoch is in force now, and forget the updates that lead to others."""
        self._all = {epoch: self._all[epoch]}
        self._steps = {each: step for each, step in self._steps.items() if each == epoch}
        self._were_in_force.add(epoch)

    def to(self, epoch: int, held: int | None) -> Sequence[WeightUpdate]:
        """Return the updates that an engine has to load, in order, to get from the weights held to those of an epoch.

        Raises:
            EngineError: loading does not help; it has to be opened again.
        """
        needed = self._all.get(epoch)
        if not needed or held not in self._were_in_force:
            raise EngineError("only a new start brings back the weights that it was opened with")
        before, update = self._steps[epoch]
        return (update,) if held == before else needed


def own_copy(update: WeightUpdate) -> WeightUpdate:
    """Return new weights that the caller cannot change: engines that are started later load them, too.

    A state dict is copied to the CPU, because a trainer goes on changing the tensors that it has handed over.
    """
    if update.state_dict is None:
        return update
    copied = {
        name: whole_tensor(value).to("cpu", copy=True) if isinstance(value, Tensor) else value
        for name, value in update.state_dict.items()
    }
    return replace(update, state_dict=copied)


def _joined(earlier: tuple[WeightUpdate, ...], update: WeightUpdate) -> tuple[WeightUpdate, ...]:
    if update.unloads:
        # An engine that is started later has to have an adapter before it can unload it.
        return (*earlier, update)
    if update.adapter is not None:
        return (*(each for each in earlier if each.adapter != update.adapter), update)
    base = tuple(each for each in earlier if each.adapter is None)
    adapters = tuple(each for each in earlier if each.adapter is not None)
    if update.state_dict is None:
        return (update, *adapters)
    last = base[-1].state_dict if base else None
    if last is None:
        return (*base, update, *adapters)
    return (*base[:-1], replace(update, state_dict={**last, **update.state_dict}), *adapters)

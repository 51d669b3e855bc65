"""`Weights`: the label of the weights in force, and how a change that core did not make is noticed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from corelm.errors import brief

_log = logging.getLogger(__name__)

#: Said of a call during which the weights changed.
CHANGED = (
    "the weights of the model were changed during the call, so its numbers are of neither the old weights nor the new "
    "ones; change the weights between two calls, or with update_weights, which waits for the calls under way"
)
#: How many states of the weights keep their label. An owner may switch to and fro, for example an adapter on and off.
_REMEMBERED = 16


class Weights:
    """Gives every state of the weights a label. Labels count up from "0".

    Args:
        state: returns the state of the weights, see the hook `weights_state`; None if the engine does not tell it.

    Attributes:
        state: see above.
        label: the label of the weights as they were when they were last looked at.
        puts: how often `put` was called.
    """

    def __init__(self, state: Callable[[], Hashable | None]) -> None:
        self.label, self.puts = "0", 0
        self.state = state
        self._used = {self.label}
        self._labels: dict[Hashable, str] = {}
        # A lock in C: its `with` statement cannot be interrupted half-way.
        self._mutex = threading.RLock()

    def look(self) -> Hashable | None:
        """Return the state of the weights, and put its label in force: a new one for a state that was not seen before.

        The state at the first look gets the label that is in force.
        """
        with self._mutex:
            # Read inside, or a thread that was held up here would put the label of an older state in force again.
            state = self.state()
            if state is None:
                return None
            known = self._labels.pop(state, None)
            label = known or (self.next_label() if self._labels else self.label)
            if label != self.label:
                told = "the weights were changed by their owner: %s are in force, after %s"
                _log.info(told, brief(label), brief(self.label))
            self._used.add(label)
            self._labels[state] = self.label = label
            while len(self._labels) > _REMEMBERED:
                del self._labels[next(iter(self._labels))]
        return state

    def watch(self) -> Watch:
        """Put the label of the weights as they are now in force, and return a watch over them."""
        return Watch(self, self.look(), self.label, self.puts)

    def put(self, label: str) -> None:
        """Put a label in force for the weights as they are now. Earlier states lose theirs."""
        with self._mutex:
            state = self.state()
            self._used.add(label)
            self._labels = {} if state is None else {state: label}
            self.label, self.puts = label, self.puts + 1

    def saved(self) -> tuple[str, dict[Hashable, str]]:
        """Return which labels the weights have, for `restore`."""
        with self._mutex:
            return self.label, dict(self._labels)

    def restore(self, saved: tuple[str, dict[Hashable, str]]) -> None:
        """Give the weights the labels that they had: the one put in force since then was not used."""
        with self._mutex:
            self._used.discard(self.label)
            self.label, self._labels = saved
            self.puts += 1

    def release(self, label: str) -> None:
        """Allow a label to be used again: no weights have it, and none have had it."""
        self._used.discard(label)

    def next_label(self, given: str | None = None) -> str:
        """Return a label for new weights: it counts up from the last one, past every label that was used before.

        Args:
            given: a label that is about to be used, and is passed over as well.
        """
        label = self.label
        while label in self._used or label == given:
            # A label that the caller has chosen need not be a number, or may be longer than Python reads.
            label = str(int(label) + 1) if label.isdecimal() and len(label) < 19 else f"{label}+1"
        return label


@dataclass(frozen=True, slots=True)
class Watch:
    """Tells whether the weights are still those of the beginning of a call.

    `Weights.put` is no change: a wrapper of the hook may update the weights during the call.
    """

    weights: Weights
    state_then: Hashable | None
    label_then: str
    puts_then: int

    @property
    def changed(self) -> bool:
        """Whether the weights have another state."""
        return self._watching and self.weights.state() != self.state_then

    @property
    def relabelled(self) -> bool:
        """Whether the weights have another label, because another thread has noticed a change."""
        return self._watching and self.weights.label != self.label_then

    @property
    def _watching(self) -> bool:
        return self.state_then is not None and self.weights.puts == self.puts_then

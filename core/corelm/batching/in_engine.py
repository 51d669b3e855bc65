"""`InEngine`: the requests in the engine, and what their rows and tokens add up to."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator

from corelm.batching.queued_call import QueuedCall
from corelm.batching.scheduling import TicketQueue

_log = logging.getLogger(__name__)


class InEngine(Collection[QueuedCall]):
    """The requests in the engine, which come from a queue. The caller of every method holds the queue's lock.

    Args:
        queue: decides which requests go next.
        workers: the largest number of threads that call the engine.
        name: the name of the backend.
    """

    def __init__(self, queue: TicketQueue[QueuedCall], workers: int, name: str) -> None:
        self._queue, self._workers, self._name = queue, workers, name
        self._calls: set[QueuedCall] = set()
        # Counted here, because adding them up for each of thousands of requests takes long.
        self._rows = self._tokens = 0
        self._told = False

    def __contains__(self, call: object) -> bool:
        return call in self._calls

    def __iter__(self) -> Iterator[QueuedCall]:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(self._calls)

    def take(self, now: float) -> list[QueuedCall]:
        """Move the requests to send now from the queue to the engine, and return them; [] for none.

        Args:
            now: the time.
        """
        if len(self._calls) == 1 and next(iter(self._calls)).barrier:
            return []
        batch = self._queue.take(now, self._rows, self._tokens)
        self._calls.update(batch)
        self._count(batch, 1)
        self.tell_if_others_wait()
        return batch

    def remove(self, batch: list[QueuedCall]) -> None:
        """Remove requests that the engine has finished."""
        self._calls.difference_update(batch)
        self._count(batch, -1)

    def tell_if_others_wait(self) -> None:
        """Log, once, that requests wait in the queue although the engine itself could take them."""
        no_thread = 1 < self._workers <= len(self._calls) and len(self._queue) > 0
        if not self._told and (no_thread or self._queue.short_of_room(self._rows, self._tokens)):
            self._told = True
            _log.info(
                "%s: requests wait in the batcher while %d rows (%d tokens) are in the engine; to send more at a time, "
                "give batching=Limits(max_batch_size=…) a larger number, and max_batch_tokens if it is set",
                self._name,
                self._rows,
                self._tokens,
            )

    def _count(self, batch: Iterable[QueuedCall], sign: int) -> None:
        self._rows += sign * sum(call.rows for call in batch)
        self._tokens += sign * sum(call.tokens for call in batch)

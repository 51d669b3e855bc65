"""Which requests go next: the rules of batching, without threads, clock or engine. Every method is passed the time.

The owner of a queue calls `take` for the next batch whenever the engine may have room, and otherwise sleeps
for `wait` seconds.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Literal, TypeVar

from corelm import validate
from corelm.errors import QueueFullError

#: Callers that were answered together often come back together with their next requests. So the engine does
#: not start with the first of them alone but waits for the others: after the call, and after each new
#: request, for GATHERING times the duration of the call, at most LONGEST_GATHERING seconds, and at most
#: batching_timeout in all. It expects as many requests as the largest of the last REMEMBERED calls had.
GATHERING, LONGEST_GATHERING, REMEMBERED = 0.1, 0.1, 4
#: A batching_timeout that follows the engine: TIMEOUT times the duration of its last call, within these
#: limits. Whoever comes later waits for a whole call, and while callers keep coming the wait fills the batch.
TIMEOUT, SHORTEST_TIMEOUT, LONGEST_TIMEOUT = 0.25, 0.1, 1.0
#: Rows in one call to an engine that takes one call at a time, unless the limits say otherwise.
ROWS_OF_A_CALL = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How requests are combined. A row is an answer, or a sequence to score; a request may have many rows.

    Attributes:
        min_batch_size: rows that the batcher waits for before it calls the engine.
        max_batch_size: the largest number of rows in the engine at once. A request with more rows goes alone.
            None is 64 for an engine that takes one call at a time (or `min_batch_size` if that is more), and
            sets no limit for an engine with `concurrent_calls`, which batches by itself.
        max_batch_tokens: most tokens in the engine at once, those given and those to be sampled; None sets no
            limit. A request with more tokens goes alone.
        batching_timeout: seconds after which the oldest request goes even if fewer rows than `min_batch_size`
            wait. None follows the engine: a quarter of the time of its last call, at least 0.1 s and at most 1 s.
        max_queue: the largest number of requests that may wait.
        on_full: what happens to a request beyond `max_queue`: "block" keeps its caller waiting, "raise" refuses it.

    Raises:
        InvalidRequestError: an illegal value; `field` names it.
    """

    min_batch_size: int = 1
    max_batch_size: int | None = None
    max_batch_tokens: int | None = None
    batching_timeout: float | None = None
    max_queue: int = 1024
    on_full: Literal["block", "raise"] = "block"

    def __post_init__(self) -> None:
        for name in ("min_batch_size", "max_batch_size", "max_batch_tokens", "max_queue"):
            value = getattr(self, name)
            if value is not None or name not in ("max_batch_size", "max_batch_tokens"):
                object.__setattr__(self, name, validate.count(name, value, 1))
        if self.max_batch_size is not None and self.min_batch_size > self.max_batch_size:
            more = f"{self.min_batch_size} is more than max_batch_size={self.max_batch_size}"
            raise validate.invalid("min_batch_size", more)
        if self.batching_timeout is not None:
            object.__setattr__(self, "batching_timeout", validate.seconds("batching_timeout", self.batching_timeout))
        validate.one_of("on_full", self.on_full, ("block", "raise"))

    def fits(self, rows: int, tokens: int) -> bool:
        """Return whether so many rows and tokens may be in the engine at once."""
        most_rows, most_tokens = self.max_batch_size, self.max_batch_tokens
        return (most_rows is None or rows <= most_rows) and (most_tokens is None or tokens <= most_tokens)

    def of_engine(self, concurrent_calls: bool) -> Limits:
        """Return these limits for an engine with or without `concurrent_calls`, which is what None depends on."""
        if concurrent_calls or self.max_batch_size is not None:
            return self
        return replace(self, max_batch_size=max(ROWS_OF_A_CALL, self.min_batch_size))


@dataclass(eq=False, slots=True, kw_only=True)
class Ticket:
    """A place in the queue for so many rows and tokens, those given and those to be sampled.

    Attributes:
        key: requests with equal keys may share a call; a request with None goes alone.
        barrier: earlier requests are sent before it, and later ones after it.
        arrived: when it was queued; set by the queue.
        number: its position in arrival order; set by the queue.
        group: equal for tickets that may share a call; set by the queue.
    """

    rows: int
    tokens: int
    key: Hashable | None = None
    barrier: bool = False
    arrived: float = field(default=0.0, init=False)
    number: int = field(default=-1, init=False)
    group: Hashable = field(default=None, init=False)


T = TypeVar("T", bound=Ticket)


class TicketQueue(Generic[T]):
    """Tickets in the order of their arrival. Tickets beyond `max_queue` stand outside until there is room.

    For an engine that takes one call at a time, requests with equal keys share a call. A group of equal keys
    is ready when it has enough rows, has no room for more, or its oldest request has waited long enough. Of
    the groups that are ready, the one with the oldest request goes. Requests of a group keep their order.

    An engine with `concurrent_calls` batches by itself: each request goes alone, in order, as far as the limits allow.

    `limits` are those that hold for the engine; `arrivals` counts the tickets that were ever added.
    """

    def __init__(self, limits: Limits, concurrent_calls: bool) -> None:
        self.limits = limits.of_engine(concurrent_calls)
        self.arrivals = 0
        self._shares_calls = not concurrent_calls
        self._tickets: dict[int, T] = {}
        self._numbers = itertools.count()
        self._flushed = 0
        # The groups of the last calls, and how many requests each had, in the call or waiting for the next one.
        self._last: deque[tuple[Hashable, int]] = deque(maxlen=REMEMBERED)
        # The awaited group; until when it is awaited if no request comes; until when at the most.
        self._awaited: Hashable = None
        self._gathering, self._until, self._at_last = 0.0, 0.0, 0.0
        # The duration of the last call.
        self._took = 0.0

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[T]:
        # Of a copy: another thread may look while the owner goes on.
        return iter(list(self._tickets.values()))

    @property
    def inside(self) -> list[T]:
        return list(itertools.islice(self._tickets.values(), self.limits.max_queue))

    @property
    def outside(self) -> list[T]:
        return list(self)[self.limits.max_queue :]

    @property
    def full(self) -> bool:
        return len(self) >= self.limits.max_queue

    def require_room(self) -> None:
        """Raise a `QueueFullError` if a ticket would stand outside, with ``on_full="raise"``."""
        if self.full and self.limits.on_full == "raise":
            full = f"the queue is full: max_queue={self.limits.max_queue} requests are waiting"
            advice = "let more wait with a larger max_queue, or let callers wait outside with on_full='block'"
            raise QueueFullError(f"{full}. Call again later, {advice}", usable=True)

    def add(self, ticket: T, now: float) -> None:
        full = self.full
        self.arrivals += 1
        ticket.number, ticket.arrived = next(self._numbers), now
        # A ticket without a key goes alone, so its group is its own number.
        ticket.group = group = ticket.number if ticket.key is None else (ticket.key,)
        if group == self._awaited and now < self._at_last:
            self._until = min(now + self._gathering, self._at_last)
        elif self._shares_calls and now >= self._until and not full and all(each.group != group for each in self):
            # The first request of a group that has been absent for longer.
            self._await(group, now)
        self._tickets[ticket.number] = ticket

    def remove(self, ticket: T) -> bool:
        """Remove a ticket. Return whether it was in the queue."""
        return self._tickets.pop(ticket.number, None) is not None

    def clear(self) -> list[T]:
        """Remove all tickets and return them."""
        tickets = list(self)
        self._tickets.clear()
        return tickets

    def flush(self) -> int:
        """Send every ticket that is in the queue now as soon as the engine can take it.

        The number that is returned is above those of all tickets so far, and below those of later ones.
        """
        self._flushed = next(self._numbers)
        return self._flushed

    def take(self, now: float, rows: int = 0, tokens: int = 0) -> list[T]:
        """Remove the tickets to send `now` and return them. So many `rows` and `tokens` are in the engine already."""
        batch = self._next(now, rows, tokens)
        for ticket in batch:
            del self._tickets[ticket.number]
        return batch

    def wait(self, now: float) -> float | None:
        """Return the seconds after which `take` may return something else even if nothing happens; None for never."""
        batches = self._batches() if self._shares_calls else ()
        ends = [self._until if self._expecting(batch, now) else self._due(batch[0]) for batch, _ in batches]
        return max(0.0, min(ends) - now) if ends else None

    def came_back(self, batch: Sequence[T], took: float, now: float) -> None:
        """Note that the engine has answered these tickets, in `took` seconds. Their callers do not know yet."""
        if self._shares_calls:
            group = batch[0].group
            self._last.append((group, len(self._batch(group, self.inside)[0]) + len(batch)))
            self._took, self._gathering = took, min(GATHERING * took, LONGEST_GATHERING)
            self._await(group, now)

    def _next(self, now: float, rows: int, tokens: int) -> list[T]:
        if not self._shares_calls:
            for ticket in self._tickets.values():
                alone = ticket.barrier or not self.limits.fits(rows + ticket.rows, tokens + ticket.tokens)
                return [] if rows and alone else [ticket]
        for batch, complete in () if rows else self._batches():
            enough = sum(ticket.rows for ticket in batch) >= self.limits.min_batch_size or now >= self._due(batch[0])
            if complete or batch[0].number < self._flushed or (enough and not self._expecting(batch, now)):
                return batch
        return []

    def _batches(self) -> Iterator[tuple[list[T], bool]]:
        """Yield for each group, the oldest first, the tickets that can go together, and whether no more could."""
        if not (inside := self.inside):
            return
        # The oldest goes most often, without a look at the others.
        yield self._batch(first := inside[0].group, inside)
        groups: dict[Hashable, list[T]] = {}
        barrier: list[T] = []
        for ticket in inside:
            if ticket.group != first:
                groups.setdefault(ticket.group, []).append(ticket)
            if ticket.barrier:
                barrier = [ticket]
                break
        for group, tickets in groups.items():
            yield self._batch(group, [*tickets, *barrier])

    def _batch(self, group: Hashable, tickets: Iterable[T]) -> tuple[list[T], bool]:
        batch: list[T] = []
        rows, tokens = (most or math.inf for most in (self.limits.max_batch_size, self.limits.max_batch_tokens))
        for ticket in tickets:
            if batch and ticket.barrier:
                return batch, True
            if ticket.group != group:
                continue
            # Counted down: the room that the batch leaves.
            rows, tokens = rows - ticket.rows, tokens - ticket.tokens
            if batch and min(rows, tokens) < 0:
                return batch, True
            batch.append(ticket)
            if ticket.key is None or min(rows, tokens) < 1:
                return batch, True
        return batch, False

    def _due(self, head: T) -> float:
        return head.arrived + self._timeout

    @property
    def _timeout(self) -> float:
        given = self.limits.batching_timeout
        return min(max(SHORTEST_TIMEOUT, TIMEOUT * self._took), LONGEST_TIMEOUT) if given is None else given

    def _expecting(self, group: Sequence[T], now: float) -> bool:
        awaited = self._awaited
        expected = max((count for last, count in self._last if last == awaited), default=0)
        return now < self._until and group[0].group == awaited and len(group) < expected

    def _await(self, group: Hashable, now: float) -> None:
        self._awaited, self._at_last = group, now + self._timeout
        self._until = min(now + self._gathering, self._at_last)

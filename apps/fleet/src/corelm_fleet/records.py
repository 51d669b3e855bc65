"""What the fleet's state machine knows and decides: states and their transitions, limits, decisions.

A *replica* is one engine of the fleet. Each start of it is a *run*, and reports of an earlier run are ignored. A
*row* is one answer to sample or one sequence to score. A *dispatch* is the rows that one call took to a replica. The
*epoch* of weights counts the updates: 0 are the weights that every replica is started with. An *isolated retry* sends a
row alone that was in flight when a replica was lost.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from dataclasses import dataclass, fields
from typing import NamedTuple

from corelm import validate
from corelm.errors import EngineError


class State(enum.Enum):
    """The state of a replica. Only a HEALTHY one gets rows."""

    JOINING = "joining"  # it is being started for the first time
    LOADING = "loading"  # it runs, but has not loaded the current weights, or its canary has not agreed yet
    HEALTHY = "healthy"  # it has the current weights, and its canary agreed
    SUSPECT = "suspect"  # it runs, but does not answer; its rows may be taken back
    DEAD = "dead"  # it has ended, and waits until it may be started again
    RESTARTING = "restarting"  # it is being started again
    DRAINING = "draining"  # it finishes its rows and then leaves
    GONE = "gone"  # it has left, or was started too often


#: States in which a replica is being started.
STARTING = (State.JOINING, State.RESTARTING)

_STARTED = {State.LOADING: "it has started", State.DEAD: "it did not start", State.GONE: "it was told to leave"}
#: What each state may become, and why.
TRANSITIONS: dict[State, dict[State, str]] = {
    State.JOINING: _STARTED,
    State.LOADING: {
        State.HEALTHY: "its canary agreed with the current weights",
        State.DEAD: "it ended, was silent for long, or refused or failed to load; or its canary disagreed",
        State.GONE: "it was told to leave",
    },
    State.HEALTHY: {
        State.LOADING: "an update began and its rows are done, or it was woken",
        State.SUSPECT: "it missed health checks",
        State.DRAINING: "it was told to leave",
        State.DEAD: "it ended, or failed too many calls in a row",
    },
    State.SUSPECT: {
        State.HEALTHY: "it passed a health check",
        State.LOADING: "it passed a health check, and an update has begun meanwhile",
        State.DEAD: "it ended, or was silent for too long",
        State.GONE: "it was told to leave",
    },
    State.DRAINING: {State.GONE: "its rows are done, or it ended or was silent"},
    State.DEAD: {State.RESTARTING: "its backoff is over", State.GONE: "it was told to leave, or restarted too often"},
    State.RESTARTING: _STARTED,
    State.GONE: {},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLimits:
    """How patient a fleet is. All times are in seconds.

    Attributes:
        misses: health checks that a replica misses in a row before it is a suspect.
        take_back: how long a suspect keeps its rows before they are sent elsewhere.
        give_up: how long a replica is a suspect, or misses health checks while it loads, before it counts as dead.
        deaths: deaths at which a row is in flight before it fails.
        trial: how long a replica must be heard from after it took a row before that row counts as harmless to it.
            `math.inf` waits for the answer.
        errors: calls that a replica fails in a row before it is restarted.
        start: how long a start may take.
        load: how long loading weights may take.
        canary: how long a canary may take.
        backoff: the wait before a restart. It doubles with each restart after which no row was answered.
        longest_backoff: the longest such wait.
        restarts: how often in a row a replica is restarted without answering a row, or being healthy for longer than
            `longest_backoff`; then it is gone.
        outage: how long rows wait while no replica is healthy; then they fail.

    Raises:
        InvalidRequestError: an illegal value; `field` names it.
    """

    misses: int = 2
    take_back: float = 10.0
    give_up: float = 60.0
    deaths: int = 2
    trial: float = 5.0
    errors: int = 3
    start: float = 900.0
    load: float = 900.0
    canary: float = 120.0
    backoff: float = 1.0
    longest_backoff: float = 60.0
    restarts: int = 5
    outage: float = 300.0

    def __post_init__(self) -> None:
        for each in fields(self):
            given = getattr(self, each.name)
            if isinstance(each.default, int):
                checked: float = validate.count(each.name, given, 0 if each.name == "restarts" else 1)
            elif each.name == "trial" and given == math.inf:
                checked = math.inf
            else:
                checked = validate.number(each.name, given, 0.0)
            object.__setattr__(self, each.name, checked)


class ReplicaRun(NamedTuple):
    """One start of a replica: 1 is the first."""

    replica: str
    number: int

    def __str__(self) -> str:
        return f"{self.replica} (start {self.number})"


@dataclass(frozen=True, slots=True)
class Start:
    """Start the replica, then call `opened`, or `died` if it does not start. It begins with the weights of epoch 0."""

    run: ReplicaRun


@dataclass(frozen=True, slots=True)
class Stop:
    """End the replica's processes and threads, and discard what it still returns."""

    run: ReplicaRun


@dataclass(frozen=True, slots=True)
class Load:
    """Load the weights of the epoch, then call `loaded`, `load_refused` or `died`."""

    run: ReplicaRun
    epoch: int


@dataclass(frozen=True, slots=True)
class AskCanary:
    """Run the canary of the epoch, then call `canary`."""

    run: ReplicaRun
    epoch: int


@dataclass(frozen=True, slots=True)
class Deliver:
    """Give these rows what their dispatch returned; they are done. Discard the rest of what it returned."""

    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Abandon:
    """Abort these rows on the replica if it still listens. They were sent elsewhere, failed, or were cancelled."""

    dispatch: int
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fail:
    """Fail a row; it is done. ``error.problems`` has the row and the reason.

    ``error.usable`` is True if only the row is at fault, and False if no replica is left.
    """

    row: int
    error: EngineError


@dataclass(frozen=True, slots=True)
class Updated:
    """The update has succeeded, and the gate is open.

    Attributes:
        missed: the replicas that do not have the weights yet, each with the reason. They get no rows until they have.
    """

    missed: dict[str, str]


@dataclass(frozen=True, slots=True)
class UpdateFailed:
    """No replica has the new weights. The old ones stay in force, and replicas load them again. The gate is open.

    Attributes:
        refused: whether a replica refused the weights without changing its own, so that the request is at fault.
        reasons: why each replica does not have them.
    """

    refused: bool
    reasons: dict[str, str]


Decision = Start | Stop | Load | AskCanary | Deliver | Abandon | Fail | Updated | UpdateFailed


#: Seconds over which throughput is averaged.
_WINDOW = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """How a replica is doing.

    Attributes:
        name: its name.
        state: its state, such as "healthy"; see `corelm_fleet.records.State`.
        epoch: the weights that it has: 0 are those that it is started with; None if that is not known.
        rows: rows that it works on.
        tokens_per_second: tokens that it has sampled in answers of the last minute, per second.
        starts: how often it was started. 1 is the first.
        why: why it last stopped serving; "" if it never has.
    """

    name: str
    state: str
    epoch: int | None
    rows: int
    tokens_per_second: float
    starts: int
    why: str


class Throughput:
    """Counts the tokens of the last minute.

    Args:
        now: the time in seconds.
    """

    def __init__(self, now: float) -> None:
        self._since = now
        self._counts: deque[tuple[float, int]] = deque()

    def add(self, tokens: int, now: float) -> None:
        """Count tokens."""
        self._counts.append((now, tokens))
        self.per_second(now)

    def per_second(self, now: float) -> float:
        """Return the tokens per second."""
        while self._counts and self._counts[0][0] < now - _WINDOW:
            self._counts.popleft()
        span = min(_WINDOW, now - self._since)
        return sum(count for _, count in self._counts) / max(span, 1.0)

"""A fleet of toy engines in this process that die, hang or refuse when a test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from corelm import Backend, hookimpl
from corelm.errors import EngineError
from corelm.spec import (
    AbortRequest,
    CloseRequest,
    GenerateRequest,
    GenerateResult,
    HealthRequest,
    ScoreRequest,
    ScoreResult,
    WeightUpdate,
)
from corelm.spec.records import SleepRequest, WakeRequest
from corelm_fleet.fleet import FleetEngine
from corelm_fleet.records import FleetLimits
from corelm_fleet.replica import Member
from corelm_fleet.routing import Policy
from corelm_testing.toy import Bigram, ToyBackend
from helpers.capable_plugins import Sleeper
from helpers.insides import look_around
from helpers.processes import PATIENCE, wait_until

#: The weights that every engine is started with, and others.
TABLE, OTHER = 2 * torch.randn(2, 260, 260, generator=torch.Generator().manual_seed(0))
#: Quick to notice and to restart.
LIMITS = FleetLimits(misses=1, take_back=0.0, give_up=0.2, trial=0.0, backoff=0.02, longest_backoff=0.05, restarts=3)

#: The capabilities of an engine that cannot score.
CANNOT_SCORE: dict[str, Any] = {
    **dict.fromkeys(("score", "score_temperature", "logits", "argmax", "gradients", "score_support"), False),
    "score_top_k": 0,
    "score_top_ids": False,
}


class MortalToy(Sleeper):
    """A toy engine that calls ``before(hook, request)`` first; what that raises, the hook raises.

    `generate` returns what ``after(engine, result)`` makes of its result.

    Attributes:
        name: the name of its member.
        alive: False after its death: every call fails.
        asked: the requests that it was given, with the name of the hook.
        aborted: set when a request is aborted.
        closed: how often it was closed.
    """

    name: str
    before: Callable[[str, Any], object]
    after: Callable[[MortalToy, GenerateResult], GenerateResult]

    @classmethod
    def make(cls, name: str, table: torch.Tensor, before: Callable[..., object], **can: Any) -> MortalToy:
        engine = cls.open(Bigram(table.clone()))
        assert isinstance(engine, cls)
        engine.name = name
        engine.alive, engine.asked, engine.closed = True, [], 0
        engine.aborted = threading.Event()
        engine.after = lambda engine, result: result
        engine.before = lambda hook, request: before(engine, hook, request)
        engine.capabilities = replace(engine.capabilities, **{"concurrent_calls": True, "abort": True, **can})
        return engine

    def die(self, why: str = "it was killed") -> None:
        self.alive = False
        raise EngineError(why, usable=False)

    def _enter(self, hook: str, request: Any) -> None:
        self.asked.append((hook, request))
        self.before(hook, request)
        if not self.alive:
            raise EngineError("it is dead", usable=False)

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        self._enter("generate", request)
        return self.after(self, ToyBackend.generate(self, request))

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        self._enter("score_logprobs", request)
        result: ScoreResult = ToyBackend.score_logprobs(self, request)
        return result

    @hookimpl
    def update_weights(self, request: WeightUpdate) -> bool:
        self._enter("update_weights", request)
        return bool(ToyBackend.update_weights(self, request))

    @hookimpl
    def sleep(self, request: SleepRequest) -> bool:
        self._enter("sleep", request)
        return bool(Sleeper.sleep(self, request))

    @hookimpl
    def wake(self, request: WakeRequest) -> bool:
        self._enter("wake", request)
        return bool(Sleeper.wake(self, request))

    @hookimpl
    def health(self, request: HealthRequest) -> bool:
        return self.alive

    @hookimpl
    def abort(self, request: AbortRequest) -> bool:
        self.asked.append(("abort", request))
        self.aborted.set()
        return True

    @hookimpl
    def close(self, request: CloseRequest) -> bool:
        self.closed += 1
        return True


class Toys:
    """A fleet of `MortalToy`.

    Args:
        names: the members.
        before: called before every hook of every engine, with the engine, the name of the hook and the request.
        tables: the weights of members that are not started with `TABLE`.
        limits: how patient the fleet is.
        policy: chooses the engine for a prompt.
        can: capabilities of all engines.

    Attributes:
        made: every engine that was opened, in order. Members are opened at the same time: the first is any of them.
        fleet: the fleet.
        backend: the backend on top.
    """

    def __init__(
        self,
        *names: str,
        before: Callable[[MortalToy, str, Any], object] = lambda engine, hook, request: None,
        tables: dict[str, torch.Tensor] | None = None,
        limits: FleetLimits = LIMITS,
        policy: Policy | None = None,
        **can: Any,
    ) -> None:
        self.made: list[MortalToy] = []
        self.before = before
        self._tables, self._can = tables or {}, can
        self.fleet = FleetEngine([self.member(name) for name in names], limits=limits, policy=policy)
        self.backend = Backend.from_plugin(self.fleet, "toys")

    def member(self, name: str) -> Member:
        """Return a member of the fleet, or one that may join it."""

        def open_it() -> MortalToy:
            table = self._tables.get(name, TABLE)
            engine = MortalToy.make(name, table, lambda *given: self.before(*given), **self._can)
            self.made.append(engine)
            return engine

        return Member(name, open_it)

    def states(self) -> dict[str, str]:
        return {each.name: each.state for each in self.fleet.status()}

    def await_state(self, name: str, state: str) -> None:
        """Wait until a replica is in this state, looking at the replicas more often than the fleet does by itself."""

        def reached() -> bool:
            look_around(self.backend)
            return self.states()[name] == state

        assert wait_until(reached), self.fleet.status()

    def settle(self, seconds: float = PATIENCE) -> None:
        """Wait until every replica serves, looking at the replicas more often than the fleet does by itself."""

        def settled() -> bool:
            look_around(self.backend)
            return set(self.states().values()) == {"healthy"}

        assert wait_until(settled, seconds), self.fleet.status()

    def __enter__(self) -> Toys:
        return self

    def __exit__(self, *exc: object) -> None:
        self.backend.close()


def one_engine(table: torch.Tensor = TABLE) -> Backend:
    """Return a single engine with these weights, to compare with."""
    return Backend.from_plugin(ToyBackend.open(Bigram(table.clone())), "toy")


def user_rows(request: Any) -> bool:
    """Return whether a request is a test's own and not the canary's, whose prompts are longer."""
    rows = request.prompts if isinstance(request, GenerateRequest) else request.sequences
    return bool(len(rows)) and int(rows.lengths.max()) <= 2

"""Each mutant breaks one rule of the fleet, and an example has to fail."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType

import pytest

from corelm.errors import CoreLMError
from corelm_fleet.records import AskCanary, Deliver, State
from corelm_fleet.state import FleetState
from helpers.fleet_world import World


def loaded(name: str) -> ModuleType:
    """Return another test file as a module."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class LateAnswersCount(FleetState):
    def answered(self, flight, rows, now):
        late = [row for row in rows if flight not in self.rows.flights and row in self.rows.all]
        for row in late:
            self.rows.finish(row)
        return [*([Deliver(tuple(late), self.epoch)] if late else []), *super().answered(flight, rows, now)]


class OpensTheGateEarly(FleetState):
    def _end_update(self, now):
        if any(each.weights == self.updating for each in self.replicas.values()):
            self._pending.clear()
        super()._end_update(now)


class WaitsForNoRowBeforeAnUpdate(FleetState):
    def _end_update(self, now):
        flights, self.rows.flights = self.rows.flights, {}
        super()._end_update(now)
        self.rows.flights = flights


class KeepsTheRowsOfSuspectsInAnUpdate(FleetState):
    def _take_rows(self, replica, why, final):
        if "update" not in why:
            super()._take_rows(replica, why, final)


class RestartsAsHealthy(FleetState):
    def opened(self, life, now):
        super().opened(life, now)
        replica = self.replicas[life.replica]
        if replica.state is State.STALE:
            replica.weights = replica.agreed = self.epoch
            self._move(replica, State.HEALTHY, now)
        return self._decided(now)


class ServesBeforeTheCanary(FleetState):
    def loaded(self, life, epoch, now):
        decisions = super().loaded(life, epoch, now)
        replica = self.replicas[life.replica]
        if replica.life == life and replica.state is State.STALE and replica.weights == epoch:
            replica.asked, replica.agreed = None, epoch
            self._advance(replica, now)
        return [*(each for each in decisions if not isinstance(each, AskCanary)), *self._decided(now)]


class TakesLateLoadsForCurrent(FleetState):
    def _done(self, asked):
        replica = self.replicas[asked.life.replica]
        if replica.state is not State.STALE:
            return None
        replica.asked = None
        return replica


class CountsBadRequests(FleetState):
    def refused(self, flight, now, rows=None):
        known = self.rows.flights.get(flight)
        decisions = super().refused(flight, now, rows)
        if known is not None:
            self._die(known.replica, now, "it refused a request")
        return [*decisions, *self._decided(now)]


class RunsAnsweredRowsAgain(FleetState):
    def answered(self, flight, rows, now):
        known = self.rows.flights.get(flight)
        decisions = super().answered(flight, rows, now)
        if known is not None and known.rows:
            self.rows.add(next(iter(rows)))
        return decisions


class ForgetsRowsAtADeath(FleetState):
    def _take_rows(self, replica, why, final):
        for flight in list(replica.flights.values()):
            for row in list(flight.rows):
                self.rows.finish(row)


class PoisonAfterThreeDeaths(FleetState):
    def __init__(self, limits=None):
        super().__init__(limits)
        self.rows.deaths = 3


class SendsAccusedRowsTogether(FleetState):
    def _blame(self, number, strike):
        super()._blame(number, strike)
        if number in self.rows.accused:
            del self.rows.accused[number]
            self.rows.fresh[number] = None


class LetsRowsJoinATrial(FleetState):
    @property
    def takers(self):
        return frozenset(name for name, each in self.replicas.items() if self._open(each) and each.room)


class NeverForgives(FleetState):
    def heard(self, life, now):
        self.rows.withdraw = lambda life: None
        return super().heard(life, now)


class TrustsSuspects(FleetState):
    def missed(self, life, now, why):
        return []


class WaitsForEver(FleetState):
    def _fail(self, rows, why, usable):
        pass


MUTANTS = [each for each in FleetState.__subclasses__() if each.__module__ == __name__]


FILES = [loaded("test_state"), loaded("test_updates_of_all")]
FOUND = [each for file in FILES for name, each in vars(file).items() if name.startswith("test_")]
EXAMPLES = [each for each in FOUND if not inspect.signature(each).parameters]


def test_an_example_notices_each_broken_rule(monkeypatch):
    assert len(MUTANTS) >= 16 and len(EXAMPLES) >= 30
    for mutant in MUTANTS:
        monkeypatch.setattr(World, "machine", mutant)
        for example in EXAMPLES:
            try:
                example()
            except (AssertionError, CoreLMError, KeyError, IndexError, StopIteration):
                break
        else:
            pytest.fail(f"no example notices {mutant.__name__}")

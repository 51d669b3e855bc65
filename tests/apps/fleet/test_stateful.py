"""Random events in a fleet: rows are settled once, weights are current, poison takes two replicas along at most.

`helpers/fleet_world.py` plays the engines, and keeps its own record of what happened to each row and each weight.
"""

from __future__ import annotations

import math
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from corelm.errors import CoreLMError
from corelm_fleet.records import FleetLimits
from helpers.each import examples
from helpers.fleet_world import Call, Engine, World

MANY = 4


class Fleet(RuleBasedStateMachine):
    """Up to four replicas. Poison rows kill their replica as soon as a rule permits it."""

    @initialize(trial=st.sampled_from([math.inf, 5.0]), restarts=st.sampled_from([2, 100]), together=st.booleans())
    def open(self, trial, restarts, together):
        limits = FleetLimits(trial=trial, restarts=restarts, take_back=10, give_up=40, outage=1e6, load=1e6, start=1e6)
        self.world = World(limits, None if together else 1)
        self.poison: set[int] = set()
        self.killed: Counter[int] = Counter()
        self.world.open("a", "b", "c")
        self.add(4, False)

    def engines(self) -> list[Engine]:
        return [each for each in self.world.engines.values() if each.alive]

    def an_engine(self, data) -> Engine:
        return data.draw(st.sampled_from(self.engines()))

    def a_call(self, data, calls: list[Call]) -> Call:
        return data.draw(st.sampled_from(calls))

    def late(self) -> list[Call]:
        """Return the calls whose rows were taken from them, on engines that still run."""
        return [call for call in self.world.calls.values() if call.engine.alive and not self.world.held(call)]

    @rule(count=st.integers(1, 4), poisoned=st.sampled_from([False, False, True]))
    def add(self, count, poisoned):
        first = len(self.world.rows)
        self.poison |= {first} if poisoned else set()
        self.world.add(*range(first, first + count))

    @precondition(lambda self: self.world.fleet.rows.fresh and self.world.fleet.takers)
    @rule(data=st.data(), most=st.sampled_from([1, 3, 10]))
    def send(self, data, most):
        rows = list(self.world.fleet.rows.fresh)[:most]
        self.world.send(data.draw(st.sampled_from(sorted(self.world.fleet.takers))), *rows)

    @precondition(lambda self: self.world.fleet.isolated_retries())
    @rule()
    def try_the_accused(self):
        for row, name in self.world.fleet.isolated_retries():
            self.world.send(name, row, isolated=True)

    def answerable(self) -> list[Call]:
        return [call for call in self.world.in_flight() if not self.poison & set(call.rows)]

    @precondition(lambda self: self.answerable())
    @rule(data=st.data(), part=st.booleans())
    def answer(self, data, part):
        call = self.a_call(data, self.answerable())
        self.world.answer(call, self.world.held(call)[:1] if part else None)

    @precondition(lambda self: self.late())
    @rule(data=st.data())
    def answer_late(self, data):
        self.world.answer(self.a_call(data, self.late()))

    @precondition(lambda self: self.answerable())
    @rule(data=st.data())
    def refuse(self, data):
        self.world.refuse(self.a_call(data, self.answerable()))

    @precondition(lambda self: self.world.fleet.rows.dispatches)
    @rule(data=st.data())
    def fail(self, data):
        self.world.fail(self.a_call(data, self.world.in_flight()))

    @precondition(lambda self: self.answerable())
    @rule(data=st.data())
    def show_progress(self, data):
        if not self.world.strict:
            self.world.obey(self.world.fleet.producing(self.a_call(data, self.answerable()).number, self.world.now))

    @precondition(lambda self: self.world.fleet.rows.all)
    @rule(data=st.data())
    def cancel(self, data):
        self.world.cancel(data.draw(st.sampled_from(sorted(self.world.fleet.rows.all))))

    @precondition(lambda self: self.poison & set(self.world.fleet.rows.all))
    @rule()
    def poison_kills(self):
        for call in self.world.in_flight():
            here = self.poison & set(self.world.held(call))
            if here and call.engine.alive:
                self.killed.update(here)
                self.world.die(call.engine)

    @precondition(lambda self: self.engines())
    @rule(data=st.data())
    def die(self, data):
        self.world.die(self.an_engine(data))

    @precondition(lambda self: self.engines())
    @rule(data=st.data(), times=st.sampled_from([1, 2, 2]), seconds=st.sampled_from([0.0, 15.0]))
    def miss(self, data, times, seconds):
        engine = self.an_engine(data)
        for _ in range(times):
            self.world.miss(engine)
        self.world.pass_time(seconds)

    @precondition(lambda self: self.engines())
    @rule(data=st.data())
    def hear(self, data):
        self.world.hear(self.an_engine(data))

    @precondition(lambda self: self.world.jobs)
    @rule(data=st.data(), well=st.sampled_from(["well"] * 5 + ["badly", "refused"]))
    def do_a_job(self, data, well):
        job = data.draw(st.sampled_from(self.world.jobs))
        if well == "well":
            self.world.finish(job)
        else:
            self.world.botch(job, refuse=well == "refused")

    @precondition(lambda self: self.world.jobs)
    @rule()
    def do_all_jobs(self):
        self.world.finish_all()

    @precondition(lambda self: not self.world.updating)
    @rule()
    def update(self):
        self.world.update()

    @precondition(lambda self: self.world.updating)
    @rule()
    def a_second_update_is_refused(self):
        with pytest.raises(CoreLMError):
            self.world.fleet.update(self.world.now)

    @precondition(lambda self: len(self.world.fleet.replicas) < MANY)
    @rule()
    def join(self):
        self.world.join("abcd"[len(self.world.fleet.replicas)])

    @rule(name=st.sampled_from("abc"))
    def leave(self, name):
        self.world.drain(name)

    @rule(seconds=st.sampled_from([1.0, 15.0, 45.0]))
    def pass_time(self, seconds):
        self.world.pass_time(seconds)

    @invariant()
    def no_row_is_lost(self):
        if hasattr(self, "world"):
            self.world.check()

    @invariant()
    def poison_takes_two_replicas_along_at_most(self):
        assert all(count <= 2 for count in getattr(self, "killed", {}).values())

    def teardown(self):
        if hasattr(self, "world"):
            self.poison.clear()
            self.world.calm_down()


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=examples(150), stateful_step_count=50, deadline=None)

"""The rules of an update of all replicas, one example each."""

from __future__ import annotations

from corelm_fleet.records import Load, State, Updated, UpdateFailed
from helpers.fleet_world import World, state, world


def test_an_update_opens_the_gate_for_all_together():
    w = world("a", "b")
    w.add(0, 1)
    call = w.send("a", 0)
    w.update()
    assert w.fleet.takers == frozenset()
    w.finish_all()
    assert state(w, "b") is State.HEALTHY and w.fleet.takers == frozenset(), "a still has a row of the old weights"
    w.answer(call)
    w.finish_all()
    assert w.ended == [Updated(1, {})] and w.fleet.takers == {"a", "b"} and w.fleet.epoch == 1


def test_an_update_waits_for_the_rows_of_a_replica_that_leaves():
    w = world("a", "b")
    w.add(0)
    call = w.send("a", 0)
    w.drain("a")
    w.update()
    w.finish_all()
    assert not w.ended
    w.answer(call)
    assert w.ended == [Updated(1, {})]


def test_a_replica_that_dies_in_an_update_loads_the_new_weights_later():
    w = world("a", "b")
    w.update()
    w.finish(w.jobs[0])
    w.die(w.engine("b"))
    w.finish_all()
    assert w.ended == [Updated(1, {"b": "exit code -9"})] and w.fleet.takers == {"a"}
    w.pass_time(1)
    w.finish(w.jobs[0])
    assert state(w, "b") is State.STALE and w.jobs == [Load(w.fleet.replicas["b"].life, 1)]
    w.finish_all()
    assert w.fleet.takers == {"a", "b"}


def test_an_update_during_a_restart_does_not_wait_for_it():
    w = world("a", "b")
    w.die(w.engine("b"))
    w.pass_time(1)
    w.update()
    w.finish(next(job for job in w.jobs if isinstance(job, Load)))
    w.finish(w.jobs[-1])
    assert w.ended == [Updated(1, {"b": "exit code -9"})]
    w.finish_all()
    assert w.fleet.takers == {"a", "b"}


def test_an_update_waits_for_a_restart_if_nothing_else_runs():
    w = world("a")
    w.die(w.engine("a"))
    w.update()
    assert not w.ended
    w.pass_time(1)
    w.finish_all()
    assert w.ended == [Updated(1, {})]


def test_an_update_waits_for_a_replica_that_came_back_if_nothing_else_runs():
    w = world("a", "b")
    w.miss(w.engine("a"))
    w.miss(w.engine("a"))
    assert state(w, "a") is State.SUSPECT
    w.update()
    w.hear(w.engine("a"))
    w.die(w.engine("b"))
    assert not w.ended
    w.finish_all()
    assert w.ended == [Updated(1, {"b": "exit code -9"})] and w.fleet.takers == {"a"}


def test_weights_that_every_replica_refuses_change_nothing():
    w = world("a", "b")
    w.update()
    for job in list(w.jobs):
        w.botch(job, refuse=True)
    assert w.ended == [UpdateFailed(True, dict.fromkeys("ab", "no such parameter"), {"a": 0, "b": 0})]
    assert w.fleet.takers == {"a", "b"} and w.fleet.epoch == 0


def test_an_update_that_fails_everywhere_says_which_weights_are_where_and_the_old_ones_come_back():
    w = world("a", "b")
    w.update()
    w.finish_all()
    w.update()
    w.botch(w.jobs[0], refuse=True)
    w.botch(w.jobs[0])
    assert w.ended[-1] == UpdateFailed(
        True, {"a": "no such parameter", "b": "no room for the weights"}, {"a": 1, "b": None}
    )
    assert w.fleet.takers == {"a"}
    w.pass_time(1)
    w.finish(w.jobs[0])
    assert w.jobs == [Load(w.fleet.replicas["b"].life, 1)]
    w.update()  # the epoch of the failed update is not used again
    assert w.fleet.updating == 3


def test_a_replica_that_refuses_what_others_load_is_restarted():
    w = world("a", "b")
    w.update()
    w.botch(w.jobs[0], refuse=True)
    w.finish_all()
    assert w.ended == [Updated(1, {"a": "no such parameter"})] and state(w, "a") is State.DEAD


def test_a_replica_whose_canary_disagrees_gets_no_rows():
    w = World()
    w.join("a")
    w.finish(w.jobs[0])
    w.botch(w.jobs[0])
    assert state(w, "a") is State.DEAD and "log-probs differ by 3" in w.fleet.replicas["a"].why


def test_a_suspect_loses_its_rows_when_an_update_begins():
    w = world("a", "b")
    w.add(0)
    old = w.send("a", 0)
    w.miss(w.engine("a"))
    w.miss(w.engine("a"))
    w.update()
    w.finish_all()
    assert w.ended == [Updated(1, {"a": "no reply to a health check"})]
    w.answer(old)
    assert not w.rows[0].outcomes
    w.hear(w.engine("a"))
    assert state(w, "a") is State.STALE

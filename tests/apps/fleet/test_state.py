"""The rules of a fleet, one example each. No engine runs: `World` says what each one did."""

from __future__ import annotations

import itertools

import pytest

from corelm.errors import InvalidRequestError
from corelm_fleet.records import TRANSITIONS, FleetLimits, Start, State, Updated
from helpers.fleet_world import World, state, world


def in_state(at: State) -> World:
    """Return a fleet whose replica `a` is in this state, with a row in flight if it can have one."""
    w = world("b")
    w.join("a")
    if at is State.LOADING:
        w.finish(w.jobs[0])
    if at not in (State.JOINING, State.LOADING):
        w.finish_all()
        w.add(0)
        w.send("a", 0)
    if at is State.SUSPECT:
        w.miss(w.engine("a"))
        w.miss(w.engine("a"))
    elif at is State.DRAINING:
        w.drain("a")
    elif at in (State.DEAD, State.RESTARTING):
        w.die(w.engine("a"))
    if at is State.RESTARTING:
        w.pass_time(1)
    assert state(w, "a") is at
    return w


def end_rows_in_update(w: World) -> None:
    w.update()
    w.answer(w.in_flight()[0])


def come_back_in_update(w: World) -> None:
    w.update()
    w.hear(w.engine("a"))


#: What causes each transition.
CAUSES = {
    **{(at, State.LOADING): lambda w: w.finish(w.jobs[0]) for at in (State.JOINING, State.RESTARTING)},
    **{(at, State.DEAD): lambda w: w.botch(w.jobs[0]) for at in (State.JOINING, State.RESTARTING, State.LOADING)},
    **{(at, State.DEAD): lambda w: w.die(w.engine("a")) for at in (State.HEALTHY, State.SUSPECT)},
    **{(at, State.GONE): lambda w: w.drain("a") for at in set(State) - {State.HEALTHY, State.DRAINING, State.GONE}},
    (State.LOADING, State.HEALTHY): lambda w: w.finish(w.jobs[0]),
    (State.HEALTHY, State.LOADING): end_rows_in_update,
    (State.HEALTHY, State.SUSPECT): lambda w: [w.miss(w.engine("a")) for _ in range(2)],
    (State.HEALTHY, State.DRAINING): lambda w: w.drain("a"),
    (State.SUSPECT, State.HEALTHY): lambda w: w.hear(w.engine("a")),
    (State.SUSPECT, State.LOADING): come_back_in_update,
    (State.DRAINING, State.GONE): lambda w: w.answer(w.in_flight()[0]),
    (State.DEAD, State.RESTARTING): lambda w: w.pass_time(1),
}


def test_every_transition_has_a_cause():
    assert CAUSES.keys() == {(at, to) for at, causes in TRANSITIONS.items() for to in causes}
    for (at, to), cause in CAUSES.items():
        w = in_state(at)
        cause(w)
        assert state(w, "a") is to, (at, to, TRANSITIONS[at][to])


def test_poison_in_a_batch_of_eight_fails_alone_and_takes_two_replicas_along():
    w = world("a", "b", "c", "d")
    w.add(*range(8))
    w.send("a", *range(8))
    w.die(w.engine("a"))
    deaths = 1
    for _ in range(20):
        for row, name in w.fleet.isolated_retries():
            w.send(name, row, isolated=True)
        for call in w.in_flight():
            if call.rows == [5]:
                w.die(call.engine)
                deaths += 1
            else:
                w.answer(call)
    assert deaths == 2 and not w.fleet.rows.all
    assert [row for row in range(8) if w.rows[row].outcomes != ["answered"]] == [5]
    error = w.failures[5].error
    assert error.usable and error.rows == (5,)
    assert "a (start 1): exit code -9; " in str(error) and "2 replicas were lost" in str(error)


def test_accused_rows_are_tried_on_half_of_the_replicas_and_fresh_ones_go_on():
    w = world("a", "b", "c", "d", "e")
    w.add(*range(20))
    w.send("a", *range(10))
    w.die(w.engine("a"))
    tried = [name for _, name in w.fleet.isolated_retries()]
    assert len(tried) == 2 and set(w.fleet.takers) == {"b", "c", "d", "e"} - set(tried)


def test_the_rows_sent_last_are_tried_first():
    w = world("a", "b")
    w.add(0, 1)
    w.send("a", 0)
    w.now += 1
    w.send("a", 1)
    w.die(w.engine("a"))
    assert list(w.fleet.rows.accused) == [1, 0]


def test_an_isolated_retry_waits_until_its_replica_has_survived_the_rows_it_has():
    w = world("a", "b", trial=5.0)
    w.add(0, 1, 2)
    w.send("a", 0)
    w.send("b", 1)
    w.die(w.engine("a"))
    assert w.fleet.isolated_retries() == [] and set(w.fleet.takers) == set()
    w.now += 5
    w.hear(w.engine("b"))
    assert w.fleet.isolated_retries() == [(0, "b")]
    call = w.send("b", 0, isolated=True)
    assert set(w.fleet.takers) == set()
    w.obey(w.fleet.producing(call.number, w.now))
    assert set(w.fleet.takers) == {"b"}, "a row that produces tokens has survived"


def test_a_death_during_an_isolated_retry_blames_only_its_row():
    w = world("a", "b", trial=5.0)
    w.add(0, 1)
    w.send("a", 0)
    w.send("b", 1)
    w.die(w.engine("a"))
    w.now += 5
    w.hear(w.engine("b"))
    w.send("b", 0, isolated=True)
    w.die(w.engine("b"))
    assert w.rows[0].outcomes == ["failed"] and list(w.fleet.rows.fresh) == [1]


def test_rows_that_did_not_reach_a_replica_are_not_blamed_for_its_death():
    w = world("a", "b", "c")
    w.add(*range(4))
    w.send("a", 0)
    unsent = w.send("a", 1, 2)
    w.engine("a").alive = False
    w.lose(w.engine("a"), [call for call in w.in_flight() if call is not unsent], final=True)
    w.obey(w.fleet.unsent(unsent.number, w.now))
    assert state(w, "a") is State.DEAD
    assert list(w.fleet.rows.fresh) == [3, 1, 2] and list(w.fleet.rows.accused) == [0]
    w.obey(w.fleet.unsent(unsent.number, w.now))
    w.check()


def test_a_replica_that_fails_every_call_is_restarted():
    w = world("a", "b")
    w.add(0, 1, 2)
    for call in [w.send("a", row) for row in range(3)]:
        assert state(w, "a") is State.HEALTHY
        w.fail(call)
    assert state(w, "a") is State.DEAD and list(w.fleet.rows.accused) == [0, 1, 2]


def test_a_suspect_that_answers_in_time_keeps_its_rows():
    w = world("a", "b")
    w.add(0)
    call = w.send("a", 0)
    w.miss(w.engine("a"))
    w.miss(w.engine("a"))
    assert set(w.fleet.takers) == {"b"}
    w.pass_time(9)
    w.answer(call)
    assert w.rows[0].outcomes == ["answered"]


def test_a_suspect_that_comes_back_is_forgiven():
    w = world("a", "b")
    w.add(0)
    w.send("a", 0)
    w.miss(w.engine("a"))
    w.miss(w.engine("a"))
    w.pass_time(10)
    assert list(w.fleet.rows.accused) == [0]
    w.hear(w.engine("a"))
    assert list(w.fleet.rows.fresh) == [0] and not w.fleet.rows.accused


def test_a_suspect_that_never_comes_back_is_restarted():
    w = world("a")
    w.miss(w.engine("a"))
    w.miss(w.engine("a"))
    w.pass_time(60)
    assert state(w, "a") is State.DEAD
    w.pass_time(1)
    assert w.jobs == [Start(w.fleet.replicas["a"].run)]


def test_a_late_report_of_an_earlier_run_is_ignored():
    w = world("a")
    old = w.engine("a")
    w.die(old)
    w.pass_time(1)
    w.finish_all()
    assert w.fleet.died(old.run, 1.0, "late") == w.fleet.opened(old.run, 1.0) == []
    assert w.fleet.loaded(old.run, 0, 1.0) == []
    assert state(w, "a") is State.HEALTHY


def test_restarts_wait_longer_each_time_and_end():
    w = world("a", backoff=1.0, longest_backoff=3.0, restarts=3)
    w.add(0)
    waits = []
    for _ in range(3):
        w.die(w.engine("a"))
        waits.append(w.fleet.replicas["a"].retry_at - w.now)
        w.pass_time(3)
        w.finish_all()
    assert waits == [1.0, 2.0, 3.0]
    w.die(w.engine("a"))
    assert state(w, "a") is State.GONE and w.rows[0].outcomes == ["failed"]
    error = w.failures[0].error
    assert error.usable is False and "no replica is left" in str(error) and "started too often" in str(error)


def test_a_replica_that_dies_once_a_day_is_restarted_though_nothing_is_asked_of_it():
    w = world("a", restarts=1)
    for _ in range(3):
        w.pass_time(86_400)
        w.die(w.engine("a"))
        w.pass_time(1)
        w.finish_all()
    assert state(w, "a") is State.HEALTHY


def test_rows_fail_after_an_outage():
    w = world("a", outage=30.0, restarts=1000, start=1e6)
    w.add(0)
    w.die(w.engine("a"))
    w.pass_time(1)
    w.pass_time(29.9)
    assert not w.rows[0].outcomes
    w.pass_time(0.1)
    assert w.rows[0].outcomes == ["failed"] and "a (start 2) is restarting" in str(w.failures[0].error)


def test_what_takes_too_long_is_given_up():
    for name, seconds in itertools.product(("start", "load", "canary"), (0.0, 1e6)):
        w = World(limits=FleetLimits(**{name: 5.0}))
        w.join("a")
        if name != "start":
            w.finish(w.jobs[0])
        if name == "load":
            w.finish_all()
            w.update()
        w.pass_time(4.9)
        assert state(w, "a") is not State.DEAD, name
        w.pass_time(0.1 + seconds)
        assert state(w, "a") is State.DEAD and "within 5 s" in w.fleet.replicas["a"].why, name


def test_a_replica_that_stalls_while_it_loads_is_given_up_before_the_limit_of_a_load():
    w = world("a", "b", give_up=60.0, load=900.0)
    w.update()
    w.finish(w.jobs[0])
    w.finish(w.jobs[-1])
    for _ in range(5):
        w.miss(w.engine("b"))
    assert state(w, "b") is State.LOADING, "it may be busy"
    w.now += 60
    w.miss(w.engine("b"))
    assert w.ended == [Updated({"b": "no reply to a health check"})]


def test_mistakes_are_refused():
    w = world("a")
    with pytest.raises(InvalidRequestError):
        w.fleet.join("a", 0.0)
    with pytest.raises(InvalidRequestError, match="there is no replica 'z'; there are a"):
        w.fleet.drain("z", 0.0)
    with pytest.raises(InvalidRequestError, match="trial: expected"):
        FleetLimits(trial=-1)
    with pytest.raises(InvalidRequestError):
        FleetLimits(deaths=0)


def test_the_rows_of_a_replica_that_dies_while_it_drains_go_elsewhere():
    w = world("a", "b")
    w.add(0)
    w.send("a", 0)
    w.drain("a")
    w.die(w.engine("a"))
    assert state(w, "a") is State.GONE and w.fleet.isolated_retries() == [(0, "b")]
    w.answer(w.send("b", 0, isolated=True))
    assert w.rows[0].outcomes == ["answered"]

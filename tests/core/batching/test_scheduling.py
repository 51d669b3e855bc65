"""The rules of batching, tested without threads and without a clock: each test passes the time."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corelm.batching.scheduling import (
    GATHERING,
    LONGEST_GATHERING,
    LONGEST_TIMEOUT,
    SHORTEST_TIMEOUT,
    TIMEOUT,
    Limits,
    Ticket,
    TicketQueue,
)
from corelm.errors import InvalidRequestError
from helpers.each import each
from helpers.refusals import refused


def ticket(key="k", rows=1, tokens=1, barrier=False):
    return Ticket(key=key, rows=rows, tokens=tokens, barrier=barrier)


def grouping_queue(*tickets, now=0.0, **limits):
    queue = TicketQueue(Limits(**limits), concurrent_calls=False)
    for one in tickets:
        queue.add(one, now)
    return queue


# An engine that takes one call at a time ------------------------------------------------------------------------------


def test_a_ticket_that_exceeds_a_limit_goes_alone_and_keeps_its_place():
    small, large, later = ticket(tokens=5), ticket(tokens=50), ticket(tokens=5)
    queue = grouping_queue(small, large, later, max_batch_tokens=10)
    assert [queue.take(0.0) for _ in range(3)] == [[small], [large], [later]]
    wide = ticket(rows=9)
    queue = grouping_queue(small, wide, later, max_batch_size=4)
    assert [queue.take(0.0) for _ in range(3)] == [[small], [wide], [later]]


def test_a_full_batch_takes_no_more():
    full, empty, later = ticket(tokens=10), ticket(tokens=0), ticket(tokens=1)
    queue = grouping_queue(full, empty, later, max_batch_tokens=10, min_batch_size=9)
    assert queue.take(0.0) == [full], "it is complete, and goes at once"
    assert queue.take(0.0) == [] and queue.take(9.0) == [empty, later]


@each("arrived", [0.1, 1e9 / 3, 12345.678])
@each("timeout", [0.1, 1 / 3, 7.7])
def test_a_batch_is_ready_after_the_seconds_that_wait_returned(arrived, timeout):
    queue = grouping_queue(ticket(), min_batch_size=2, batching_timeout=timeout, now=arrived)
    now = arrived
    for _ in range(3):
        if batch := queue.take(now):
            break
        wait = queue.wait(now)
        assert wait > 0, "a wait of zero seconds that leads to no batch would loop forever"
        now = max(now + wait, math.nextafter(now, math.inf))
    assert batch


def test_a_batch_is_ready_with_min_batch_size_rows_or_if_it_cannot_grow():
    assert grouping_queue(ticket(rows=3), min_batch_size=3).take(0.0)
    # The second ticket does not fit next to the first, so waiting longer could not make the batch larger.
    assert len(grouping_queue(ticket(tokens=6), ticket(tokens=6), min_batch_size=2, max_batch_tokens=10).take(0.0)) == 1
    assert len(grouping_queue(ticket(tokens=10), min_batch_size=2, max_batch_tokens=10).take(0.0)) == 1


def test_tickets_before_a_barrier_go_at_once_and_tickets_after_it_wait():
    before, barrier, after = ticket(), ticket(None, barrier=True), ticket()
    queue = grouping_queue(before, barrier, after, min_batch_size=2, batching_timeout=9.0)
    assert queue.take(0.0) == [before]
    assert queue.take(0.0) == [barrier]
    assert queue.take(0.0) == [], "after the barrier min_batch_size applies again"
    assert queue.take(9.0) == [after]


# Waiting for callers to come back ------------------------------------------------------------------------------------


def after_a_call(*waiting, served=3, took=1.0, batching_timeout=0.3):
    """A queue whose call of `served` tickets came back at time 10."""
    queue = grouping_queue(*(ticket() for _ in range(served)), now=9.0, batching_timeout=batching_timeout)
    batch = queue.take(9.0)
    for one in waiting:
        queue.add(one, 9.5)
    queue.came_back(batch, took, 10.0)
    return queue


def test_the_queue_waits_until_all_callers_of_the_last_call_are_back():
    queue = after_a_call(served=3)
    queue.add(ticket(), 10.01)
    queue.add(ticket(), 10.02)
    assert queue.take(10.02) == [] and queue.wait(10.02) == pytest.approx(GATHERING)
    queue.add(ticket(), 10.03)
    assert len(queue.take(10.03)) == 3


def test_the_queue_stops_waiting_when_no_caller_comes_back():
    queue = after_a_call(served=3)
    queue.add(ticket(), 10.0)
    assert queue.take(10.0 + GATHERING * 0.9) == []
    assert len(queue.take(10.0 + GATHERING * 1.1)) == 1


@each(
    "given, took, waits",
    [(0.3, 1000.0, 0.3), (None, 0.3, SHORTEST_TIMEOUT), (None, 3.0, 3.0 * TIMEOUT), (None, 1000.0, LONGEST_TIMEOUT)],
)
def test_waiting_for_callers_ends_after_batching_timeout(given, took, waits):
    queue = after_a_call(served=50, took=took, batching_timeout=given)
    now, step = 10.0, LONGEST_GATHERING / 4
    while not (batch := queue.take(now)):
        queue.add(ticket(), now)
        assert queue.wait(now) <= LONGEST_GATHERING
        now += step
    assert now == pytest.approx(10.0 + waits, abs=step + 1e-6)
    assert len(batch) > 3


# An engine with concurrent_calls --------------------------------------------------------------------------------------


def test_requests_pass_through_in_order_within_the_limits():
    queue = TicketQueue(Limits(max_batch_size=4, max_batch_tokens=10), concurrent_calls=True)
    first, second, third = ticket(rows=3), ticket("b", rows=2), ticket(tokens=11)
    for one in (first, second, third):
        queue.add(one, 0.0)
    assert queue.take(0.0) == [first]
    assert queue.take(0.0, rows=3, tokens=1) == [], "no later ticket may overtake"
    assert queue.take(0.0, rows=2, tokens=1) == [second]
    assert queue.take(0.0, rows=1, tokens=1) == []
    assert queue.take(0.0) == [third], "a ticket that is alone may exceed a limit"


def test_a_barrier_waits_until_the_engine_is_empty():
    queue = TicketQueue(Limits(), concurrent_calls=True)
    barrier = ticket(None, barrier=True)
    queue.add(barrier, 0.0)
    queue.add(ticket(), 0.0)
    assert queue.take(0.0, rows=1, tokens=1) == []
    assert queue.take(0.0) == [barrier]


# Limits --------------------------------------------------------------------------------------------------------------


@each(
    "field, value",
    [
        *[(name, bad) for name in ("min_batch_size", "max_batch_size", "max_queue") for bad in (0, -1, 1.5, True, "2")],
        ("max_batch_tokens", 0),
        ("batching_timeout", 0.0),
        ("batching_timeout", math.inf),
        ("on_full", "wait"),
    ],
)
def test_an_illegal_limit_is_named(field, value):
    with refused(InvalidRequestError, field=field):
        Limits(**{field: value})


def test_fewer_rows_at_most_than_at_least_are_refused():
    with pytest.raises(InvalidRequestError, match="8 is more than max_batch_size=7") as error:
        Limits(min_batch_size=8, max_batch_size=7)
    assert error.value.field == "min_batch_size"


def test_without_a_largest_batch_only_an_engine_that_takes_one_call_at_a_time_has_a_limit():
    assert Limits().of_engine(concurrent_calls=False).max_batch_size == 64
    assert Limits(min_batch_size=100).of_engine(concurrent_calls=False).max_batch_size == 100
    assert Limits(max_batch_size=7).of_engine(concurrent_calls=False).max_batch_size == 7
    assert Limits(max_batch_size=7).of_engine(concurrent_calls=True).max_batch_size == 7
    assert Limits().of_engine(concurrent_calls=True).fits(rows=10**6, tokens=10**9)


# Random operations ---------------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(["a", "b", None]), st.integers(1, 6), st.integers(1, 30)),
        st.tuples(st.just("barrier")),
        st.tuples(st.just("take")),
        st.tuples(st.just("remove"), st.integers(0, 9)),
        st.tuples(st.just("tick"), st.floats(0, 1)),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(
    steps=STEPS,
    least=st.integers(1, 4),
    most=st.integers(4, 8),
    tokens=st.one_of(st.none(), st.integers(10, 40)),
    room=st.integers(1, 6),
)
def test_every_ticket_leaves_once_in_order_within_the_limits(steps, least, most, tokens, room):
    limits = Limits(min_batch_size=least, max_batch_size=most, max_batch_tokens=tokens, max_queue=room)
    queue, now = TicketQueue(limits, concurrent_calls=False), 0.0
    added, gone = [], []

    def take():
        before, batch = [*queue.inside], queue.take(now)
        if not batch:
            return False
        assert len({each.key for each in batch}) == 1 and (batch[0].key is not None or len(batch) == 1)
        if len(batch) > 1:
            assert limits.fits(sum(each.rows for each in batch), sum(each.tokens for each in batch))
        older = [each for each in queue.inside if each.number < batch[-1].number]
        assert not any(each.barrier for each in older), "it has overtaken a barrier"
        own = [each for each in before if each.key == batch[0].key is not None and each in queue.inside]
        assert all(each.number > batch[-1].number for each in own), "it has overtaken its own group"
        if own and not any(each.barrier and each.number < own[0].number for each in before):
            total = [sum(each.rows for each in (*batch, own[0])), sum(each.tokens for each in (*batch, own[0]))]
            assert not limits.fits(*total), "it has left one behind that fits"
        if batch[0].barrier:
            assert not older
        gone.extend(batch)
        queue.came_back(batch, 0.5, now)
        return True

    for kind, *values in steps:
        if kind == "add":
            added.append(ticket(*values))
            queue.add(added[-1], now)
        elif kind == "barrier":
            added.append(ticket(None, barrier=True))
            queue.add(added[-1], now)
        elif kind == "take":
            take()
        elif kind == "remove" and values[0] < len(added) and queue.remove(added[values[0]]):
            gone.append(added[values[0]])
        elif kind == "tick":
            now += values[0]
        assert len(queue.inside) <= room and (not queue.outside or queue.full)
        assert len(added) == len(gone) + len(queue)
    while len(queue):
        if not take():
            # Every wait must end.
            now = max(now + queue.wait(now), math.nextafter(now, math.inf))
    assert sorted(each.number for each in gone) == list(range(len(added)))

"""Callers that stop waiting, and fleets that are closed or dropped: calls end, and nothing is left."""

from __future__ import annotations

import _thread
import gc
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from apps.fleet.conftest import PROMPTS, SAMPLING, assert_same
from corelm import hookimpl
from corelm.errors import BackendClosedError, BackendTimeoutError, EngineError
from corelm.spec import CloseRequest
from corelm_fleet.fleet import FleetEngine
from corelm_fleet.replica import Member
from helpers.insides import holds_rows, look_around
from helpers.mortal_toys import OTHER, TABLE, MortalToy, Toys, user_rows
from helpers.processes import wait_until


def hang(engine: MortalToy, hook: str, request: Any) -> None:
    """Hold calls of tests until they are aborted."""
    if hook == "generate" and user_rows(request):
        engine.aborted.wait(20)


def all_asked(toys: Toys) -> bool:
    """Return whether every engine has been asked to sample for a test."""
    return all(any(hook == "generate" and user_rows(each) for hook, each in engine.asked) for engine in toys.made)


def test_a_timeout_ends_the_wait_and_the_calls() -> None:
    with Toys("a", "b", before=hang) as toys:
        with pytest.raises(BackendTimeoutError):
            toys.backend.generate(PROMPTS, SAMPLING, timeout=2.0)
        assert all_asked(toys)
        assert all(engine.aborted.wait(5) for engine in toys.made)
        toys.before = lambda *given: None
        assert_same(toys.backend.generate(PROMPTS, SAMPLING))


def test_an_abort_reaches_the_replica_that_has_the_request() -> None:
    with Toys("a", "b", before=hang) as toys:
        names = [f"r{n}" for n in range(20)]
        future = toys.backend.submit_generate(PROMPTS, SAMPLING, request_ids=names)
        assert wait_until(lambda: all_asked(toys))
        toys.backend.abort(["r0"])
        owner = next(
            each
            for each in toys.made
            for hook, request in each.asked
            if hook == "generate" and PROMPTS[0] in request.prompts.tolist()
        )
        assert owner.aborted.wait(5)
        others = [each for each in toys.made if each is not owner]
        assert not any(each.aborted.is_set() for each in others)
        toys.backend.abort(names)
        assert len(future.result(10).ids) == 20


def test_rows_that_wait_are_aborted_at_once() -> None:
    with Toys("a", before=hang, concurrent_calls=False) as toys:
        first = toys.backend.submit_generate(PROMPTS[:1], SAMPLING, request_ids=["first"])
        assert wait_until(lambda: all_asked(toys))
        second = toys.backend.submit_generate(PROMPTS[1:3], SAMPLING, request_ids=["x", "y"])

        def ended() -> bool:
            # Another thread submits the rows: an abort may come before them.
            toys.backend.abort(["x", "y"])
            return second.done()

        assert wait_until(ended)
        found = second.result(5)
        assert found.finish_reasons == ("abort", "abort") and found.ids.tolist() == [[], []]
        assert not first.done()
        toys.backend.abort(["first"])
        assert len(first.result(5).ids) == 1 and not holds_rows(toys.backend)


def test_closing_ends_calls_and_threads() -> None:
    before = set(threading.enumerate())
    toys = Toys("a", "b", before=hang)
    future = toys.backend.submit_generate(PROMPTS, SAMPLING)
    assert wait_until(lambda: all_asked(toys))
    threading.Timer(0.2, lambda: [engine.aborted.set() for engine in toys.made]).start()
    toys.backend.close()
    with pytest.raises(BackendClosedError):
        future.result(5)
    with pytest.raises(BackendClosedError):
        toys.backend.generate(PROMPTS, SAMPLING)
    assert wait_until(lambda: not set(threading.enumerate()) - before, 10)
    assert [engine.closed for engine in toys.made] == [1, 1]


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of beginnings of the names of threads for which the system has no room."""
    names, start = list[str](), threading.Thread.start

    def start_if_there_is_room(thread: threading.Thread) -> None:
        if thread.name.startswith(tuple(names)):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_if_there_is_room)
    return names


def test_a_replica_is_ended_when_there_is_room_for_a_thread_again(no_room: list[str]) -> None:
    with Toys("a", "b") as toys:
        first = next(engine for engine in toys.made if engine.name == "a")
        no_room.append("corelm-fleet-")
        toys.fleet.drain("a")
        toys.await_state("a", "gone")
        assert not first.closed
        no_room.clear()
        toys.fleet.join(toys.member("a"))
        toys.settle()
        assert first.closed == 1 and [each.name for each in toys.made].count("a") == 2


@pytest.mark.parametrize("drained", [False, True])
def test_a_fleet_is_closed_without_room_for_threads(no_room: list[str], drained: bool) -> None:
    toys = Toys("a", "b")
    no_room.append("corelm-")
    if drained:
        toys.fleet.drain("a")
        toys.await_state("a", "gone")
    toys.fleet.close(CloseRequest())
    assert [engine.closed for engine in toys.made] == [1, 1]


@pytest.mark.parametrize("closed", [False, True])
def test_a_delayed_start_does_not_begin_when_nobody_wants_it_any_more(no_room: list[str], closed: bool) -> None:
    with Toys("a") as toys:
        no_room.append("corelm-fleet-start")
        toys.fleet.join(toys.member("b"))
        if closed:
            toys.backend.close()
        else:
            toys.fleet.drain("b")
        no_room.clear()
        look_around(toys.backend)
        for thread in threading.enumerate():
            if thread.name == "corelm-fleet-start":
                thread.join()
        assert [engine.name for engine in toys.made] == ["a"]


def test_engines_that_can_have_a_thread_are_closed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is closed without a thread may take long, and may fail."""

    class Failing(MortalToy):
        @hookimpl
        def close(self, request: CloseRequest) -> bool:
            raise EngineError("it does not close")

    closing, other_ended, waited = list[threading.Thread](), threading.Event(), list[bool]()

    def end(engine: MortalToy) -> None:
        if len(closing) > 1 and threading.get_ident() == closing[1].ident:
            other_ended.set()
            return
        waited.append(other_ended.wait(5))
        raise OSError("it cannot be ended")

    def open_it(name: str) -> MortalToy:
        return Failing.make(name, TABLE, lambda *given: None)

    fleet = FleetEngine([Member(name, partial(open_it, name), end) for name in ("a", "b")])
    start = threading.Thread.start

    def start_the_second(thread: threading.Thread) -> None:
        if thread.name == "corelm-fleet-close":
            closing.append(thread)
        if thread.name.startswith("corelm-") and closing[1:] != [thread]:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_the_second)
    fleet.close(CloseRequest())
    assert waited == [True]


def test_calls_fail_without_room_for_threads(no_room: list[str]) -> None:
    with Toys("a", "b") as toys:
        no_room.append("corelm-fleet-call")
        with pytest.raises(EngineError, match="no room for a thread"):
            toys.backend.generate(PROMPTS, SAMPLING)


def test_a_fleet_that_is_dropped_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    toys = Toys("a", "b")
    assert len(toys.backend.generate(PROMPTS, SAMPLING).ids) == 20
    del toys

    def ended() -> bool:
        gc.collect()
        return not set(threading.enumerate()) - before

    assert wait_until(ended)


def test_an_interrupt_ends_the_wait_and_the_calls() -> None:
    with Toys("a", "b", before=hang) as toys:

        def interrupt() -> None:
            wait_until(lambda: all_asked(toys))
            _thread.interrupt_main()

        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            toys.backend.generate(PROMPTS, SAMPLING)
        assert all(engine.aborted.wait(5) for engine in toys.made)
        toys.before = lambda *given: None
        assert_same(toys.backend.generate(PROMPTS, SAMPLING))


def test_an_interrupt_while_engines_begin_to_open_closes_those_that_have_begun() -> None:
    made = list[MortalToy]()

    def open_it() -> MortalToy:
        made.append(MortalToy.make("a", TABLE, lambda *given: None))
        return made[-1]

    class Interrupted(list[Member]):
        read = 0

        def __iter__(self) -> Iterator[Member]:
            self.read += 1
            for member in list.__iter__(self):
                if self.read > 1 and member.name == "b":
                    assert wait_until(lambda: bool(made))
                    raise KeyboardInterrupt
                yield member

    with pytest.raises(KeyboardInterrupt):
        FleetEngine(Interrupted([Member("a", open_it), Member("b", open_it)]))
    assert wait_until(lambda: made[0].closed == 1)
    assert len(made) == 1


def test_an_interrupt_ends_the_wait_for_new_weights() -> None:
    begun, loaded, ended = threading.Event(), threading.Event(), list[bool]()

    def before(engine: MortalToy, hook: str, request: Any) -> None:
        if hook == "update_weights":
            begun.set()
            ended.append(loaded.wait(60))

    with Toys("a", "b", before=before) as toys:

        def interrupt() -> None:
            begun.wait()
            _thread.interrupt_main()

        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            toys.backend.update_weights({"table": OTHER})
        assert not ended, "the interrupt has waited for the engines"
        loaded.set()


def test_closing_does_not_wait_for_an_engine_that_hangs() -> None:
    never, ended = threading.Event(), []

    def before(engine: MortalToy, hook: str, request: Any) -> None:
        if hook == "generate" and user_rows(request):
            never.wait(60)
            ended.append(hook)

    toys = Toys("a", before=before, abort=False, concurrent_calls=False)
    future = toys.backend.submit_generate(PROMPTS, SAMPLING)
    assert wait_until(lambda: all_asked(toys))
    toys.backend.close()
    with pytest.raises(BackendClosedError):
        future.result(1)
    assert not ended
    never.set()

"""A fleet sleeps and wakes as one engine, also when some of its engines do not."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from apps.fleet.conftest import PROMPTS, SAMPLING, assert_same
from corelm.errors import BackendAsleepError, CapabilityError, EngineError, InvalidRequestError, StaleWeightsError
from helpers.insides import a_call_waits, look_around
from helpers.mortal_toys import LIMITS, OTHER, MortalToy, Toys, one_engine
from helpers.processes import wait_until


def hooks_of(toys: Toys) -> list[list[str]]:
    """Return which of the hooks `sleep` and `wake` each engine was asked for."""
    return [[hook for hook, _ in each.asked if hook in ("sleep", "wake")] for each in toys.made]


def test_all_engines_sleep_and_answer_as_before() -> None:
    with Toys("a", "b", "c") as toys:
        assert_same(toys.backend.generate(PROMPTS, SAMPLING))
        toys.backend.sleep()
        assert hooks_of(toys) == [["sleep"]] * 3
        with pytest.raises(BackendAsleepError):
            toys.backend.generate(PROMPTS, SAMPLING)
        toys.backend.wake()
        assert_same(toys.backend.generate(PROMPTS, SAMPLING))
        assert hooks_of(toys) == [["sleep", "wake"]] * 3
        assert set(toys.states().values()) <= {"healthy", "loading"} and toys.backend.weight_version == "0"


def test_weights_are_loaded_between_the_two_halves_of_waking() -> None:
    with Toys("a", "b") as toys:
        toys.backend.sleep(level=2)
        toys.backend.wake(["weights"])
        toys.backend.update_weights({"table": OTHER}, version="tuned")
        toys.backend.wake(["kv_cache"])
        assert_same(toys.backend.generate(PROMPTS, SAMPLING), one_engine(OTHER).generate(PROMPTS, SAMPLING))
        toys.settle()
        assert toys.backend.weight_version == "tuned" and len(toys.made) == 2


def test_no_engine_is_started_while_the_fleet_sleeps() -> None:
    # An engine that is lost may be started again at once.
    with Toys("a", "b", limits=replace(LIMITS, backoff=0.0)) as toys:
        toys.backend.sleep()
        lost = toys.made[0]
        lost.alive = False
        toys.await_state(lost.name, "dead")
        for _ in range(20):
            look_around(toys.backend)
            assert toys.states()[lost.name] == "dead"
        with pytest.raises(BackendAsleepError):
            toys.fleet.join(toys.member("c"))
        toys.backend.wake()
        assert_same(toys.backend.generate(PROMPTS, SAMPLING))
        toys.settle()
        assert len(toys.made) == 3


@pytest.mark.parametrize("hook", ["sleep", "wake"])
def test_an_engine_that_fails_is_ended_and_started_when_the_fleet_is_awake(hook: str) -> None:
    def before(engine: MortalToy, asked: str, request: Any) -> None:
        if asked == hook and engine is toys.made[0]:
            engine.die()

    with Toys("a", "b", before=before) as toys:
        toys.backend.sleep()
        toys.backend.wake()
        assert_same(toys.backend.generate(PROMPTS, SAMPLING))
        toys.settle()
        assert len(toys.made) == 3 and toys.made[0].closed == 1


def test_an_engine_that_wakes_with_other_weights_serves_nobody() -> None:
    def before(engine: MortalToy, asked: str, request: Any) -> None:
        if asked == "wake" and engine is toys.made[0]:
            assert engine.kept is not None
            engine.kept = engine.kept.flip(0)

    with Toys("a", "b", before=before) as toys:
        toys.backend.sleep()
        toys.backend.wake()
        for _ in range(5):
            assert_same(toys.backend.generate(PROMPTS, SAMPLING))
        toys.settle()
        assert toys.made[0].closed == 1 and len(toys.made) == 3


def test_engines_that_wake_with_unlike_weights_are_told_apart() -> None:
    # Each has agreed with itself: the weights came while its cache slept, so no canary could ask it.
    def before(engine: MortalToy, asked: str, request: Any) -> None:
        if asked == "wake" and request.last and engine is toys.made[-1]:
            engine.model.table.data = engine.model.table.data.flip(0)

    with Toys("a", "b", before=before) as toys:
        toys.backend.sleep(level=2)
        toys.backend.wake(["weights"])
        toys.backend.update_weights({"table": OTHER})
        toys.backend.wake()
        found = toys.backend.score_logprobs([[1, 2]] * 8).logprobs.tolist()
        assert found == [found[0]] * 8
        assert "loading" in toys.states().values() or toys.made[0].closed or toys.made[1].closed


def test_a_fleet_of_which_nothing_is_left_says_so() -> None:
    def before(engine: MortalToy, asked: str, request: Any) -> None:
        if asked == "wake" and engine.kept is not None:
            engine.kept = engine.kept.flip(0)

    with Toys("a", "b", before=before) as toys:
        toys.backend.sleep()
        with pytest.raises(StaleWeightsError):
            toys.backend.wake()


def test_an_engine_that_never_falls_asleep_is_ended_after_the_time_that_loading_may_take() -> None:
    def before(engine: MortalToy, asked: str, request: Any) -> None:
        if asked == "sleep" and engine is toys.made[0]:
            engine.aborted.wait(20)

    with Toys("a", "b", before=before, limits=replace(LIMITS, load=0.2)) as toys:
        toys.backend.sleep()
        late, other = (engine.name for engine in toys.made)
        assert toys.states() == {late: "dead", other: "healthy"}
        toys.made[0].aborted.set()
        toys.backend.wake()
        assert_same(toys.backend.generate(PROMPTS, SAMPLING))


def test_a_fleet_whose_engines_all_fail_to_sleep_raises() -> None:
    def before(engine: MortalToy, asked: str, request: Any) -> None:
        if asked == "sleep":
            engine.die("it cannot")

    with Toys("a", "b", before=before) as toys:
        with pytest.raises(EngineError):
            toys.backend.sleep()
        toys.backend.wake()
        toys.settle()
        assert_same(toys.backend.generate(PROMPTS, SAMPLING))


def test_a_fleet_of_which_one_engine_refuses_is_awake_as_a_whole() -> None:
    def before(engine: MortalToy, asked: str, request: Any) -> None:
        if asked == "sleep" and engine is toys.made[0]:
            raise CapabilityError("others use it", capability="sleep_levels")

    with Toys("a", "b", before=before) as toys:
        with pytest.raises(CapabilityError):
            toys.backend.sleep()
        assert_same(toys.backend.generate(PROMPTS, SAMPLING))
        toys.settle()
        assert len(toys.made) == 2


def test_a_fleet_of_engines_without_weights_answers_after_an_update() -> None:
    with Toys("a", "b", without_weights=True) as toys:
        with pytest.raises(BackendAsleepError):
            toys.backend.score_logprobs([[1, 2]])
        toys.backend.update_weights({"table": OTHER})
        assert_same(toys.backend.generate(PROMPTS, SAMPLING), one_engine(OTHER).generate(PROMPTS, SAMPLING))
        toys.made[0].alive = False
        assert_same(toys.backend.generate(PROMPTS, SAMPLING), one_engine(OTHER).generate(PROMPTS, SAMPLING))
        toys.settle()
        assert len(toys.made) == 3
        assert_same(toys.backend.generate(PROMPTS, SAMPLING), one_engine(OTHER).generate(PROMPTS, SAMPLING))


def test_a_fleet_that_has_dropped_its_weights_does_not_speak_of_old_ones() -> None:
    with Toys("a", "b") as toys:
        toys.backend.sleep(level=2)
        toys.backend.wake(["weights"])
        with pytest.raises(InvalidRequestError, match="it still has no weights") as caught:
            toys.backend.update_weights({"no.such.parameter": OTHER}, version="wrong")
        assert "old ones" not in str(caught.value)
        toys.backend.update_weights({"table": OTHER}, version="tuned")
        toys.backend.wake()
        assert_same(toys.backend.generate(PROMPTS, SAMPLING), one_engine(OTHER).generate(PROMPTS, SAMPLING))
        with pytest.raises(InvalidRequestError):
            toys.backend.update_weights({"no.such.parameter": OTHER})


def test_a_fleet_that_one_engine_keeps_awake_has_not_lost_the_weights_of_the_others() -> None:
    def before(engine: MortalToy, asked: str, request: Any) -> None:
        if asked == "sleep" and engine is toys.made[0]:
            raise InvalidRequestError("the server refused the request")

    with Toys("a", "b", before=before) as toys:
        with pytest.raises(InvalidRequestError):
            toys.backend.sleep(level=2)
        toys.settle()
        for _ in range(5):
            assert_same(toys.backend.generate(PROMPTS, SAMPLING))
        # The one that had dropped its weights was started again with them; the one that refused has gone on.
        assert len(toys.made) == 3 and toys.made[0].closed == 0 and toys.made[1].closed == 1


def test_two_threads_that_wake_a_fleet_end_none_of_its_engines() -> None:
    def before(engine: MortalToy, asked: str, request: Any) -> None:
        if asked == "wake" and engine is toys.made[0] and not other.ident:
            other.start()
            assert wait_until(lambda: a_call_waits(toys.backend))

    with Toys("a", "b", before=before) as toys:
        other = threading.Thread(target=lambda: toys.backend.wake())
        toys.backend.sleep()
        toys.backend.wake()
        other.join()
        toys.settle()
        assert_same(toys.backend.generate(PROMPTS, SAMPLING))
        assert len(toys.made) == 2

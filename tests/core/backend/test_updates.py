"""New weights: their versions, what they wait for, and the provenance of what was computed with them."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from corelm import Backend, hookimpl
from corelm.errors import CapabilityError, EngineError, InvalidRequestError
from corelm.spec import GenerateResult, WeightUpdate
from helpers.each import each
from helpers.fakes import SHORT, Fake, Gate, fake, sent
from helpers.insides import a_call_waits
from helpers.processes import wait_until
from helpers.refusals import refused
from helpers.stepping import LONG, PATIENCE, Stepping


def test_weight_versions_count_up_unless_the_caller_names_them():
    backend = fake()
    assert backend.generate([[1]], SHORT).weight_versions == ("0",)
    assert backend.update_weights({"w": torch.zeros(1)}) == "1"
    assert sent(backend)[-1].state_dict.keys() == {"w"} and sent(backend)[-1].path is None
    assert backend.update_weights("some/where", version="step-9") == "step-9"
    assert sent(backend)[-1].path == Path("some/where")
    out = backend.generate([[1], [3]], SHORT)
    assert backend.provenance(out).weight_version == "step-9"
    with refused(InvalidRequestError, field="weights"):
        backend.update_weights(3)
    with refused(CapabilityError, capability="update_weights"):
        fake(update_weights=False).update_weights({})


@each("concurrent", [False, True])
def test_concurrent_updates_get_different_versions(concurrent):
    gate, inside = Gate(), []

    class Slow(Fake):
        @hookimpl
        def update_weights(self, request):
            inside.append(request.version)
            gate(None)
            return True

    backend = Backend.from_plugin(Slow(concurrent_calls=concurrent), "fake")
    with ThreadPoolExecutor(3) as pool:
        updates = [pool.submit(backend.update_weights, {}) for _ in range(3)]
        gate.wait_for_call()
        gate.opened.set()
        assert sorted(update.result(timeout=10) for update in updates) == ["1", "2", "3"] == inside
    assert backend.weight_version == "3"


def test_a_default_version_is_never_one_that_was_used_before():
    backend = fake()
    for version in ("3", "1", "1"):
        assert backend.update_weights({}, version) == version
    assert [backend.update_weights({}) for _ in range(3)] == ["2", "4", "5"]
    assert backend.update_weights({}, "9" * 5000) and backend.update_weights({}) == "9" * 5000 + "+1"


def test_an_update_that_waits_is_not_overtaken_by_later_calls():
    gate = Gate()
    backend = Backend.from_plugin(Fake(gate, concurrent_calls=True), "fake")
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(backend.generate, [[1]], SHORT)
        gate.wait_for_call()
        update = pool.submit(backend.update_weights, {})
        assert wait_until(lambda: a_call_waits(backend))
        later = pool.submit(backend.generate, [[3]], SHORT)
        assert not wait([update, later], 0.1).done
        gate.opened.set()
        assert [each.result(10).weight_versions for each in (first, later)] == [("0",), ("1",)]


def test_an_update_waits_for_calls_in_flight_or_aborts_them():
    """An engine that takes several calls at once must not load weights into one of them."""
    gate = Gate()

    class Abortable(Fake):
        @hookimpl
        def abort(self, request):
            self.requests.append(request)
            gate.opened.set()
            return True

    engine = Abortable(gate, concurrent_calls=True, abort=True)
    backend, answers = Backend.from_plugin(engine, "fake"), []
    for when in ("drain", "abort"):
        gate.entered.clear()
        gate.opened.clear()
        call = threading.Thread(target=lambda: answers.append(backend.generate([[1]], SHORT, request_ids=["mine"])))
        update = threading.Thread(target=backend.update_weights, args=({},), kwargs={"when": when})
        call.start()
        gate.wait_for_call()
        update.start()
        if when == "drain":
            update.join(0.1)
            assert update.is_alive(), "the update must wait for the call"
            assert not any(isinstance(request, WeightUpdate) for request in engine.requests)
            gate.opened.set()
        for thread in (call, update):
            thread.join(timeout=10)
    # Core repeats the abort until the call has ended.
    assert [name for name, _ in groupby(type(request).__name__ for request in engine.requests)] == [
        *("GenerateRequest", "WeightUpdate"),
        *("GenerateRequest", "AbortRequest", "WeightUpdate"),
    ]
    assert engine.requests[3].request_ids == ("mine",)
    assert [batch.weight_versions for batch in answers] == [("0",), ("1",)] and backend.weight_version == "2"


def test_an_abort_that_came_too_early_is_repeated():
    """An engine cannot abort a request that has not reached it yet. This engine ignores the first two aborts."""
    gate = Gate()

    class LateAbort(Fake):
        @hookimpl
        def abort(self, request):
            self.requests.append(request)
            if len(self.requests) > 3:
                gate.opened.set()
            return True

    backend = Backend.from_plugin(LateAbort(gate, concurrent_calls=True, abort=True), "fake")
    call = threading.Thread(target=backend.generate, args=([[1]], SHORT))
    call.start()
    gate.wait_for_call()
    assert backend.update_weights({}, when="abort") == "1"
    call.join(timeout=10)
    assert [type(request).__name__ for request in sent(backend)][1:4] == ["AbortRequest"] * 3


def test_closing_an_engine_with_concurrent_calls_does_not_wait_for_them():
    gate = Gate()

    class Closable(Fake):
        @hookimpl
        def close(self, request):
            gate.opened.set()
            return True

    def fail_once_closed(batch):
        gate(batch)
        raise OSError("the engine is gone")

    backend, errors = Backend.from_plugin(Closable(fail_once_closed, concurrent_calls=True), "fake"), []

    def call():
        with pytest.raises(EngineError) as error:
            backend.generate([[1]], SHORT)
        errors.append(error.value)

    thread = threading.Thread(target=call)
    thread.start()
    gate.wait_for_call()
    backend.close()
    thread.join(timeout=10)
    assert "the engine is gone" in str(errors[0])


# New weights for answers under way ------------------------------------------------------------------------------------


@pytest.fixture
def stepping() -> Iterator[tuple[Backend, Stepping, Callable[[], Future[GenerateResult]]]]:
    """Yield a backend, its engine, and a function that begins an answer and returns in the middle of it."""
    engine = Stepping()
    backend = Backend.from_plugin(engine, "stepping")

    def begin() -> Future[GenerateResult]:
        engine.in_the_middle.clear()
        engine.go_on.clear()
        answer = backend.submit_generate([[5], [6]], LONG)
        assert engine.in_the_middle.wait(PATIENCE)
        return answer

    yield backend, engine, begin
    engine.go_on.set()
    engine.scored.set()


def ended(engine: Stepping, answer: Future[GenerateResult]) -> GenerateResult:
    engine.go_on.set()
    return answer.result(PATIENCE)


def test_an_answer_under_way_has_both_labels_and_a_later_one_only_the_new(stepping: Any) -> None:
    backend, engine, begin = stepping
    answer = begin()
    assert backend.update_weights({}, "new", when="now") == "new"
    assert engine.requests[-1].when == "now"
    batch = ended(engine, answer)
    assert batch.version_runs == ((("0", 0), ("new", 3)),) * 2 and batch.weight_versions == ("0", "0")
    later = backend.generate([[5]], LONG)
    assert later.version_runs is None and later.weight_versions == ("new",)
    provenance = backend.provenance(batch)
    assert provenance.version_runs == (("0", 0), ("new", 3)) and provenance.weight_version == "0"
    assert backend.provenance(later).version_runs == ()


def test_updates_are_counted_on_while_an_answer_is_under_way(stepping: Any) -> None:
    backend, engine, begin = stepping
    for _ in range(3):
        backend.update_weights({})
    answer = begin()
    assert [backend.update_weights({}, when="now") for _ in range(2)] == ["4", "5"]
    assert ended(engine, answer).version_runs == ((("3", 0), ("5", 3)),) * 2
    updates = [request for request in engine.requests if isinstance(request, WeightUpdate)]
    assert [update.number for update in updates] == [1, 2, 3, 4, 5]


def test_a_label_that_failed_once_in_a_call_is_not_trusted_in_it(stepping: Any) -> None:
    """The engine says "new" of tokens that were sampled after the failure and after the success alike."""
    backend, engine, begin = stepping
    answer = begin()
    engine.fails = EngineError("half-way")
    with pytest.raises(EngineError):
        backend.update_weights({}, "new", when="now")
    engine.fails = None
    backend.update_weights({}, "new", when="now")
    assert ended(engine, answer).version_runs == ((("0", 0), ("1", 3)),) * 2
    assert backend.generate([[5]], LONG).weight_versions == ("new",)


def test_scores_finish_on_the_old_weights_first(stepping: Any) -> None:
    backend, engine, _ = stepping
    engine.scored.clear()
    with ThreadPoolExecutor() as pool:
        scores = pool.submit(backend.score_logprobs, [[5, 6]])
        assert engine.scoring.wait(PATIENCE)
        update = pool.submit(backend.update_weights, {}, "new", "now")
        with pytest.raises(TimeoutError):
            update.result(0.3)
        engine.scored.set()
        assert scores.result(PATIENCE).weight_versions == ("0",) and update.result(PATIENCE) == "new"
    names = [type(request).__name__ for request in engine.requests]
    assert names.index("ScoreRequest") < names.index("WeightUpdate")


def test_an_answer_waits_for_the_verdict_on_weights_that_it_has_seen(stepping: Any) -> None:
    """A listener looks after the hook. Until it agrees, nobody knows the label of the tokens sampled meanwhile."""
    backend, engine, begin = stepping
    asking, answered = threading.Event(), threading.Event()

    class Disagreeing:
        def awake(self) -> None: ...

        def update_failed(self, label: str) -> None: ...

        def before_update(self, update: WeightUpdate) -> None:
            assert backend.score_logprobs([[5, 6]]).weight_versions == ("0",)

        def after_update(self, update: WeightUpdate) -> None:
            # The answer is still in the engine, which takes one call at a time.
            assert backend.score_logprobs([[5, 6]]) is not None
            asking.set()
            assert answered.wait(PATIENCE)
            raise EngineError("the listener disagrees", usable=True)

    backend.engine.listener = Disagreeing()
    answer = begin()
    with ThreadPoolExecutor() as pool:
        update = pool.submit(backend.update_weights, {}, "new", "now")
        assert asking.wait(PATIENCE)
        engine.go_on.set()
        with pytest.raises(TimeoutError):
            answer.result(0.3)
        answered.set()
        with pytest.raises(EngineError, match="disagrees"):
            update.result(PATIENCE)
    assert answer.result(PATIENCE).version_runs == ((("0", 0), ("1", 3)),) * 2 and backend.weight_version == "1"


@pytest.mark.parametrize(
    "runs",
    [
        None,
        (),
        ((("0", 0),),),
        ((("0", 0),), ()),
        ((("0", 1),), (("0", 0),)),
        ((("0", 0),), (("0", 0), ("1", 0))),
        ((("0", 0),), (("0", 0), ("1", 4), ("2", 3))),
        ((("0", 0),), (("0", 0), ("1", 6))),
        ((("0", 0),), ((0, 0),)),
        ((("0", 0),), (("0", True),)),
    ],
)
def test_runs_that_cannot_be_are_the_engines_fault(stepping: Any, runs: Any) -> None:
    _, engine, begin = stepping
    engine.report = lambda batch: replace(batch, version_runs=runs)
    with pytest.raises(EngineError):
        ended(engine, begin())


def test_runs_that_go_back_to_earlier_weights_are_the_engines_fault(stepping: Any) -> None:
    backend, engine, begin = stepping
    answer = begin()
    for label in ("first", "second"):
        backend.update_weights({}, label, when="now")
    runs = (("0", 0),), (("0", 0), ("second", 1), ("first", 2))
    engine.report = lambda batch: replace(batch, version_runs=runs)
    with pytest.raises(EngineError):
        ended(engine, answer)


def test_weights_that_were_loaded_twice_may_come_again(stepping: Any) -> None:
    backend, engine, begin = stepping
    answer = begin()
    for label in ("new", "0"):
        backend.update_weights({}, label, when="now")
    runs = ((("0", 0), ("new", 1), ("0", 2)),) * 2
    engine.report = lambda batch: replace(batch, version_runs=runs)
    assert ended(engine, answer).version_runs == runs


def test_now_needs_an_engine_that_can() -> None:
    with refused(CapabilityError, capability="updates_in_flight"):
        fake().update_weights({}, when="now")


@each("when", ["later", True, None, 3])
def test_a_word_that_is_none_is_refused(when: Any) -> None:
    with refused(InvalidRequestError, field="when"):
        fake().update_weights({}, when=when)


def test_an_adapter_is_of_one_version_in_an_answer() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        fake(adapters=True).load_adapter("one", {}, config={}, when="now")
    assert caught.value.field == "when"

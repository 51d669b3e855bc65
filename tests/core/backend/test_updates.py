"""New weights: their versions, what they wait for, and the provenance of what was computed with them."""

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import groupby
from pathlib import Path

import pytest
import torch

from corelm import Backend, hookimpl
from corelm.errors import CapabilityError, EngineError, InvalidRequestError
from corelm.spec.records import WeightUpdate
from helpers.each import each
from helpers.fakes import SHORT, Fake, Gate, fake, sent
from helpers.insides import a_call_waits
from helpers.processes import wait_until
from helpers.refusals import refused


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

"""How an engine's hooks are called: with retries, in turn, new weights only between calls, until it is closed."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
import tenacity
import torch

from corelm import Backend, Ragged, SamplingParams, hookimpl
from corelm.errors import (
    BackendClosedError,
    BackendIncompatibleError,
    BackendTimeoutError,
    CapabilityError,
    EngineError,
    InvalidRequestError,
)
from corelm.spec.records import ContainerRequest, Parts, WeightUpdate
from helpers.fakes import SHORT, Fake, Gate, fake, sent

# Retries, turns, closing ---------------------------------------------------------------------------------------------


def failing(times: int, error: Exception):
    left = iter(range(times))

    def bend(batch):
        for _ in left:
            raise error
        return batch

    return bend


def test_a_failed_call_is_retried_as_often_as_asked():
    three_attempts = tenacity.Retrying(stop=tenacity.stop_after_attempt(3), reraise=True)
    backend = Backend.from_plugin(Fake(failing(2, OSError("lost"))), "fake", retry=three_attempts)
    assert len(backend.generate([[1]], SHORT).ids) == 1
    with pytest.raises(EngineError, match="lost"):
        Backend.from_plugin(Fake(failing(3, OSError("lost"))), "fake", retry=three_attempts).generate([[1]], SHORT)


def test_an_unusable_engine_is_not_called_again():
    engine = Fake(failing(1, EngineError("dead", usable=False)))
    with pytest.raises(EngineError, match="dead"):
        Backend.from_plugin(engine, "fake", retry=3).generate([[1]], SHORT)
    assert len(engine.requests) == 1


@pytest.mark.parametrize("grad", [True, False])
def test_an_engine_cannot_change_the_callers_grad_mode(grad):
    def careless(batch):
        torch.set_grad_enabled(not grad)
        return batch

    with torch.set_grad_enabled(grad):
        fake(careless).generate([[1]], SHORT)
        assert torch.is_grad_enabled() is grad


def test_one_thread_at_a_time_enters_an_engine_without_concurrent_calls():
    inside, together = threading.Event(), threading.Barrier(2)

    def hold(batch):
        inside.set()
        together.wait(timeout=10)
        return batch

    backend = fake(hold)
    first = threading.Thread(target=backend.generate, args=([[1]], SHORT))
    first.start()
    assert inside.wait(timeout=10)
    with pytest.raises(BackendTimeoutError, match="busy"):
        backend.generate([[1]], SHORT, timeout=0.01)
    together.wait(timeout=10)
    first.join(timeout=10)
    shared = fake(hold, concurrent_calls=True)
    together.reset()
    threads = [threading.Thread(target=shared.generate, args=([[1]], SHORT)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        # Both calls must be in the engine at once to pass the barrier.
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in threads) and len(sent(shared)) == 2


def test_a_closed_backend_refuses_calls_and_can_be_closed_again():
    with fake() as backend:
        assert backend.health()
    backend.close()
    assert backend.closed and not backend.health()
    for call in (
        lambda: backend.generate([[1]], SHORT),
        lambda: backend.score_logprobs([[1, 2]]),
        lambda: backend.tokenize(["1"]),
        lambda: backend.update_weights({}),
    ):
        with pytest.raises(BackendClosedError, match="fake"):
            call()


def test_waiting_and_running_share_one_timeout():
    backend = fake()
    backend.generate([[1]], SHORT, timeout=5)
    assert 0 < sent(backend)[-1].timeout <= 5


def test_a_tenacity_retrying_raises_the_last_error_itself():
    twice = tenacity.Retrying(stop=tenacity.stop_after_attempt(2))
    with pytest.raises(EngineError, match="lost"):
        Backend.from_plugin(Fake(failing(2, OSError("lost"))), "fake", retry=twice).generate([[1]], SHORT)


def test_health_does_not_wait_for_a_call_under_way():
    class Healthy(Fake):
        @hookimpl
        def health(self, request):
            return True

    gate = Gate()
    backend = Backend.from_plugin(Healthy(gate), "fake")
    thread = threading.Thread(target=backend.generate, args=([[1]], SHORT))
    thread.start()
    gate.wait_for_call()
    assert backend.health()
    gate.opened.set()
    thread.join(timeout=10)


@pytest.mark.parametrize("lacks", ["capabilities", "tokenizer"])
def test_an_engine_without_capabilities_or_tokenizer_and_a_wrapper_without_hooks_are_refused(lacks):
    engine = type("Bare", (), {"capabilities": Fake.capabilities, "tokenizer": Fake.tokenizer, lacks: None})()
    if lacks == "tokenizer":
        del type(engine).tokenizer
    with pytest.raises(BackendIncompatibleError, match="without `capabilities` or `tokenizer`"):
        Backend.from_plugin(engine, "fake")
    with pytest.raises(BackendIncompatibleError, match="has no hook"):
        Backend.from_plugin(Fake(), "fake", wrappers=[object()])


def test_a_timeout_in_the_engine_becomes_a_backend_timeout_error():
    with pytest.raises(BackendTimeoutError, match="too slow"):
        fake(failing(1, TimeoutError("too slow"))).generate([[1]], SHORT)


def test_wrappers_see_and_replace_results():
    class Shout:
        @hookimpl(wrapper=True)
        def generate(self, request):
            batch = yield
            return replace(batch, finish_reasons=("abort",) * len(batch.ids))

    out = Backend.from_plugin(Fake(), "fake", wrappers=[Shout()]).generate([[1]], SHORT)
    assert out.finish_reasons == ("abort",)


@pytest.mark.parametrize("hook", ["genrate", "score"])
def test_a_misspelt_hook_is_an_error(hook):
    def method(self, request):
        return None

    plugin = type("Typo", (), {hook: hookimpl(method)})()
    with pytest.raises(BackendIncompatibleError, match=hook):
        Backend.from_plugin(Fake(), "fake", wrappers=[plugin])


def test_a_hook_with_the_wrong_signature_is_an_error():
    class Wrong:
        @hookimpl
        def generate(self, prompts): ...

    with pytest.raises(BackendIncompatibleError, match="generate"):
        Backend.from_plugin(Wrong.__new__(type("W", (Wrong, Fake), {})), "fake")


# Weights and provenance ----------------------------------------------------------------------------------------------


def test_weight_versions_count_up_unless_the_caller_names_them():
    backend = fake()
    assert backend.generate([[1]], SHORT).weight_versions == ("0",)
    assert backend.update_weights({"w": torch.zeros(1)}) == "1"
    assert sent(backend)[-1].state_dict.keys() == {"w"} and sent(backend)[-1].path is None
    assert backend.update_weights("some/where", version="step-9") == "step-9"
    assert sent(backend)[-1].path == Path("some/where")
    out = backend.generate([[1], [3]], SHORT)
    assert backend.provenance(out).weight_version == "step-9"
    with pytest.raises(InvalidRequestError, match="weights: expected a state dict or a path"):
        backend.update_weights(3)
    with pytest.raises(CapabilityError, match="update_weights"):
        fake(update_weights=False).update_weights({})


@pytest.mark.parametrize("concurrent", [False, True])
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


def test_raw_log_probs_are_labelled_with_temperature_one():
    backend = Backend.from_plugin(Fake(), "fake", model_name="m")
    sampling = SamplingParams(temperature=0.5, max_new_tokens=2)
    made = backend.provenance(backend.generate([[1]], sampling), sampling)
    assert made.distribution == ("raw", 1.0, "full", ())
    assert (made.backend, made.model, made.weight_version) == ("fake", "m", "0")


def test_rows_from_different_weights_have_different_provenance():
    backend = fake(lambda b: replace(b, weight_versions=("7", "8")))
    made = backend.provenance(backend.generate([[1], [3]], SHORT))
    assert [p.weight_version for p in made] == ["7", "8"]


def test_a_call_that_waited_for_an_update_carries_the_new_version():
    gate = Gate()
    backend = fake(gate)
    results = {}
    first = threading.Thread(target=lambda: results.update(first=backend.generate([[1]], SHORT)))
    first.start()
    gate.wait_for_call()
    # The update waits for the first call. The second call may enter before or after the update: its label must be true.
    engine = backend.engine.plugin
    engine.bend = lambda batch: batch
    update = threading.Thread(target=backend.update_weights, args=({},))
    second = threading.Thread(target=lambda: results.update(second=backend.generate([[1]], SHORT)))
    update.start()
    second.start()
    gate.opened.set()
    for thread in (first, update, second):
        thread.join(timeout=10)
    updated_before = [type(r).__name__ for r in engine.requests].index("WeightUpdate") < len(engine.requests) - 1
    assert results["first"].weight_versions == ("0",)
    assert results["second"].weight_versions == (("1",) if updated_before else ("0",))


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
    for drain in (True, False):
        gate.entered.clear()
        gate.opened.clear()
        call = threading.Thread(target=lambda: answers.append(backend.generate([[1]], SHORT, request_ids=["mine"])))
        update = threading.Thread(target=backend.update_weights, args=({},), kwargs={"drain": drain})
        call.start()
        gate.wait_for_call()
        update.start()
        if drain:
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
    assert backend.update_weights({}, drain=False) == "1"
    call.join(timeout=10)
    assert [type(request).__name__ for request in sent(backend)][1:4] == ["AbortRequest"] * 3


@pytest.mark.parametrize("wrapped", [False, True])
def test_hooks_of_core_do_not_wait_for_the_engine_unless_they_are_wrapped(wrapped):
    """A caller tokenizes and builds containers while the engine works for another, unless these hooks are wrapped."""
    gate = Gate()

    class Wrapper:
        @hookimpl(wrapper=True)
        def tokenize(self, request):
            return (yield)

        @hookimpl(wrapper=True)
        def to_containers(self, request):
            return (yield)

    backend = Backend.from_plugin(Fake(gate), "fake", wrappers=[Wrapper()] if wrapped else [])
    results, done = [], threading.Event()

    def call_core_hooks():
        results.append(backend.tokenize(["12"]).ids.tolist())
        tokens = Parts(None, None, Ragged.from_list([[1, 2]]))
        found = backend.to_containers(ContainerRequest(batch_size=(1,), fields=frozenset({"tokens"}), tokens=tokens))
        results.append(found["tokens", "full"])
        done.set()

    threads = [threading.Thread(target=backend.generate, args=([[1]], SHORT)), threading.Thread(target=call_core_hooks)]
    threads[0].start()
    gate.wait_for_call()
    threads[1].start()
    assert done.wait(timeout=0.2 if wrapped else 10) is not wrapped
    gate.opened.set()
    for thread in threads:
        thread.join(timeout=10)
    assert done.is_set() and results[0] == [[1, 2]]


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


def test_an_update_that_returns_false_is_an_error():
    engine = Fake()
    engine.updated = False
    with pytest.raises(EngineError, match="returned False: the new weights are not in force"):
        Backend.from_plugin(engine, "fake").update_weights({})


# Failures of the engine that are not exceptions as usual -------------------------------------------------------------


class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (asyncio.CancelledError("stopped"), "CancelledError: stopped"),
        (SystemExit(3), "SystemExit: 3"),
        (GeneratorExit(), "GeneratorExit: "),
        (Silent(), r"Silent: \(its message cannot be read: RuntimeError\)"),
    ],
)
def test_whatever_an_engine_raises_becomes_an_engine_error(error, text):
    for timeout in (None, 9.0):
        with pytest.raises(EngineError, match=text) as raised:
            fake(failing(1, error)).generate([[1]], SHORT, timeout=timeout)
        assert raised.value.__cause__ is error


def test_an_interrupt_in_the_engine_reaches_the_caller():
    with pytest.raises(KeyboardInterrupt):
        fake(failing(1, KeyboardInterrupt())).generate([[1]], SHORT)


@pytest.mark.parametrize(
    "bend",
    [
        lambda b: replace(b, ids=Ragged(b.ids.values.to("meta"), b.ids.lengths)),
        lambda b: replace(b, ids=Ragged(b.ids.values.to_sparse(), b.ids.lengths)),
        lambda b: replace(b, ids=b.ids.tolist()),
        lambda b: replace(b, finish_reasons=3),
        lambda b: 7,
    ],
    ids=["meta", "sparse", "list", "a-number", "no-record"],
)
def test_a_result_that_cannot_be_read_is_an_engine_error(bend):
    with pytest.raises(EngineError, match="hook generate"):
        fake(bend).generate([[1]], SHORT)


def test_an_engine_keeps_the_capabilities_that_it_declared_when_it_was_opened():
    backend = fake()
    declared, backend.engine.plugin.capabilities = backend.capabilities, None
    assert backend.capabilities is declared
    assert backend.generate([[1]], SHORT).ids.tolist() == [[1, 1]]

"""How an engine's hooks are called: retried, in turn, with new weights between calls and not in them; and its end."""

import threading
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
from helpers.fakes import SHORT, Fake, fake, sent

# Retries, turns, life ------------------------------------------------------------------------------------------------


def failing(times: int, error: Exception):
    left = iter(range(times))

    def bend(batch):
        for _ in left:
            raise error
        return batch

    return bend


def test_a_failed_call_is_repeated_as_often_as_asked():
    patient = tenacity.Retrying(stop=tenacity.stop_after_attempt(3), reraise=True)
    assert (
        len(Backend.from_plugin(Fake(failing(2, OSError("lost"))), "fake", retry=patient).generate([[1]], SHORT).ids)
        == 1
    )
    with pytest.raises(EngineError, match="lost"):
        Backend.from_plugin(Fake(failing(3, OSError("lost"))), "fake", retry=patient).generate([[1]], SHORT)


def test_an_engine_that_is_gone_is_not_asked_again():
    engine = Fake(failing(1, EngineError("dead", usable=False)))
    with pytest.raises(EngineError, match="dead"):
        Backend.from_plugin(engine, "fake", retry=3).generate([[1]], SHORT)
    assert len(engine.requests) == 1


@pytest.mark.parametrize("grad", [True, False])
def test_an_engine_changes_no_setting_of_its_callers_thread(grad):
    def careless(batch):
        torch.set_grad_enabled(not grad)
        return batch

    with torch.set_grad_enabled(grad):
        fake(careless).generate([[1]], SHORT)
        assert torch.is_grad_enabled() is grad


def test_one_thread_at_a_time_unless_the_engine_takes_several():
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
        # Both must be inside at once to pass the barrier.
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in threads) and len(sent(shared)) == 2


def test_a_closed_backend_says_so_and_closes_twice():
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


def test_a_callers_retrying_ends_with_the_last_error_itself():
    twice = tenacity.Retrying(stop=tenacity.stop_after_attempt(2))
    with pytest.raises(EngineError, match="lost"):
        Backend.from_plugin(Fake(failing(2, OSError("lost"))), "fake", retry=twice).generate([[1]], SHORT)


def test_health_does_not_wait_for_a_call_under_way():
    class Healthy(Fake):
        @hookimpl
        def health(self, request):
            return True

    inside, go_on = threading.Event(), threading.Event()
    backend = Backend.from_plugin(Healthy(lambda batch: (inside.set(), go_on.wait(timeout=10), batch)[-1]), "fake")
    thread = threading.Thread(target=backend.generate, args=([[1]], SHORT))
    thread.start()
    assert inside.wait(timeout=10)
    assert backend.health()
    go_on.set()
    thread.join(timeout=10)


@pytest.mark.parametrize("lacks", ["capabilities", "tokenizer"])
def test_an_engine_without_what_the_specification_names_is_refused(lacks):
    engine = type("Bare", (), {"capabilities": Fake.capabilities, "tokenizer": Fake.tokenizer, lacks: None})()
    if lacks == "tokenizer":
        del type(engine).tokenizer
    with pytest.raises(BackendIncompatibleError, match="without `capabilities` or `tokenizer`"):
        Backend.from_plugin(engine, "fake")
    with pytest.raises(BackendIncompatibleError, match="has no hook"):
        Backend.from_plugin(Fake(), "fake", wrappers=[object()])


def test_a_timeout_inside_the_engine_is_typed():
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
def test_a_misspelt_hook_is_an_error_and_not_silence(hook):
    def method(self, request):
        return None

    plugin = type("Typo", (), {hook: hookimpl(method)})()
    with pytest.raises(BackendIncompatibleError, match=hook):
        Backend.from_plugin(Fake(), "fake", wrappers=[plugin])


def test_a_hook_with_another_signature_is_an_error():
    class Wrong:
        @hookimpl
        def generate(self, prompts): ...

    with pytest.raises(BackendIncompatibleError, match="generate"):
        Backend.from_plugin(Wrong.__new__(type("W", (Wrong, Fake), {})), "fake")


# Weights and provenance ----------------------------------------------------------------------------------------------


def test_a_weight_version_counts_up_or_is_the_callers():
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


def test_raw_log_probs_have_temperature_one_whatever_they_were_sampled_with():
    backend = Backend.from_plugin(Fake(), "fake", model_name="m")
    sampling = SamplingParams(temperature=0.5, max_new_tokens=2)
    made = backend.provenance(backend.generate([[1]], sampling), sampling)
    assert made.distribution == ("raw", 1.0, "full", ())
    assert (made.backend, made.model, made.weight_version) == ("fake", "m", "0")


def test_rows_of_different_weights_have_different_provenance():
    backend = fake(lambda b: replace(b, weight_versions=("7", "8")))
    made = backend.provenance(backend.generate([[1], [3]], SHORT))
    assert [p.weight_version for p in made] == ["7", "8"]


def test_a_call_that_waited_behind_an_update_has_the_new_version():
    inside, go_on = threading.Event(), threading.Event()

    def hold(batch):
        inside.set()
        assert go_on.wait(timeout=10)
        return batch

    backend = fake(hold)
    results = {}
    first = threading.Thread(target=lambda: results.update(a=backend.generate([[1]], SHORT)))
    first.start()
    assert inside.wait(timeout=10)
    # The update waits for the first call, and the second call behind the update or before it: its label must be true.
    engine = backend.engine.plugin
    engine.bend = lambda batch: batch
    update = threading.Thread(target=backend.update_weights, args=({},))
    second = threading.Thread(target=lambda: results.update(c=backend.generate([[1]], SHORT)))
    update.start()
    second.start()
    go_on.set()
    for thread in (first, update, second):
        thread.join(timeout=10)
    updated_before = [type(r).__name__ for r in engine.requests].index("WeightUpdate") < len(engine.requests) - 1
    assert results["a"].weight_versions == ("0",)
    assert results["c"].weight_versions == (("1",) if updated_before else ("0",))


def test_an_update_waits_for_calls_in_flight_or_ends_them():
    """An engine that takes several calls at once must not load weights into one of them."""
    inside, ended = threading.Event(), threading.Event()

    class Abortable(Fake):
        @hookimpl
        def abort(self, request):
            self.requests.append(request)
            ended.set()
            return True

    def hold(batch):
        inside.set()
        assert ended.wait(timeout=10)
        return batch

    engine = Abortable(hold, concurrent_calls=True, abort=True)
    backend, answers = Backend.from_plugin(engine, "fake"), []
    for drain in (True, False):
        inside.clear()
        ended.clear()
        call = threading.Thread(target=lambda: answers.append(backend.generate([[1]], SHORT, request_ids=["mine"])))
        update = threading.Thread(target=backend.update_weights, args=({},), kwargs={"drain": drain})
        call.start()
        assert inside.wait(timeout=10)
        update.start()
        if drain:
            assert not any(isinstance(request, WeightUpdate) for request in engine.requests)
            ended.set()
        for thread in (call, update):
            thread.join(timeout=10)
    # The abort is repeated for as long as it takes.
    assert [name for name, _ in groupby(type(request).__name__ for request in engine.requests)] == [
        *("GenerateRequest", "WeightUpdate"),
        *("GenerateRequest", "AbortRequest", "WeightUpdate"),
    ]
    assert engine.requests[3].request_ids == ("mine",)
    assert [batch.weight_versions for batch in answers] == [("0",), ("1",)] and backend.weight_version == "2"


def test_an_abort_that_came_too_early_is_repeated():
    """Between its listing and the engine an answer cannot be aborted: here the engine knows none of it at first."""
    inside, ended = threading.Event(), threading.Event()

    class Deaf(Fake):
        @hookimpl
        def abort(self, request):
            self.requests.append(request)
            if len(self.requests) > 3:
                ended.set()
            return True

    def hold(batch):
        inside.set()
        assert ended.wait(timeout=10)
        return batch

    backend = Backend.from_plugin(Deaf(hold, concurrent_calls=True, abort=True), "fake")
    call = threading.Thread(target=backend.generate, args=([[1]], SHORT))
    call.start()
    assert inside.wait(timeout=10)
    assert backend.update_weights({}, drain=False) == "1"
    call.join(timeout=10)
    assert [type(request).__name__ for request in sent(backend)][1:4] == ["AbortRequest"] * 3


@pytest.mark.parametrize("watched", [False, True])
def test_what_core_does_itself_does_not_wait_for_the_engine(watched):
    """Callers tokenize and build containers while another one's answers are made, unless a plugin looks on."""
    inside, go_on = threading.Event(), threading.Event()

    class Watcher:
        @hookimpl(wrapper=True)
        def tokenize(self, request):
            return (yield)

        @hookimpl(wrapper=True)
        def to_containers(self, request):
            return (yield)

    engine = Fake(lambda batch: (inside.set(), go_on.wait(timeout=10), batch)[-1])
    backend = Backend.from_plugin(engine, "fake", wrappers=[Watcher()] if watched else [])
    results, done = [], threading.Event()

    def own():
        results.append(backend.tokenize(["12"]).ids.tolist())
        tokens = Parts(None, None, Ragged.from_list([[1, 2]]))
        found = backend.to_containers(ContainerRequest(batch_size=(1,), fields=frozenset({"tokens"}), tokens=tokens))
        results.append(found["tokens", "full"])
        done.set()

    threads = [threading.Thread(target=backend.generate, args=([[1]], SHORT)), threading.Thread(target=own)]
    threads[0].start()
    assert inside.wait(timeout=10)
    threads[1].start()
    assert done.wait(timeout=0.2 if watched else 10) is not watched
    go_on.set()
    for thread in threads:
        thread.join(timeout=10)
    assert done.is_set() and results[0] == [[1, 2]]


def test_closing_an_engine_that_takes_several_calls_does_not_wait_for_them():
    inside, closed = threading.Event(), threading.Event()

    class Closable(Fake):
        @hookimpl
        def close(self, request):
            closed.set()
            return True

    def hold(batch):
        inside.set()
        assert closed.wait(timeout=10)
        raise OSError("the engine is gone")

    backend, errors = Backend.from_plugin(Closable(hold, concurrent_calls=True), "fake"), []

    def call():
        with pytest.raises(EngineError) as error:
            backend.generate([[1]], SHORT)
        errors.append(error.value)

    thread = threading.Thread(target=call)
    thread.start()
    assert inside.wait(timeout=10)
    backend.close()
    thread.join(timeout=10)
    assert "the engine is gone" in str(errors[0])


def test_an_update_that_did_not_happen_is_an_error():
    engine = Fake()
    engine.updated = False
    with pytest.raises(EngineError, match="returned False: the new weights are not in force"):
        Backend.from_plugin(engine, "fake").update_weights({})

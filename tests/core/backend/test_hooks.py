"""How an engine's hooks are called: with retries, in turn, new weights only between calls, until it is closed."""

import asyncio
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import tenacity
import torch

from corelm import Backend, Capabilities, hookimpl
from corelm.errors import (
    BackendClosedError,
    BackendIncompatibleError,
    BackendTimeoutError,
    CapabilityError,
    CoreLMError,
    EngineError,
    InvalidRequestError,
    ProvenanceMismatchError,
)
from helpers.each import each
from helpers.fakes import SHORT, Fake, Gate, fake, sent


def test_an_engine_tells_facts_about_itself():
    engine = Fake()
    backend = Backend.from_plugin(engine, "fake")
    assert backend.info == {}
    engine.info = {"decoding": "cached"}
    found = backend.info
    engine.info["decoding"] = "uncached"
    assert found == {"decoding": "cached"} and backend.info == {"decoding": "uncached"}
    with pytest.raises(TypeError):
        found["decoding"] = "other"
    engine.info = {"dtype": torch.float32, 1: None}
    assert backend.info == {"dtype": "torch.float32", "1": "None"}
    # Engines behind a URL call something else so.
    engine.info = object()
    assert backend.info == {}
    backend.close()
    with pytest.raises(BackendClosedError):
        _ = backend.info


def test_an_engine_that_cannot_tell_facts_says_why():
    class Unknowing(Fake):
        info = property(lambda self: 1 / 0)

    assert Backend.from_plugin(Unknowing(), "fake").info == {"info": "ZeroDivisionError: division by zero"}


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


def test_a_retry_does_not_outlive_the_timeout():
    pauses = []
    for wait, retried in ((60.0, False), (0.5, True)):
        twice = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(2), wait=tenacity.wait_fixed(wait), sleep=pauses.append
        )
        backend = Backend.from_plugin(Fake(failing(9, OSError("lost"))), "fake", retry=twice)
        with pytest.raises(EngineError, match="lost"):
            backend.generate([[1]], SHORT, timeout=30.0)
        assert len(sent(backend)) == 1 + retried
    assert pauses == [0.5]


def test_an_unusable_engine_is_not_called_again():
    engine = Fake(failing(1, EngineError("dead", usable=False)))
    with pytest.raises(EngineError):
        Backend.from_plugin(engine, "fake", retry=3).generate([[1]], SHORT)
    assert len(engine.requests) == 1


@each("grad", [True, False])
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
    # The timeout may pass before the call waits for its turn.
    with pytest.raises(BackendTimeoutError):
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
        with pytest.raises(BackendClosedError):
            call()


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


class Bare:
    """Has what every engine has, and no more."""

    capabilities, tokenizer = Fake.capabilities, Fake.tokenizer


class WithoutCapabilities(Bare):
    capabilities = None


class WithoutTokenizer:
    capabilities = Fake.capabilities


class OtherArguments(Fake):
    @hookimpl
    def generate(self, prompts): ...


class Misspelt:
    @hookimpl
    def genrate(self, request): ...


@each(
    "engine, wrappers",
    [
        (WithoutCapabilities, []),
        (WithoutTokenizer, []),
        (OtherArguments, []),
        (Fake, [object()]),
        (Fake, [Misspelt()]),
    ],
)
def test_an_engine_or_a_wrapper_that_does_not_fit_the_hooks_is_refused(engine, wrappers):
    with pytest.raises(BackendIncompatibleError):
        Backend.from_plugin(engine(), "fake", wrappers=wrappers)


@each(
    "declared",
    [{"score": True}, {"update_weights": True}, {"adapters": True}, {"sleep_levels": frozenset({1})}, {"abort": True}],
)
def test_a_capability_without_its_hook_is_refused_when_the_engine_opens(declared):
    class Bare:
        capabilities = Capabilities(vocab_size=4, max_context=None, **declared)
        tokenizer = Fake.tokenizer

        @hookimpl
        def generate(self, request): ...

    class Watcher:
        @hookimpl(wrapper=True)
        def score_logprobs(self, request):
            return (yield)

    with pytest.raises(BackendIncompatibleError):
        Backend.from_plugin(Bare(), "bare", wrappers=[Watcher()])


# Failures of the engine that are not exceptions as usual -------------------------------------------------------------


@each("error", [asyncio.CancelledError("stopped"), SystemExit(3), GeneratorExit()])
def test_whatever_an_engine_raises_becomes_an_engine_error(error):
    with ThreadPoolExecutor(1) as pool:
        for timeout in (None, 9.0):
            call = pool.submit(fake(failing(1, error)).generate, [[1]], SHORT, timeout=timeout)
            with pytest.raises(EngineError) as raised:
                call.result(10)
            assert raised.value.__cause__ is error


@each("timeout", [None, 9.0])
def test_a_signal_handler_that_exits_ends_the_program_and_not_the_call(timeout):
    engine = Fake()

    def terminated(batch):
        # On the thread of a call with a timeout, Python runs the handler in the main thread, which waits.
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
        ended.wait(timeout=10)
        return batch

    engine.bend, ended = terminated, threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: (ended.set(), sys.exit(143)))
    try:
        with pytest.raises(SystemExit) as exited:
            Backend.from_plugin(engine, "fake", retry=3).generate([[1]], SHORT, timeout=timeout)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert exited.value.code == 143 and len(engine.requests) == 1


def test_an_interrupt_in_the_engine_reaches_the_caller():
    with pytest.raises(KeyboardInterrupt):
        fake(failing(1, KeyboardInterrupt())).generate([[1]], SHORT)


# What a hook raises and what its caller gets: the table in `corelm.spec.hookspecs` ------------------------------------


@each(
    "raised, kind",
    [
        (CapabilityError("top_p with min_p", capability="min_p"), None),
        (InvalidRequestError("temperature: too cold", field="temperature", problems={1: "too cold"}), None),
        (EngineError("dead", usable=False), None),
        (ProvenanceMismatchError("another distribution"), None),
        (TimeoutError("too slow"), BackendTimeoutError),
        (RuntimeError("out of memory"), EngineError),
        (NotImplementedError(), EngineError),
    ],
)
def test_the_caller_gets_the_error_that_the_table_says(raised: Exception, kind: type[CoreLMError] | None):
    def bend(result):
        raise raised

    for call in (lambda backend: backend.generate([[1], [3]], SHORT), lambda backend: backend.score_logprobs([[1, 3]])):
        with pytest.raises(CoreLMError) as caught:
            call(fake(bend))
        if kind is None:
            assert caught.value is raised
        else:
            assert type(caught.value) is kind and caught.value.__cause__ is raised

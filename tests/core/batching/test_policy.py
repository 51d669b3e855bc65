"""`LLMPolicy(batching=True)` and `aforward`: policies share a batcher, and threads and tasks share its calls."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tensordict import TensorDict

import corelm
from corelm import Backend, History, LLMPolicy
from corelm.batching import DynamicBatcher, Limits, QueueFullError
from corelm.errors import BackendClosedError, BackendTimeoutError, InvalidRequestError
from helpers.batching_fakes import LONG, GatedEngine, all_capabilities, corelm_threads, join_threads, lone_answer
from helpers.each import each
from helpers.fakes import SHORT
from helpers.refusals import refused

QUESTIONS = ["Where is the cat?", "Is the tea hot?", "Who sings in the tree?", "When is it dark?"]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    """Allow threads some time to end: a backend without a batcher answers before its thread has ended."""
    before = set(threading.enumerate())
    yield
    join_threads(each for each in corelm_threads() if each not in before)


def run(main):
    return asyncio.run(asyncio.wait_for(main, LONG))


def gated_policy(engine, **options):
    return LLMPolicy(
        Backend.from_plugin(engine, "gated"), input_mode="tokens", sampling_params=SHORT, inplace=False, **options
    )


def tokens(*rows):
    return TensorDict(tokens=torch.tensor(rows), batch_size=[len(rows)])


def responses(td):
    return corelm.ragged(td, ("tokens", "response")).tolist()


@each("mode", ["text", "tokens"])
def test_threads_get_the_same_results_as_without_a_batcher(mode):
    with corelm.get_backend("toy") as backend:
        alone = LLMPolicy(backend, input_mode=mode, sampling_params={"max_new_tokens": 8}, num_samples=2)
        shared = alone.replace(batching=Limits(max_batch_size=16))

        def prompt(n):
            if mode == "text":
                return TensorDict(text=[QUESTIONS[n % 4]], batch_size=[1])
            return TensorDict(tokens=torch.tensor([[1 + n % 255, 65 + n % 7]]), batch_size=[1])

        with ThreadPoolExecutor(16) as pool:
            outs = list(pool.map(lambda n: shared(prompt(n), seed=n), range(48)))
        for n, out in enumerate(outs):
            own = alone(prompt(n), seed=n)
            assert responses(out) == responses(own)
            assert set(out.keys(include_nested=True)) == set(own.keys(include_nested=True))
            torch.testing.assert_close(
                corelm.ragged(out, ("log_probs", "full")).values, corelm.ragged(own, ("log_probs", "full")).values
            )
            assert out["log_probs"].provenance == own["log_probs"].provenance
        scorer, reference = (policy.replace(generate=False) for policy in (shared, alone))
        with ThreadPoolExecutor(4) as pool:
            texts = [TensorDict(text=[q], batch_size=[1]) if mode == "text" else prompt(3) for q in QUESTIONS]
            for td, out in zip(texts, pool.map(lambda td: scorer(td.clone()), texts), strict=True):
                own = reference(td.clone())["log_probs"].full
                assert [row.tolist() for row in out["log_probs"].full] == [row.tolist() for row in own]
        assert shared.get_batching_state().batches < 48 + 4
        shared.cleanup_batching()


def test_a_parser_may_wait_for_the_answer_of_another_thread():
    """Callers whose calls are merged read and write one after another, which must not become a deadlock."""
    parsing, other_is_done = threading.Event(), threading.Event()

    def parser(text):
        if not parsing.is_set():
            parsing.set()
            assert other_is_done.wait(LONG)
        return {"role": "assistant", "content": text}

    with (
        corelm.get_backend("toy") as backend,
        LLMPolicy(backend, batching=True, response_parser=parser, sampling_params=SHORT, inplace=False) as policy,
        ThreadPoolExecutor(2) as pool,
    ):

        def ask(question):
            history = History.from_chats([[{"role": "user", "content": question}]])
            return policy(TensorDict(history=history, batch_size=[1]))

        first = pool.submit(ask, QUESTIONS[0])
        assert parsing.wait(LONG)
        second = pool.submit(ask, QUESTIONS[1])
        second.add_done_callback(lambda done: other_is_done.set())
        for done in (second, first):
            assert done.result(LONG)["tokens"].response[0].tolist()


def test_a_caller_waits_no_longer_for_others_to_read_and_write_than_its_timeout(monkeypatch):
    monkeypatch.setattr("corelm.batching.batcher._LONGEST_WAIT", LONG * 9)
    parsing, go_on = threading.Event(), threading.Event()

    def parser(text):
        parsing.set()
        assert go_on.wait(LONG * 2)
        return {"role": "assistant", "content": text}

    with (
        corelm.get_backend("toy") as backend,
        LLMPolicy(backend, batching=True, sampling_params=SHORT, inplace=False) as policy,
        ThreadPoolExecutor(2) as pool,
    ):
        history = TensorDict(history=History.from_chats([[{"role": "user", "content": QUESTIONS[0]}]]))
        first = pool.submit(policy.replace(response_parser=parser), history)
        assert parsing.wait(LONG)
        second = pool.submit(policy, history, timeout=0.5)
        assert isinstance(second.exception(LONG), BackendTimeoutError | None), "a slow machine may need longer"
        go_on.set()
        assert first.result(LONG)["tokens"].response[0].tolist()


def test_policies_made_by_replace_share_the_batcher():
    engine = GatedEngine(permits=0)
    policy = gated_policy(engine, batching=Limits(min_batch_size=2, batching_timeout=60.0))
    other = policy.replace(on_error="skip").get_new_version(pad_output=True)
    assert isinstance(policy.backend, DynamicBatcher) and other.backend is policy.backend
    with ThreadPoolExecutor(2) as pool:
        outs = [pool.submit(each, tokens([n, 5]), seed=n) for n, each in ((3, policy), (4, other))]
        engine.free()
        assert [responses(out.result(LONG)) for out in outs] == [[lone_answer([3, 5], 3)], [lone_answer([4, 5], 4)]]
    assert [len(call.prompts) for call in engine.calls] == [2]
    plain = policy.replace(batching=False)
    assert plain.backend is policy.backend.backend and plain.get_batching_state() is None
    plain.cleanup_batching()
    policy.close()
    for one in (policy, other, plain):
        with pytest.raises(BackendClosedError):
            one(tokens([3]))


def test_a_batcher_passed_as_the_backend_keeps_its_limits():
    with DynamicBatcher(Backend.from_plugin(GatedEngine(), "gated")) as batcher:
        options = {"input_mode": "tokens", "sampling_params": SHORT}
        for policy in (LLMPolicy(batcher, **options), LLMPolicy(batcher, batching=True, **options)):
            assert policy.backend is batcher and policy.get_batching_state().queued == 0
        with refused(InvalidRequestError, field="batching"):
            LLMPolicy(batcher, batching=Limits(max_batch_size=3), **options)


def test_tasks_share_calls_and_two_threads_serve_them_all():
    engine = GatedEngine(permits=0)
    policy = gated_policy(engine, batching=True)

    async def main():
        tasks = [asyncio.create_task(policy.aforward(tokens([3 + n % 9, 1 + n % 7]), seed=n)) for n in range(64)]
        while (state := policy.get_batching_state()).queued + state.in_flight < 64:
            await asyncio.sleep(0.001)
        assert len(corelm_threads()) == 2, "one for the queue and one for the engine"
        engine.free()
        return await asyncio.gather(*tasks)

    outs = run(main())
    for n, out in enumerate(outs):
        assert responses(out) == [lone_answer([3 + n % 9, 1 + n % 7], n)]
    assert len(engine.calls) <= 4
    policy.close()


@each("batching", [True, False])
def test_cancelling_a_task_aborts_its_request_in_an_engine_that_can_abort(batching):
    engine = GatedEngine(permits=0, **all_capabilities(concurrent_calls=True))
    policy = gated_policy(engine, batching=batching)

    async def main():
        dropped = asyncio.create_task(policy.aforward(tokens([3], [4])))
        await asyncio.to_thread(engine.wait_for_calls, 1)
        kept = asyncio.create_task(policy.aforward(tokens([5]), seed=1))
        await asyncio.to_thread(engine.wait_for_calls, 2)
        dropped.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dropped
        await asyncio.to_thread(engine.wait_for, lambda: len(engine.aborted) == 2)
        engine.free()
        return await kept

    assert responses(run(main())) == [lone_answer([5], 1)]
    assert engine.aborted == set(engine.calls[0].request_ids)
    policy.close()


def test_cancelling_a_task_removes_its_request_from_the_queue():
    engine = GatedEngine(permits=0)
    policy = gated_policy(engine, batching=True)

    async def main():
        running = asyncio.create_task(policy.aforward(tokens([3]), seed=0))
        await asyncio.to_thread(engine.wait_for_calls, 1)
        dropped = asyncio.create_task(policy.aforward(tokens([4]), seed=0))
        while policy.get_batching_state().queued < 1:
            await asyncio.sleep(0.001)
        dropped.cancel()
        await asyncio.wait([dropped])
        assert policy.get_batching_state().queued == 0
        with pytest.raises(BackendTimeoutError):
            await policy.aforward(tokens([4]), timeout=0.01)
        engine.free()
        return await running

    assert responses(run(main())) == [lone_answer([3], 0)]
    assert len(engine.calls) == 1
    policy.close()


@each("on_full", ["block", "raise"])
def test_a_full_queue_delays_or_refuses_tasks_without_blocking_their_event_loop(on_full):
    engine = GatedEngine(permits=0)
    policy = gated_policy(engine, batching=Limits(max_queue=1, on_full=on_full))

    async def main():
        first = asyncio.create_task(policy.aforward(tokens([3]), seed=0))
        await asyncio.to_thread(engine.wait_for_calls, 1)
        more = [asyncio.create_task(policy.aforward(tokens([n]), seed=0)) for n in (4, 5, 6)]
        if on_full == "raise":
            while sum(task.done() for task in more) < 2:
                await asyncio.sleep(0.001)
        else:
            while policy.get_batching_state().outside < 2:
                await asyncio.sleep(0.001)
        engine.free()
        return [await first, *await asyncio.gather(*more, return_exceptions=True)]

    outs = run(main())
    refused = [out for out in outs if isinstance(out, QueueFullError)]
    assert len(refused) == (2 if on_full == "raise" else 0)
    policy.close()

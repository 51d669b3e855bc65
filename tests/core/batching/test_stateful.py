"""Random operations on a batcher: every request is settled exactly once, with its own answer or its own error."""

from concurrent.futures import CancelledError, Future, wait

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.batching.conftest import threads
from corelm import Backend
from corelm.backend.arguments import answer_seeds
from corelm.batching import DynamicBatcher, Limits, QueueFullError
from corelm.errors import BackendClosedError, BackendTimeoutError, EngineError
from helpers.batching_fakes import LONG, POISON, Clock, GatedEngine, all_capabilities, answer, rows_of
from helpers.each import examples

PROMPTS = st.lists(st.lists(st.sampled_from([3, 4, 5, 6]), min_size=1, max_size=4), min_size=1, max_size=3)


class Callers(RuleBasedStateMachine):
    """Callers of one batcher. The engine answers only when a rule permits it, and only a rule moves the clock."""

    @initialize(
        least=st.integers(1, 3),
        most=st.integers(3, 6),
        tokens=st.sampled_from([None, 20]),
        room=st.sampled_from([2, 1024]),
        concurrent=st.booleans(),
        abort=st.booleans(),
    )
    def open(self, least, most, tokens, room, concurrent, abort):
        self.threads = threads()
        self.engine = GatedEngine(permits=0, **all_capabilities(concurrent_calls=concurrent, abort=abort))
        self.clock = Clock()
        self.batcher = DynamicBatcher(
            Backend.from_plugin(self.engine, "gated"),
            Limits(
                min_batch_size=least,
                max_batch_size=most,
                max_batch_tokens=tokens,
                batching_timeout=5.0,
                max_queue=room,
                on_full="raise",
            ),
            clock=self.clock,
        )
        self.asked: list[tuple[Future, list[list[int]], int, float, int]] = []
        self.settled: list[Future] = []
        self.closed = False

    @precondition(lambda self: not self.closed)
    @rule(
        prompts=PROMPTS,
        seed=st.integers(0, 3),
        temperature=st.sampled_from([0.5, 1.0]),
        samples=st.sampled_from([None, 2]),
        poisoned=st.sampled_from([False] * 5 + [True]),
        timeout=st.sampled_from([None, None, 3.0]),
    )
    def ask(self, prompts, seed, temperature, samples, poisoned, timeout):
        if poisoned:
            prompts = [[POISON], *prompts]
        sampling = {"max_new_tokens": 2, "seed": seed, "temperature": temperature, "num_samples": samples}
        try:
            future = self.batcher.submit_generate(prompts, sampling, timeout=timeout)
        except QueueFullError as error:
            future = Future()
            future.set_exception(error)
        future.add_done_callback(self.settled.append)
        self.asked.append((future, prompts, seed, temperature, samples or 1))

    @rule(permits=st.integers(1, 3))
    def serve(self, permits):
        self.engine.release(permits)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data):
        data.draw(st.sampled_from(self.asked))[0].cancel()

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def advance_the_clock(self, seconds):
        self.clock.now += seconds

    @precondition(lambda self: not self.closed)
    @rule(flush=st.booleans())
    def clean_up(self, flush):
        self.engine.release(100)
        self.batcher.cleanup(flush=flush)
        assert self.batcher.state().threads == 0

    @precondition(lambda self: not self.closed)
    @rule(flush=st.booleans())
    def close(self, flush):
        self.engine.free()
        self.batcher.close(flush=flush)
        self.closed = True
        assert all(future.done() for future, *_ in self.asked)

    @invariant()
    def no_request_is_settled_twice(self):
        settled = list(getattr(self, "settled", ()))
        assert len({id(future) for future in settled}) == len(settled)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.engine.free()
        if not self.closed:
            self.batcher.close()
        assert not wait([future for future, *_ in self.asked], LONG).not_done
        assert len(self.settled) == len(self.asked)
        for future, prompts, seed, temperature, samples in self.asked:
            seeds = answer_seeds(seed, range(len(prompts)), samples).tolist()
            own = [
                answer(prompt, seeds[row * samples + sample], 2, temperature)
                for row, prompt in enumerate(prompts)
                for sample in range(samples)
            ]
            try:
                batch = future.result()
            except CancelledError:
                continue
            except (BackendClosedError, BackendTimeoutError, QueueFullError):
                continue
            except EngineError as error:
                assert prompts[0] == [POISON], f"failed because of another request: {error}"
                continue
            assert prompts[0] != [POISON]
            got = batch.ids.tolist()
            if batch.finish_reasons[0] == "abort":
                assert self.engine.capabilities.abort
            else:
                assert got == own
        for call in self.engine.calls:
            assert len(set(call.request_ids)) == len(rows_of(call))
        state = self.batcher.state()
        assert state.queued == state.in_flight == 0
        assert threads() <= self.threads


TestCallers = Callers.TestCase
TestCallers.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)

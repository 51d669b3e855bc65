"""Calls of several threads: their rows share steps, join and leave between two of them, and fail apart."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from corelm import Backend
from corelm.backend import futures
from corelm.backend.arguments import prepare_generation
from corelm.errors import EngineError
from corelm.spec import GenerateResult, TokenChunk
from helpers.plain_forward import Open, assert_answers
from helpers.tiny_models import VOCAB, random_rows, tiny_model
from transformers_backend.continuation import CachedRows

PROMPTS = random_rows(7, 12, 7, 9, 5, 6, 8, 11)
LONG = {"max_new_tokens": 2000, "ignore_eos": True, "seed": 3}
SHORT = {"max_new_tokens": 2, "top_k": 7, "temperature": 0.7, "seed": 5}
CONTEXT = 4096
#: Rows of a forward pass from which on it belongs to the long call. Trial rows are fewer.
MANY = 6
in_thread = partial(futures.in_thread, name="caller")


class Paced:
    """Lets a decoding step of many rows begin when a test says so, and notes how many rows each step had."""

    def __init__(self, model: Any) -> None:
        self.begun, self.may_go_on = threading.Semaphore(0), threading.Semaphore(10**9)
        self.steps: list[int] = []
        self.raises: Callable[[int], BaseException | None] = lambda rows: None
        self._paced = False
        model.get_input_embeddings().register_forward_hook(self._look)

    def _look(self, module: object, args: Any, out: object) -> None:
        rows, columns = args[0].shape
        if columns == 1:
            self.steps.append(rows)
            if self._paced and rows >= MANY:
                self.begun.release()
                assert self.may_go_on.acquire(timeout=60)
            if error := self.raises(rows):
                raise error

    @contextmanager
    def paced(self) -> Iterator[None]:
        self.steps.clear()
        self.may_go_on, self._paced = threading.Semaphore(0), True
        try:
            yield
        finally:
            self._paced = False
            self.may_go_on.release(10**6)

    def step(self, count: int = 1) -> None:
        """Let so many steps go on, and wait until the next one has begun."""
        for _ in range(count):
            self.may_go_on.release()
            assert self.begun.acquire(timeout=60)


def arrived(backend: Backend, calls: int) -> None:
    """Wait until so many calls share steps."""
    loop = backend.engine.plugin.loop
    for _ in range(60_000):
        if len(loop._stepping) >= calls:
            return
        threading.Event().wait(0.001)
    raise AssertionError("no call came")


def opened(open_model: Open, family: str = "qwen2", **options: Any) -> tuple[Any, Backend, Paced]:
    """Return a model that was tried, with rows that join others if it can."""
    model = tiny_model(family, max_position_embeddings=CONTEXT)
    paced = Paced(model)
    backend = open_model(model, **options)
    backend.generate(PROMPTS, {**LONG, "max_new_tokens": 30})
    backend.generate(PROMPTS[:1], SHORT)
    return model, backend, paced


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "mamba"])
def test_two_tokens_wait_three_steps_at_most_behind_eight_rows_of_2000(open_model: Open, family: str) -> None:
    model, backend, paced = opened(open_model, family)
    expected = backend.generate(PROMPTS[:1], SHORT)
    with paced.paced():
        long = in_thread(lambda: backend.generate(PROMPTS, LONG, request_ids=list("abcdefgh")))
        assert paced.begun.acquire(timeout=60)
        paced.step(5)
        short = in_thread(lambda: backend.generate(PROMPTS[:1], SHORT))
        arrived(backend, 2)
        steps = len(paced.steps)
        # The step that had begun, and one for each of its tokens.
        paced.step(3)
        found = short.result(60)
        assert not long.done()
        backend.abort(list("abcdefgh"))
    assert found.ids.tolist() == expected.ids.tolist()
    assert_answers(found, model, PROMPTS[:1])
    # Windows and recurrent states take turns.
    assert (9 in paced.steps[steps - 1 :]) == (family == "qwen2")
    answers = long.result(60)
    assert answers.finish_reasons == ("abort",) * 8
    assert_answers(answers, model, PROMPTS)


def test_answers_are_those_of_calls_made_one_after_another(open_model: Open) -> None:
    model, backend, paced = opened(open_model)
    asked: list[tuple[Any, dict[str, Any]]] = [
        (PROMPTS, {**LONG, "max_new_tokens": 40}),
        (PROMPTS[:3], {"max_new_tokens": 25, "temperature": 0.0, "repetition_penalty": 1.3}),
        (PROMPTS[3:4], {"max_new_tokens": 30, "top_p": 0.8, "seed": 2, "ignore_eos": True}),
        (PROMPTS[4:], {"max_new_tokens": 9, "temperature": 0.5, "seed": 8, "stop_token_ids": list(range(3, 90))}),
    ]
    expected = [backend.generate(prompts, sampling) for prompts, sampling in asked]
    with paced.paced():
        calls = [in_thread(lambda: backend.generate(*asked[0]))]
        assert paced.begun.acquire(timeout=60)
        paced.step(2)
        for number, each in enumerate(asked[1:], 2):
            calls.append(in_thread(lambda each=each: backend.generate(*each)))  # type: ignore[misc]
            arrived(backend, number)
            paced.step(2)
    for (prompts, _), call, alone in zip(asked, calls, expected, strict=True):
        found = call.result(60)
        assert found.ids.tolist() == alone.ids.tolist() and found.finish_reasons == alone.finish_reasons
        assert_answers(found, model, prompts)
    assert max(paced.steps) == 8 + 3 + 1 + 4


@contextmanager
def two_calls(backend: Backend, paced: Paced) -> Iterator[tuple[Future[GenerateResult], Future[GenerateResult]]]:
    """Yield the futures of a call of eight rows and of one of a single row, which share steps after the next."""
    with paced.paced():
        many = in_thread(lambda: backend.generate(PROMPTS, {**LONG, "max_new_tokens": 30}))
        assert paced.begun.acquire(timeout=60)
        one = in_thread(lambda: backend.generate(PROMPTS[:1], {**LONG, "max_new_tokens": 20}))
        arrived(backend, 2)
        yield many, one


def test_a_call_whose_steps_fail_fails_alone(open_model: Open) -> None:
    _, backend, paced = opened(open_model)
    expected = backend.generate(PROMPTS, {**LONG, "max_new_tokens": 30})
    # The step of all nine fails. Made apart, that of the one fails again.
    paced.raises = lambda rows: RuntimeError("no such row") if rows == 9 or (rows == 1 and 9 in paced.steps) else None
    with two_calls(backend, paced) as (many, one):
        pass
    with pytest.raises(EngineError, match="no such row"):
        one.result(60)
    assert many.result(60).ids.tolist() == expected.ids.tolist() and 9 in paced.steps
    paced.raises = lambda rows: RuntimeError("too many") if rows == 9 else None
    with two_calls(backend, paced) as (many, one):
        pass
    assert many.result(60).ids.tolist() == expected.ids.tolist() and len(one.result(60).ids.values) == 20


@pytest.mark.parametrize("rows", [8, 9])
def test_an_interrupt_ends_the_call_of_the_main_thread_only(open_model: Open, rows: int) -> None:
    """It comes in a step of that thread's own rows, or in one of all."""
    model, backend, paced = opened(open_model)
    expected = backend.generate(PROMPTS[:1], {**LONG, "max_new_tokens": 20})
    others: list[Future[GenerateResult]] = []
    interrupted: list[int] = []

    def act(found: int) -> None:
        if len(paced.steps) == 4:
            others.append(in_thread(lambda: backend.generate(PROMPTS[:1], {**LONG, "max_new_tokens": 20})))
            arrived(backend, 2)
        if others and found == rows and not interrupted:
            interrupted.append(threading.get_ident())
            signal.raise_signal(signal.SIGINT)

    paced.steps.clear()
    paced.raises = act
    with pytest.raises(KeyboardInterrupt):
        backend.generate(PROMPTS, LONG)
    # The main thread makes no step of others.
    assert (interrupted == [threading.get_ident()]) == (rows == 8)
    found = others[0].result(60)
    assert found.ids.tolist() == expected.ids.tolist()
    assert_answers(found, model, PROMPTS[:1])
    assert not backend.engine.plugin.loop._stepping and not backend.engine.plugin.decoder.in_the_model()
    assert backend.generate(PROMPTS[:1], SHORT).finish_reasons == ("length",)


def test_an_interrupt_while_the_tokens_of_another_caller_are_sampled_does_not_end_his_call(open_model: Open) -> None:
    _, backend, paced = opened(open_model)
    expected = backend.generate(PROMPTS[:1], {**LONG, "max_new_tokens": 20})
    others: list[Future[GenerateResult]] = []

    def interrupting(chunk: TokenChunk) -> None:
        if chunk.row == 0 and paced.steps[-1] == 9 and not told:
            told.append(chunk)
            signal.raise_signal(signal.SIGINT)

    def stream() -> GenerateResult:
        sampling = {**LONG, "max_new_tokens": 20}
        return backend.run(prepare_generation(backend.engine, PROMPTS[:1], sampling, on_tokens=interrupting))

    def act(found: int) -> None:
        if len(paced.steps) == 4:
            others.append(in_thread(stream))
            arrived(backend, 2)

    told: list[TokenChunk] = []
    paced.steps.clear()
    paced.raises = act
    with pytest.raises(KeyboardInterrupt):
        backend.generate(PROMPTS, LONG)
    assert others[0].result(60).ids.tolist() == expected.ids.tolist() and told


def test_new_weights_come_between_the_steps_of_all_calls(open_model: Open) -> None:
    _, backend, paced = opened(open_model, recompute_kv_on_update=True)
    new = tiny_model(seed=1, max_position_embeddings=CONTEXT)
    with two_calls(backend, paced) as (many, one):
        paced.step(3)
        update = threading.Thread(target=lambda: backend.update_weights(new.state_dict(), "new", when="now"))
        update.start()
    update.join(60)
    for answers in (many.result(60), one.result(60)):
        assert answers.version_runs is not None
        assert all([version for version, _ in runs] == ["0", "new"] for runs in answers.version_runs)
    assert_answers(backend.generate(PROMPTS[:2], SHORT), new, PROMPTS[:2])


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error")])
def test_rows_go_on_apart_if_they_cannot_be_joined(
    error: Exception, open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, backend, paced = opened(open_model)
    expected = backend.generate(PROMPTS, {**LONG, "max_new_tokens": 30})
    join, cat = CachedRows.join, torch.cat
    failed: list[int] = []

    def without_memory(tensors: Any, *args: Any, **options: Any) -> Any:
        # The last thing that is made: the logits of both.
        if tensors[0].ndim == 2 and tensors[0].shape[-1] == VOCAB:
            failed.append(len(tensors))
            raise error
        return cat(tensors, *args, **options)

    def joined(self: CachedRows, other: CachedRows) -> None:
        with monkeypatch.context() as patch:
            if self.shares and not failed:
                patch.setattr(torch, "cat", without_memory)
            join(self, other)

    monkeypatch.setattr(CachedRows, "join", joined)
    with two_calls(backend, paced) as (many, one):
        pass
    assert many.result(60).ids.tolist() == expected.ids.tolist() and len(one.result(60).ids.values) == 20
    assert failed and 9 not in paced.steps


def test_new_weights_after_the_last_step_do_not_count_as_wrong_numbers(open_model: Open) -> None:
    model, new = tiny_model(max_position_embeddings=CONTEXT), tiny_model(seed=1, max_position_embeddings=CONTEXT)
    steps = 0

    def look(module: object, args: Any, out: object) -> None:
        nonlocal steps
        if args[0].shape == (3, 1):
            steps += 1
            if steps == 39:
                update.start()
                while not backend.engine.plugin.loop._guests:
                    threading.Event().wait(0.001)

    backend = open_model(model)
    update = threading.Thread(target=lambda: backend.update_weights(new.state_dict(), "new", when="now"))
    backend.generate(PROMPTS[:3], {"max_new_tokens": 2})
    hook = model.get_input_embeddings().register_forward_hook(look)
    steps = -(10**9)
    backend.generate(PROMPTS[3:5], {"max_new_tokens": 2})
    steps = 0
    made = backend.generate(PROMPTS[:3], {**LONG, "max_new_tokens": 40})
    update.join(60)
    hook.remove()
    assert steps == 39 and made.version_runs is None and made.weight_versions == ("0",) * 3
    assert backend.engine.plugin.decoder.info == "cached and padded"


def test_scores_come_between_two_steps(open_model: Open) -> None:
    _, backend, paced = opened(open_model)
    expected = backend.score_logprobs(PROMPTS[:2])
    with two_calls(backend, paced) as (many, _):
        scores = in_thread(lambda: backend.score_logprobs(PROMPTS[:2]))  # type: ignore[arg-type, return-value]
        paced.step(5)
        assert not many.done()
        torch.testing.assert_close(scores.result(60).logprobs.values, expected.logprobs.values)

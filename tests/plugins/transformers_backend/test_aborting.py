"""Requests that are aborted while the model runs: each ends with the step under way, and the others go on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from corelm import Backend, DynamicBatcher
from corelm.errors import BackendTimeoutError, EngineError
from corelm.spec import GenerateResult
from helpers import oracle
from helpers.plain_forward import Open, assert_answers
from helpers.tiny_models import random_rows, tiny_model

PROMPTS = random_rows(5, 9, 9)
NAMES = ["first", "second", "third"]
ENDLESS = {"max_new_tokens": 60, "ignore_eos": True, "seed": 4}


class Watch:
    """Acts in a forward pass of a model. Its hook stays, because the self-test starts anew with every new hook."""

    def __init__(self, model: Any) -> None:
        self.left, self.action = 0, _nothing
        model.model.embed_tokens.register_forward_hook(self._look)

    def _look(self, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            self.action()

    @contextmanager
    def at(self, forward: int, action: Callable[[], object]) -> Iterator[None]:
        """Do something in the forward pass of this number, counted from now on."""
        self.left, self.action = forward, action
        try:
            yield
        finally:
            self.left = 0


def _nothing() -> None:
    pass


def warmed_up(open_model: Open, model: nn.Module, **options: Any) -> tuple[Backend, Watch]:
    """Return a backend whose self-test is over."""
    watch = Watch(model)
    backend = open_model(model, **options)
    backend.generate(PROMPTS, ENDLESS)
    backend.score_logprobs(PROMPTS)
    return backend, watch


def generate(backend: Backend, watch: Watch, number: int, *names: str, **options: Any) -> GenerateResult:
    with watch.at(number, lambda: backend.abort(names)):
        return backend.generate(PROMPTS, ENDLESS, request_ids=NAMES, **options)


def test_an_aborted_row_keeps_its_tokens_and_the_others_go_on(open_model: Open) -> None:
    model = tiny_model()
    backend, watch = warmed_up(open_model, model)
    whole = backend.generate(PROMPTS, ENDLESS, request_ids=NAMES).ids.tolist()
    result = generate(backend, watch, 6, "second", "no such request")
    found = result.ids.tolist()
    assert result.finish_reasons == ("length", "abort", "length")
    assert 0 < len(found[1]) < 10 and found[1] == whole[1][: len(found[1])]
    assert [found[0], found[2]] == [whole[0], whole[2]]
    assert_answers(result, model, PROMPTS)


def test_all_rows_may_be_aborted(open_model: Open) -> None:
    model = tiny_model()
    backend, watch = warmed_up(open_model, model)
    result = generate(backend, watch, 6, *NAMES)
    assert result.finish_reasons == ("abort",) * 3 and int(result.ids.lengths.max()) < 10
    assert backend.generate(PROMPTS, ENDLESS).finish_reasons == ("length",) * 3


def test_rows_aborted_before_their_batch_begins_get_no_tokens(open_model: Open) -> None:
    model = tiny_model()
    # Each row is a batch, and the longest go first.
    backend, watch = warmed_up(open_model, model, max_batch_tokens=70)
    result = generate(backend, watch, 6, "first", "third")
    assert result.finish_reasons == ("abort", "length", "abort")
    assert result.ids.lengths.tolist()[0] == 0 and result.ids.lengths.tolist()[1] == 60
    assert result.logprobs.lengths.tolist() == result.ids.lengths.tolist()


def test_a_row_that_ended_by_itself_was_not_aborted(open_model: Open) -> None:
    model = tiny_model()
    backend, watch = warmed_up(open_model, model)
    with watch.at(2, lambda: backend.abort(["first"])):
        result = backend.generate(PROMPTS, {**ENDLESS, "max_new_tokens": 2}, request_ids=NAMES)
    assert result.finish_reasons == ("length",) * 3


def test_an_abort_ends_the_trials_of_a_new_model(open_model: Open) -> None:
    model = tiny_model()
    backend = open_model(model)
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1
        backend.abort(NAMES)

    hook = model.model.embed_tokens.register_forward_hook(count)
    result = backend.generate(PROMPTS, ENDLESS, request_ids=NAMES)
    assert result.finish_reasons == ("abort",) * 3 and result.ids.lengths.tolist() == [0, 0, 0]
    with pytest.raises(EngineError, match="row 0: aborted before it was scored; likewise rows 1, 2"):
        backend.score_logprobs(PROMPTS, request_ids=NAMES)
    assert forwards < 40
    hook.remove()
    whole = backend.generate(PROMPTS, ENDLESS)
    torch.testing.assert_close(
        whole.logprobs.split()[0], oracle.answer_logprobs(model, PROMPTS[0], whole.ids.tolist()[0]), rtol=0, atol=1e-5
    )


def test_aborted_scores_are_errors_of_their_rows(open_model: Open) -> None:
    model, rows = tiny_model(), random_rows(*[30] * 8)
    names = [str(number) for number in range(8)]
    backend, watch = warmed_up(open_model, model, max_batch_tokens=32)
    backend.score_logprobs(rows)
    with watch.at(1, lambda: backend.abort(names[1:])):
        result = backend.score_logprobs(rows, request_ids=names, on_error="skip")
    assert result.errors is not None and result.errors[0] == ""
    # Rows that share the forward pass under way are scored.
    assert result.errors.count("aborted before it was scored") >= 5
    for row, error, scored, found in zip(
        rows, result.errors, result.scored.split(), result.logprobs.split(), strict=True
    ):
        assert bool(scored[1:].all()) is (error == "") and bool(scored.any()) is (error == "")
        if not error:
            torch.testing.assert_close(found, oracle.logprobs(model, row), rtol=1e-7, atol=1e-5)
    with (
        watch.at(1, lambda: backend.abort(names[1:])),
        pytest.raises(EngineError, match="aborted before it was scored") as caught,
    ):
        backend.score_logprobs(rows, request_ids=names)
    assert 0 not in caught.value.rows and caught.value.usable


def test_a_beam_search_ends_with_the_beams_it_has(open_model: Open) -> None:
    model = tiny_model()
    backend, watch = warmed_up(open_model, model)
    beams = {"max_new_tokens": 30, "ignore_eos": True, "num_beams": 2, "temperature": 0.0}
    backend.generate(PROMPTS, beams, logprobs="none")
    # One prompt after another: the first is answered, the second is aborted, and so is the third.
    with watch.at(36, lambda: backend.abort(["second", "third"])):
        result = backend.generate(PROMPTS, beams, logprobs="none", request_ids=NAMES)
    assert result.finish_reasons == ("length", "abort", "abort")
    assert result.ids.lengths.tolist()[0] == 30 and 0 < result.ids.lengths.tolist()[1] < 30
    assert result.ids.lengths.tolist()[2] == 0


def test_a_timeout_ends_a_beam_search(open_model: Open) -> None:
    model = tiny_model(max_position_embeddings=100_000)
    # Far more than half a second of steps. The self-test reads as many tokens in one pass, which no timeout ends.
    beams = {"max_new_tokens": 2_000, "ignore_eos": True, "num_beams": 2, "temperature": 0.0}
    backend = open_model(model)
    with pytest.raises(BackendTimeoutError):
        backend.generate(PROMPTS, beams, logprobs="none", timeout=0.5)
    assert backend.generate(PROMPTS, {"max_new_tokens": 1}).finish_reasons


@pytest.mark.parametrize("batched", [False, True])
def test_a_cancelled_request_frees_the_model(open_model: Open, batched: bool) -> None:
    model = tiny_model(max_position_embeddings=100_000)
    backend, watch = warmed_up(open_model, model)
    caller = DynamicBatcher(backend) if batched else backend
    begun = threading.Event()
    with watch.at(4, begun.set):
        future = caller.submit_generate(PROMPTS, {**ENDLESS, "max_new_tokens": 90_000})
        assert begun.wait(60) and future.cancel()
        assert caller.generate(PROMPTS, ENDLESS, timeout=60.0).finish_reasons == ("length",) * 3
    caller.close()


def test_a_request_cancelled_while_it_waits_is_not_run(open_model: Open) -> None:
    model = tiny_model(max_position_embeddings=100_000)
    backend, watch = warmed_up(open_model, model)
    begun = threading.Event()
    with watch.at(4, begun.set):
        first = backend.submit_generate(PROMPTS, {**ENDLESS, "max_new_tokens": 90_000}, request_ids=NAMES)
        assert begun.wait(60)
        second = backend.submit_generate(PROMPTS, {**ENDLESS, "max_new_tokens": 90_000})
        second.cancel()
        backend.abort(NAMES)
        assert first.result(60).finish_reasons == ("abort",) * 3
        assert backend.generate(PROMPTS, ENDLESS, timeout=60.0).finish_reasons == ("length",) * 3


@pytest.mark.parametrize("batched", [False, True])
def test_an_exception_in_a_with_block_ends_the_calls_of_other_threads(open_model: Open, batched: bool) -> None:
    model = tiny_model(max_position_embeddings=100_000)
    backend, watch = warmed_up(open_model, model)
    caller = DynamicBatcher(backend) if batched else backend
    begun = threading.Event()
    found: list[GenerateResult] = []

    def ask() -> None:
        found.append(caller.generate(PROMPTS, {**ENDLESS, "max_new_tokens": 90_000}))

    thread = threading.Thread(target=ask)
    with watch.at(4, begun.set), pytest.raises(KeyboardInterrupt), caller:
        thread.start()
        assert begun.wait(60)
        raise KeyboardInterrupt
    thread.join(60)
    assert not thread.is_alive() and backend.closed
    assert found[0].finish_reasons == ("abort",) * 3

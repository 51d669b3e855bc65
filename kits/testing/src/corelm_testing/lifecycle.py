"""The life of a backend: its capabilities, bad rows, calls from many threads, and closing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from threading import Barrier
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import corelm
from corelm import Backend, LLMPolicy, Ragged
from corelm.errors import BackendTimeoutError, InvalidRequestError
from corelm.spec import GenerateResult
from corelm_testing.base import ConformanceBase, needs, not_applicable, require

BAD_ROWS = ("id-too-large", "negative-id", "no-tokens", "too-long")


class FaultPromises(ConformanceBase, theme="faults"):
    """A bad row is refused by its number, and the engine still serves the other rows."""

    @needs("generation_modes")
    @pytest.mark.parametrize("fault", BAD_ROWS)
    def test_good_prompts_are_served_next_to_a_bad_one(self, backend: Backend, fault: str) -> None:
        bad = self._bad_row(backend, fault, prompt=True)
        first, last = self.rows(backend, 5, 9)
        sampling = {"max_new_tokens": 3, "num_samples": 2}
        batch = backend.generate([first, bad, last], sampling, on_error="skip")
        served = torch.tensor([0, 1, 4, 5])
        assert batch.errors is not None and [row for row, text in enumerate(batch.errors) if text] == [2, 3]
        assert batch.finish_reasons[2:4] == ("error", "error")
        assert {batch.finish_reasons[row] for row in served} <= {"stop", "length"}
        assert batch.ids.lengths[2:4].tolist() == [0, 0] and bool((batch.ids.lengths[served] > 0).all())
        assert batch.logprobs is not None
        good = replace(batch, ids=batch.ids.select(served), logprobs=batch.logprobs.select(served))
        self.assert_true_answers([first, first, last, last], good)

    @needs("score")
    @pytest.mark.parametrize("fault", BAD_ROWS)
    def test_good_sequences_are_scored_next_to_a_bad_one(self, backend: Backend, fault: str) -> None:
        bad = self._bad_row(backend, fault, prompt=False)
        first, last = self.rows(backend, 5, 9)
        batch = backend.score_logprobs([first, bad, last], on_error="skip")
        assert batch.errors is not None and [bool(text) for text in batch.errors] == [False, True, False]
        for ids, found, scored in zip([first, bad, last], batch.logprobs.split(), batch.scored.split(), strict=True):
            if ids is bad:
                assert len(found) == len(bad) and not scored.any() and not found.any()
            else:
                assert scored.tolist() == [False] + [True] * (len(ids) - 1)
                self.assert_close(found[1:], self.oracle(ids, 1.0)[1:], f"next to {fault}")

    def test_the_policy_reports_what_is_wrong_with_a_row(self, backend: Backend) -> None:
        rows = self.rows(backend, 4, 4, 4)
        rows[1][2] = self.vocab_size
        policy = LLMPolicy(
            backend,
            input_mode="tokens",
            sampling_params={"max_new_tokens": 2},
            on_error="skip",
            inplace=False,
            return_log_probs=False,
        )
        out = policy(TensorDict(tokens=torch.tensor(rows), batch_size=[3]))
        assert out["finish_reason"][1] == "error" and str(self.vocab_size) in out["errors"][1]
        assert out["errors"][0] == out["errors"][2] == ""
        assert [len(answer) > 0 for answer in out["tokens"].response] == [True, False, True]

    def test_an_unknown_option_is_refused_before_the_engine_opens(self, backend: Backend) -> None:
        if backend.name not in {info.name for info in corelm.list_backends() if info.engine_available is not False}:
            not_applicable("needs an entry point, and its engine in this environment")
        with pytest.raises(InvalidRequestError) as caught:
            corelm.get_backend(backend.name, None, no_such_option=1)
        assert caught.value.field == "no_such_option"

    def _bad_row(self, backend: Backend, fault: str, *, prompt: bool) -> list[int]:
        (good,) = self.rows(backend, 5)
        limit = backend.capabilities.max_context
        if fault == "no-tokens" and prompt and backend.capabilities.empty_prompt:
            not_applicable("empty_prompt is declared")
        if fault == "too-long":
            require(backend, "max_context")
        bad: dict[str, Any] = {
            "id-too-large": [*good, self.vocab_size],
            "negative-id": [good[0], -1, good[1]],
            "no-tokens": [],
            # A sequence may fill the context; a prompt must leave room for an answer.
            "too-long": good[:1] * ((limit or 0) + (0 if prompt else 1)),
        }
        row: list[int] = bad[fault]
        return row


THREADS = 8
#: Seconds that a call must take for its timeout to be tested.
LONG_CALL = 0.4
#: The largest number of rows that such a call may have.
MOST_ROWS = 4096


class LifecyclePromises(ConformanceBase, theme="lifecycle"):
    """The life of a backend: its capabilities, calls from many threads, and closing."""

    @pytest.fixture(scope="class")
    @classmethod
    def closed(cls, open_backend: Callable[[], Backend]) -> Backend:
        """Return a backend that has served a request and was closed."""
        opened = open_backend()
        opened.generate(cls().rows(opened, 3), {"max_new_tokens": 1}, logprobs="none")
        opened.close()
        return opened

    def test_capabilities_describe_a_model(self, backend: Backend) -> None:
        capabilities = backend.capabilities
        assert capabilities.vocab_size > 1
        assert capabilities.max_context is None or capabilities.max_context > 1
        assert all(0 <= token < self.vocab_size for token in backend.eos_token_ids)
        assert 0 <= backend.pad_id < self.vocab_size
        assert capabilities.generation_modes <= {"raw", "processed", "scaled"}

    def test_an_open_backend_is_healthy(self, backend: Backend) -> None:
        assert backend.health() and not backend.closed

    @needs("score")
    def test_later_calls_do_not_change_scores(self, backend: Backend) -> None:
        # Core copies log-probs without gradients, but neither logits nor results with gradients.
        capabilities = backend.capabilities
        options: list[dict[str, Any]] = [{}]
        options += [{"return_logits": True}] if capabilities.logits else []
        options += [{"grad": True}] if capabilities.gradients else []
        for given in options:
            batch = backend.score_logprobs(self.rows(backend, 4, 9), **given)
            rows = [rows.values.detach() for rows in (batch.logprobs, batch.scored, batch.logits) if rows is not None]
            kept = [values.clone() for values in rows]
            backend.score_logprobs(self.rows(backend, 4, 9, seed=1), **given)
            assert all(torch.equal(a, b) for a, b in zip(kept, rows, strict=True)), given

    def test_later_calls_do_not_change_a_result(self, backend: Backend) -> None:
        prompts = self.rows(backend, 4, 9)
        logprobs = "raw" if backend.capabilities.generation_modes else "none"
        first = backend.generate(prompts, {"max_new_tokens": 5}, logprobs=logprobs)  # type: ignore[arg-type]
        kept = [rows.values.clone() for rows in (first.ids, first.logprobs) if rows is not None]
        backend.generate(self.rows(backend, 4, 9, seed=1), {"max_new_tokens": 5}, logprobs=logprobs)  # type: ignore[arg-type]
        now = [rows.values for rows in (first.ids, first.logprobs) if rows is not None]
        assert all(bool((a == b).all()) for a, b in zip(kept, now, strict=True))

    def test_a_call_does_not_change_its_request(self, backend: Backend) -> None:
        rows = Ragged.from_list(self.rows(backend, 4, 9))
        before = rows.tolist()
        backend.generate(rows, {"max_new_tokens": 2}, logprobs="none")
        if backend.capabilities.score:
            backend.score_logprobs(rows)
        assert rows.tolist() == before

    @needs("generation_modes")
    def test_eight_threads_at_once_each_get_their_own_answers(self, backend: Backend) -> None:
        prompts = [self.rows(backend, 3 + thread, 20 - thread, seed=thread) for thread in range(THREADS)]
        together = Barrier(THREADS)

        def ask(rows: list[list[int]]) -> GenerateResult:
            together.wait(timeout=60)
            return backend.generate(rows, {"max_new_tokens": 4})

        with ThreadPoolExecutor(THREADS) as pool:
            for rows, batch in zip(prompts, pool.map(ask, prompts), strict=True):
                self.assert_true_answers(rows, batch)

    @needs("score")
    def test_eight_threads_at_once_each_get_their_own_scores(self, backend: Backend) -> None:
        rows = [self.rows(backend, 3 + thread, 20 - thread, seed=thread) for thread in range(THREADS)]
        with ThreadPoolExecutor(THREADS) as pool:
            for sequences, batch in zip(rows, pool.map(backend.score_logprobs, rows), strict=True):
                self.assert_true_scores(sequences, batch)

    def test_a_timeout_ends_the_wait_and_the_engine_if_it_declares_so(self, backend: Backend) -> None:
        room = backend.capabilities.max_context
        most = 64 if room is None else min(64, room - 8)

        def seconds(count: int, new: int = most, timeout: float | None = None) -> float:
            prompts, started = self.rows(backend, *[8] * count), time.monotonic()
            with nullcontext() if timeout is None else pytest.raises(BackendTimeoutError):
                backend.generate(prompts, {"max_new_tokens": new}, logprobs="none", timeout=timeout)
            return time.monotonic() - started

        # A busy machine delays any call by about the same time, whatever its length. So an engine that fails with short
        # calls is tried with longer ones.
        found, rows, whole = "", 1, min(seconds(1), seconds(1))
        for least in (LONG_CALL, 3 * LONG_CALL, 9 * LONG_CALL):
            # The quicker of two calls, because the first may find a cold engine.
            while whole < least and rows <= MOST_ROWS:
                rows *= min(16, 1 + math.ceil(least / whole))
                whole = min(seconds(rows), seconds(rows)) if rows <= MOST_ROWS else whole
            if rows > MOST_ROWS:
                break
            waited, after = seconds(rows, timeout=whole / 10), seconds(1, new=1)
            if waited >= whole / 2:
                found = f"a timeout of {whole / 10:.2f} s did not end the call within {whole / 2:.2f} s"
            elif backend.capabilities.stops_at_timeout and after >= whole / 2:
                found = f"declared stops_at_timeout, but the next call waited more than {whole / 2:.2f} s"
            else:
                return
        if not found:
            not_applicable("needs calls that take long enough for a timeout")
        pytest.fail(found)

    @needs("abort")
    def test_aborting_a_finished_request_does_nothing(self, backend: Backend) -> None:
        batch = backend.generate(
            self.rows(backend, 4), {"max_new_tokens": 1}, logprobs="none", request_ids=["a request that has ended"]
        )
        backend.abort(["a request that has ended", "one that never was"])
        assert batch.finish_reasons[0] in ("stop", "length") and backend.health()

    def test_closing_twice_is_fine(self, closed: Backend) -> None:
        closed.close()
        assert closed.closed and not closed.health()

    def test_closing_one_backend_leaves_another_open(self, backend: Backend, closed: Backend) -> None:
        assert closed.closed and not backend.closed
        backend.generate(self.rows(backend, 3), {"max_new_tokens": 1}, logprobs="none")

    def test_leaving_the_context_closes(self, open_backend: Callable[[], Backend]) -> None:
        with pytest.raises(KeyError, match="the user's own"), open_backend() as opened:
            raise KeyError("the user's own")
        assert opened.closed

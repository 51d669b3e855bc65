"""A bad row is refused by its number, and the engine still serves the other rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import corelm
from corelm import Backend, LLMPolicy
from corelm.errors import InvalidRequestError
from corelm_testing.base import ConformanceBase, needs, not_applicable, require

BAD_ROWS = ("id-too-large", "negative-id", "no-tokens", "too-long")


class FaultPromises(ConformanceBase):
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

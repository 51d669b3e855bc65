"""What one row asks of the engine, and what becomes of a row that it refuses."""

from __future__ import annotations

import pytest
import torch

from corelm import Backend, Ragged
from corelm.errors import EngineError, InvalidRequestError
from corelm.spec.records import ScoreRequest
from helpers import oracle
from helpers.tiny_models import CONTEXT, VOCAB, random_rows, tiny_model
from vllm_backend.engine import AsyncEngine

MODEL = tiny_model(hidden_size=128)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found, expected, rtol=0, atol=1e-4)


# Refused by the engine ------------------------------------------------------------------------------------------------


def test_an_answer_that_the_engine_refuses_fails_alone(shared: Backend) -> None:
    # Nothing is wrong with the second prompt, but it leaves no room for so many tokens.
    prompts = random_rows(5, CONTEXT - 10, 7)
    sampling = {"max_new_tokens": None, "min_new_tokens": 40, "stop": ["e"]}
    batch = shared.generate(prompts, sampling, on_error="skip")
    assert batch.errors is not None and [bool(text) for text in batch.errors] == [False, True, False]
    assert "min_tokens" in batch.errors[1] and batch.finish_reasons[1] == "error"
    assert int(batch.ids.lengths[1]) == 0 and bool((batch.ids.lengths[[0, 2]] >= 40).all())
    assert batch.logprobs is not None
    for prompt, answer, found in zip(prompts, batch.ids.tolist(), batch.logprobs.split(), strict=True):
        assert close(found, oracle.answer_logprobs(MODEL, prompt, answer))
    with pytest.raises(EngineError) as caught:
        shared.generate(prompts, sampling)
    assert caught.value.usable and caught.value.problems.keys() == {1}
    assert shared.health()


def test_a_sequence_that_the_engine_refuses_fails_alone(engine: AsyncEngine) -> None:
    # Past core's own check, which would have caught the second one.
    rows = [*random_rows(5), [3, VOCAB + 7, 4], *random_rows(6, seed=1)]
    sequences = Ragged.from_list(rows)
    batch = engine.score(
        ScoreRequest(
            sequences=sequences,
            score_from=torch.tensor([1, 1, 3]),
            temperature=1.0,
            return_logits=False,
            grad=False,
            device=None,
            request_ids=("a", "b", "c"),
            timeout=None,
        )
    )
    assert batch.errors is not None and [bool(text) for text in batch.errors] == [False, True, False]
    found, scored = batch.logprobs.split(), batch.scored.split()
    assert not scored[1].any() and not found[1].any()
    assert scored[0].tolist() == [False] + [True] * 4 and scored[2].tolist() == [False] * 3 + [True] * 3
    assert close(found[0], oracle.logprobs(MODEL, rows[0]))
    assert close(found[2][3:], oracle.logprobs(MODEL, rows[2])[3:])


# Scoring --------------------------------------------------------------------------------------------------------------


def test_a_row_of_which_only_the_last_id_is_asked_for_needs_no_prompt_log_probs(shared: Backend) -> None:
    rows = random_rows(200, 200, CONTEXT, 2)
    batch = shared.score_logprobs(rows, score_from=[199, 150, CONTEXT - 1, 1])
    assert [int(scored.sum()) for scored in batch.scored.split()] == [1, 50, 1, 1]
    for row, found, scored in zip(rows, batch.logprobs.split(), batch.scored.split(), strict=True):
        assert close(found[scored], oracle.logprobs(MODEL, row)[scored])


def test_of_some_rows_nothing_is_asked(shared: Backend) -> None:
    batch = shared.score_logprobs([[5], [6, 7]])
    assert [scored.tolist() for scored in batch.scored.split()] == [[False], [False, True]]
    assert not shared.score_logprobs([[5], [6]]).scored.values.any()


# Sampling -------------------------------------------------------------------------------------------------------------


def test_engine_kwargs_reach_the_engine(shared: Backend) -> None:
    prompts = random_rows(5, 9)
    sampling = {"max_new_tokens": 8, "engine_kwargs": {"allowed_token_ids": [7, 8, 9]}, "seed": 1}
    batch = shared.generate(prompts, sampling)
    assert set(batch.ids.values.tolist()) <= {7, 8, 9}
    assert batch.logprobs is not None
    for prompt, answer, found in zip(prompts, batch.ids.tolist(), batch.logprobs.split(), strict=True):
        assert close(found, oracle.answer_logprobs(MODEL, prompt, answer))


@pytest.mark.parametrize(
    ("kwargs", "hint"),
    [
        ({"alowed_token_ids": [7]}, "allowed_token_ids"),
        ({"temperature": 0.5}, "give it as temperature"),
        ({"min_tokens": 3}, "give it as min_new_tokens"),
        ({"logprobs": 5}, "corelm decides it"),
    ],
)
def test_engine_kwargs_that_vllm_does_not_know_or_core_does_are_refused(
    shared: Backend, kwargs: dict[str, object], hint: str
) -> None:
    with pytest.raises(InvalidRequestError, match=hint) as caught:
        shared.generate([[5, 6]], {"engine_kwargs": kwargs})
    assert caught.value.field == "engine_kwargs"


def test_an_eos_that_is_ignored_is_not_held_back_before_the_least_length(shared: Backend) -> None:
    (eos,) = shared.eos_token_ids
    prompts = random_rows(*[6] * 200, seed=5)
    chances = torch.stack([oracle.next_logits(MODEL, prompt)[-1].softmax(-1)[eos] for prompt in prompts])
    draws = int(20 / float(chances.max()))
    sampling = {
        "max_new_tokens": 2,
        "min_new_tokens": 2,
        "ignore_eos": True,
        "stop": ["never"],
        "num_samples": draws,
        "seed": 1,
    }
    batch = shared.generate([prompts[int(chances.argmax())]], sampling, logprobs="none")
    first = torch.tensor(batch.ids.tolist())[:, 0]
    assert draws < 5000 and 5 < int((first == eos).sum()) < 50

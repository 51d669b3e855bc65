"""Kept ids: an engine is believed only if its sets are those that its scores imply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from corelm.spec import GenerateRequest, GenerateResult, Ragged, ScoreRequest, ScoreResult, TokenSets
from corelm_engine_kit import wrong_kept_ids

LOGPROBS = torch.tensor([0.3, 0.25, 0.2, 0.1, 0.05, 0.05, 0.05]).log()


def generate(request: GenerateRequest) -> GenerateResult:
    """The answers of a model whose distribution is always the same."""
    assert request.return_support and request.sampling.top_k == 5
    ids = Ragged.from_list([[0, 1, 2, 3]] * 2)
    sets = TokenSets.from_list([[[0, 1, 2, 3, 4]] * 4] * 2)
    mass = ids.with_values(torch.full((8,), float(LOGPROBS[:5].logsumexp(0))))
    return GenerateResult(ids=ids, logprobs=None, finish_reasons=("length",) * 2, kept_ids=sets, kept_log_mass=mass)


def score(request: ScoreRequest) -> ScoreResult:
    rows = request.sequences
    scored = rows.with_values(torch.tensor([t >= s for n, s in zip([7, 5], [3, 1], strict=True) for t in range(n)]))
    top = LOGPROBS[:5].repeat(12, 1)
    return ScoreResult(
        logprobs=rows.with_values(torch.zeros(12)), scored=scored, top_logprobs=Ragged(top, rows.lengths)
    )


Spoil = Callable[[GenerateResult], GenerateResult]

SPOILS: dict[str, tuple[Spoil, str]] = {
    "failed": (lambda made: replace(made, errors=("it burns", "")), "it burns"),
    "another-mass": (lambda made: replace(made, kept_log_mass=made.ids.with_values(torch.full((8,), -0.9))), "scores"),
    "nan": (lambda made: replace(made, kept_log_mass=made.ids.with_values(torch.full((8,), torch.nan))), "scores"),
    "more": (
        lambda made: replace(made, kept_ids=TokenSets.from_list([[[0, 1, 2, 3, 4, 5]] * 4] * 2)),
        "ids instead of 5",
    ),
    "fewer": (lambda made: replace(made, kept_ids=TokenSets.from_list([[[0, 1, 2, 3]] * 4] * 2)), "ids instead of 5"),
    "not-the-token": (
        lambda made: replace(made, kept_ids=TokenSets.from_list([[[0, 1, 2, 4, 5]] * 4] * 2)),
        "not in its set",
    ),
}


def test_an_engine_is_believed_whose_sets_are_those_that_its_scores_imply() -> None:
    assert wrong_kept_ids(generate, score, 7) == ""


@pytest.mark.parametrize("name", SPOILS)
def test_an_engine_with_other_sets_is_not_believed(name: str) -> None:
    spoil, message = SPOILS[name]
    assert message in wrong_kept_ids(lambda request: spoil(generate(request)), score, 7)

"""What the kit compares with an oracle: every number, and no fewer."""

import pytest
import torch

from corelm import Provenance, Ragged
from corelm.spec import GenerateResult, ScoreResult
from corelm_testing import ConformanceBase


def test_a_wrong_log_prob_is_found_wherever_it_is() -> None:
    class Case(ConformanceBase):
        def oracle(self, ids: list[int], temperature: float) -> torch.Tensor:
            return torch.arange(float(len(ids))).neg()

    case, rows, prompts = Case(), [[5, 6, 7, 8], [9, 8]], [[5], [9]]
    lengths, right = torch.tensor([4, 2]), torch.tensor([0.0, -1.0, -2.0, -3.0, 0.0, -1.0])
    scored = right != 0

    label = Provenance.label_of_scores(1.0)

    def look_at_scores(values: torch.Tensor) -> None:
        batch = ScoreResult(logprobs=Ragged(values, lengths), scored=Ragged(scored, lengths), **label)
        case.assert_true_scores(rows, batch)

    def look_at_answers(values: torch.Tensor) -> None:
        ids, logprobs = (Ragged(part[scored], lengths - 1) for part in (torch.arange(6), values))
        batch = GenerateResult(ids=ids, logprobs=logprobs, finish_reasons=("length",) * 2, **label)
        case.assert_true_answers(prompts, batch)

    for look in (look_at_scores, look_at_answers):
        look(right)
        for place in scored.nonzero().flatten().tolist():
            wrong = right.clone()
            wrong[place] -= 2 * case.tolerance
            with pytest.raises(AssertionError, match="off by"):
                look(wrong)

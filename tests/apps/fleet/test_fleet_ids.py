"""A fleet returns the ids that truncation left and the most probable ids as one engine does, whatever it loses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from apps.fleet.conftest import PROMPTS
from corelm import Backend, Ragged, TokenSets
from corelm.backend.arguments import prepare_generation
from corelm.spec import GenerateRequest, GenerateResult, ScoreResult, TokenChunk
from corelm_fleet.pending import PendingCall
from helpers.mortal_toys import MortalToy, Toys, one_engine, user_rows

CUT = {"temperature": 0.7, "top_k": 5, "max_new_tokens": 6, "seed": 1, "ignore_eos": True}
ASKED: dict[str, Any] = {"logprobs": "processed", "return_support": True, "top_logprobs": 3}
OF_IDS = ("kept_ids", "kept_log_mass", "top_ids", "top_logprobs", "tail_log_mass")
ONE = one_engine()
EXPECTED = ONE.generate(PROMPTS, CUT, **ASKED)
#: What scoring may be asked for about ids, for `SEQUENCES`.
SEQUENCES = Ragged.from_list(PROMPTS)
OF_SCORES: dict[str, dict[str, Any]] = {
    "support": {"support": [[[], [row, ids[1]]] for row, ids in enumerate(PROMPTS)]},
    "top_k": {"top_k": 4},
    "top_ids": {"top_ids": [torch.tensor([[row, 200 + row]]) for row in range(len(PROMPTS))]},
}
BAD = 7


def rows_of(result: GenerateResult | ScoreResult, name: str) -> list[Any]:
    value = getattr(result, name)
    assert isinstance(value, (Ragged, TokenSets)), name
    return value.tolist()


def assert_rows(found: Any, expected: Any, names: tuple[str, ...], left_out: tuple[int, ...] = ()) -> None:
    """Check that all rows are those of one engine, but for some."""
    for name in names:
        for row, (one, other) in enumerate(zip(rows_of(found, name), rows_of(expected, name), strict=True)):
            if row in left_out:
                continue
            if name.endswith("ids"):
                assert one == other, (name, row)
            else:
                torch.testing.assert_close(torch.tensor(one), torch.tensor(other), atol=1e-6, rtol=0)


def assert_sets_cross(fleet: Backend, one: Backend) -> None:
    """Check that sets and ids are those of one engine. `test_fleet_hosts.py` has a fleet of processes for it."""
    expected = one.generate(PROMPTS, CUT, **ASKED)
    assert_rows(fleet.generate(PROMPTS, CUT, **ASKED), expected, ("ids", "logprobs", *OF_IDS))
    for given in OF_SCORES.values():
        found, plain = (backend.score_logprobs(SEQUENCES, **given) for backend in (fleet, one))
        assert_rows(found, plain, ("logprobs", *(OF_IDS[2:] if "support" not in given else ())))


def bad(request: Any) -> bool:
    rows = request.prompts if isinstance(request, GenerateRequest) else request.sequences
    return user_rows(request) and PROMPTS[BAD] in rows.tolist()


def dies_of_one(engine: MortalToy, hook: str, request: Any) -> None:
    if hook in ("generate", "score_logprobs") and bad(request):
        engine.die()


def test_the_other_rows_keep_their_sets_when_one_fails() -> None:
    with Toys("a", "b", "c", before=dies_of_one) as toys:
        found = toys.backend.generate(PROMPTS, CUT, **ASKED, on_error="skip")
        assert found.finish_reasons[BAD] == "error" and found.errors is not None and found.errors[BAD]
        assert_rows(found, EXPECTED, ("ids", "logprobs", *OF_IDS), (BAD,))
        assert all(rows_of(found, name)[BAD] == [] for name in OF_IDS)
        assert sum(any(user_rows(request) for _, request in each.asked) for each in toys.made) > 1


@pytest.mark.parametrize("asked", OF_SCORES)
def test_the_other_rows_keep_their_scores_when_one_fails(asked: str) -> None:
    given = {"temperature": 0.7, **OF_SCORES[asked]}
    expected = ONE.score_logprobs(SEQUENCES, **given)
    with Toys("a", "b", "c", before=dies_of_one) as toys:
        found = toys.backend.score_logprobs(SEQUENCES, **given, on_error="skip")
        assert (found.support, found.mode) == (expected.support, expected.mode)
        assert found.errors is not None and [bool(error) for error in found.errors].index(True) == BAD
        assert rows_of(found, "scored")[BAD] == [False, False]
        assert_rows(found, expected, ("logprobs", *(OF_IDS[2:] if asked != "support" else ())), (BAD,))
        if asked != "support":
            width = len(rows_of(expected, "top_ids")[0][0])
            assert rows_of(found, "top_ids")[BAD] == [[-1] * width] * 2
            assert rows_of(found, "tail_log_mass")[BAD] == [0.0, 0.0]


def test_an_answer_that_is_aborted_after_a_loss_fails_alone_if_its_sets_are_not_known() -> None:
    """Chunks carry no sets, so those of tokens whose replica was lost are gone."""
    told: list[TokenChunk] = []
    requests: list[GenerateRequest] = []
    with Toys("a", before=lambda engine, hook, request: hook == "generate" and requests.append(request)) as toys:
        engine = toys.backend.engine
        engine.call(prepare_generation(engine, PROMPTS[:2], CUT, **ASKED, on_tokens=told.append))
    request = next(each for each in requests if user_rows(each))
    call = PendingCall(request)
    call.teller([0, 1], lambda: None)(TokenChunk(row=0, ids=[5], logprobs=[-0.5]))  # type: ignore[misc]
    call.aborted = {0, 1}
    assert call.leave_out(0) and call.leave_out(1)
    found = call.result("1")
    assert isinstance(found, GenerateResult) and found.errors is not None
    assert found.finish_reasons == ("error", "abort") and "the 1 tokens that had been handed over" in found.errors[0]
    assert rows_of(found, "kept_ids") == [[], []] and rows_of(found, "top_ids") == [[], []]

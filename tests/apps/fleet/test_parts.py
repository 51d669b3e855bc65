"""A call is split and joined without losing a field of its records."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from corelm import Ragged, SamplingParams, TokenSets
from corelm.errors import EngineError
from corelm.spec import GenerateRequest, GenerateResult, RowAnswer, RowFailure, ScoreRequest, ScoreResult, TopIds
from corelm_fleet.pending import Part, Request, request_of_rows, result_of_parts

ROWS = [[1], [2, 3], [4, 5, 6], [7]]


def generate_request() -> GenerateRequest:
    return GenerateRequest(
        prompts=Ragged.from_list(ROWS),
        sampling=SamplingParams(max_new_tokens=3),
        logprobs="processed",
        seeds=torch.tensor([10, 11, 12, 13]),
        stop_ids=frozenset({9}),
        request_ids=("a", "b", "c", "d"),
        timeout=50.0,
        on_tokens=lambda chunk: None,
        adapter="policy",
        return_support=True,
        top_logprobs=2,
        weight_version="7",
        weight_update=3,
    )


def score_request() -> ScoreRequest:
    return ScoreRequest(
        sequences=Ragged.from_list(ROWS),
        score_from=torch.tensor([1, 1, 2, 1]),
        temperature=0.5,
        return_logits=True,
        return_argmax=True,
        grad=False,
        device=torch.device("cpu"),
        request_ids=("a", "b", "c", "d"),
        timeout=50.0,
        adapter=False,
        support=TokenSets.from_list([[[position, 50 + row] for position in ids] for row, ids in enumerate(ROWS)]),
        top_k=2,
        top_ids=pairs(Ragged.from_list(ROWS), 60),
    )


def pairs(rows: Ragged, first: int) -> Ragged:
    """Return two numbers for each position of these rows, all of them different."""
    return rows.with_values(first + torch.arange(2 * len(rows.values)).reshape(-1, 2))


def numbers(rows: Ragged, first: float) -> Ragged:
    """Return one number for each position of these rows, all of them different."""
    return rows.with_values(first - torch.arange(len(rows.values)) / 8)


@pytest.mark.parametrize("request_", [generate_request(), score_request()], ids=["generate", "score"])
def test_every_field_of_a_request_is_carried(request_: Request) -> None:
    rows, names = [3, 1], ["d-1", "b-1"]

    def chunks(chunk: object) -> None:
        raise AssertionError

    made = request_of_rows(request_, rows, names, 7.0, chunks)
    expected: dict[str, Any] = {"request_ids": tuple(names), "timeout": 7.0, "on_tokens": chunks}
    for each in fields(request_):
        given, found = getattr(request_, each.name), getattr(made, each.name)
        assert given is not None and given != each.default, f"{each.name}: give it another value than its default"
        if each.name in expected:
            assert expected[each.name] == found, each.name
        elif isinstance(given, (Ragged, TokenSets, torch.Tensor)):
            assert found.tolist() == [given.tolist()[row] for row in rows], each.name
        else:
            # A field that has a value for each row needs a line above.
            assert found == given and not (isinstance(given, tuple) and len(given) == len(ROWS)), each.name


def whole_answers() -> GenerateResult:
    ids = Ragged.from_list([[20], [21, 22], [], [23]])
    return GenerateResult(
        ids=ids,
        logprobs=Ragged.from_list([[-0.1], [-0.2, -0.3], [], [-0.4]], torch.float32),
        finish_reasons=("stop", "length", "error", "abort"),
        mode="processed",
        temperature=0.5,
        support="truncated",
        sampling=SamplingParams(temperature=0.5),
        texts=("p", "q", "r", "s"),
        weight_versions=("1", "2", "3", "4"),
        errors=("", "", "odd", ""),
        adapter="policy",
        kept_ids=TokenSets.from_list([[[2, 20]], [[21], [3, 4, 22]], [], [[23, 30]]]),
        kept_log_mass=numbers(ids, -1.0),
        top_ids=pairs(ids, 40),
        top_logprobs=pairs(ids, -90).with_values(pairs(ids, -90).values.float()),
        tail_log_mass=numbers(ids, -3.0),
        version_runs=((("1", 0),), (("2", 0), ("3", 1)), (("3", 0),), (("4", 0),)),
        cached_tokens=(1, 0, None, 1),
    )


def whole_scores() -> ScoreResult:
    flat = Ragged.from_list(ROWS)
    count = len(flat.values)
    return ScoreResult(
        logprobs=flat.with_values(-torch.arange(count) / 8),
        scored=flat.with_values(torch.arange(count) % 2 == 0),
        logits=flat.with_values(torch.arange(3.0 * count).reshape(count, 3)),
        argmax=flat.with_values(torch.arange(count)),
        mode="processed",
        temperature=0.5,
        support="full",
        weight_versions=("1", "2", "3", "4"),
        errors=("", "odd", "", ""),
        adapter=False,
        top_ids=pairs(flat, 40),
        top_logprobs=pairs(flat, -90).with_values(pairs(flat, -90).values.float()),
        tail_log_mass=numbers(flat, -3.0),
    )


def part(whole: Any, rows: list[int]) -> Any:
    """Return some rows of a result, as an engine would return them."""
    values: dict[str, Any] = {}
    for each in fields(whole):
        value = getattr(whole, each.name)
        if isinstance(value, (Ragged, TokenSets)):
            values[each.name] = value.select(rows)
        elif isinstance(value, tuple):
            values[each.name] = tuple(value[row] for row in rows)
    return replace(whole, **values)


@pytest.mark.parametrize(
    ("request_", "whole"),
    [(generate_request(), whole_answers()), (score_request(), whole_scores())],
    ids=["generate", "score"],
)
def test_every_field_of_a_result_is_carried(request_: Request, whole: Any) -> None:
    # The second engine was sent row 1 as well, which counts as the first engine returned it.
    parts = [Part(part(whole, [2, 1]), [0, 1], [2, 1]), Part(part(whole, [3, 1, 0]), [0, 2], [3, 0])]
    made = result_of_parts(request_, parts, {}, "now")
    for each in fields(whole):
        given, found = getattr(whole, each.name), getattr(made, each.name)
        if each.name != "support" or isinstance(whole, GenerateResult):
            assert given is not None and given != each.default, f"{each.name}: give it another value than its default"
        if isinstance(given, Ragged):
            assert found.tolist() == given.tolist() and found.values.dtype == given.values.dtype, each.name
        elif isinstance(given, TokenSets):
            assert found.tolist() == given.tolist(), each.name
        else:
            assert found == given, each.name


def test_rows_that_failed_are_put_among_the_others() -> None:
    whole = replace(whole_answers(), texts=None, weight_versions=None, errors=None)
    failures: dict[int, RowFailure | RowAnswer] = {1: RowFailure("poisoned")}
    top = TopIds.of([{20: -0.5, 7: -2.0}, {21: -0.25}], 2)
    failures[2] = RowAnswer([20, 21], [-0.5, -0.25], "abort", [[20, 7], [21]], [-0.75, -0.5], top)
    made = result_of_parts(generate_request(), [Part(part(whole, [3, 0]), [0, 1], [3, 0])], failures, "now")
    assert isinstance(made, GenerateResult) and made.logprobs is not None
    assert made.ids.tolist() == [[20], [], [20, 21], [23]] and made.logprobs.tolist()[2] == [-0.5, -0.25]
    assert made.finish_reasons == ("stop", "error", "abort", "abort") and made.errors == ("", "poisoned", "", "")
    assert made.weight_versions is None
    assert made.kept_ids is not None and made.kept_ids.tolist() == [[[2, 20]], [], [[7, 20], [21]], [[23, 30]]]
    assert made.top_ids is not None and made.top_ids.tolist() == [[[40, 41]], [], [[20, 7], [21, -1]], [[46, 47]]]
    assert made.cached_tokens == (1, None, None, 1)
    assert made.version_runs is not None and made.version_runs[1:3] == ((("now", 0),),) * 2

    scores = replace(whole_scores(), weight_versions=("7",) * 4, errors=None)
    parts = [Part(part(scores, [0, 2, 3]), [0, 1, 2], [0, 2, 3])]
    found = result_of_parts(score_request(), parts, {1: RowFailure("poisoned")}, "now")
    assert isinstance(found, ScoreResult) and found.logits is not None and found.argmax is not None
    assert found.errors == ("", "poisoned", "", "") and found.weight_versions == ("7", "now", "7", "7")
    assert found.logprobs.tolist()[1] == [0.0, 0.0] and found.argmax.tolist()[1] == [-1, -1]
    assert found.scored.tolist()[1] == [False, False] and found.logits.tolist()[1] == [[0.0] * 3] * 2
    assert found.logits.tolist()[2] == whole_scores().logits.tolist()[2]  # type: ignore[union-attr]


def test_results_that_do_not_belong_together_are_not_joined() -> None:
    one, other = part(whole_answers(), [0, 1]), part(whole_answers(), [2, 3])
    for wrong, match in ({"temperature": 2.0}, "temperature"), ({"mode": "raw"}, "mode"), ({"texts": None}, "texts"):
        parts = [Part(one, [0, 1], [0, 1]), Part(replace(other, **wrong), [0, 1], [2, 3])]
        with pytest.raises(EngineError, match=match):
            result_of_parts(generate_request(), parts, {}, "now")
    mixed = [Part(one, [0, 1], [0, 1]), Part(replace(other, support="full"), [0, 1], [2, 3])]
    assert result_of_parts(generate_request(), mixed, {}, "now").support == "truncated"

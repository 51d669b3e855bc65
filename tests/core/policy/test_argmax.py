"""The most probable ids on request, and whether a row is greedy: what lm-eval calls `is_greedy`."""

import pytest
import torch
from tensordict import TensorDict

import corelm
from corelm import LLMPolicy, Text, Tokens
from corelm.containers import PerToken
from corelm.errors import EngineError, InvalidRequestError
from corelm_testing.toy import Bigram
from helpers.each import each
from helpers.refusals import refused

#: After id 0 comes 1, after 1 comes 2 or 3 alike, after 2 comes 0; after 3 id 4 is almost certain.
TABLE = torch.tensor(
    [[0.0, 1, 0, 0, 0], [0, 0, 1, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 9], [0, 0, 0, 0, 0]], dtype=torch.float32
)
ROWS = [[0, 1, 2, 0], [3, 4, 1, 3], [0, 1, 3], [2]]
BEST = [[-1, 1, 2, 0], [-1, 4, 0, 2], [-1, 1, 2], [-1]]


@pytest.fixture(scope="module")
def backend():
    with corelm.get_backend("toy", Bigram(TABLE)) as opened:
        yield opened


def scorer(backend, **options):
    options = {"input_mode": "tokens", "generate": False, "inplace": False, "return_argmax": True, **options}
    return LLMPolicy(backend, **options)


def of_rows(prompt, response=None):
    if response is None:
        tokens = Tokens.from_rows(full=prompt)
    else:
        tokens = Tokens.from_rows(prompt=prompt, response=response).exclude("full")
    return TensorDict({"tokens": tokens}, batch_size=tokens.batch_size)


def test_a_backend_returns_the_lowest_of_the_most_probable_ids(backend):
    asked = backend.score_logprobs(ROWS, return_argmax=True)
    assert asked.argmax.tolist() == BEST and asked.argmax.values.dtype == torch.int64
    assert backend.score_logprobs(ROWS).argmax is None
    assert backend.score_logprobs([], return_argmax=True).argmax.tolist() == []
    skipped = backend.score_logprobs([[0, 1], [0, 99], [3, 4]], return_argmax=True, on_error="skip")
    assert skipped.argmax.tolist() == [[-1, 1], [-1, -1], [-1, 4]]


def test_a_policy_says_which_rows_are_greedy(backend):
    out = scorer(backend)(of_rows(ROWS))
    assert [row.tolist() for row in out["argmax"].full] == BEST
    # Nothing of the last row is scored.
    assert out["is_greedy"].tolist() == [True, False, False, False]
    dense = scorer(backend, pad_output=True)(of_rows(ROWS))
    assert dense["argmax"].tolist() == [row + [-1] * (4 - len(row)) for row in BEST]
    assert dense["is_greedy"].dtype == torch.bool
    assert corelm.ragged(out, ("argmax", "full")).tolist() == BEST


def test_other_layouts_keep_minus_one_where_nothing_is_scored(backend):
    rows, dense = (scorer(backend, pad_output=pad)(of_rows(ROWS)) for pad in (False, True))
    for td in (rows, dense):
        assert corelm.repad(td)["argmax"].tolist() == dense["argmax"].tolist()
        assert corelm.ragged(corelm.repad(td, pad_output=False), ("argmax", "full")).tolist() == BEST
    narrow = [[-1, 1, 2], [-1, -1, -1]]
    for options in ({}, {"per_token": ["argmax"]}, {"per_token": []}):
        assert corelm.repad(dense[2:], **options)["argmax"].tolist() == narrow
    assert corelm.repad(TensorDict({"next": dense}, batch_size=4)[2:])["next", "argmax"].tolist() == narrow
    widths = [*corelm.repad(dense[:2]), *corelm.repad(dense[2:])]
    assert corelm.collate(widths)["argmax"].tolist() == dense["argmax"].tolist()
    ranks = PerToken.from_rows(full=[[1.0, 2.0, 3.0, 4.0]] * 2 + [[1.0, 2.0, 3.0], [1.0]])
    assert corelm.repad(rows.clone().set("ranks", ranks))["ranks"][3].tolist() == [1.0, 0.0, 0.0, 0.0]


def test_only_the_response_decides(backend):
    td = of_rows([[3, 0], [0, 1]], [[1, 2], [3]])
    assert scorer(backend)(td)["is_greedy"].tolist() == [True, False]
    td["tokens"] = Tokens.from_rows(prompt=[[3, 0], [0, 1]], response=[[1, 2], [3]])
    assert scorer(backend)(td)["is_greedy"].tolist() == [True, False]


def test_multiple_choice_as_lm_eval_reports_it():
    with corelm.get_backend("toy") as toy:
        policy = LLMPolicy(toy, input_mode="text", generate=False, return_argmax=True, inplace=False)
        greedy = LLMPolicy(toy, input_mode="text", sampling_params={"temperature": 0, "max_new_tokens": 4})
        said = greedy(TensorDict(text=["The cat"]))["text"].response[0]
        td = TensorDict(text=Text(prompt=["The cat"], response=[[said, " xyz"]], batch_size=(1,)), batch_size=1)
        out = policy(td)
    assert out["is_greedy"].tolist() == [[True, False]] and out["is_greedy"].shape == out.batch_size


def test_nothing_in_place_is_replaced(backend):
    td = of_rows(ROWS)
    policy = scorer(backend, inplace=True)
    policy(td)
    with refused(InvalidRequestError, field="argmax"):
        policy.replace(log_probs_key="ref_log_probs")(td)
    policy.replace(overwrite=True)(td)
    assert td["is_greedy"].tolist() == [True, False, False, False]
    assert {"argmax", "is_greedy"} <= set(policy.out_keys)


def test_a_policy_that_samples_has_no_argmax(backend):
    with refused(InvalidRequestError, field="return_argmax"):
        LLMPolicy(backend, return_argmax=True)


def test_callers_with_and_without_argmax_share_no_call(backend):
    with corelm.DynamicBatcher(backend) as batcher:
        futures = [batcher.submit_score_logprobs(ROWS, return_argmax=asked) for asked in (True, False, True)]
        found = [future.result(30).argmax for future in futures]
    assert found[1] is None and found[0].tolist() == found[2].tolist() == BEST


@each(
    "change, what",
    [
        (lambda argmax: None, "returned no argmax"),
        (lambda argmax: argmax.with_values(argmax.values.float()), "argmax are torch.float32"),
        (lambda argmax: argmax.with_values(argmax.values.clamp_min(0)), "must be -1"),
        (lambda argmax: argmax.with_values(argmax.values * 9), "must be -1"),
        (lambda argmax: argmax.with_values(argmax.values.clone().fill_(-1)), "outside the vocabulary"),
        (lambda argmax: corelm.Ragged(argmax.values[:-1], argmax.lengths - torch.tensor([0, 0, 0, 1])), "length"),
    ],
)
def test_a_wrong_argmax_is_an_error_of_the_engine(backend, change, what):
    class Wrong:
        @corelm.hookimpl(wrapper=True)
        def score_logprobs(self, request):
            result = yield
            return corelm.spec.ScoreResult(logprobs=result.logprobs, scored=result.scored, argmax=change(result.argmax))

    wrong = corelm.get_backend("toy", Bigram(TABLE), wrappers=[Wrong()])
    with wrong, pytest.raises(EngineError, match=what):
        wrong.score_logprobs(ROWS, return_argmax=True)

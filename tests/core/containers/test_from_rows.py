"""Containers made by hand from rows of their own length."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import corelm
from corelm import LLMPolicy, LogProbs, Masks, Ragged, Tokens
from corelm.containers import PerToken
from corelm.errors import InvalidRequestError
from helpers.each import each
from helpers.four_rows import RAW
from helpers.refusals import refused

PROMPT, RESPONSE, FULL = [[5, 17], [300]], [[2], [7, 2]], [[5, 17, 2], [300, 7, 2]]


@each(
    "rows",
    [
        PROMPT,
        tuple(map(tuple, PROMPT)),
        [torch.tensor(row) for row in PROMPT],
        [np.array(row, dtype=np.int32) for row in PROMPT],
        Ragged.from_list(PROMPT),
        torch.nested.nested_tensor([torch.tensor(row) for row in PROMPT], layout=torch.jagged),
        [[np.int64(5), torch.tensor(17)], [300]],
        np.array([np.array(row) for row in PROMPT], dtype=object),
    ],
)
def test_rows_of_ids_in_every_form(rows):
    tokens = Tokens.from_rows(prompt=rows)
    assert tuple(tokens.batch_size) == (2,) and not tokens.padded
    assert [row.tolist() for row in tokens.prompt] == PROMPT and {row.dtype for row in tokens.prompt} == {torch.int64}
    assert tokens.full is None and set(tokens.keys()) == {"prompt"}


@each(
    "rows, shape",
    [
        ([5, 17], ()),
        (torch.tensor([5, 17]), ()),
        (PROMPT, (2,)),
        ([PROMPT, RESPONSE], (2, 2)),
        ([[[5]], [[6, 7]]], (2, 1)),
        ([], (0,)),
        ([[], []], (2,)),
        ([[], [5]], (2,)),
    ],
)
def test_the_batch_is_how_the_rows_are_nested(rows, shape):
    tokens = Tokens.from_rows(full=rows)
    assert tuple(tokens.batch_size) == shape and not tokens.padded
    td = TensorDict(tokens=tokens, batch_size=shape)
    flat = [[5, 17]] if shape == () else [row for part in rows for row in part] if len(shape) == 2 else rows
    assert corelm.ragged(td, ("tokens", "full")).tolist() == flat


def test_full_is_the_prompt_followed_by_the_response():
    tokens = Tokens.from_rows(prompt=PROMPT, response=RESPONSE)
    assert [row.tolist() for row in tokens.full] == FULL
    assert [row.tolist() for row in Tokens.from_rows(prompt=PROMPT, full=FULL).prompt] == PROMPT
    for wrong in ({"response": RESPONSE, "full": [FULL[0], [300, 7, 3]]}, {"full": [FULL[0], [301, 7, 2]]}):
        with refused(InvalidRequestError, field="full", rows=(1,)):
            Tokens.from_rows(prompt=PROMPT, **wrong)


@each(
    "rows",
    [
        [[5], ["a"]],
        [[5], [0.5]],
        [[5], [True]],
        [torch.zeros(2), [5]],
        torch.zeros(2, 3, dtype=torch.int64),
        [np.zeros((2, 3))],
        (row for row in PROMPT),
        {"a": 1},
        [[[5]], [6]],
    ],
)
def test_what_is_not_a_row_of_ids_is_refused(rows):
    with refused(InvalidRequestError, field="prompt"):
        Tokens.from_rows(prompt=rows)


def test_fields_of_different_batches_and_no_fields_are_refused():
    with refused(InvalidRequestError, field="response"):
        Tokens.from_rows(prompt=PROMPT, response=[[2]])
    with pytest.raises(InvalidRequestError, match=r"pass the rows of a field: prompt, response, full"):
        Tokens.from_rows()


def test_log_probs_and_masks_are_as_long_as_the_tokens():
    scores = LogProbs.from_rows(
        prompt=[[0, 0], [0]], response=[[-0.5], [-1, -2]], scored_mask=[[0, 0, 1], [0, 1, 1]], provenance=RAW
    )
    assert [row.tolist() for row in scores.full] == [[0.0, 0.0, -0.5], [0.0, -1.0, -2.0]]
    assert {row.dtype for row in scores.full} == {torch.float32} and scores.provenance == scores[1].provenance == RAW
    assert [row.tolist() for row in scores.scored_mask] == [[False, False, True], [False, True, True]]
    masks = Masks.from_rows(all_attention_mask=[[1, 1, 1]] * 2, all_assistant_mask=[[False, False, True]] * 2)
    assert [row.tolist() for row in masks.all_assistant_mask] == [[False, False, True]] * 2
    assert [len(row) for row in PerToken.from_rows(full=[[0.5], [1, 2]]).full] == [1, 2]
    with refused(InvalidRequestError, field="scored_mask", rows=(1,)):
        LogProbs.from_rows(full=[[0, 0], [0, 0, 0]], scored_mask=[[0, 1], [0, 1]])
    with refused(InvalidRequestError, field="all_assistant_mask", rows=(0,)):
        Masks.from_rows(all_assistant_mask=[[0, 2]])


def test_a_policy_reads_them_without_masks():
    with corelm.get_backend("toy") as backend:
        rows = [[72, 105], [87, 104, 111]]
        policy = LLMPolicy(backend, input_mode="tokens", sampling_params={"max_new_tokens": 3}, inplace=False)
        out = policy(TensorDict(tokens=Tokens.from_rows(prompt=rows)))
        assert corelm.ragged(out, ("tokens", "prompt")).tolist() == rows
        split = Tokens.from_rows(prompt=rows, response=[[32], [63]])
        scored = policy.replace(generate=False)(TensorDict(tokens=split))
        assert [len(row) for row in scored["log_probs"].response] == [1, 1]


def test_the_constructor_names_from_rows():
    with pytest.raises(InvalidRequestError, match=r"no lists of rows; type Tokens.from_rows\(prompt=…\)"):
        Tokens(prompt=PROMPT, batch_size=[2])

"""Helpers of the KL tests: two bigram models behind the toy backend, rollouts, and KL values computed from the tables.

A test file binds the two fixtures to short names: ``gen, ref = gen_policy, ref_policy``.
"""

import pytest
import torch
from tensordict import TensorDict

import corelm
from corelm import LLMPolicy, Ragged
from corelm.containers.classes import flat
from corelm.kl import PerToken
from corelm_testing.toy import Bigram
from helpers.each import each

#: With seed 4 their answers are 6, 9, 3 and 9 tokens long.
QUESTIONS = ["The cat", "Who", "It is so", "When is it dark"]
GEN = Bigram.of_talk()
#: `GEN` plus noise: its tokens have other probabilities.
REF = Bigram(GEN.table.detach() + torch.randn(260, 260, generator=torch.Generator().manual_seed(0)))
LAYOUTS = each("pad", [False, True])
SHAPES = each("shape", [(), (3,), (2, 2)])
COEFF = 0.25


@pytest.fixture(scope="module")
def gen_policy():
    with corelm.get_backend("toy", GEN) as opened:
        yield LLMPolicy(opened, input_mode="text", sampling_params={"max_new_tokens": 9}, inplace=False)


@pytest.fixture(scope="module")
def ref_policy():
    with corelm.get_backend("toy", REF) as opened:
        yield LLMPolicy(opened, input_mode="text", generate=False)


def rollout(gen, shape=(3,), pad=False, seed=4, texts=QUESTIONS, **changes):
    policy = gen.replace(pad_output=pad, **changes)
    texts = texts[: shape[0] if shape else 1]
    if len(shape) == 2:
        policy = policy.replace(num_samples=shape[1])
    return policy(TensorDict(text=texts if shape else texts[0]), seed=seed)


def said(model, ids):
    """Return float64[len(ids)]: a bigram's log-prob of every id; 0 for the first."""
    table = model.table.detach().double().log_softmax(-1)
    return torch.cat([torch.zeros(1, dtype=torch.float64), table[ids[:-1], ids[1:]]])


def by_hand(td, counts=None, value=lambda gen, ref: gen - ref):
    """Return, row by row, the estimate at each position that counts (by default the response), and 0 elsewhere."""
    made = []
    prompts = corelm.ragged(td, ("tokens", "prompt")).tolist()
    for row, ids in enumerate(corelm.ragged(td, ("tokens", "full")).tolist()):
        where = torch.tensor(counts[row] if counts else [t >= len(prompts[row]) for t in range(len(ids))])
        made.append(torch.where(where, value(said(GEN, ids), said(REF, ids)), 0.0))
    return made


def rows_of(td, key):
    """Return the values under `key`, row by row without pads: of a dense tensor or of a `PerToken`."""
    value = td[key] if key in td.keys(include_nested=True) else None
    lengths = corelm.ragged(td, ("tokens", "full")).lengths.tolist()
    if isinstance(value, PerToken):
        found = flat(value.full)
    else:
        mask = td["masks"].all_attention_mask
        assert value.shape == mask.shape and not bool(value[~mask].any())
        found = Ragged(value[mask], mask.sum(-1).flatten()).split()
    assert [len(row) for row in found] == lengths
    return found


def assert_rows(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, atol=2e-5, rtol=1e-5)


def flat_rows(td):
    return [td] if not td.batch_dims else [row for part in td.unbind(0) for row in flat_rows(part)]


def token_rewards(td):
    return [torch.arange(len(ids), dtype=torch.float32) for ids in corelm.ragged(td, ("tokens", "full")).tolist()]

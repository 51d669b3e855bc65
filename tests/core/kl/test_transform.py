"""`KLRewardTransform` without an environment, changing coefficients, and warnings about biased estimators."""

import subprocess
import sys
import warnings

import pytest
import torch
from tensordict import TensorDict

from corelm import LogProbs, Masks
from corelm.kl import (
    AdaptiveKLController,
    BiasedKLWarning,
    FixedKLController,
    KLComputation,
    KLRewardTransform,
    RetrieveLogProb,
    k3_st,
)
from corelm.kl.transforms import BIASED
from helpers.kl_cases import COEFF, LAYOUTS, by_hand, gen_policy, ref_policy, rollout

gen, ref = gen_policy, ref_policy


@LAYOUTS
def test_the_transform_needs_no_environment(gen, ref, pad):
    td = rollout(gen, pad=pad)
    td["next"] = TensorDict(reward=torch.ones(3, 1), done=torch.ones(3, 1, dtype=torch.bool), batch_size=3)
    out = KLRewardTransform(ref, COEFF)(td)
    assert out is td and "reward" not in td.keys() and "ref_log_probs" in td["next"].keys()
    sums = torch.stack([row.sum() for row in by_hand(td)])[:, None]
    torch.testing.assert_close(td["next", "reward"].double(), 1 - COEFF * sums, atol=1e-4, rtol=1e-5)
    with pytest.raises(TypeError):
        KLRewardTransform(ref, add_to_reward=False)


def test_the_transform_works_on_log_probs_without_provenance():
    logp, other = torch.tensor([[-1.0, -2.0, -3.0]] * 2), torch.tensor([[-1.5, -1.0, -3.0]] * 2)
    mask = torch.tensor([[False, True, True], [False, True, False]])
    td = TensorDict(
        log_probs=LogProbs(full=logp, batch_size=2),
        masks=Masks(all_attention_mask=torch.ones(2, 3, dtype=torch.bool), all_assistant_mask=mask, batch_size=2),
        next=TensorDict(
            ref_log_probs=LogProbs(full=other, batch_size=2), reward=torch.tensor([[1.0], [2.0]]), batch_size=2
        ),
        batch_size=2,
    )
    KLComputation("k1", 0.5)(td)
    torch.testing.assert_close(td["next", "kl_penalty"], torch.tensor([[0.0, -1.0, 0.0], [0.0, -1.0, 0.0]]))
    torch.testing.assert_close(td["next", "reward"], torch.tensor([[1.5], [2.5]]))
    bare = TensorDict(
        log_probs=LogProbs(full=logp, batch_size=2), ref_log_probs=LogProbs(full=other, batch_size=2), batch_size=2
    )
    KLComputation("k1", add_to_reward=False, assistant_only=False)(bare)
    torch.testing.assert_close(bare["kl_penalty"], logp - other)


def test_a_controllers_value_is_read_at_every_call(gen, ref):
    td = RetrieveLogProb(ref)(rollout(gen))
    td["reward"] = torch.zeros(3)
    controller = AdaptiveKLController(0.1, target=1.0, horizon=10)
    module = KLComputation(coeff=controller)
    first = module(td.clone())["reward"]
    controller.update(100.0, 10)
    torch.testing.assert_close(module(td.clone())["reward"], first * 1.2)
    fixed = KLComputation(coeff=FixedKLController(0.1))(td.clone())
    torch.testing.assert_close(fixed["reward"], first)


USES = """
import warnings
from corelm.kl import KLComputation
for _ in range(2):
    for name in ("k1", "k2", "k3", "abs", "k1_st", "k3_st"):
        for options in ({"add_to_reward": True}, {"add_to_reward": False, "detach": False}, {"add_to_reward": False}):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                KLComputation(name, **options)
            where = "reward" if options["add_to_reward"] else "loss"
            for warning in caught:
                print(where, name, warning.category.__name__, warning.filename, "arXiv" in str(warning.message))
"""


@pytest.mark.process
def test_biased_uses_warn_once_and_point_at_the_caller():
    run = subprocess.run([sys.executable, "-c", USES], capture_output=True, text=True, check=True)
    lines = [line.split() for line in run.stdout.splitlines()]
    assert sorted((where, name) for where, name, *_ in lines) == sorted(BIASED)
    assert {tuple(rest[:2]) for _, _, *rest in lines} == {("BiasedKLWarning", "<string>")}
    cited = {(where, name) for where, name, _, _, cites in lines if cites == "True"}
    assert {("reward", "k3"), ("loss", "k1")} <= cited


def test_unbiased_uses_do_not_warn(ref):
    with warnings.catch_warnings():
        warnings.simplefilter("error", BiasedKLWarning)
        KLRewardTransform(ref)
        KLComputation("k3_st", detach=False, add_to_reward=False)
        KLComputation(k3_st)

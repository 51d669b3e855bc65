"""coeff · KL is subtracted from rewards of every shape: per token, or summed per sequence."""

import subprocess
import sys
import warnings

import pytest
import torch
from tensordict import TensorDict, lazy_stack

import corelm
from corelm import LogProbs, Masks, Ragged
from corelm.errors import InvalidRequestError, MissingKeyError
from corelm.kl import (
    AdaptiveKLController,
    BiasedKLWarning,
    FixedKLController,
    KLComputation,
    KLRewardTransform,
    PerToken,
    RetrieveKL,
    RetrieveLogProb,
    k3_st,
)
from corelm.kl.transforms import BIASED
from helpers.each import each
from helpers.kl_cases import (
    COEFF,
    LAYOUTS,
    SHAPES,
    assert_rows,
    by_hand,
    flat_rows,
    gen_policy,
    ref_policy,
    rollout,
    rows_of,
    token_rewards,
)
from helpers.refusals import refused

gen, ref = gen_policy, ref_policy


@LAYOUTS
@SHAPES
@each("form", ["scalar", "sequence", "sequence of one step", "token", "token with a last dimension"])
def test_the_kl_is_subtracted_from_dense_rewards(gen, ref, shape, pad, form):
    td = RetrieveLogProb(ref)(rollout(gen, shape, pad))
    kl, rewards = by_hand(td), token_rewards(td)
    if form.startswith("token"):
        prompts, responses = (corelm.ragged(td, ("tokens", name)) for name in ("prompt", "response"))
        at = torch.cat([prompts.mask("left"), responses.mask("right")], -1)
        reward = torch.zeros(at.shape).masked_scatter(at, torch.cat(rewards)).reshape(*shape, -1)
        td["reward"] = reward.unsqueeze(-1) if form != "token" else reward
    else:
        count = torch.Size(shape).numel()
        sizes = {"scalar": (), "sequence": (1,), "sequence of one step": (1, 1)}
        td["reward"] = torch.arange(count, dtype=torch.float32).reshape((*shape, *sizes[form]))
    given = td["reward"].clone()
    KLComputation("k1", COEFF)(td)
    assert td["reward"].shape == given.shape and td["reward"].dtype == torch.float32
    if form.startswith("token"):
        found = td["reward"].reshape(at.shape)
        assert not bool(found[~at].any())
        assert_rows(Ragged(found[at], at.sum(-1)).split(), [r - COEFF * k for r, k in zip(rewards, kl, strict=True)])
    else:
        sums = torch.stack([row.sum() for row in kl]).reshape(given.shape)
        torch.testing.assert_close(td["reward"].double(), given - COEFF * sums, atol=1e-4, rtol=1e-5)


@LAYOUTS
@SHAPES
@each("form", ["token", "token with a last dimension", "sequence"])
def test_the_kl_is_subtracted_from_rewards_in_rows_of_different_lengths(gen, ref, shape, pad, form):
    td = RetrieveLogProb(ref)(rollout(gen, shape, pad))
    kl, rewards = by_hand(td), token_rewards(td)
    if form == "sequence":
        rewards = [row.sum().reshape(1) for row in rewards]
    elif form != "token":
        rewards = [row.unsqueeze(-1) for row in rewards]
    level = [TensorDict(reward=row) for row in rewards]
    for width in reversed(shape):
        level = [lazy_stack(level[at : at + width]) for at in range(0, len(level), width)]
    td["next"] = level[0]
    KLComputation("k1", COEFF)(td)
    expected = [
        r - COEFF * (k.sum() if form == "sequence" else k).reshape(r.shape) for r, k in zip(rewards, kl, strict=True)
    ]
    assert_rows([row["reward"] for row in flat_rows(td["next"])], expected)


@LAYOUTS
@SHAPES
def test_rewards_in_a_per_token_container_stay_in_one(gen, ref, shape, pad):
    td = RetrieveLogProb(ref)(rollout(gen, shape, pad))
    rewards = token_rewards(td)
    # KLComputation writes a PerToken for rows; it also accepts one as a reward.
    rows = rollout(gen, shape, False)
    RetrieveKL(ref, add_to_reward=False)(rows)
    td["reward"] = rows["kl_penalty"].clone()
    for row, value in zip(flat_rows(td["reward"]), rewards, strict=True):
        row.set("full", value)
    KLComputation("k1", COEFF)(td)
    assert isinstance(td["reward"], PerToken)
    assert_rows(rows_of(td, "reward"), [r - COEFF * k for r, k in zip(rewards, by_hand(td), strict=True)])


@each("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float32, torch.float64])
def test_float_rewards_keep_their_dtype_and_others_become_float32(gen, ref, dtype):
    td = RetrieveLogProb(ref)(rollout(gen))
    td["reward"] = torch.tensor([1, 0, 1]).to(dtype)
    given = td["reward"]
    KLComputation(coeff=COEFF)(td)
    assert td["reward"].dtype == (dtype if dtype.is_floating_point else torch.float32)
    sums = torch.stack([row.sum() for row in by_hand(td)])
    torch.testing.assert_close(td["reward"].double(), given.double() - COEFF * sums, atol=0.2, rtol=0.02)
    assert torch.equal(given, torch.tensor([1, 0, 1]).to(dtype)), "the caller's tensor is unchanged"


def test_a_reward_in_float64_is_penalised_in_float64(gen, ref):
    td = RetrieveLogProb(ref)(rollout(gen))
    td["reward"] = torch.full((3,), 1e9 + 0.25, dtype=torch.float64)
    KLComputation(coeff=COEFF)(td)
    sums = torch.stack([row.sum() for row in by_hand(td)])
    torch.testing.assert_close(td["reward"], 1e9 + 0.25 - COEFF * sums, atol=1e-4, rtol=0)


@LAYOUTS
def test_rewards_of_another_shape_are_refused_and_nothing_is_written(gen, ref, pad):
    td = RetrieveLogProb(ref)(rollout(gen, (3,), pad))
    with pytest.raises(MissingKeyError, match=r"no 'reward'.*add_to_reward=False"):
        KLComputation()(td)
    td["rewards"] = torch.zeros(3)
    with pytest.raises(MissingKeyError, match=r"no 'reward' to subtract .* \(did you mean 'rewards'\?\)"):
        KLComputation()(td)
    for shape in [(3, 2), (3, 2, 1), (3, 4, 5)]:
        td["reward"] = torch.zeros(shape)
        with refused(InvalidRequestError, field="reward"):
            KLComputation()(td)
    td["next"] = lazy_stack([TensorDict(reward=torch.zeros(size)) for size in (1, 2, 3)])
    with refused(InvalidRequestError, field="reward", rows=(1, 2)):
        KLComputation()(td)
    assert "kl_penalty" not in td.keys() and "kl_penalty" not in td["next"].keys()


@LAYOUTS
def test_a_reward_that_is_nan_is_refused_by_row_and_pads_may_hold_any(gen, ref, pad):
    td = RetrieveLogProb(ref)(rollout(gen, (3,), pad))
    td["reward"] = torch.tensor([1.0, torch.nan, 1.0])
    with refused(InvalidRequestError, field="reward", rows=(1,)):
        KLComputation()(td)
    td["next"] = lazy_stack([TensorDict(reward=torch.full((1,), value)) for value in (1.0, 1.0, torch.nan)])
    with refused(InvalidRequestError, field="reward", rows=(2,)):
        KLComputation()(td)
    del td["next"]
    if pad:
        real = td["masks"].all_attention_mask
        td["reward"] = torch.ones(real.shape).masked_fill(~real, torch.nan)
        td["reward"][2, real[2].nonzero()[-1]] = torch.nan
        with refused(InvalidRequestError, field="reward", rows=(2,)):
            KLComputation()(td)
        td["reward"][2, real[2]] = 1.0
        assert KLComputation()(td)["reward"][real].isfinite().all() and not bool(real.all())


def test_a_kl_that_cannot_be_stored_penalises_no_reward(gen, ref):
    td = RetrieveLogProb(ref)(rollout(gen, (2,), False))
    td["reward"], td["stats"] = torch.ones(2), torch.zeros(2)
    with pytest.raises(KeyError):
        KLComputation("k2", COEFF, kl_key=("stats", "kl"), add_to_reward=True)(td)
    assert td["reward"].tolist() == [1.0, 1.0]


def test_a_reward_at_the_root_is_not_used_if_there_is_a_next(gen, ref):
    td = RetrieveLogProb(ref)(rollout(gen))
    td["reward"], td["next"] = torch.zeros(3), TensorDict(done=torch.ones(3, dtype=torch.bool), batch_size=3)
    with refused(MissingKeyError, field="reward"):
        KLComputation()(td)


# The transform, changing coefficients, and warnings about biased estimators -------------------------------------------


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

"""Errors of the KL modules: inputs that would give wrong numbers are refused, and the rows are named."""

from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict, lazy_stack

import corelm
from corelm import LogProbs, Masks
from corelm.errors import CapabilityError, InvalidRequestError, MissingKeyError, ProvenanceMismatchError
from corelm.kl import (
    DistillationLoss,
    FixedKLController,
    KLComputation,
    KLRewardTransform,
    PerToken,
    RetrieveKL,
    RetrieveLogProb,
    mismatch_report,
    staleness,
)
from helpers.each import each
from helpers.kl_cases import LAYOUTS, gen_policy, ref_policy, rollout
from helpers.refusals import refused

gen, ref = gen_policy, ref_policy


@LAYOUTS
@each("poison", [float("nan"), float("-inf"), float("inf")])
@each("side", ["log_probs", "ref_log_probs"])
def test_log_probs_that_are_not_finite_are_refused_by_row(gen, ref, pad, poison, side):
    td = RetrieveLogProb(ref)(rollout(gen, (2, 2), pad))
    container = td[side]
    last = corelm.ragged(td, ("tokens", "full")).lengths[2] - 1
    if pad:
        at = td["masks"].all_attention_mask[1, 0].nonzero()[last, 0]
        container.full[1, 0, at] = poison
    else:
        container.full[1][0][last] = poison
    with refused(InvalidRequestError, field="log-probs", rows=(2,)):
        KLComputation(add_to_reward=False)(td)


@LAYOUTS
def test_log_probs_of_another_distribution_are_refused_unless_allowed(gen, ref, pad):
    sampling = {"max_new_tokens": 9, "temperature": 0.7}
    hot = rollout(gen, pad=pad, sampling_params=sampling, log_probs_mode="processed")
    with pytest.raises(
        ProvenanceMismatchError, match=r"row 0: .*: processed, temperature 0.7, full support; and raw, .*allow_mismatch"
    ):
        RetrieveKL(ref, add_to_reward=False)(hot)
    RetrieveKL(ref, add_to_reward=False, allow_mismatch=True)(hot)
    # Equal modes and temperatures match; so do other weight versions and other temperatures of sampling.
    same = ref.replace(sampling_params={"temperature": 0.7}, log_probs_mode="processed")
    RetrieveKL(same, add_to_reward=False)(hot)
    RetrieveKL(ref, add_to_reward=False)(rollout(gen, pad=pad, sampling_params=sampling))
    with pytest.raises(CapabilityError):
        RetrieveKL(ref.replace(sampling_params={"top_k": 3}, log_probs_mode="processed"), add_to_reward=False)(hot)


def test_rows_of_several_distributions_are_compared_row_by_row(gen, ref):
    sampling = {"max_new_tokens": 9, "temperature": 0.7}
    hot = rollout(gen, sampling_params=sampling, log_probs_mode="processed")
    RetrieveLogProb(ref.replace(sampling_params={"temperature": 0.7}, log_probs_mode="processed"))(hot)
    cold = RetrieveLogProb(ref)(rollout(gen))
    both = lazy_stack([*hot.unbind(0)[:1], *cold.unbind(0)[1:]])
    assert len(both["log_probs"].provenance) == 2
    KLComputation(add_to_reward=False)(both)
    both[2]["ref_log_probs"].set("provenance", hot[2]["ref_log_probs"].provenance)
    with pytest.raises(ProvenanceMismatchError, match="row 2"):
        KLComputation(add_to_reward=False)(both)


def test_layouts_that_differ_are_refused_by_row(gen, ref):
    rows, dense = rollout(gen, pad=False), rollout(gen, pad=True)
    td = RetrieveLogProb(ref)(rows.clone())
    longer = rollout(gen, seed=5, sampling_params={"max_new_tokens": 4, "ignore_eos": True})
    td["ref_log_probs"] = RetrieveLogProb(ref)(longer)["ref_log_probs"]
    differ = corelm.ragged(td, ("log_probs", "full")).lengths != corelm.ragged(td, ("ref_log_probs", "full")).lengths
    with refused(InvalidRequestError, field="('ref_log_probs', 'full')", rows=(0, 1, 2)) as caught:
        KLComputation(add_to_reward=False)(td)
    assert caught.value.rows == tuple(differ.nonzero().flatten().tolist()) != ()
    td["ref_log_probs"] = RetrieveLogProb(ref)(dense.clone())["ref_log_probs"]
    with refused(InvalidRequestError, field="('ref_log_probs', 'full')"):
        KLComputation(add_to_reward=False)(td)
    td = RetrieveLogProb(ref)(dense.clone())
    td["ref_log_probs"] = LogProbs(full=td["ref_log_probs"].full[:, :-1], batch_size=3)
    with refused(InvalidRequestError, field="('ref_log_probs', 'full')"):
        KLComputation(add_to_reward=False)(td)
    td = TensorDict(dense)
    td["ref_log_probs"] = RetrieveLogProb(ref)(rollout(gen, (3, 1), True))["ref_log_probs"]
    with refused(InvalidRequestError, field="('ref_log_probs', 'full')"):
        KLComputation(add_to_reward=False)(td)


def test_dense_log_probs_that_are_off_by_one_column_are_noticed(gen, ref):
    # One prompt is a token longer than the other, and both answers have the same length. Scoring the texts pads on the
    # right, so the second row moves by one column and the width stays the same.
    td = rollout(gen, (2,), True, sampling_params={"max_new_tokens": 4, "ignore_eos": True}, texts=["Whoa", "Who"])
    scored = ref.replace(pad_output=True, inplace=False)(TensorDict(text=td["text"].full))
    assert scored["log_probs"].full.shape == td["log_probs"].full.shape
    assert not bool((scored["log_probs"].scored_mask & ~td["masks"].all_attention_mask).any()), "no pad is scored"
    td["ref_log_probs"] = scored["log_probs"]
    with refused(InvalidRequestError, field="('ref_log_probs', 'full')", rows=(1,)):
        KLComputation(add_to_reward=False)(td)
    # Without a scored_mask the shift cannot be detected.
    td["ref_log_probs"] = LogProbs(full=scored["log_probs"].full, batch_size=2)
    KLComputation(add_to_reward=False)(td)


def test_a_scored_mask_of_zeros_and_ones_is_one_of_false_and_true(gen, ref):
    td = RetrieveLogProb(ref)(rollout(gen, pad=True))
    wanted = KLComputation(add_to_reward=False)(td.clone())["kl_penalty"]
    for dtype in (torch.float32, torch.int64):
        td["log_probs"].scored_mask = td["log_probs"].scored_mask.to(dtype)
        assert torch.equal(KLComputation(add_to_reward=False, kl_key=str(dtype))(td)[str(dtype)], wanted)
    td["log_probs"].scored_mask[0] = torch.nan if td["log_probs"].scored_mask.is_floating_point() else 1
    with refused(InvalidRequestError, field="('log_probs', 'full')"):
        KLComputation(add_to_reward=False)(td)


def test_a_scored_mask_of_other_rows_is_refused(gen, ref):
    td = RetrieveLogProb(ref)(rollout(gen))
    marks = td["ref_log_probs"].scored_mask
    td["ref_log_probs"].scored_mask = [marks[0][:-1], torch.cat([marks[1], marks[1][-1:]]), marks[2]]
    with refused(InvalidRequestError, field="('ref_log_probs', 'scored_mask')", rows=(0, 1)):
        KLComputation(add_to_reward=False)(td)


@each(
    "options, field",
    [
        ({"estimator": "k4"}, "estimator"),
        *(({"coeff": value}, "coeff") for value in (float("nan"), "much", -0.1)),
    ],
)
def test_invalid_arguments_are_refused_by_the_constructor(options, field):
    with refused(InvalidRequestError, field=field):
        KLComputation(**options)


def test_keys_that_do_not_lead_to_log_probs_are_refused(gen, ref):
    td = RetrieveLogProb(ref)(rollout(gen))
    with refused(MissingKeyError, field="('old', 'full')"):
        KLComputation(add_to_reward=False, ref_log_probs_key=("old", "full"))(td)
    for key in (("ref_log_probs", "response"), "full"):
        with pytest.raises(InvalidRequestError, match=r"its field full: \('log_probs', 'full'\)"):
            RetrieveKL(ref, ref_log_probs_key=key)
    td["old"] = TensorDict(full=torch.zeros(3, 4), batch_size=3)
    with refused(InvalidRequestError, field="('old', 'full')"):
        KLComputation(add_to_reward=False, ref_log_probs_key=("old", "full"))(td)


def test_masks_that_do_not_belong_to_dense_log_probs_are_refused(gen, ref):
    td = RetrieveLogProb(ref)(rollout(gen, pad=True))
    compute = KLComputation(add_to_reward=False)
    td["masks"] = rollout(gen, pad=False)["masks"]
    with refused(InvalidRequestError, field="masks") as error:
        compute(td)
    assert "('log_probs', 'full')" in str(error.value)
    td["masks"] = Masks(all_attention_mask=torch.ones(3, 2, dtype=torch.bool), batch_size=3)
    with refused(InvalidRequestError, field="('log_probs', 'full')"):
        compute(td)
    td["masks"] = TensorDict(all_attention_mask=torch.ones(3, 2, dtype=torch.bool), batch_size=3)
    with refused(InvalidRequestError, field="masks"):
        compute(td)


@each(
    "make, said",
    [
        (lambda ref, td: KLComputation(coef=0.1), "KLComputation has no argument 'coef'; did you mean 'coeff'"),
        (lambda ref, td: FixedKLController(coeff=0.1), "FixedKLController has no .* 'coef'"),
        (lambda ref, td: KLRewardTransform(ref, coef=0.1), "KLRewardTransform has no .* 'coeff'"),
        (lambda ref, td: RetrieveKL(ref, asistant_only=True), "RetrieveKL has no .* 'assistant_only'"),
        (lambda ref, td: RetrieveLogProb(ref, overwrit=True), "RetrieveLogProb has no .* 'overwrite'"),
        (lambda ref, td: DistillationLoss(ref, kinds="js"), "DistillationLoss has no .* 'kind'"),
        (
            lambda ref, td: mismatch_report(td, train_log_prob_key="x"),
            "mismatch_report has no .* 'train_log_probs_key'",
        ),
        (lambda ref, td: staleness(td, "0", log_probs_keys="x"), "staleness has no .* 'log_probs_key'"),
    ],
)
def test_a_misspelt_argument_is_told_the_right_one(gen, ref, make, said):
    with pytest.raises(TypeError, match=said):
        make(ref, rollout(gen))


def test_lowering_a_reward_warns_where_it_may_be_the_second_time(gen, ref):
    td = rollout(gen)
    td["next"] = TensorDict(reward=torch.ones(3), score=torch.ones(3), batch_size=3)
    penalise = KLRewardTransform(ref, 0.1)
    penalise(td)
    once = td["next", "reward"].clone()
    KLComputation(add_to_reward=False)(td)
    for again in (penalise, KLComputation(coeff=0.1)):
        said = r"^'kl_penalty' is there already: if that KL was subtracted from 'reward' before, .* delete that key"
        with pytest.warns(UserWarning, match=said) as warned:
            again(td)
        assert [one.filename for one in warned] == [__file__], "said at the call"
    torch.testing.assert_close(1 - td["next", "reward"], 3 * (1 - once))
    # Programs that subtract once from each reward.
    KLComputation(coeff=0.1, reward_key="score", kl_key="second")(td)
    assert torch.equal(td["next", "score"], once)
    td["next", "reward"] = torch.ones(3)
    del td["next", "kl_penalty"]
    assert torch.equal(penalise(td)["next", "reward"], once)


def test_retrieved_log_probs_of_another_model_are_not_replaced(gen, ref):
    td = RetrieveLogProb(ref)(rollout(gen))
    td["ref_log_probs"].set("provenance", replace(td["ref_log_probs"].provenance, model="another"))
    ref.backend.weights_changed()
    with refused(InvalidRequestError, field="ref_log_probs", rows=(0, 1, 2)) as caught:
        RetrieveLogProb(ref)(td)
    told = str(caught.value)
    assert "row 0: " in told and "model='another', weight_version='0', the new ones of " in told
    assert told.count("'another'") == 1 and "temperature" not in told and "; likewise rows 1, 2. " in told
    assert td["ref_log_probs"].provenance.model == "another"
    for version in ("1", "2"):
        RetrieveLogProb(ref, overwrite=version == "1")(td)
        assert td["ref_log_probs"].provenance.weight_version == version
        ref.backend.weights_changed()


def test_a_container_and_its_field_full_are_the_same_key(gen, ref):
    td = RetrieveLogProb(ref, log_probs_key=("train_log_probs", "full"))(rollout(gen))
    assert isinstance(td["train_log_probs"], LogProbs)
    assert mismatch_report(td, train_log_probs_key="train_log_probs", log_probs_key="log_probs") == mismatch_report(td)
    gen.replace(generate=False, input_mode="tokens", inplace=True, log_probs_key=("mine", "full"))(td)
    kl = KLComputation(add_to_reward=False, gen_log_probs_key="mine", ref_log_probs_key=("train_log_probs",))(td)
    assert isinstance(kl["kl_penalty"], PerToken) and len(staleness(td, "0", log_probs_key="mine").full) == 3

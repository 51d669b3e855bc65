"""Log-probs of truncated sampling are compared only over the same ids; the reference scores over the sampler's.

The oracle is the tables of the two bigram models, normalised over the ids that top-k leaves.
"""

import pytest
import torch
from tensordict import TensorDict, lazy_stack

import corelm
from corelm import LogProbs, TokenSets, token_sets
from corelm.errors import ProvenanceMismatchError
from corelm.kl import (
    ImportanceCorrection,
    KLComputation,
    KLRewardTransform,
    RetrieveKL,
    RetrieveLogProb,
    mismatch_report,
)
from helpers.each import each
from helpers.kl_cases import GEN, LAYOUTS, REF, assert_rows, gen_policy, ref_policy, rollout, rows_of

gen, ref = gen_policy, ref_policy
HEAT, K = 0.7, 4
TRUNCATED = {
    "sampling_params": {"max_new_tokens": 9, "temperature": HEAT, "top_k": K},
    "log_probs_mode": "processed",
    "return_support": True,
}


def truncated(gen, pad=False, **changes):
    return rollout(gen, pad=pad, **TRUNCATED | changes)


def over_kept(model, td, heat=HEAT):
    """Return float64 rows: the log-prob of each sampled token over the ids that GEN's top-k leaves; 0 for prompts."""
    made = []
    prompts = corelm.ragged(td, ("tokens", "prompt")).lengths.tolist()
    for prompt, ids in zip(prompts, corelm.ragged(td, ("tokens", "full")).tolist(), strict=True):
        row = torch.zeros(len(ids), dtype=torch.float64)
        for at in range(prompt, len(ids)):
            kept = GEN.table[ids[at - 1]].topk(K).indices
            logits = model.table[ids[at - 1]].detach().double() / heat
            row[at] = logits[ids[at]] - logits[kept].logsumexp(-1)
        made.append(row)
    return made


@LAYOUTS
def test_the_reference_scores_over_the_ids_of_the_sampler(gen, ref, pad):
    td = truncated(gen, pad)
    RetrieveKL(ref, add_to_reward=False)(td)
    assert token_sets(td, "ref_log_probs").tolist() == token_sets(td).tolist()
    assert td["ref_log_probs"].provenance.distribution == td["log_probs"].provenance.distribution
    pairs = zip(over_kept(GEN, td), over_kept(REF, td), strict=True)
    assert_rows(rows_of(td, "kl_penalty"), [one - other for one, other in pairs])


@LAYOUTS
def test_importance_weights_at_the_sampler_s_weights_are_one(gen, pad):
    td = truncated(gen, pad)
    RetrieveLogProb(gen, log_probs_key="train_log_probs")(td)
    ImportanceCorrection(high=None)(td)
    mask = corelm.ragged(td, ("log_probs", "scored_mask")).tolist()
    assert_rows(rows_of(td, "importance_weights"), [torch.tensor(row, dtype=torch.float64) for row in mask])
    assert mismatch_report(td).max_abs < 1e-5
    # Without the sets, the ratio is the mass that truncation kept, or the scores are not of that distribution at all.
    RetrieveLogProb(gen, log_probs_key="train_log_probs", support_key=None)(td)
    with pytest.raises(ProvenanceMismatchError, match="support_key"):
        ImportanceCorrection()(td)
    whole = gen.replace(sampling_params={"temperature": HEAT}, log_probs_mode="processed")
    RetrieveLogProb(whole, log_probs_key="train_log_probs", support_key=None)(td)
    with pytest.raises(ProvenanceMismatchError, match="over the same ids"):
        ImportanceCorrection()(td)
    ImportanceCorrection(high=None, allow_mismatch=True)(td)
    mass = corelm.ragged(td, ("log_probs", "kept_log_mass"))
    kept = [row.exp().double() * torch.tensor(on) for row, on in zip(mass.split(), mask, strict=True)]
    assert max(float(row[row > 0].min()) for row in kept) < 0.9
    assert_rows(rows_of(td, "importance_weights"), kept)


@LAYOUTS
def test_both_policies_score_over_the_sampler_s_ids(gen, ref, pad):
    td = truncated(gen, pad)
    RetrieveKL(ref, gen_policy=gen, gen_log_probs_key=("again", "full"), add_to_reward=False, assistant_only=False)(td)
    assert token_sets(td, "again").tolist() == token_sets(td, "ref_log_probs").tolist() == token_sets(td).tolist()
    pairs = zip(over_kept(GEN, td), over_kept(REF, td), strict=True)
    start = corelm.ragged(td, ("tokens", "prompt")).lengths.tolist()
    found = [row[at:] for row, at in zip(rows_of(td, "kl_penalty"), start, strict=True)]
    assert_rows(found, [(one - other)[at:] for (one, other), at in zip(pairs, start, strict=True)])


def test_the_reward_is_that_of_the_kept_ids(gen, ref):
    td = truncated(gen).set("reward", torch.zeros(3, 1))
    KLRewardTransform(ref, 0.5)(td)
    kl = [one - other for one, other in zip(over_kept(GEN, td), over_kept(REF, td), strict=True)]
    torch.testing.assert_close(
        td["reward"][:, 0].double(), torch.stack([-0.5 * row.sum() for row in kl]), atol=1e-4, rtol=0
    )


@each("mode", ["raw", "processed"])
def test_numbers_of_full_support_are_scored_as_before(gen, ref, mode):
    # Raw numbers are the model's own, whatever was cut off; those of an untouched distribution need no sets.
    changes = {"log_probs_mode": mode}
    if mode == "processed":
        changes["sampling_params"] = {"max_new_tokens": 9}
    td = truncated(gen, **changes)
    RetrieveKL(ref, add_to_reward=False)(td)
    assert td["ref_log_probs"].provenance.support == "full" and td["ref_log_probs"].kept_ids is None


@LAYOUTS
def test_truncated_numbers_without_sets_are_refused(gen, ref, pad):
    td = truncated(gen, pad, return_support=False)
    td["ref_log_probs"] = td["log_probs"].clone()
    with pytest.raises(ProvenanceMismatchError, match=r"return_support=True.*support_key=…"):
        KLComputation(add_to_reward=False)(td)
    KLComputation(add_to_reward=False, allow_mismatch=True)(td)
    one = truncated(gen, pad)
    one["ref_log_probs"] = td["log_probs"]
    with pytest.raises(ProvenanceMismatchError):
        KLComputation(add_to_reward=False)(one)


@LAYOUTS
def test_sets_that_differ_are_named_by_row_and_position(gen, pad):
    td = truncated(gen, pad)
    sets = token_sets(td).tolist()
    start = int(corelm.ragged(td, ("tokens", "prompt")).lengths[1])
    shuffled = [[list(reversed(ids)) for ids in row] for row in sets]

    def with_sets(given):
        found = td.clone()
        log_probs = LogProbs.from_rows(
            full=list(corelm.ragged(td, ("log_probs", "full")).split()),
            scored_mask=list(corelm.ragged(td, ("log_probs", "scored_mask")).split()),
            provenance=td["log_probs"].provenance,
            kept_ids=TokenSets.from_list(given),
        )
        if pad:
            held = TensorDict({"tokens": td["tokens"], "masks": td["masks"], "log_probs": log_probs}, batch_size=[3])
            log_probs = corelm.repad(held)["log_probs"]
        return found.set("ref_log_probs", log_probs)

    # The order of a set means nothing, and neither does what stands where no token counts.
    shuffled[1][0] = [5]
    KLComputation(add_to_reward=False)(with_sets(shuffled))
    for wrong in ([*sets[1][start + 2][:-1], 259], sets[1][start + 2][:-1], []):
        other = [[[*ids] for ids in row] for row in sets]
        other[1][start + 2] = wrong
        with pytest.raises(ProvenanceMismatchError):
            KLComputation(add_to_reward=False)(with_sets(other))
        KLComputation(add_to_reward=False, allow_mismatch=True)(with_sets(other))
    only = td["masks"].all_response_mask
    marks = [torch.as_tensor(row).clone() for row in only] if not pad else only.clone()
    if pad:
        marks[1] = False
        other = with_sets(other).set("mine", marks)
        KLComputation(add_to_reward=False, mask_key="mine")(other)


def test_rows_of_full_support_and_rows_of_truncated_support_side_by_side(gen, ref):
    whole = rollout(gen, **TRUNCATED | {"sampling_params": {"max_new_tokens": 9, "temperature": HEAT}})
    both = lazy_stack([*truncated(gen).unbind(0), *whole.unbind(0)])
    RetrieveKL(ref, add_to_reward=False)(both)
    assert [row["ref_log_probs"].provenance.support for row in both] == ["truncated"] * 3 + ["full"] * 3
    # A label that says truncated, where no id was cut off in the row, is of full support.
    labelled = whole.clone()
    for row in labelled["log_probs"]:
        row.set("provenance", truncated(gen)[0]["log_probs"].provenance)
    labelled["ref_log_probs"] = both["ref_log_probs"][3:]
    KLComputation(add_to_reward=False)(labelled)


def test_rows_of_two_temperatures_have_no_common_scores(gen, ref):
    other = truncated(gen, sampling_params={"max_new_tokens": 9, "temperature": 1.5, "top_k": K})
    both = lazy_stack([*truncated(gen).unbind(0), *other.unbind(0)])
    with pytest.raises(ProvenanceMismatchError):
        RetrieveLogProb(ref)(both)
    with pytest.raises(ProvenanceMismatchError):
        RetrieveLogProb(ref)(penalised(gen))


def penalised(gen):
    td = truncated(gen)
    for row in td["log_probs"]:
        row.set("provenance", {**row.provenance.to_dict(), "penalties": (("repetition_penalty", 1.2),)})
    return td

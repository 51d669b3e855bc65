"""Keys, stacks and saved batches of the KL modules, and batches without rows."""

import torch
from tensordict import TensorDict, lazy_stack

from corelm import History
from corelm.kl import KLComputation, KLRewardTransform, PerToken, RetrieveKL, RetrieveLogProb
from corelm.policy.options import Keys
from helpers.each import each
from helpers.kl_cases import COEFF, LAYOUTS, QUESTIONS, assert_rows, by_hand, gen_policy, ref_policy, rollout, rows_of

gen, ref = gen_policy, ref_policy


def test_in_keys_and_out_keys_follow_the_key_arguments(gen, ref):
    keys = Keys(tokens=("a", "ids"), masks=("a", "masks"), log_probs=("a", "logp"), text="words")
    policy = gen.replace(keys=keys)
    td = policy(TensorDict(words=QUESTIONS[:3]), seed=4)
    td["a", "r"] = torch.zeros(3, 1)
    module = RetrieveKL(
        ref,
        coeff=COEFF,
        tokens_key=keys.tokens,
        masks_key=keys.masks,
        gen_log_probs_key=(*keys.log_probs, "full"),
        ref_log_probs_key=("b", "logp", "full"),
        kl_key=("b", "kl"),
        reward_key=("a", "r"),
    )
    assert module.in_keys == [
        ("a", "ids", "full"),
        ("a", "logp", "full"),
        ("a", "masks", "all_assistant_mask"),
        ("a", "r"),
    ]
    assert module.out_keys == [("b", "logp", "full"), ("b", "logp", "scored_mask"), ("b", "kl"), ("a", "r")]
    before = set(td.keys(include_nested=True))
    module(td)
    assert set(module.out_keys) <= set(td.keys(include_nested=True))
    assert {key[:2] for key in set(td.keys(include_nested=True)) - before} <= {"b", ("b", "logp"), ("b", "kl")}
    plain = RetrieveKL(ref, coeff=COEFF)(rollout(gen).set("reward", torch.zeros(3, 1)))
    torch.testing.assert_close(td["a", "r"], plain["reward"])


@LAYOUTS
def test_rows_from_a_buffer_give_the_same_as_a_batch(gen, ref, pad):
    td = RetrieveLogProb(ref)(rollout(gen, (3,), pad))
    td["reward"] = torch.arange(3.0)
    kept = lazy_stack(list(td.clone().unbind(0)))[torch.tensor([2, 0])]
    KLComputation("k1", COEFF)(td)
    KLComputation("k1", COEFF)(kept)
    for row, original in zip(kept.unbind(0), (2, 0), strict=True):
        torch.testing.assert_close(row["reward"], td["reward"][original])
    whole = RetrieveLogProb(ref)(lazy_stack(list(rollout(gen, (3,), pad).unbind(0))))
    KLComputation(add_to_reward=False)(whole)
    assert_rows(rows_of(whole, "kl_penalty"), by_hand(whole))
    # The results can be stacked like other entries.
    again = lazy_stack([whole[1], whole[0]])
    assert_rows(rows_of(again, "kl_penalty"), by_hand(again))


def test_dense_batches_of_different_widths_stacked_are_read_row_by_row(gen, ref):
    one, two = rollout(gen, (1,), True), rollout(gen, (4,), True)
    assert one["tokens"].full.shape[-1] != two["tokens"].full.shape[-1]
    both = lazy_stack([*RetrieveLogProb(ref)(one).unbind(0), *RetrieveLogProb(ref)(two).unbind(0)])
    KLComputation(add_to_reward=False)(both)
    assert_rows(both["kl_penalty"].full, by_hand(both))


@LAYOUTS
@each("shape", [(0,), (2, 0)])
def test_a_batch_without_rows_is_accepted(gen, ref, shape, pad):
    history = History.of([], shape)
    td = gen.replace(input_mode="history", pad_output=pad)(TensorDict(history=history))
    td["reward"] = torch.zeros(shape)
    KLRewardTransform(ref)(td)
    assert td["reward"].shape == shape and tuple(td["kl_penalty"].shape[: len(shape)]) == shape
    if not pad:
        td["reward"] = td["kl_penalty"].clone()
        KLComputation()(td)
        assert isinstance(td["reward"], PerToken) and tuple(td["reward"].batch_size) == shape


@LAYOUTS
def test_nothing_is_subtracted_from_the_reward_of_a_skipped_row(gen, ref, pad):
    long = "x" * 600
    td = gen.replace(pad_output=pad, on_error="skip")(TensorDict(text=[QUESTIONS[0], long]), seed=0)
    td["reward"] = torch.ones(2)
    KLRewardTransform(ref.replace(on_error="skip"), COEFF)(td)
    assert float(td["reward"][1]) == 1.0 and float(td["reward"][0]) != 1.0

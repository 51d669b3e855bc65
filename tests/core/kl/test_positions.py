"""Which tokens count, and where gradients go."""

import itertools

import pytest
import torch
from tensordict import TensorDict, lazy_stack

import corelm
from corelm import History, LLMPolicy, LogProbs
from corelm.errors import InvalidRequestError, MissingKeyError
from corelm.kl import KLComputation, KLRewardTransform, PerToken, RetrieveKL, RetrieveLogProb, mismatch_report
from corelm.policy.options import Keys
from corelm_testing.toy import Bigram
from helpers.each import each
from helpers.kl_cases import (
    COEFF,
    GEN,
    LAYOUTS,
    QUESTIONS,
    REF,
    assert_rows,
    by_hand,
    gen_policy,
    ref_policy,
    rollout,
    rows_of,
    said,
)
from helpers.refusals import refused

gen, ref = gen_policy, ref_policy


def conversation(gen, pad, turns=2):
    """Return two sampled turns with a user turn between them, with the policy's log-probs of every token."""
    policy = gen.replace(input_mode="history", return_history=True)
    history = History.from_chats([[{"role": "user", "content": question}] for question in QUESTIONS[:2]])
    for turn in range(turns):
        out = policy(TensorDict(history=history), seed=turn)
        history = out["history"].full.append({"role": "user", "content": "And then?"})
    scorer = policy.replace(generate=False, pad_output=pad)
    return scorer(TensorDict(history=out["history"].full)), out


@LAYOUTS
def test_assistant_only_counts_every_assistant_turn_and_nothing_else(gen, ref, pad):
    td, _ = conversation(gen, pad)
    RetrieveKL(ref, add_to_reward=False)(td)
    masks = corelm.ragged(td, ("masks", "all_assistant_mask")).tolist()
    switches = [sum(a != b for a, b in itertools.pairwise(mask)) for mask in masks]
    assert all(number >= 3 for number in switches), "at least two spans"
    found, full = rows_of(td, "kl_penalty"), corelm.ragged(td, ("tokens", "full")).tolist()
    hand = [
        torch.where(torch.tensor(mask), said(GEN, ids) - said(REF, ids), 0.0)
        for mask, ids in zip(masks, full, strict=True)
    ]
    assert_rows(found, hand)
    everything = RetrieveKL(ref, add_to_reward=False, assistant_only=False, kl_key="all")(td)
    hand = [said(GEN, ids) - said(REF, ids) for ids in full]
    assert_rows(rows_of(everything, "all"), hand)


@LAYOUTS
@each("mode", ["history", "text", "tokens"])
def test_a_generation_counts_its_answers_in_every_input_mode(gen, ref, mode, pad):
    text = gen(TensorDict(text=QUESTIONS[:3]), seed=1)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS[:3]]
    given = {"text": QUESTIONS[:3], "history": History.from_chats(chats), "tokens": text["tokens"]}[mode]
    td = gen.replace(input_mode=mode, pad_output=pad)(TensorDict({mode: given}, batch_size=3), seed=2)
    RetrieveKL(ref, add_to_reward=False)(td)
    assert_rows(rows_of(td, "kl_penalty"), by_hand(td))


@LAYOUTS
def test_mask_key_replaces_the_assistant_mask(gen, ref, pad):
    td = rollout(gen, pad=pad)
    # gen_policy scores the prompt too, so that a mask can select it.
    RetrieveKL(ref, gen_policy=gen, add_to_reward=False, mask_key=("masks", "all_response_mask"))(td)
    assert_rows(rows_of(td, "kl_penalty"), by_hand(td))
    RetrieveKL(ref, gen_policy=gen, add_to_reward=False, mask_key=("masks", "all_attention_mask"))(td)
    everything = [[True] * len(ids) for ids in corelm.ragged(td, ("tokens", "full")).tolist()]
    assert_rows(rows_of(td, "kl_penalty"), by_hand(td, everything))
    if pad:
        width = td["tokens"].full.shape[-1]
        td["mine"] = torch.arange(width).expand(3, width) % 3 == 0
        KLComputation(add_to_reward=False, mask_key="mine")(td)
        assert torch.equal(td["kl_penalty"] != 0, td["mine"] & td["log_probs"].scored_mask)
        td["mine"] = torch.full((3, width), torch.nan)
        with refused(InvalidRequestError, field="mine"):
            KLComputation(add_to_reward=False, mask_key="mine")(td)


def test_positions_that_one_of_the_two_did_not_score_do_not_count(gen, ref):
    td = RetrieveLogProb(ref)(rollout(gen, pad=True))
    reference = td["ref_log_probs"]
    dropped = reference.scored_mask.clone()
    last = dropped.shape[-1] - 1 - dropped.flip(-1).long().argmax(-1)
    dropped[torch.arange(3), last] = False
    reference.scored_mask = dropped
    reference.full[torch.arange(3), last] = torch.nan
    KLComputation(add_to_reward=False, assistant_only=False)(td)
    assert torch.equal(td["kl_penalty"] != 0, dropped & td["log_probs"].scored_mask)


def test_a_missing_assistant_mask_is_an_error_that_says_what_to_do(gen, ref):
    td = rollout(gen)
    scored = gen.replace(input_mode="text", generate=False, inplace=False)(TensorDict(text=td["text"].full))
    with pytest.raises(MissingKeyError, match=r"no field 'all_assistant_mask', only all_attention_mask.*mask_key="):
        RetrieveKL(ref, add_to_reward=False)(scored)
    RetrieveKL(ref, add_to_reward=False, assistant_only=False)(scored)
    del td["masks"]
    with refused(MissingKeyError, field="masks"):
        RetrieveKL(ref, add_to_reward=False)(td)
    RetrieveKL(ref, add_to_reward=False, assistant_only=False)(td)


def with_gradients(policy, td):
    """Add the policy's log-probs of the tokens, with gradients, in a `LogProbs` under ``current``."""
    if td["tokens"].padded:
        td["current"] = LogProbs(full=policy.log_prob(td), batch_size=td.batch_size)
    else:
        td["current"] = td["log_probs"].clone()
        td["current"].full = policy.log_prob(td)
    return td


CURRENT = {"gen_log_probs_key": ("current", "full")}


@LAYOUTS
@each("name", ["k2", "k3", "k1_st", "k3_st"])
def test_a_loss_gets_the_gradient_of_the_estimator(ref, name, pad):
    model = Bigram(GEN.table.detach().clone())
    with corelm.get_backend("toy", model) as backend:
        gen = LLMPolicy(backend, input_mode="text", sampling_params={"max_new_tokens": 9}, inplace=False)
        td = RetrieveLogProb(ref)(rollout(gen, pad=pad))
        with_gradients(gen.replace(generate=False, input_mode="tokens", pad_output=pad), td)
        loss = KLComputation(name, detach=False, add_to_reward=False, **CURRENT)(td)
        torch.cat(rows_of(loss, "kl_penalty")).sum().backward()
        found = model.table.grad.clone()
        # By hand: the derivative of each token's estimate times the gradient of its log-prob.
        table = model.table.detach().clone().requires_grad_()
        total = 0.0
        prompts = corelm.ragged(td, ("tokens", "prompt")).lengths.tolist()
        for start, ids in zip(prompts, corelm.ragged(td, ("tokens", "full")).tolist(), strict=True):
            gen_row = table.log_softmax(-1)[ids[start - 1 : -1], ids[start:]]
            away = (gen_row - said(REF, ids)[start:]).detach()
            total = total + ((1 - (-away).exp() if name == "k3" else away) * gen_row).sum()
        total.backward()
        torch.testing.assert_close(found, table.grad.float(), atol=1e-5, rtol=1e-4)


@LAYOUTS
def test_detach_stops_the_gradient_of_the_kl_and_keeps_that_of_the_reward(gen, ref, pad):
    td = RetrieveLogProb(ref)(rollout(gen, pad=pad))
    with_gradients(gen.replace(generate=False, input_mode="tokens", pad_output=pad), td)
    learned = torch.zeros(3, requires_grad=True)
    td["reward"] = learned * 2
    detached = KLComputation(**CURRENT)(td.clone(False))
    assert not any(row.requires_grad for row in rows_of(detached, "kl_penalty"))
    detached["reward"].sum().backward()
    assert torch.equal(learned.grad, torch.full((3,), 2.0)) and GEN.table.grad is None
    itself = KLComputation(lambda gen, ref, mask: gen, add_to_reward=False, **CURRENT)(td.clone(False))
    assert not any(row.requires_grad for row in rows_of(itself, "kl_penalty"))
    kept = KLComputation("k1_st", detach=False, **CURRENT)(td)
    assert any(row.requires_grad for row in rows_of(kept, "kl_penalty"))
    torch.cat(rows_of(kept, "kl_penalty")).sum().backward()
    assert GEN.table.grad is not None and bool(GEN.table.grad.any())
    GEN.table.grad = None
    with torch.no_grad():
        assert not any(
            row.requires_grad
            for row in rows_of(KLComputation("k1_st", detach=False, add_to_reward=False)(td), "kl_penalty")
        )


# Few-shot examples: turns of the assistant in a prompt do not count ---------------------------------------------------


CHAT = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "two, of course"},
    {"role": "user", "content": "2+2?"},
]


def test_examples_in_the_prompt_do_not_count() -> None:
    with corelm.get_backend("toy") as backend:
        sampling = {"max_new_tokens": 6, "ignore_eos": True}
        rollout = LLMPolicy(backend, sampling_params=sampling, inplace=False)(
            TensorDict(history=History.from_chats([CHAT])), seed=0
        )
        score = LLMPolicy(backend, generate=False, input_mode="tokens", log_probs_key="ref_log_probs")
        again = LLMPolicy(backend, generate=False, overwrite=True)(rollout.clone())
        assert again["log_probs"].scored_mask[0].sum() > 6
        for td in (score(rollout.clone()), score(again)):
            assert mismatch_report(td, train_log_probs_key=("ref_log_probs", "full")).tokens == 6
        td["ref_log_probs"] = td["ref_log_probs"].clone()
        td["ref_log_probs"].full = [row - 1.0 for row in td["ref_log_probs"].full]
        kl = KLComputation(add_to_reward=False)(td)["kl_penalty"].full[0]
        assert (kl != 0).sum() == 6


# Keys, stacks and saved batches, and batches without rows -------------------------------------------------------------


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
        KLComputation(kl_key="second")(td)
        assert isinstance(td["reward"], PerToken) and tuple(td["reward"].batch_size) == shape


@LAYOUTS
def test_nothing_is_subtracted_from_the_reward_of_a_skipped_row(gen, ref, pad):
    long = "x" * 600
    td = gen.replace(pad_output=pad, on_error="skip")(TensorDict(text=[QUESTIONS[0], long]), seed=0)
    td["reward"] = torch.ones(2)
    KLRewardTransform(ref.replace(on_error="skip"), COEFF)(td)
    assert float(td["reward"][1]) == 1.0 and float(td["reward"][0]) != 1.0

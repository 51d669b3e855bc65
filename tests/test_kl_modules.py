"""The KL modules on rollouts of the toy backend: every number is what two bigram tables say, token by token."""

import itertools
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from tensordict.nn import TensorDictSequential
from toy_backend import Bigram, ByteTokenizer

import corelm
import oracle
from corelm import History, LLMPolicy, LogProbs, Masks, Ragged
from corelm.errors import CapabilityError, InvalidRequestError, MissingKeyError, ProvenanceMismatchError
from corelm.inputs import Keys
from corelm.kl import (
    AdaptiveKLController,
    BiasedKLWarning,
    FixedKLController,
    KLComputation,
    KLRewardTransform,
    PerToken,
    RetrieveKL,
    RetrieveLogProb,
    k1,
    k3_st,
)
from corelm.kl.penalty import BIASED

#: Whose answers, with seed 4, are 6, 9, 3 and 9 tokens long.
QUESTIONS = ["The cat", "Who", "It is so", "When is it dark"]
GEN = Bigram.of_talk()
#: As sure of itself, and of other things.
REF = Bigram(GEN.table.detach() + torch.randn(260, 260, generator=torch.Generator().manual_seed(0)))
LAYOUTS = pytest.mark.parametrize("pad", [False, True], ids=["rows", "dense"])
SHAPES = pytest.mark.parametrize("shape", [(), (3,), (2, 2)], ids=str)


@pytest.fixture(scope="module")
def gen():
    with corelm.get_backend("toy", GEN) as opened:
        yield LLMPolicy(opened, input_mode="text", sampling_params={"max_new_tokens": 9}, inplace=False)


@pytest.fixture(scope="module")
def ref():
    with corelm.get_backend("toy", REF) as opened:
        yield LLMPolicy(opened, input_mode="text", generate=False)


def rollout(gen, shape=(3,), pad=False, seed=4, **changes):
    policy = gen.replace(pad_output=pad, **changes)
    texts = QUESTIONS[: shape[0] if shape else 1]
    if len(shape) == 2:
        policy = policy.replace(num_samples=shape[1])
    return policy(TensorDict(text=texts if shape else texts[0]), seed=seed)


def said(model, ids):
    """float64: what a bigram says of every id; 0 of the first."""
    table = model.table.detach().double().log_softmax(-1)
    return torch.cat([torch.zeros(1, dtype=torch.float64), table[ids[:-1], ids[1:]]])


def by_hand(td, counts=None, value=lambda gen, ref: gen - ref):
    """Row by row, as long as the tokens: the estimate at each position that counts (the response's), else 0."""
    made = []
    prompts = corelm.ragged(td, ("tokens", "prompt")).tolist()
    for row, ids in enumerate(corelm.ragged(td, ("tokens", "full")).tolist()):
        where = torch.tensor(counts[row] if counts else [t >= len(prompts[row]) for t in range(len(ids))])
        made.append(torch.where(where, value(said(GEN, ids), said(REF, ids)), 0.0))
    return made


def rows_of(td, key):
    """What stands under `key`, row by row without pads, whatever its form."""
    value = td[key] if key in td.keys(include_nested=True) else None
    lengths = corelm.ragged(td, ("tokens", "full")).lengths.tolist()
    if isinstance(value, PerToken):
        flat = value.full
        while isinstance(flat, list) and isinstance(flat[0], list):
            flat = [leaf for part in flat for leaf in part]
        flat = flat if isinstance(flat, list) else [flat]
    else:
        mask = td["masks"].all_attention_mask
        assert value.shape == mask.shape and not bool(value[~mask].any())
        flat = Ragged(value[mask], mask.sum(-1).flatten()).split()
    assert [len(row) for row in flat] == lengths
    return flat


def assert_rows(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, atol=2e-5, rtol=1e-5)


# What the reference says ---------------------------------------------------------------------------------------------


@LAYOUTS
@SHAPES
def test_retrieved_log_probs_are_a_whole_container_that_lines_up(gen, ref, shape, pad):
    td = rollout(gen, shape, pad)
    before = sorted(map(str, td.keys(include_nested=True)))
    out = RetrieveLogProb(ref)(td)
    assert out is td and isinstance(td["ref_log_probs"], LogProbs)
    assert td["ref_log_probs"].padded == pad and tuple(td["ref_log_probs"].batch_size) == shape
    full = corelm.ragged(td, ("ref_log_probs", "full"))
    assert_rows(full.split(), [said(REF, ids) for ids in corelm.ragged(td, ("tokens", "full")).tolist()])
    scored = corelm.ragged(td, ("ref_log_probs", "scored_mask"))
    assert torch.equal(scored.values, full.positions > 0)
    assert td["ref_log_probs"].provenance.model == ref.backend.model_name
    if pad:
        assert td["ref_log_probs"].full.shape == td["log_probs"].full.shape
    after = set(map(str, td.keys(include_nested=True))) - set(before)
    assert all("ref_log_probs" in key for key in after)


def test_a_policy_in_any_mode_scores_the_tokens_and_renders_nothing(gen, ref):
    td = rollout(gen)
    expected = RetrieveLogProb(ref)(td.clone())["ref_log_probs"].full
    td["text"].full = ["nonsense", "that nobody", "sampled"]
    for mode in ("history", "text", "tokens"):
        for policy in (ref.replace(input_mode=mode), gen.replace(input_mode=mode)):
            td = RetrieveLogProb(policy, log_probs_key=("one", mode))(td)
        policy = LLMPolicy(ref.backend, input_mode=mode, num_samples=4, on_error="skip")
        found = RetrieveLogProb(policy)(td)["ref_log_probs"].full
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_retrieving_needs_tokens_and_a_policy(ref):
    with pytest.raises(InvalidRequestError, match="expected an LLMPolicy, got Backend"):
        RetrieveLogProb(ref.backend)
    with pytest.raises(MissingKeyError, match=r"there is no 'tokens'; there are: text"):
        RetrieveLogProb(ref)(TensorDict(text=["a"]))
    with pytest.raises(InvalidRequestError, match="expected Tokens, got Tensor"):
        RetrieveLogProb(ref)(TensorDict(tokens=torch.zeros(2, 3, dtype=torch.int64)))


# The KL of every token -----------------------------------------------------------------------------------------------


@LAYOUTS
@SHAPES
@pytest.mark.parametrize("under_next", [False, True, "split"], ids=["root", "next", "split"])
def test_the_kl_of_every_token_is_what_the_tables_say(gen, ref, shape, pad, under_next):
    td = RetrieveLogProb(ref)(rollout(gen, shape, pad))
    if under_next is True:
        td = TensorDict(next=td, batch_size=shape)
    elif under_next == "split":
        # The policy wrote before the step, the reference after it.
        td["next"] = TensorDict(ref_log_probs=td["ref_log_probs"], batch_size=shape)
        del td["ref_log_probs"]
    out = KLComputation(add_to_reward=False)(td)
    assert out is td
    place = td["next"] if under_next else td
    if under_next:
        assert "kl_penalty" not in td.keys()
    else:
        assert isinstance(place["kl_penalty"], torch.Tensor if pad else PerToken)
    whole = td["next"] if under_next is True else td
    if under_next == "split":
        whole["kl_penalty"] = place["kl_penalty"]
    assert_rows(rows_of(whole, "kl_penalty"), by_hand(whole))


@pytest.mark.parametrize("pad", [False, True], ids=["rows", "dense"])
@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs", "k1_st", "k3_st"])
def test_every_estimator_by_name_and_a_function(gen, ref, name, pad):
    formulas = {
        "k1": lambda g, r: g - r,
        "k2": lambda g, r: (g - r) ** 2 / 2,
        "k3": lambda g, r: (r - g).exp() - 1 - (r - g),
        "abs": lambda g, r: (g - r).abs(),
    }
    td = RetrieveLogProb(ref)(rollout(gen, pad=pad))
    expected = by_hand(td, value=formulas[name.removesuffix("_st")])
    assert_rows(rows_of(KLComputation(name, add_to_reward=False)(td), "kl_penalty"), expected)
    twice = KLComputation(lambda *a: 2 * k1(*a), add_to_reward=False, kl_key=("stats", "kl"))(td)
    assert_rows(rows_of(twice, ("stats", "kl")), [2 * row for row in by_hand(td)])


def test_of_a_policy_with_itself_it_is_zero(gen):
    for pad in (False, True):
        td = RetrieveKL(gen, add_to_reward=False)(rollout(gen, pad=pad))
        assert all(float(row.abs().max()) < 1e-5 for row in rows_of(td, "kl_penalty"))


# Rewards -------------------------------------------------------------------------------------------------------------

COEFF = 0.25


def flat_rows(td):
    return [td] if not td.batch_dims else [row for part in td.unbind(0) for row in flat_rows(part)]


def token_rewards(td):
    return [torch.arange(len(ids), dtype=torch.float32) for ids in corelm.ragged(td, ("tokens", "full")).tolist()]


@LAYOUTS
@SHAPES
@pytest.mark.parametrize("form", ["scalar", "sequence", "sequence of one step", "token", "token with a last dimension"])
def test_dense_rewards_lose_the_kl(gen, ref, shape, pad, form):
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
@pytest.mark.parametrize("form", ["token", "token with a last dimension", "sequence"])
def test_rewards_row_by_row_lose_the_kl_and_stay_rows(gen, ref, shape, pad, form):
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
def test_rewards_in_a_container_of_rows_come_back_in_one(gen, ref, shape, pad):
    td = RetrieveLogProb(ref)(rollout(gen, shape, pad))
    rewards = token_rewards(td)
    # What KLComputation writes for rows is a container that it also takes.
    rows = rollout(gen, shape, False)
    RetrieveKL(ref, add_to_reward=False)(rows)
    td["reward"] = rows["kl_penalty"].clone()
    for row, value in zip(flat_rows(td["reward"]._tensordict), rewards, strict=True):
        row["full"] = value
    KLComputation("k1", COEFF)(td)
    assert isinstance(td["reward"], PerToken)
    assert_rows(rows_of(td, "reward"), [r - COEFF * k for r, k in zip(rewards, by_hand(td), strict=True)])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float32, torch.float64])
def test_rewards_keep_their_precision_and_whole_numbers_become_float32(gen, ref, dtype):
    td = RetrieveLogProb(ref)(rollout(gen))
    td["reward"] = torch.tensor([1, 0, 1]).to(dtype)
    given = td["reward"]
    KLComputation(coeff=COEFF)(td)
    assert td["reward"].dtype == (dtype if dtype.is_floating_point else torch.float32)
    sums = torch.stack([row.sum() for row in by_hand(td)])
    torch.testing.assert_close(td["reward"].double(), given.double() - COEFF * sums, atol=0.2, rtol=0.02)
    assert torch.equal(given, torch.tensor([1, 0, 1]).to(dtype)), "the caller's tensor is not written to"


@LAYOUTS
def test_rewards_of_another_shape_are_refused_and_nothing_is_written(gen, ref, pad):
    td = RetrieveLogProb(ref)(rollout(gen, (3,), pad))
    with pytest.raises(MissingKeyError, match=r"no 'reward'.*add_to_reward=False"):
        KLComputation()(td)
    for shape in [(3, 2), (3, 2, 1), (3, 4, 5)]:
        td["reward"] = torch.zeros(shape)
        with pytest.raises(InvalidRequestError, match=r"expected a reward a sequence, \[3\] or \[3, 1\]"):
            KLComputation()(td)
    td["next"] = lazy_stack([TensorDict(reward=torch.zeros(size)) for size in (1, 2, 3)])
    with pytest.raises(InvalidRequestError, match=r"row 1: expected \d+ rewards, one a token") as caught:
        KLComputation()(td)
    assert caught.value.rows == (1, 2)
    assert "kl_penalty" not in td.keys() and "kl_penalty" not in td["next"].keys()


def test_a_reward_before_the_step_is_not_the_one_after_it(gen, ref):
    td = RetrieveLogProb(ref)(rollout(gen))
    td["reward"], td["next"] = torch.zeros(3), TensorDict(done=torch.ones(3, dtype=torch.bool), batch_size=3)
    with pytest.raises(MissingKeyError, match="no 'reward'"):
        KLComputation()(td)


# Positions -----------------------------------------------------------------------------------------------------------


def conversation(gen, pad, turns=2):
    """Two sampled turns with a user's between them; the log-probs are the policy's of every token."""
    policy = gen.replace(input_mode="history", return_history=True)
    history = History.from_chats([[{"role": "user", "content": question}] for question in QUESTIONS[:2]])
    for turn in range(turns):
        out = policy(TensorDict(history=history), seed=turn)
        history = out["history"].full.append({"role": "user", "content": "And then?"})
    scorer = policy.replace(generate=False, pad_output=pad)
    return scorer(TensorDict(history=out["history"].full)), out


@LAYOUTS
def test_assistant_only_counts_every_turn_of_the_assistant_and_nobody_else(gen, ref, pad):
    td, _ = conversation(gen, pad)
    RetrieveKL(ref, add_to_reward=False)(td)
    masks = corelm.ragged(td, ("masks", "all_assistant_mask")).tolist()
    switches = [sum(a != b for a, b in itertools.pairwise(mask)) for mask in masks]
    assert all(number >= 3 for number in switches), "two spans at least"
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
@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_a_generation_counts_its_answers_in_every_input_mode(gen, ref, mode, pad):
    text = gen(TensorDict(text=QUESTIONS[:3]), seed=1)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS[:3]]
    given = {"text": QUESTIONS[:3], "history": History.from_chats(chats), "tokens": text["tokens"]}[mode]
    td = gen.replace(input_mode=mode, pad_output=pad)(TensorDict({mode: given}, batch_size=3), seed=2)
    RetrieveKL(ref, add_to_reward=False)(td)
    assert_rows(rows_of(td, "kl_penalty"), by_hand(td))


@LAYOUTS
def test_a_mask_of_ones_own_takes_the_place_of_the_assistants(gen, ref, pad):
    td = rollout(gen, pad=pad)
    # Scored anew, so that the prompt counts too if it is asked for.
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
        td["mine"] = td["mine"].float()
        with pytest.raises(InvalidRequestError, match=r"mine: expected bool, got torch.float32"):
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


def test_input_without_the_assistants_mask_says_what_to_do(gen, ref):
    td = rollout(gen)
    scored = gen.replace(input_mode="text", generate=False, inplace=False)(TensorDict(text=td["text"].full))
    with pytest.raises(
        MissingKeyError, match=r"nothing of 'all_assistant_mask', only of all_attention_mask.*mask_key="
    ):
        RetrieveKL(ref, add_to_reward=False)(scored)
    RetrieveKL(ref, add_to_reward=False, assistant_only=False)(scored)
    del td["masks"]
    with pytest.raises(MissingKeyError, match=r"there is no \('masks',\)"):
        RetrieveKL(ref, add_to_reward=False)(td)
    RetrieveKL(ref, add_to_reward=False, assistant_only=False)(td)


# Gradients -----------------------------------------------------------------------------------------------------------


def with_gradients(policy, td):
    """The policy's log-probs of the tokens, with gradients, in a container made by hand."""
    if td["tokens"].padded:
        td["current"] = LogProbs(full=policy.log_prob(td), batch_size=td.batch_size)
    else:
        td["current"] = td["log_probs"].clone()
        td["current"].full = policy.log_prob(td)
    return td


CURRENT = {"gen_log_probs_key": ("current", "full")}


@LAYOUTS
@pytest.mark.parametrize("name", ["k2", "k3", "k1_st", "k3_st"])
def test_a_loss_gets_the_gradient_of_the_estimator(ref, name, pad):
    model = Bigram(GEN.table.detach().clone())
    with corelm.get_backend("toy", model) as backend:
        gen = LLMPolicy(backend, input_mode="text", sampling_params={"max_new_tokens": 9}, inplace=False)
        td = RetrieveLogProb(ref)(rollout(gen, pad=pad))
        with_gradients(gen.replace(generate=False, input_mode="tokens", pad_output=pad), td)
        loss = KLComputation(name, detach=False, add_to_reward=False, **CURRENT)(td)
        torch.cat(rows_of(loss, "kl_penalty")).sum().backward()
        found = model.table.grad.clone()
        # By hand: each token's slope times the gradient of its log-prob.
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
def test_detach_cuts_the_gradient_of_both_and_leaves_the_rewards_own(gen, ref, pad):
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


# What is refused -----------------------------------------------------------------------------------------------------


@LAYOUTS
@pytest.mark.parametrize("poison", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize("side", ["log_probs", "ref_log_probs"])
def test_log_probs_that_are_not_finite_are_refused_by_row(gen, ref, pad, poison, side):
    td = RetrieveLogProb(ref)(rollout(gen, (2, 2), pad))
    container = td[side]
    last = corelm.ragged(td, ("tokens", "full")).lengths[2] - 1
    if pad:
        at = td["masks"].all_attention_mask[1, 0].nonzero()[last, 0]
        container.full[1, 0, at] = poison
    else:
        container.full[1][0][last] = poison
    with pytest.raises(
        InvalidRequestError, match=rf"row 2: \('{side}', 'full'\) is -?(nan|inf) at position {last}"
    ) as e:
        KLComputation(add_to_reward=False)(td)
    assert e.value.rows == (2,)


@LAYOUTS
def test_what_is_not_finite_does_not_matter_where_nothing_counts(gen, ref, pad):
    td = RetrieveLogProb(ref)(rollout(gen, pad=pad))
    expected = by_hand(td)
    for name in ("log_probs", "ref_log_probs"):
        full = td[name].full
        for row in full:
            row[0] = float("nan")
    KLComputation(add_to_reward=False)(td)
    assert_rows(rows_of(td, "kl_penalty"), expected)


@LAYOUTS
def test_log_probs_of_another_distribution_are_refused_unless_allowed(gen, ref, pad):
    sampling = {"max_new_tokens": 9, "temperature": 0.7}
    hot = rollout(gen, pad=pad, sampling_params=sampling, log_probs_mode="processed")
    with pytest.raises(ProvenanceMismatchError, match=r"row 0: .*temperature=0.7.*allow_mismatch=True"):
        RetrieveKL(ref, add_to_reward=False)(hot)
    RetrieveKL(ref, add_to_reward=False, allow_mismatch=True)(hot)
    # The same way on both sides is no mismatch; nor is another weight version or another temperature of sampling.
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
    with pytest.raises(InvalidRequestError, match=r"has \d+ tokens and \('ref_log_probs', 'full'\) \d+") as caught:
        KLComputation(add_to_reward=False)(td)
    assert caught.value.rows == tuple(differ.nonzero().flatten().tolist()) != ()
    td["ref_log_probs"] = RetrieveLogProb(ref)(dense.clone())["ref_log_probs"]
    with pytest.raises(InvalidRequestError, match="laid out differently: one row a sample and dense"):
        KLComputation(add_to_reward=False)(td)
    td = RetrieveLogProb(ref)(dense.clone())
    td["ref_log_probs"] = LogProbs(full=td["ref_log_probs"].full[:, :-1], batch_size=3)
    with pytest.raises(InvalidRequestError, match=r"expected \[3, \d+\], as wide as the masks; got \[3, \d+\]"):
        KLComputation(add_to_reward=False)(td)
    td = TensorDict(dense)
    td["ref_log_probs"] = RetrieveLogProb(ref)(rollout(gen, (3, 1), True))["ref_log_probs"]
    with pytest.raises(InvalidRequestError, match=r"batches \(3,\) and \(3, 1\)"):
        KLComputation(add_to_reward=False)(td)


def test_dense_log_probs_in_other_columns_are_noticed(gen, ref):
    # As wide as the sampler's, but all padded on the right.
    td = rollout(gen, pad=True)
    ids = corelm.ragged(td, ("tokens", "full"))
    width = td["tokens"].full.shape[-1]
    values = Ragged(torch.cat([said(REF, row).float() for row in ids.tolist()]), ids.lengths)
    scored = Ragged(values.positions > 0, ids.lengths)
    td["ref_log_probs"] = LogProbs(
        full=values.to_padded(0.0, "right", width),
        scored_mask=scored.to_padded(False, "right", width),
        batch_size=3,
    )
    with pytest.raises(InvalidRequestError, match="its columns are others") as caught:
        KLComputation(add_to_reward=False)(td)
    assert caught.value.rows


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": "k4"}, "'k1', 'k2', 'k3', 'abs'"),
        ({"coeff": float("nan")}, "coeff: expected a finite number"),
        ({"coeff": "much"}, "coeff: expected a finite number"),
    ],
)
def test_arguments_that_are_not_legal_are_refused_at_once(options, message):
    with pytest.raises(InvalidRequestError, match=message):
        KLComputation(**options)


def test_keys_that_lead_nowhere(gen, ref):
    td = RetrieveLogProb(ref)(rollout(gen))
    with pytest.raises(MissingKeyError, match=r"no \('old',\)"):
        KLComputation(add_to_reward=False, ref_log_probs_key=("old", "full"))(td)
    with pytest.raises(InvalidRequestError, match="expected the key of a LogProbs and 'full'"):
        KLComputation(add_to_reward=False, ref_log_probs_key=("ref_log_probs", "response"))(td)
    td["old"] = TensorDict(full=torch.zeros(3, 4), batch_size=3)
    with pytest.raises(InvalidRequestError, match=r"expected a LogProbs, got TensorDict.*LogProbs\(full=tensor"):
        KLComputation(add_to_reward=False, ref_log_probs_key=("old", "full"))(td)


def test_masks_that_do_not_belong_to_dense_log_probs_are_refused(gen, ref):
    td = RetrieveLogProb(ref)(rollout(gen, pad=True))
    compute = KLComputation(add_to_reward=False)
    td["masks"] = rollout(gen, pad=False)["masks"]
    with pytest.raises(InvalidRequestError, match=r"need an attention mask of that shape.*got none that is dense"):
        compute(td)
    td["masks"] = Masks(all_attention_mask=torch.ones(3, 2, dtype=torch.bool), batch_size=3)
    with pytest.raises(InvalidRequestError, match=r"expected \[3, 2\], as wide as the masks"):
        compute(td)
    td["masks"] = TensorDict(all_attention_mask=torch.ones(3, 2, dtype=torch.bool), batch_size=3)
    with pytest.raises(InvalidRequestError, match="expected Masks, got TensorDict"):
        compute(td)


# Keys, stacks, batches -----------------------------------------------------------------------------------------------


def test_keys_are_parameters_and_true(gen, ref):
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


def test_in_a_sequence_after_the_policy(gen, ref):
    module = TensorDictSequential(gen.replace(inplace=True), RetrieveLogProb(ref), KLComputation(add_to_reward=False))
    td = module(TensorDict(text=QUESTIONS[:2]))
    assert_rows(rows_of(td, "kl_penalty"), by_hand(td))


@LAYOUTS
def test_rows_from_a_buffer_are_as_good_as_a_batch(gen, ref, pad):
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
    # What is written is stacked, sliced and saved as the rest is.
    again = lazy_stack([whole[1], whole[0]])
    assert_rows(rows_of(again, "kl_penalty"), by_hand(again))


def test_dense_batches_of_different_widths_stacked_are_read_row_by_row(gen, ref):
    one, two = rollout(gen, (1,), True), rollout(gen, (4,), True)
    assert one["tokens"].full.shape[-1] != two["tokens"].full.shape[-1]
    both = lazy_stack([*RetrieveLogProb(ref)(one).unbind(0), *RetrieveLogProb(ref)(two).unbind(0)])
    KLComputation(add_to_reward=False)(both)
    assert_rows(both["kl_penalty"].full, by_hand(both))


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)], ids=str)
def test_values_of_rows_can_be_saved_and_sent(gen, ref, shape, tmp_path):
    td = RetrieveKL(ref, add_to_reward=False)(rollout(gen, shape))
    sent = pickle.loads(pickle.dumps(td))
    td.memmap(tmp_path / "saved")
    for again in (sent, TensorDict.load_memmap(tmp_path / "saved"), td.clone(), td.to(torch.device("cpu"))):
        assert_rows(rows_of(again, "kl_penalty"), by_hand(td))


@LAYOUTS
@pytest.mark.parametrize("shape", [(0,), (2, 0)], ids=str)
def test_no_rows_are_no_error(gen, ref, shape, pad):
    history = History.of([], shape)
    td = gen.replace(input_mode="history", pad_output=pad)(TensorDict(history=history))
    td["reward"] = torch.zeros(shape)
    KLRewardTransform(ref)(td)
    assert td["reward"].shape == shape and tuple(td["kl_penalty"].shape[: len(shape)]) == shape


@LAYOUTS
def test_an_answer_that_was_never_made_costs_nothing(gen, ref, pad):
    long = "x" * 600
    td = gen.replace(pad_output=pad, on_error="skip")(TensorDict(text=[QUESTIONS[0], long]), seed=0)
    td["reward"] = torch.ones(2)
    KLRewardTransform(ref.replace(on_error="skip"), COEFF)(td)
    assert float(td["reward"][1]) == 1.0 and float(td["reward"][0]) != 1.0


# The transform, coefficients, warnings ------------------------------------------------------------------------------


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


def test_the_transform_on_a_tensordict_made_by_hand():
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


PAIRS = """
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


def test_pairs_that_are_known_to_be_biased_warn_once_and_where_they_were_asked_for():
    run = subprocess.run([sys.executable, "-c", PAIRS], capture_output=True, text=True, check=True)
    lines = [line.split() for line in run.stdout.splitlines()]
    assert sorted((where, name) for where, name, *_ in lines) == sorted(BIASED)
    assert {tuple(rest[:2]) for _, _, *rest in lines} == {("BiasedKLWarning", "<string>")}
    cited = {(where, name) for where, name, _, _, cites in lines if cites == "True"}
    assert {("reward", "k3"), ("loss", "k1")} <= cited


def test_pairs_that_are_right_do_not_warn(ref):
    with warnings.catch_warnings():
        warnings.simplefilter("error", BiasedKLWarning)
        KLRewardTransform(ref)
        KLComputation("k3_st", detach=False, add_to_reward=False)
        KLComputation(k3_st)


# Two engines ---------------------------------------------------------------------------------------------------------


@LAYOUTS
def test_sampled_with_one_engine_and_scored_with_another(gen, pad):
    from tiny_models import tiny_model

    model = tiny_model("qwen2", vocab_size=260)
    td = rollout(gen, (2, 2), pad)
    td["reward"] = torch.zeros(2, 2)
    with corelm.get_backend("transformers", model, tokenizer=ByteTokenizer()) as backend:
        RetrieveKL(LLMPolicy(backend, generate=False))(td)
    expected = []
    for ids, prompt in zip(
        corelm.ragged(td, ("tokens", "full")).tolist(), corelm.ragged(td, ("tokens", "prompt")).lengths, strict=True
    ):
        away = said(GEN, ids) - oracle.logprobs(model, ids).double()
        expected.append(torch.where(torch.arange(len(ids)) >= prompt, away, 0.0))
    for found, hand in zip(rows_of(td, "kl_penalty"), expected, strict=True):
        torch.testing.assert_close(found.double(), hand, atol=2e-4, rtol=1e-4)
    assert td["log_probs"].provenance.backend == "toy" and td["ref_log_probs"].provenance.backend == "transformers"

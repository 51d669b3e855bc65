"""Log-probs retrieved from a reference, and the KL of every token, against the tables of both models."""

import torch
from tensordict import TensorDict

import corelm
from corelm import LLMPolicy, LogProbs
from corelm.errors import InvalidRequestError, MissingKeyError
from corelm.kl import KLComputation, PerToken, RetrieveKL, RetrieveLogProb, k1
from corelm_testing.toy import ByteTokenizer
from helpers import oracle
from helpers.each import each
from helpers.kl_cases import (
    GEN,
    LAYOUTS,
    REF,
    SHAPES,
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


@LAYOUTS
@SHAPES
def test_retrieved_log_probs_are_a_complete_container_aligned_with_the_tokens(gen, ref, shape, pad):
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
    td["text"].full = ["not", "what was", "sampled"]
    for mode in ("history", "text", "tokens"):
        for policy in (ref.replace(input_mode=mode), gen.replace(input_mode=mode)):
            td = RetrieveLogProb(policy, log_probs_key=("one", mode), overwrite=True)(td)
        policy = LLMPolicy(ref.backend, input_mode=mode, num_samples=4, on_error="skip")
        found = RetrieveLogProb(policy)(td)["ref_log_probs"].full
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_retrieving_needs_tokens_and_a_policy(ref):
    with refused(InvalidRequestError, field="policy"):
        RetrieveLogProb(ref.backend)
    with refused(MissingKeyError, field="tokens"):
        RetrieveLogProb(ref)(TensorDict(text=["a"]))
    with refused(InvalidRequestError, field="tokens"):
        RetrieveLogProb(ref)(TensorDict(tokens=torch.zeros(2, 3, dtype=torch.int64)))


@LAYOUTS
@SHAPES
@each("under_next", [False, True, "split"])
def test_the_kl_of_every_token_matches_the_tables(gen, ref, shape, pad, under_next):
    td = RetrieveLogProb(ref)(rollout(gen, shape, pad))
    if under_next is True:
        td = TensorDict(next=td, batch_size=shape)
    elif under_next == "split":
        # The policy wrote at the root, before the step; the reference under ``next``.
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


@each("pad", [False, True])
@each("name", ["k1", "k2", "k3", "abs", "k1_st", "k3_st"])
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


@LAYOUTS
def test_an_estimator_function_may_ignore_the_mask(gen, ref, pad):
    td = RetrieveKL(ref, gen_policy=gen, estimator=lambda g, r, mask: g - r, add_to_reward=False)(rollout(gen, pad=pad))
    assert_rows(rows_of(td, "kl_penalty"), by_hand(td))
    for wrong in (lambda g, r, mask: (g - r).mean(), lambda g, r, mask: (g - r)[:, None]):
        with refused(InvalidRequestError, field="estimator"):
            KLComputation(wrong, add_to_reward=False)(td)


@LAYOUTS
def test_one_engine_samples_and_another_scores(gen, pad):
    from helpers.tiny_models import tiny_model

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

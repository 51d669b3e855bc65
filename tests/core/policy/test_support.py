"""The ids that truncation left, and the most probable ones, from a policy to its containers and back into scores.

The oracle is the table of the toy backend's bigram model: the logits after a token are a row of it.
"""

from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict, lazy_stack

import corelm
from corelm import History, LLMPolicy, LogProbs, PolicyOptions, TokenSets, token_sets
from corelm.errors import CapabilityError, InvalidRequestError, MissingKeyError, ProvenanceMismatchError
from corelm.kl import RetrieveLogProb
from corelm_testing.toy import Bigram
from helpers.each import each
from helpers.refusals import refused

MODEL = Bigram.of_talk()
TABLE = MODEL.table.detach().double()
TEXTS = ["The cat", "Who", "It is so"]
HEAT, K = 0.7, 3
SAMPLING = {"max_new_tokens": 6, "temperature": HEAT, "top_k": K}
LAYOUTS = each("pad", [False, True])


@pytest.fixture(scope="module")
def sampler(backend):
    return LLMPolicy(
        backend,
        input_mode="text",
        sampling_params=SAMPLING,
        log_probs_mode="processed",
        return_support=True,
        inplace=False,
    )


def scorer_of(policy, **changes):
    given = {"input_mode": "tokens", "support_key": "log_probs"}
    given |= {"sampling_params": {"temperature": HEAT}, "log_probs_mode": "processed"}
    return policy.replace(generate=False, **given | changes)


def sampled(policy, seed=3, **changes):
    return policy.replace(**changes)(TensorDict(text=TEXTS), seed=seed)


def of_table(td, cut=True, heat=HEAT):
    """Return, by row and position, the set and the log-prob over it; prompts are over the whole vocabulary."""
    sets, numbers, masses = [], [], []
    prompts = corelm.ragged(td, ("tokens", "prompt")).lengths.tolist()
    for prompt, ids in zip(prompts, corelm.ragged(td, ("tokens", "full")).tolist(), strict=True):
        row, values, mass = [[]], [0.0], [0.0]
        for at in range(1, len(ids)):
            whole = (TABLE[ids[at - 1]] / heat).log_softmax(-1)
            kept = sorted(whole.topk(K).indices.tolist()) if cut and at >= prompt else []
            mass.append(float(whole[kept].logsumexp(-1)) if kept else 0.0)
            row.append(kept)
            values.append(float(whole[ids[at]]) - mass[-1])
        sets.append(row)
        numbers.append(values)
        masses.append(mass)
    return sets, numbers, masses


def best_of(before, ids, k):
    """Return the k largest log-probs after each token; `ids` have them. Equally probable ids may stand in any order."""
    whole = TABLE[before].log_softmax(-1)
    best = whole.topk(k).values
    torch.testing.assert_close(whole.gather(-1, ids), best)
    return best


def assert_close(td, key, expected, where=None):
    found = corelm.ragged(td, key)
    flat = torch.tensor([value for row in expected for value in row], dtype=torch.float64)
    mask = torch.ones(len(flat), dtype=torch.bool) if where is None else corelm.ragged(td, where).values
    assert mask.any()
    torch.testing.assert_close(found.values[mask].double(), flat[mask], atol=1e-5, rtol=0)


# Sampling ------------------------------------------------------------------------------------------------------------


@LAYOUTS
@each("samples", [None, 2])
def test_what_was_left_is_written_next_to_the_numbers(sampler, pad, samples):
    td = sampled(sampler, pad_output=pad, num_samples=samples)
    sets, numbers, masses = of_table(td)
    assert token_sets(td).tolist() == sets and td["log_probs"].provenance.support == "truncated"
    assert_close(td, ("log_probs", "full"), numbers, ("log_probs", "scored_mask"))
    assert_close(td, ("log_probs", "kept_log_mass"), masses)
    assert set(map(str, sampler.out_keys)) <= set(map(str, td.keys(include_nested=True)))
    assert td["log_probs"].top_ids is None


@LAYOUTS
def test_the_most_probable_ids(sampler, pad):
    td = sampled(sampler, pad_output=pad, top_logprobs=4, log_probs_mode="raw", return_support=False)
    assert td["log_probs"].kept_ids is None and td["log_probs"].top_ids is not None
    answered = corelm.ragged(td, ("log_probs", "scored_mask")).values
    ids, tail = (corelm.ragged(td, ("log_probs", name)).values for name in ("top_ids", "tail_log_mass"))
    before = corelm.ragged(td, ("tokens", "full")).values.roll(1)[answered]
    best = best_of(before, ids[answered], 4)
    assert ids[~answered].eq(-1).all()
    values = corelm.ragged(td, ("log_probs", "top_log_probs")).values[answered]
    torch.testing.assert_close(values.double(), best, atol=1e-5, rtol=0)
    torch.testing.assert_close(tail[answered].double().exp(), 1.0 - best.exp().sum(-1), atol=1e-5, rtol=0)


def test_conversations_carry_sets_too(backend):
    chats = History.from_chats([[{"role": "user", "content": "Who?"}], [{"role": "user", "content": "It is?"}]])
    policy = LLMPolicy(backend, sampling_params=SAMPLING, log_probs_mode="processed", return_support=True)
    td = policy(TensorDict(history=chats, batch_size=[2]), seed=1)
    assert token_sets(td).tolist() == of_table(td)[0]
    scorer_of(policy, input_mode="history", log_probs_key="again")(td)
    mask = ("log_probs", "scored_mask")
    assert_close(td, ("again", "full"), corelm.ragged(td, ("log_probs", "full")).tolist(), mask)


def test_without_truncation_the_sets_are_empty_and_the_support_is_full(sampler):
    td = sampled(sampler, sampling_params={"max_new_tokens": 6, "temperature": HEAT})
    assert not corelm.ragged(td, ("log_probs", "kept_counts")).values.any()
    assert td["log_probs"].provenance.support == "full"
    scorer_of(sampler, log_probs_key="again", inplace=True)(td)
    assert td["again"].provenance == td["log_probs"].provenance and token_sets(td, "again").tolist()
    assert_close(td, ("again", "full"), of_table(td, cut=False)[1])


def test_greedy_answers_were_drawn_from_one_id(sampler):
    td = sampled(sampler, sampling_params={"max_new_tokens": 6, "temperature": 0.0})
    ids, said = corelm.ragged(td, ("tokens", "full")).tolist(), corelm.ragged(td, ("log_probs", "scored_mask")).tolist()
    expected = [[[t] if on else [] for t, on in zip(*row, strict=True)] for row in zip(ids, said, strict=True)]
    assert token_sets(td).tolist() == expected
    td = sampled(sampler, sampling_params={"max_new_tokens": 6, "temperature": 0.0, "top_k": K})
    at_zero = scorer_of(sampler, sampling_params={"temperature": 0.0})
    for score in (scorer_of(sampler), at_zero, RetrieveLogProb(sampler)):
        with pytest.raises(ProvenanceMismatchError, match=r"row 0: is greedy.* score without support_key"):
            score(td)
    RetrieveLogProb(sampler.replace(log_probs_mode="raw"), support_key=None)(td)


# Scoring -------------------------------------------------------------------------------------------------------------


@LAYOUTS
@each("samples", [None, 2])
def test_scores_over_the_sampler_s_ids_are_the_sampler_s_numbers(sampler, pad, samples):
    td = sampled(sampler, pad_output=pad, num_samples=samples)
    scorer = scorer_of(sampler, log_probs_key="again", pad_output=pad, inplace=True)
    assert scorer(td) is td
    assert_close(td, ("again", "full"), of_table(td)[1])  # prompts over the whole vocabulary, at the temperature
    mask = ("log_probs", "scored_mask")
    assert_close(td, ("again", "full"), corelm.ragged(td, ("log_probs", "full")).tolist(), mask)
    assert token_sets(td, "again").tolist() == token_sets(td).tolist()
    assert td["again"].provenance == td["log_probs"].provenance and td["again"].kept_log_mass is None
    assert set(map(str, scorer.out_keys)) <= set(map(str, td.keys(include_nested=True)))


@LAYOUTS
def test_log_prob_and_get_dist_are_over_the_same_ids_with_gradients(sampler, pad):
    td = sampled(sampler, pad_output=pad)
    scorer = scorer_of(sampler, pad_output=pad)
    full = scorer.log_prob(td)
    values = full[td["masks"].all_attention_mask] if pad else torch.cat(full)
    expected = torch.tensor([value for row in of_table(td)[1] for value in row])
    torch.testing.assert_close(values, expected.float(), atol=1e-5, rtol=0)
    assert values.requires_grad
    dist = scorer.get_dist(td, mask="response")
    dense = corelm.repad(td)
    numbers = dist.log_prob(dense["tokens"].full)
    torch.testing.assert_close(numbers, dense["log_probs"].full, atol=1e-5, rtol=0)
    entropy = dist.entropy()[dist.mask]
    assert torch.isfinite(entropy).all() and entropy.max() <= torch.tensor(float(K)).log() + 1e-5


def test_rows_without_sets_keep_the_label_of_full_support(sampler):
    whole = sampled(sampler, seed=5, sampling_params={"max_new_tokens": 6, "temperature": HEAT})
    both = lazy_stack([*sampled(sampler).unbind(0), *whole.unbind(0)])
    scorer_of(sampler, log_probs_key="again", inplace=True)(both)
    assert [row["again"].provenance.support for row in both] == ["truncated"] * 3 + ["full"] * 3
    mask = ("log_probs", "scored_mask")
    assert_close(both, ("again", "full"), corelm.ragged(both, ("log_probs", "full")).tolist(), mask)


# What does not belong together ---------------------------------------------------------------------------------------


@each(
    "options, field, what",
    [
        ({"generate": False, "return_support": True}, "return_support", "support_key"),
        ({"generate": False, "top_logprobs": 2}, "top_logprobs", "top_k=2"),
        ({"top_k": 5}, "top_k", 'sampling_params={"top_k": 5}'),
        ({"support_key": "log_probs"}, "support_key", "generate=False"),
        ({"return_support": True, "return_log_probs": False}, "return_support", "return_log_probs=False"),
        ({"top_logprobs": -1}, "top_logprobs", "at least 0"),
        ({"top_logprobs": True}, "top_logprobs", "whole number"),
        ({"return_support": "yes"}, "return_support", "expected"),
        ({"generate": False, "support_key": "log_probs", "top_k": 2}, "top_k", "support_key"),
        ({"generate": False, "support_key": 5}, "support_key", "key"),
    ],
)
def test_options_that_do_not_fit(options, field, what):
    with pytest.raises(InvalidRequestError) as caught:
        PolicyOptions(**options)
    assert caught.value.field == field and what in str(caught.value)


def broken(td, **changes):
    out = td.clone()
    out["log_probs"] = LogProbs.from_rows(
        full=list(td["log_probs"].full), provenance=td["log_probs"].provenance, **changes
    )
    return out


def test_sets_that_are_not_those_of_the_tokens(sampler):
    td = sampled(sampler)
    score = scorer_of(sampler, log_probs_key="again")
    sets = token_sets(td).tolist()
    start = len(td["tokens"].prompt[1])
    sampled_id = int(td["tokens"].response[1][0])
    without = [[[*ids] for ids in row] for row in sets]
    without[1][start] = [token for token in without[1][start] if token != sampled_id]
    twice = [[[*ids] for ids in row] for row in sets]
    twice[1][start] = [*twice[1][start], twice[1][start][0]]
    for wrong in (without, twice):
        with refused(InvalidRequestError, field="sequences", rows=(1,)) as caught:
            score(broken(td, kept_ids=TokenSets.from_list(wrong)))
        assert f"position {start}" in str(caught.value)
    skipped = score.replace(on_error="skip")(broken(td, kept_ids=TokenSets.from_list(without)))
    assert [bool(error) for error in skipped["errors"]] == [False, True, False]
    short = td.clone()
    row = short["log_probs"][2]
    row.set("full", row.full[:-1]), row.set("kept_counts", row.kept_counts[:-1])
    row.set("kept_ids", row.kept_ids[:-K])
    with refused(InvalidRequestError, field="log_probs", rows=(2,)) as caught:
        score(short)
    skipped = score.replace(on_error="skip")(short)
    assert [bool(error) for error in skipped["errors"]] == [False, False, True]
    with refused(InvalidRequestError, field="log_probs"):
        score(TensorDict({"tokens": td["tokens"], "log_probs": td["log_probs"][:2]}))


def test_sets_of_another_distribution(sampler):
    td = sampled(sampler)
    with pytest.raises(ProvenanceMismatchError, match=r'"temperature": 0.7') as caught:
        scorer_of(sampler, log_probs_mode="raw")(td)
    assert "row 0" in str(caught.value)
    with pytest.raises(ProvenanceMismatchError, match="is raw"):
        scorer_of(sampler)(sampled(sampler, log_probs_mode="raw"))
    with pytest.raises(ProvenanceMismatchError):
        scorer_of(sampler)(sampled(sampler, sampling_params={"temperature": 0.0, "max_new_tokens": 3}))
    with refused(CapabilityError, capability="score"):
        scorer_of(sampler, sampling_params={"temperature": HEAT, "repetition_penalty": 1.2})(td)
    label = td["log_probs"].provenance
    td["log_probs"].provenance = replace(label, penalties=(("repetition_penalty", 1.2),))
    with pytest.raises(ProvenanceMismatchError, match="with penalties"):
        scorer_of(sampler, log_probs_key="again")(td)


def test_nothing_to_take_the_sets_from(sampler):
    td = sampled(sampler, return_support=False)
    score = scorer_of(sampler, log_probs_key="again")
    with refused(MissingKeyError, field="log_probs.kept_ids"):
        score(td)
    with refused(MissingKeyError, field="log_probs"):
        score(td.select("tokens"))
    with refused(InvalidRequestError, field="log_probs"):
        score(td.set("log_probs", td["tokens"]))


def test_an_engine_that_knows_no_sets(backend, sampler):
    engine = backend.engine.plugin
    plain = type(engine)(engine.model, engine.tokenizer, engine.max_context)
    plain.capabilities = replace(engine.capabilities, score_support=False)
    scorer = scorer_of(sampler).options
    with corelm.Backend.from_plugin(plain, "plain") as opened:
        policy, td = LLMPolicy(opened, scorer), sampled(sampler)
        with refused(CapabilityError, capability="score_support"):
            policy(td)
        # Where nothing was cut off, it can.
        whole = sampled(sampler, sampling_params={"max_new_tokens": 6, "temperature": HEAT})
        assert policy(whole)["log_probs"].provenance.support == "full"

"""Policies refuse sets of ids that do not belong to the tokens, and options that do not fit together."""

from dataclasses import replace

import pytest
from tensordict import TensorDict

import corelm
from corelm import LLMPolicy, LogProbs, PolicyOptions, TokenSets, token_sets
from corelm.errors import CapabilityError, InvalidRequestError, MissingKeyError, ProvenanceMismatchError
from helpers.each import each
from helpers.refusals import refused

TEXTS = ["The cat", "Who", "It is so"]
HEAT, K = 0.7, 3
SAMPLING = {"max_new_tokens": 6, "temperature": HEAT, "top_k": K}


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


def test_another_kind_of_policy_drops_the_options_of_the_first():
    options = PolicyOptions(return_support=True, top_logprobs=3)
    scoring = options.replace(generate=False, support_key="log_probs")
    assert not scoring.return_support and not scoring.top_logprobs
    again = scoring.replace(generate=True)
    assert again.support_key is None and again == PolicyOptions()


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
    class Without:
        def __init__(self, toy):
            self.toy, self.tokenizer = toy, toy.tokenizer
            self.capabilities = corelm.Capabilities(
                vocab_size=toy.capabilities.vocab_size,
                max_context=toy.capabilities.max_context,
                score=True,
                score_temperature=True,
            )

        @corelm.hookimpl
        def score_logprobs(self, request):
            assert request.support is None
            return self.toy.score_logprobs(request)

    plain = corelm.Backend.from_plugin(Without(backend.engine.plugin), "plain")
    td = sampled(sampler)
    options = {"generate": False, "input_mode": "tokens", "log_probs_mode": "processed", "inplace": False}
    policy = LLMPolicy(plain, sampling_params={"temperature": HEAT}, support_key="log_probs", **options)
    with refused(CapabilityError, capability="score_support"):
        policy(td)
    # Where nothing was cut off, it can.
    whole = sampled(sampler, sampling_params={"max_new_tokens": 6, "temperature": HEAT})
    assert policy(whole)["log_probs"].provenance.support == "full"

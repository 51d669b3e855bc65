"""Scoring in place joins log-probs of the same tokens and the same distribution, and no others."""

import torch
from tensordict import TensorDict

import corelm
from corelm import LLMPolicy, LogProbs, Tokens
from corelm.errors import InvalidRequestError
from corelm_testing.toy import Bigram
from helpers.each import each
from helpers.refusals import refused
from helpers.rollouts import contents, plain, rollout

PADS = each("pad", [False, True])


@PADS
def test_log_probs_of_another_provenance_are_refused_before_the_engine_is_asked(backend, pad):
    calls = []

    class ScoreRecorder:
        @corelm.hookimpl(wrapper=True)
        def score_logprobs(self, request):
            calls.append(request)
            return (yield)

    td = rollout(backend, pad=pad)
    before = contents(td)
    with corelm.get_backend("toy", Bigram.of_talk(), wrappers=[ScoreRecorder()]) as watched:
        reference = LLMPolicy(watched, generate=False)
        with refused(InvalidRequestError, field="log_probs", rows=(0, 1, 2)) as error:
            reference(td)
        told = str(error.value)
        assert "toy ('', weights '0', raw)" in told and "toy ('Bigram', weights '0', raw)" in told
        assert calls == [] and contents(td) == before
        assert reference.replace(log_probs_key="ref_log_probs")(td) is td
        assert contents(td) == before and td["ref_log_probs"].provenance.model == "Bigram"
        assert td["ref_log_probs"].padded is pad and td["ref_log_probs"].prompt is not None
        reference.replace(overwrite=True)(td)
    assert td["log_probs"].provenance.model == "Bigram" and td["log_probs"].response is not None
    assert {key: value for key, value in contents(td).items() if key[0] != "log_probs"} == {
        key: value for key, value in before.items() if key[0] != "log_probs"
    }


def test_a_temperature_or_new_weights_are_another_provenance():
    with corelm.get_backend("toy") as own:
        td = rollout(own)
        hot = {"generate": False, "log_probs_mode": "processed", "sampling_params": {"temperature": 2.0}}
        with refused(InvalidRequestError, field="log_probs", rows=(0, 1, 2)):
            LLMPolicy(own, **hot)(td)
        # At temperature 1 both modes have the same numbers, and the same label.
        LLMPolicy(own, generate=False, log_probs_mode="processed")(td)
        own.update_weights(own.engine.plugin.model.state_dict(), version="later")
        with refused(InvalidRequestError, field="log_probs", rows=(0, 1, 2)):
            LLMPolicy(own, generate=False)(td)


def test_weights_that_change_during_the_call_are_noticed():
    class Updater:
        @corelm.hookimpl(wrapper=True)
        def score_logprobs(self, request):
            result = yield
            own.weights_changed("later")
            return result

    with corelm.get_backend("toy", wrappers=[Updater()]) as own:
        td = rollout(own)
        before = contents(td)
        with refused(InvalidRequestError, field="log_probs", rows=(0, 1, 2)):
            LLMPolicy(own, generate=False)(td)
        assert contents(td) == before


@PADS
def test_models_that_share_a_label_are_told_apart_by_their_numbers(pad):
    noise = torch.randn(260, 260, generator=torch.Generator().manual_seed(0))
    sampler, reference = Bigram.of_talk(), Bigram(Bigram.of_talk().table.detach() + noise)
    with corelm.get_backend("toy", sampler) as one, corelm.get_backend("toy", reference) as two:
        td = rollout(one, pad=pad)
        before = contents(td)
        with refused(InvalidRequestError, field="log_probs", rows=(2,)):
            LLMPolicy(two, generate=False)(td)
        assert contents(td) == before
        LLMPolicy(two, generate=False, overwrite=True)(td)
        assert contents(td)["log_probs", "full"] != before["log_probs", "full"]


def test_log_probs_of_an_earlier_answer_are_not_joined_to_a_new_one(backend, other):
    """A long prompt, whose log-probs agree, does not hide that those of a short answer do not."""
    long = [[65 + at % 26 for at in range(250)], [66 + at % 20 for at in range(250)]]
    td = TensorDict(tokens=Tokens.from_rows(prompt=long), batch_size=[2])
    policy = LLMPolicy(backend, input_mode="tokens", sampling_params={"max_new_tokens": 8, "ignore_eos": True})
    scorer = LLMPolicy(other, input_mode="tokens", generate=False, log_probs_key="ref_log_probs")
    scorer(policy(td, seed=1))
    before = plain(td["ref_log_probs"].full)
    scorer(td)  # the same tokens again
    assert plain(td["ref_log_probs"].full) == before
    policy(td, seed=2)
    with refused(InvalidRequestError, field="ref_log_probs", rows=(1,)):
        scorer(td)
    assert plain(td["ref_log_probs"].full) == before
    scorer.replace(overwrite=True)(td)
    scored = scorer.replace(inplace=False)(td)["ref_log_probs"].full
    assert plain(td["ref_log_probs"].full) == plain(scored) != before


def test_log_probs_of_one_row_that_was_replaced_are_not_joined(backend):
    rows = [[65 + (at * step) % 26 for at in range(40)] for step in range(1, 65)]
    scorer = LLMPolicy(backend, input_mode="tokens", generate=False)
    td = scorer(TensorDict(tokens=Tokens.from_rows(full=rows), batch_size=[64]))
    rows[17] = [200 - at for at in range(40)]
    td["tokens"] = Tokens.from_rows(full=rows)
    with refused(InvalidRequestError, field="log_probs", rows=(17,)):
        scorer(td)


def test_log_probs_of_an_unknown_source_are_refused(backend):
    td = rollout(backend, pad=True)
    td["log_probs"] = LogProbs(full=td["log_probs"].full, batch_size=[3])
    with refused(InvalidRequestError, field="log_probs", rows=(0, 1, 2)):
        LLMPolicy(backend, generate=False)(td)


@PADS
def test_scores_keep_the_split_of_log_probs_when_the_tokens_have_lost_theirs(backend, pad):
    td = rollout(backend, pad=pad)
    expected = contents(td)
    lean = td.select(("tokens", "full"), "masks", "log_probs", "history")
    LLMPolicy(backend, generate=False, return_text=False)(lean)
    assert contents(lean)["log_probs", "response"] == expected["log_probs", "response"]
    assert contents(lean)["tokens", "prompt"] == expected["tokens", "prompt"]

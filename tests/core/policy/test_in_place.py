"""Scoring in place joins what a rollout holds, and replaces nothing unless told."""

import pytest
import torch
from tensordict import TensorDict, lazy_stack

import corelm
from corelm import History, Keys, LLMPolicy, Masks, PolicyOptions, Provenance, Text, Tokens
from corelm.errors import InvalidRequestError
from corelm.kl import RetrieveKL, RetrieveLogProb
from corelm_testing.toy import Bigram, ByteTokenizer
from helpers.each import each
from helpers.refusals import refused
from helpers.toy_prompts import QUESTIONS, SAMPLING, TABLE, TOKENIZER, chat, prompts

PADS = each("pad", [False, True])
SHAPES = each("shape", [(), (3,), (2, 2)])
FIELDS = {
    "text": ("prompt", "response", "full"),
    "tokens": ("prompt", "response", "full"),
    "masks": ("all_attention_mask", "all_assistant_mask", "all_response_mask"),
    "log_probs": ("prompt", "response", "full", "scored_mask"),
    "history": ("prompt", "response", "full"),
}


def rollout(backend, mode="history", shape=(3,), pad=False, **changes):
    td, _ = prompts(mode, shape)
    return LLMPolicy(backend, input_mode=mode, pad_output=pad, sampling_params=SAMPLING, **changes)(td, seed=1)


def plain(value):
    if isinstance(value, History):
        return value.to_chats()
    return [plain(item) for item in value] if isinstance(value, list) else getattr(value, "tolist", lambda: value)()


def contents(td, keys=FIELDS):
    there = [(name, field) for name in keys if name in td.keys() for field in keys[name]]
    return {(name, field): plain(getattr(td[name], field)) for name, field in there}


@PADS
@SHAPES
@each("mode", ["history", "text", "tokens"])
def test_scoring_with_all_defaults_drops_no_field_of_a_rollout(backend, mode, shape, pad):
    td = rollout(backend, mode, shape, pad)
    td["reward"] = torch.ones(shape)
    before, keys = contents(td), set(td.keys())
    scorer = LLMPolicy(backend, input_mode=mode, generate=False, log_probs_key="scores")
    assert scorer(td) is td and set(td.keys()) == {*keys, "scores"}
    after = contents(td)
    kept = [key for key in before if key[0] != "log_probs"]
    assert {key: after[key] for key in kept} == {key: before[key] for key in kept}
    assert None not in after.values() or mode != "history"
    assert {key: after[key] for key in after if key[0] == "log_probs"} == {
        key: value for key, value in before.items() if key[0] == "log_probs"
    }
    assert td["scores"].provenance == Provenance("toy", "", "0") and td["scores"].padded is pad
    full, ids = corelm.ragged(td, ("scores", "full")), corelm.ragged(td, ("tokens", "full"))
    assert torch.equal(corelm.ragged(td, ("scores", "scored_mask")).values, ids.positions > 0)
    for row, values in zip(ids.split(), full.split(), strict=True):
        torch.testing.assert_close(values[1:].double(), TABLE[row[:-1], row[1:]], atol=1e-5, rtol=0)
    first = corelm.ragged(td, ("scores", "prompt"))
    assert [a[: len(b)] for a, b in zip(full.tolist(), first.tolist(), strict=True)] == first.tolist()


@PADS
def test_log_probs_that_are_there_are_refused_before_the_engine_is_asked(backend, pad):
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
        with pytest.raises(InvalidRequestError, match=r'log_probs_key="ref_log_probs".*overwrite=True') as error:
            reference(td)
        assert error.value.field == "log_probs" and calls == [] and contents(td) == before
        assert reference.replace(log_probs_key="ref_log_probs")(td) is td
        assert contents(td) == before and td["ref_log_probs"].provenance.model == "Bigram"
        with pytest.raises(InvalidRequestError, match=r"pass overwrite=True to score again; or another log_probs_key"):
            reference.replace(log_probs_key="ref_log_probs")(td)
        assert td["ref_log_probs"].padded is pad and td["ref_log_probs"].prompt is not None
        reference.replace(overwrite=True)(td)
    assert td["log_probs"].provenance.model == "Bigram" and td["log_probs"].response is not None
    assert {key: value for key, value in contents(td).items() if key[0] != "log_probs"} == {
        key: value for key, value in before.items() if key[0] != "log_probs"
    }


def test_a_scorer_with_another_template_or_tokenizer_mixes_nothing(backend):
    class Shouting(ByteTokenizer):
        def apply_chat_template(self, conversation, **options):
            return super().apply_chat_template(conversation, **options).replace("user", "USER")

    td = rollout(backend)
    before = contents(td)
    with corelm.get_backend("toy", tokenizer=Shouting()) as another:
        scorer = LLMPolicy(another, generate=False)
        for policy in (scorer, scorer.replace(log_probs_key="ref_log_probs")):
            with refused(InvalidRequestError, field="tokens", rows=(0, 1, 2)):
                policy(td)
        assert contents(td) == before and "ref_log_probs" not in td.keys()
        assert scorer.replace(inplace=False)(td)["text"].full[0].startswith("<|im_start|>USER")
        keys = Keys(text="ref_text", tokens="ref_tokens", masks="ref_masks", log_probs="ref_log_probs")
        scorer.replace(keys=keys)(td)
        assert contents(td) == before and td["ref_text"].full[0].startswith("<|im_start|>USER")
        scorer.replace(overwrite=True)(td)
        assert td["text"].full[0].startswith("<|im_start|>USER") and td["tokens"].prompt is None
        assert td["history"].response is not None  # what was read stays whole


def test_an_input_that_changed_since_is_refused_or_replaced(backend):
    scorer = LLMPolicy(backend, input_mode="text", generate=False)
    td = scorer(TensorDict(text=["The cat", "Who"]))
    td["text"].full = ["The cat", "When"]
    with refused(InvalidRequestError, field="tokens", rows=(1,)):
        scorer(td)
    scorer.replace(overwrite=True)(td)
    assert [len(row) for row in td["tokens"].full] == [8, 5] == [len(row) for row in td["log_probs"].full]


def test_log_probs_of_tokens_that_are_replaced_do_not_stay(backend):
    policy = LLMPolicy(backend, input_mode="text", sampling_params=SAMPLING)
    td = policy(TensorDict(text=["The cat", "Who"]), seed=1)
    before = contents(td)
    again = policy.replace(log_probs_key="mine")
    with refused(InvalidRequestError, field="log_probs"):
        again(td)
    td["text"].full = ["The dog", "When"]
    scorer = policy.replace(generate=False, overwrite=True, prefer_tokens=False)
    with refused(InvalidRequestError, field="log_probs"):
        scorer.replace(log_probs_key="ref_log_probs")(td)
    assert "ref_log_probs" not in td.keys()
    with refused(InvalidRequestError, field="masks"):
        scorer.replace(return_masks=False)(td)
    assert contents(td, {"tokens": FIELDS["tokens"]}).items() <= before.items()
    lean = td.exclude("log_probs")
    scorer.replace(log_probs_key="ref_log_probs")(lean)
    assert [len(row) for row in lean["ref_log_probs"].full] == [len(row) for row in lean["tokens"].full] == [8, 5]


@each(
    "name, value",
    [
        ("text", ["a", "b", "c"]),
        ("tokens", torch.zeros(3, 2)),
        ("masks", torch.ones(3, 2, dtype=torch.bool)),
        ("log_probs", torch.zeros(3)),
        ("log_probs", TensorDict(full=torch.zeros(3, 2), batch_size=[3])),
        ("text", Text(full=["a", "b", "c"], batch_size=[3])),
        ("masks", Masks(all_attention_mask=torch.ones(3, 2), batch_size=[3])),
        ("tokens", Tokens(prompt=torch.ones(3, 2), batch_size=[3])),
    ],
)
def test_what_a_user_keeps_under_the_key_of_a_container_is_not_replaced(backend, name, value):
    td = TensorDict(history=History.from_chats([chat(q) for q in QUESTIONS[:3]]), batch_size=[3])
    td[name] = value
    scorer = LLMPolicy(backend, generate=False)
    with refused(InvalidRequestError, field=name):
        scorer(td)
    assert set(td.keys()) == {"history", name}
    assert scorer.replace(overwrite=True)(td)["log_probs"].provenance


def test_a_plain_tensordict_keeps_what_its_container_would_lose(backend):
    ids = torch.tensor([[72, 105], [72, 111]])
    td = TensorDict(tokens=TensorDict(prompt=ids[:, :1], full=ids, batch_size=[2]), batch_size=[2])
    scorer = LLMPolicy(backend, input_mode="tokens", generate=False)
    with refused(InvalidRequestError, field="tokens"):
        scorer(td)
    assert isinstance(scorer(td.exclude(("tokens", "prompt")))["tokens"], Tokens)


def test_a_custom_mask_is_kept(backend):
    td = rollout(backend)
    td["masks"].all_assistant_mask = [torch.zeros_like(mask) for mask in td["masks"].all_assistant_mask]
    LLMPolicy(backend, generate=False, log_probs_key="scores")(td)
    assert not any(bool(mask.any()) for mask in td["masks"].all_assistant_mask)


@PADS
def test_fields_that_are_missing_are_added(backend, pad):
    td = rollout(backend, pad=pad)
    expected = contents(td)
    del td["masks", "all_assistant_mask"], td["text", "full"], td["tokens", "response"]
    before = contents(td)
    assert before["masks", "all_assistant_mask"] is None and before["text", "full"] is None
    LLMPolicy(backend, generate=False, log_probs_key="scores")(td)
    after = contents(td)
    assert after["masks", "all_assistant_mask"] == expected["masks", "all_assistant_mask"]
    assert after["tokens", "response"] == expected["tokens", "response"]
    assert after["text", "prompt"] == expected["text", "prompt"] and after["text", "full"] is not None


def test_bare_dense_tokens_with_masks_keep_their_columns(backend):
    ids = torch.tensor([[256, 72, 105], [72, 101, 108]])
    masks = {"all_attention_mask": ids != 256, "all_assistant_mask": ids == 105}
    for kind in (Masks, TensorDict):
        td = TensorDict(tokens=ids, masks=kind(**masks, batch_size=[2]), batch_size=[2])
        LLMPolicy(backend, input_mode="tokens", generate=False, pad_output=True)(td)
        assert torch.equal(td["masks"].all_assistant_mask, ids == 105)
        assert torch.equal(td["masks"].all_attention_mask, ids != 256) and torch.equal(td["tokens"].full, ids)


def test_messages_about_skipped_rows_are_kept(backend):
    td = LLMPolicy(backend, input_mode="text", sampling_params=SAMPLING, on_error="skip")(TensorDict(text=["", "Who"]))
    td["errors"] = ["was slow", ""]
    scorer = LLMPolicy(backend, input_mode="tokens", generate=False, on_error="skip", log_probs_key="scores")
    scorer(td)
    assert td["errors"] == ["was slow", ""]
    del td["scores"]
    td["errors"] = torch.zeros(2)
    with refused(InvalidRequestError, field="errors"):
        scorer(td)


def test_scoring_a_stack_of_rows_in_place_keeps_their_fields(backend):
    td = lazy_stack(list(rollout(backend).unbind(0)))
    before = contents(td)
    after = contents(LLMPolicy(backend, generate=False, log_probs_key="scores")(td))
    assert {key for key, value in before.items() if value is not None} <= {key for key, value in after.items() if value}
    assert after["tokens", "prompt"] == before["tokens", "prompt"]


# The key of the log-probs ---------------------------------------------------------------------------------------------


def test_log_probs_key_is_short_for_keys(backend):
    assert PolicyOptions(log_probs_key="ref") == PolicyOptions(keys=Keys(log_probs="ref"))
    assert PolicyOptions(keys=Keys(log_probs=("a", "b"))).log_probs_key == ("a", "b")
    policy = LLMPolicy(backend, input_mode="text", log_probs_key="mine", sampling_params=SAMPLING)
    assert {"mine"} < set(policy(TensorDict(text=["Hi"])).keys())
    assert policy.replace(pad_output=True).options.keys.log_probs == "mine"
    assert policy.replace(log_probs_key="other").options.keys == Keys(log_probs="other")
    assert policy.replace(keys=Keys(text="words")).options.log_probs_key == "log_probs"
    assert policy.replace(log_probs_key=None).options.keys == Keys()
    with refused(InvalidRequestError, field="log_probs_key"):
        LLMPolicy(backend, keys=Keys(log_probs="b"), log_probs_key="a")
    for bad in (3, (), ("a", 1)):
        with refused(InvalidRequestError, field="log_probs_key"):
            LLMPolicy(backend, log_probs_key=bad)
    with refused(InvalidRequestError, field="overwrite"):
        LLMPolicy(backend, overwrite="yes")


# corelm.kl -----------------------------------------------------------------------------------------------------------


@PADS
@SHAPES
def test_retrieving_protects_sampled_log_probs_under_every_key(backend, other, pad, shape):
    # The scorer has its own key, but RetrieveKL writes to "log_probs" by default.
    own = LLMPolicy(other, log_probs_key="gen_log_probs")
    td = rollout(backend, shape=shape, pad=pad)
    before = contents(td)
    for make in (
        lambda: RetrieveKL(LLMPolicy(other), gen_policy=own, add_to_reward=False),
        lambda: RetrieveLogProb(own, log_probs_key="log_probs"),
    ):
        with refused(InvalidRequestError, field="log_probs"):
            make()(td)
    assert contents(td) == before and "gen_log_probs" not in td.keys()
    # The sampler had another key, which none of the scorers has.
    td = rollout(backend, shape=shape, pad=pad, log_probs_key=("gen", "log_probs"))
    answers = plain(td["gen", "log_probs"].full)
    retrieve = RetrieveLogProb(LLMPolicy(other), log_probs_key=("gen", "log_probs"))
    with pytest.raises(InvalidRequestError, match=r"^gen.log_probs: row 0.*overwrite=True"):
        retrieve(td)
    assert plain(td["gen", "log_probs"].full) == answers
    RetrieveLogProb(LLMPolicy(other), log_probs_key=("gen", "log_probs"), overwrite=True)(td)
    assert td["gen", "log_probs"].provenance.model == "Bigram"
    # What was retrieved under such a key is not sampled, but of another model.
    with pytest.raises(InvalidRequestError, match=r"^gen.log_probs: row 0.*overwrite=True"):
        RetrieveLogProb(LLMPolicy(backend), log_probs_key=("gen", "log_probs"))(td)
    RetrieveLogProb(LLMPolicy(backend), log_probs_key=("gen", "log_probs"), overwrite=True)(td)
    assert td["gen", "log_probs"].provenance.model == ""


# Generating ----------------------------------------------------------------------------------------------------------


def test_a_new_answer_replaces_the_containers_of_an_earlier_one_and_leaves_the_rest(backend):
    policy = LLMPolicy(backend, input_mode="text", sampling_params=SAMPLING)
    td = policy(TensorDict(text=QUESTIONS[:2]), seed=1)
    td["reward"] = torch.ones(2)
    td["text"] = Text(prompt=QUESTIONS[2:], batch_size=[2])
    again = policy.replace(inplace=False)(td.select("text"), seed=2)
    policy(td, seed=2)
    names = ("text", "tokens", "masks", "log_probs")
    assert contents(td, {name: FIELDS[name] for name in names}) == contents(again)
    assert td["reward"].tolist() == [1.0, 1.0]


def test_a_new_answer_is_not_left_next_to_scores_of_an_earlier_one(backend):
    policy = LLMPolicy(backend, input_mode="text", sampling_params=SAMPLING)
    td = policy(TensorDict(text=QUESTIONS[:2]), seed=1)
    policy.replace(generate=False, input_mode="tokens", log_probs_key="ref_log_probs")(td)
    before = contents(td)
    with pytest.raises(InvalidRequestError, match=r"^ref_log_probs: .*next to a new answer; delete it"):
        policy(td, seed=2)
    assert contents(td) == before
    del td["ref_log_probs"]
    assert policy(td, seed=2) is td
    td["next"] = TensorDict(reward=torch.ones(2), batch_size=[2])
    RetrieveLogProb(policy)(td)
    with pytest.raises(InvalidRequestError, match=r"^next.ref_log_probs: .*next to a new answer"):
        policy(td, seed=3)


def test_log_probs_of_an_earlier_answer_are_not_left_in_stacked_rows(backend):
    td = rollout(backend, "text")
    policy = LLMPolicy(backend, input_mode="text", sampling_params=SAMPLING, log_probs_key="other")
    with pytest.raises(InvalidRequestError, match=r"^log_probs: .*next to a new answer"):
        policy(lazy_stack(list(td.unbind(0))), seed=2)
    scored = RetrieveLogProb(policy)(td)
    with pytest.raises(InvalidRequestError, match=r"^ref_log_probs: .*next to a new answer"):
        policy.replace(log_probs_key="log_probs")(lazy_stack(list(scored.unbind(0))), seed=2)


@each("first", [0, 1])
def test_two_agents_answer_in_one_tensordict_again_and_again(backend, first):
    td = TensorDict(asked=QUESTIONS[:3])
    one = LLMPolicy(backend, input_mode="text", sampling_params=SAMPLING, input_key="asked")
    agents = one, one.replace(keys={name: f"b_{name}" for name in ("text", "tokens", "masks", "log_probs")})
    for turn in range(4):
        agents[(first + turn) % 2](td, seed=turn)
    for name in ("", "b_"):
        assert [*map(len, td[f"{name}log_probs"].response)] == [*map(len, td[f"{name}tokens"].response)]


def test_a_key_in_a_tuple_of_one_is_that_key(backend):
    policy = LLMPolicy(backend, input_mode="text", sampling_params=SAMPLING, log_probs_key=("current",))
    td = TensorDict(text=QUESTIONS[:2])
    assert policy(policy(td, seed=1), seed=2) is td and policy.options.log_probs_key == "current"


@each("name", ["text", "tokens", "masks", "log_probs", "history"])
def test_a_new_answer_next_to_a_container_of_an_earlier_one_is_refused(backend, name):
    td = rollout(backend)
    policy = LLMPolicy(backend, sampling_params=SAMPLING, **{f"return_{name}": False})
    td["history"].prompt = td["history"].full.append({"role": "user", "content": "And?"})
    before = contents(td)
    with pytest.raises(InvalidRequestError, match=f"'{name}' holds that of an earlier answer") as error:
        policy(td)
    assert error.value.field == f"return_{name}" and contents(td) == before
    assert name not in policy.replace(inplace=False)(td).keys()


# A policy scores what another one sampled -----------------------------------------------------------------------------


@each("pad", [False, True])
@each("samples", [None, 2])
def test_scoring_sampled_rows_gives_the_same_ids_and_log_probs(backend, pad, samples):
    td, _ = prompts("history", (3,))
    policy = LLMPolicy(backend, pad_output=pad, num_samples=samples, sampling_params=SAMPLING)
    out = policy(td, seed=1)
    by_tokens = policy.replace(input_mode="tokens", generate=False, inplace=False)(out)
    by_history = policy.replace(generate=False, inplace=False)(out)
    sampled, answered = corelm.ragged(out, ("log_probs", "full")), corelm.ragged(out, ("log_probs", "scored_mask"))
    for scored in (by_tokens, by_history):
        assert corelm.ragged(scored, ("tokens", "full")).tolist() == corelm.ragged(out, ("tokens", "full")).tolist()
        again = corelm.ragged(scored, ("log_probs", "full"))
        torch.testing.assert_close(again.values[answered.values], sampled.values[answered.values], atol=1e-5, rtol=0)
        assert corelm.ragged(scored, ("masks", "all_assistant_mask")).tolist() == answered.tolist()
    # A history next to its own tokens keeps their split into prompt and response and, if they are dense, their columns.
    for scored in (by_tokens, by_history):
        assert scored["log_probs"].prompt is not None
        if pad:
            assert torch.equal(scored["tokens"].full, out["tokens"].full)
            assert torch.equal(scored["masks"].all_attention_mask, out["masks"].all_attention_mask)
            assert torch.equal(scored["tokens"].response, out["tokens"].response)
    alone = policy.replace(generate=False, inplace=False)(out.select("history"))
    assert alone["log_probs"].prompt is None
    told = History.of(
        [[*c[:-1], {"role": "assistant", "content": "Else."}] for c in out["history"].full.chats], out.shape
    )
    stale = policy.replace(generate=False, inplace=False)(out.copy().set("history", told))
    assert stale["log_probs"].prompt is None


def test_prefer_tokens_false_reports_the_rows_rendered_from_text(backend):
    policy = LLMPolicy(backend, sampling_params={"max_new_tokens": 4, "ignore_eos": True}, inplace=False)
    first = policy(TensorDict(history=History.from_chats([chat(q) for q in QUESTIONS[:2]])), seed=1)
    assert "retokenized" not in first.keys() and "retokenized" not in policy.out_keys
    again = policy.replace(prefer_tokens=False, generate=False)
    assert "retokenized" in again.out_keys
    mixed = History.of([first["history"].full.chats[0], first["history"].prompt.chats[1]], (2,))
    assert again(TensorDict(history=mixed))["retokenized"].tolist() == [True, False]
    going_on = policy.replace(prefer_tokens=False, continue_final_message=True)
    assert going_on(TensorDict(history=mixed), seed=1)["retokenized"].tolist() == [True, False]


# `get_dist` and `log_prob` --------------------------------------------------------------------------------------------


@each("mask", ["attention", "assistant", "response", "tensor"])
@each("pad", [True, False])
def test_distributions_of_the_positions_asked_for(mask, pad):
    with corelm.get_backend("toy") as backend:
        policy = LLMPolicy(backend, pad_output=pad, sampling_params=SAMPLING)
        out = policy(TensorDict(history=History.from_chats([chat(q) for q in QUESTIONS])), seed=4)
        scorer = policy.replace(input_mode="tokens", generate=False)
        full = corelm.ragged(out, ("tokens", "full"))
        split = [corelm.ragged(out, (name, field)) for name, field in (("tokens", "prompt"), ("tokens", "response"))]
        dense = torch.cat([split[0].to_padded(0, "left"), split[1].to_padded(0, "right")], -1)
        at = torch.cat([split[0].mask("left"), split[1].mask("right")], -1)
        if mask == "tensor":
            chosen = at & (torch.arange(at.shape[1]) % 2 == 0)
            first = at.long().argmax(-1)
            expected = chosen & (torch.arange(at.shape[1]) != first[:, None])
        else:
            chosen, expected = mask, {"attention": None}.get(mask, corelm.ragged(out, ("masks", "all_response_mask")))
            if expected is None:
                expected = corelm.Ragged((full.positions > 0), full.lengths)
            expected = at.new_zeros(at.shape).masked_scatter_(at, expected.values)
        dist = scorer.get_dist(out, mask=chosen)
        assert torch.equal(dist.mask, expected)
        logp = dist.log_prob(dense)
        assert bool((logp[~expected] == 0).all())
        rows, columns = expected.nonzero().T
        # Inside a row tokens are neighbours, so the one before is one column to the left.
        truth = TABLE[dense[rows, columns - 1], dense[rows, columns]]
        torch.testing.assert_close(logp[expected].double(), truth, atol=1e-5, rtol=0)
        logp.sum().backward()
        assert backend.engine.plugin.model.table.grad.abs().sum() > 0


def test_log_prob_carries_gradients_and_equals_the_scores():
    with corelm.get_backend("toy") as backend:
        policy = LLMPolicy(backend, input_mode="text", generate=False, inplace=False)
        td = TensorDict(text=QUESTIONS)
        rows = policy.log_prob(td)
        assert [len(row) for row in rows] == [len(ids) for ids in TOKENIZER(QUESTIONS)["input_ids"]]
        for row, scored in zip(rows, policy(td)["log_probs"].full, strict=True):
            assert torch.equal(row.detach(), scored)
        sum(row.sum() for row in rows).backward()
        assert backend.engine.plugin.model.table.grad.abs().sum() > 0
        with torch.no_grad():
            assert not policy.replace(pad_output=True).log_prob(td).requires_grad


def test_a_mask_that_the_input_does_not_have_is_refused(backend):
    policy = LLMPolicy(backend, input_mode="text", generate=False)
    with refused(InvalidRequestError, field="mask"):
        policy.get_dist(TensorDict(text=["hello"]), mask="assistant")
    with refused(InvalidRequestError, field="mask"):
        policy.get_dist(TensorDict(text=["hello"]), mask="prompt")
    with refused(InvalidRequestError, field="mask"):
        policy.get_dist(TensorDict(text=["hello"]), mask=torch.ones(1, 3, dtype=torch.bool))

"""One training row of several turns: ids, masks and log-probs against a plain forward of the whole conversation."""

import pytest
import torch
from tensordict import TensorDict, lazy_stack

import corelm
from corelm import History, LLMPolicy, LogProbs, merge_turns, ragged
from corelm.errors import InvalidRequestError, MissingKeyError, ProvenanceMismatchError
from corelm.kl import KLRewardTransform
from helpers import oracle
from helpers.chat_templates import FORGETFUL
from helpers.each import each
from helpers.refusals import refused
from helpers.tiny_models import tiny_model, tiny_tokenizer

SAMPLING = {"max_new_tokens": 6}
CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "assistant", "content": "I am Pip."}, {"role": "user", "content": "Hello there, who are you?"}],
]
SAID = [{"role": "tool", "content": "The sky is clear."}, {"role": "user", "content": "And then?"}]


@pytest.fixture(scope="module")
def models():
    return [tiny_model(seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def backend(models):
    with corelm.get_backend("transformers", models[0], tokenizer=tiny_tokenizer()) as opened:
        yield opened


def converse(policy, turns, chats=CHATS, between=lambda turn: None):
    """Return the result of every turn."""
    history, results = History.from_chats(chats), []
    for turn in range(turns):
        results.append(policy.replace(inplace=False)(TensorDict(history=history), seed=turn))
        history = results[-1]["history"].full.extend(SAID[: 1 + turn % 2])
        between(turn)
    return results


def rows(td, container, field):
    return ragged(td, (container, field)).tolist()


@each("turns", [1, 3])
@each("sampled_dense", [False, True])
@each("pad_output", [False, True])
def test_a_row_has_the_log_probs_of_the_sampled_tokens_of_every_turn(backend, models, turns, sampled_dense, pad_output):
    results = converse(LLMPolicy(backend, sampling_params=SAMPLING, pad_output=sampled_dense), turns)
    row = merge_turns(results, pad_output=pad_output, pad_id=backend.pad_id)
    assert row["tokens"].padded is pad_output and tuple(row.batch_size) == (2,)
    full, prompt, response = (rows(row, "tokens", name) for name in ("full", "prompt", "response"))
    assert full == rows(results[-1], "tokens", "full") and prompt == rows(results[0], "tokens", "prompt")
    assert [a + b for a, b in zip(prompt, response, strict=True)] == full
    for i, ids in enumerate(full):
        # Where the answer of each turn is, found without the masks: after its own prompt.
        expected = torch.zeros(len(ids), dtype=torch.bool)
        for td in results:
            expected[len(rows(td, "tokens", "prompt")[i]) : len(rows(td, "tokens", "full")[i])] = True
        assert expected.sum() == sum(len(rows(td, "tokens", "response")[i]) for td in results)
        for container, mask in (("masks", "all_assistant_mask"), ("log_probs", "scored_mask")):
            assert rows(row, container, mask)[i] == expected.tolist(), mask
        in_response = [False] * len(prompt[i]) + [True] * len(response[i])
        assert rows(row, "masks", "all_response_mask")[i] == in_response
        found = ragged(row, ("log_probs", "full")).split()[i]
        oracle.close(found[expected], oracle.logprobs(models[0], ids)[expected])
        assert not found[~expected].any()
    assert row["log_probs"].provenance == results[0]["log_probs"].provenance
    assert list(row["weight_versions"]) == [("0",) * turns] * 2


def test_every_turn_keeps_the_numbers_and_the_version_of_the_weights_that_sampled_it(models):
    with corelm.get_backend("transformers", tiny_model(seed=0), tokenizer=tiny_tokenizer()) as backend:

        def train(turn):
            backend.update_weights(models[turn + 1].state_dict(), version=f"step {turn + 1}")

        results = converse(LLMPolicy(backend, sampling_params=SAMPLING), 2, between=train)
    row = merge_turns(results)
    assert list(row["weight_versions"]) == [("0", "step 1")] * 2
    assert row["log_probs"].provenance.weight_version == "0, step 1"
    for i, ids in enumerate(rows(row, "tokens", "full")):
        found = ragged(row, ("log_probs", "full")).split()[i]
        for model, td in zip(models, results, strict=False):
            answer = slice(len(rows(td, "tokens", "prompt")[i]), len(rows(td, "tokens", "full")[i]))
            oracle.close(found[answer], oracle.logprobs(model, ids)[answer])


def test_a_merged_row_can_be_scored_again_and_compared(backend):
    row = merge_turns(converse(LLMPolicy(backend, sampling_params=SAMPLING), 2))
    row["next"] = TensorDict(reward=torch.ones(2), batch_size=[2])
    td = KLRewardTransform(LLMPolicy(backend), 0.1)(row)
    torch.testing.assert_close(td["next", "reward"], torch.ones(2), atol=1e-5, rtol=0)
    assert td["next", "ref_log_probs"].provenance.matches(row["log_probs"].provenance)


def test_conversations_of_different_numbers_of_turns_are_merged_one_by_one_and_stacked(backend):
    policy = LLMPolicy(backend, sampling_params=SAMPLING)
    long, short = converse(policy, 3, CHATS[:1]), converse(policy, 1, CHATS[1:])
    stacked = lazy_stack([merge_turns([td[0] for td in long]), merge_turns([td[0] for td in short])])
    assert tuple(stacked.batch_size) == (2,)
    assert rows(stacked, "tokens", "full") == rows(long[-1], "tokens", "full") + rows(short[-1], "tokens", "full")
    assert [len(versions) for versions in stacked["weight_versions"]] == [3, 1]


def test_turns_that_the_template_rewrites_are_refused(backend):
    options = {"chat_template": FORGETFUL, "prefer_tokens": False, "return_masks": False}
    results = converse(LLMPolicy(backend, sampling_params=SAMPLING, **options), 2)
    with refused(InvalidRequestError, field="turns", rows=(0, 1)):
        merge_turns(results)


def test_a_row_that_a_turn_skipped_is_named(backend):
    policy = LLMPolicy(backend, sampling_params=SAMPLING, on_error="skip", inplace=False)
    first = policy(TensorDict(history=History.from_chats(CHATS)), seed=0)
    cut = [[{"role": "user", "content": "Half an emoji \ud83d"}], SAID[:1]]
    second = policy(TensorDict(history=first["history"].full.extend(cut)), seed=1)
    assert [bool(error) for error in second["errors"]] == [True, False]
    with refused(InvalidRequestError, field="turns", rows=(0,)) as error:
        merge_turns([first, second])
    assert "template" not in str(error.value)
    with refused(InvalidRequestError, field="turns", rows=(0,)):
        merge_turns([second, first])


def test_a_changed_prompt_is_refused_with_its_row(backend):
    results = converse(LLMPolicy(backend, sampling_params=SAMPLING), 2)
    with refused(InvalidRequestError, field="turns", rows=(1,)):
        merge_turns([results[0], with_tokens(results[1], 1, 2)])


def with_tokens(td, row, position):
    """Return the turn with another id at one position of one row's prompt."""
    td = td.clone()
    for part in ("prompt", "full"):
        ids = [value.clone() for value in getattr(td["tokens"], part)]
        ids[row][position] += 1
        setattr(td["tokens"], part, ids)
    return td


def with_log_probs_of_unknown_origin(td, row):
    """Return the turn without the provenance of one row."""
    parts = list(td.clone().unbind(0))
    plain = parts[row]["log_probs"]
    parts[row]["log_probs"] = LogProbs(full=plain.full, scored_mask=plain.scored_mask, padded=False)
    return lazy_stack(parts)


@each(
    "change, error, field",
    [
        (lambda turns: turns[0], InvalidRequestError, "turns"),
        (lambda turns: [], InvalidRequestError, "turns"),
        (lambda turns: [turns[0], turns[1][:1]], InvalidRequestError, "turns"),
        (lambda turns: [turns[0], turns[1].exclude("tokens")], MissingKeyError, "tokens"),
        (lambda turns: [turns[0], turns[1].exclude("log_probs")], MissingKeyError, "log_probs"),
        (lambda turns: turns[::-1], InvalidRequestError, "turns"),
    ],
)
def test_turns_that_do_not_belong_together_are_refused(backend, change, error, field):
    with refused(error, field=field):
        merge_turns(change(converse(LLMPolicy(backend, sampling_params=SAMPLING), 2)))


def test_log_probs_of_different_distributions_are_refused_with_the_row(backend):
    one, two = converse(LLMPolicy(backend, sampling_params=SAMPLING), 2)
    hot = LLMPolicy(
        backend, sampling_params=SAMPLING | {"temperature": 0.5}, log_probs_mode="processed", inplace=False
    )(TensorDict(history=one["history"].full.extend(SAID[:1])))
    with pytest.raises(
        ProvenanceMismatchError, match=r"row 0: raw at temperature 1\.0 .* processed at temperature 0\.5"
    ):
        merge_turns([one, hot])
    unlabelled = with_log_probs_of_unknown_origin(hot, row=0)
    with pytest.raises(ProvenanceMismatchError, match=r"row 1: raw at temperature 1\.0") as error:
        merge_turns([one, unlabelled])
    assert "row 0" not in str(error.value)
    assert isinstance(merge_turns([one, two])["log_probs"], LogProbs)

"""TorchRL's own `KLRewardTransform` with our policies, and ours, in the same environment: against the formula."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

import corelm
from corelm import LLMPolicy
from corelm.errors import InvalidRequestError, MissingKeyError, ProvenanceMismatchError
from helpers import oracle
from helpers.torchrl import skip_without_torchrl

skip_without_torchrl()

from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.llm.transforms import KLRewardTransform as TheirKLRewardTransform
from torchrl.envs.llm.transforms import RetrieveLogProb as TheirRetrieveLogProb

from corelm_interop.torchrl import ReferenceActor
from helpers import torchrl_envs
from helpers.torchrl_envs import Ask, Reward, env


def rollout(policy, *transforms):
    """Return two conversations of two turns each."""
    return torchrl_envs.rollout(env(Reward(), *transforms, Ask()), policy)


def each(td, container, field):
    return corelm.ragged(td, (container, field)).tolist()


@pytest.mark.parametrize("how", [{}, {"temperature": 0.6}, {"temperature": 0.6, "top_k": 5}], ids=str)
def test_torchrls_transform_subtracts_the_kl_of_each_turns_own_tokens(backend, trainer, model, trained, how):
    sampling = {"max_new_tokens": 6, **how}
    mode = {"log_probs_mode": "processed"} if how else {}
    policy = LLMPolicy(backend, sampling_params=sampling, pad_output=True, return_support="top_k" in how, **mode)
    actor = ReferenceActor(LLMPolicy(trainer, sampling_params=sampling, **mode))
    td = rollout(policy, TheirKLRewardTransform(actor, coef=0.1))
    heat = how.get("temperature", 1.0)
    for turn in range(2):
        step = td[:, turn]
        for row in range(2):
            prompt, answer = (each(step, "tokens", part)[row] for part in ("prompt", "response"))
            if "top_k" in how:
                kl = corelm.ragged(step, ("log_probs", "response")).split()[row] - over_top_k(
                    trained, model, prompt, answer, heat, how["top_k"]
                )
            else:
                kl = oracle.answer_logprobs(model, prompt, answer, heat) - oracle.answer_logprobs(
                    trained, prompt, answer, heat
                )
            scored = corelm.ragged(step, ("log_probs", "scored_mask")).split()[row]
            mask = step[row]["log_probs"].scored_mask
            reward, penalty = (step[row]["next", key].squeeze(-1) for key in ("reward", "kl_penalty"))
            assert scored.sum() == len(answer)
            torch.testing.assert_close(penalty[mask], kl, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(reward[mask], 1 - 0.1 * kl, atol=1e-4, rtol=1e-4)
            # Prompts and the answer of the turn before cost nothing.
            assert not penalty[~mask].any() and (reward[~mask] == 1).all()


def over_top_k(trained, model, prompt, answer, temperature, k):
    """Return the log-probs of the trained model over the k ids that were left by the model that sampled."""
    found = []
    for position, token in enumerate(answer):
        ids = [*prompt, *answer[:position]]
        kept = oracle.next_logits(model, ids)[-1].topk(k).indices
        logits = (oracle.next_logits(trained, ids)[-1] / temperature)[kept]
        found.append(logits.log_softmax(-1)[kept == token])
    return torch.cat(found)


def test_rows_are_refused_and_the_message_names_what_reads_them(backend, trainer):
    policy = LLMPolicy(backend, sampling_params={"max_new_tokens": 6})
    with pytest.raises(InvalidRequestError, match=r"pad_output=True, or put corelm\.kl\.KLRewardTransform") as error:
        rollout(policy, TheirKLRewardTransform(ReferenceActor(LLMPolicy(trainer))))
    assert error.value.field == "tokens"


def test_a_policy_in_place_of_the_actor_fails(backend, trainer):
    with pytest.raises(InvalidRequestError):
        rollout(
            LLMPolicy(backend, sampling_params={"max_new_tokens": 6}, pad_output=True),
            TheirKLRewardTransform(LLMPolicy(trainer, generate=False)),
        )


def test_log_probs_of_another_distribution_are_refused(backend, trainer):
    policy = LLMPolicy(backend, sampling_params={"temperature": 0.5}, log_probs_mode="processed", pad_output=True)
    with pytest.raises(ProvenanceMismatchError, match="give the actor the log_probs_mode and temperature"):
        rollout(policy, TheirKLRewardTransform(ReferenceActor(LLMPolicy(trainer))))


def test_data_that_no_policy_wrote_is_refused(trainer):
    with pytest.raises(MissingKeyError, match=r"no log_probs\.scored_mask"):
        ReferenceActor(LLMPolicy(trainer))(TensorDict(batch_size=[2]))


def test_torchrls_retrieval_of_log_probs_from_a_buffer(backend, trainer, trained):
    policy = LLMPolicy(backend, sampling_params={"max_new_tokens": 6}, pad_output=True)
    buffer = ReplayBuffer(storage=LazyStackStorage(2), batch_size=2)
    key = ("ref_log_probs", "full")
    actor = ReferenceActor(LLMPolicy(trainer))
    buffer.append_transform(TheirRetrieveLogProb(actor, log_probs_full_key=key, assistant_only=False))
    buffer.extend(rollout(policy)[:, 0])
    td = buffer.sample()
    for row in td.unbind(0):
        (prompt,), (answer,) = each(row, "tokens", "prompt"), each(row, "tokens", "response")
        found = row["next", "ref_log_probs", "full"][row["log_probs"].scored_mask]
        torch.testing.assert_close(found, oracle.answer_logprobs(trained, prompt, answer), atol=1e-4, rtol=1e-4)

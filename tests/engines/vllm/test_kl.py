"""The KL between answers sampled with vLLM and scores from transformers, and a mismatch that is refused."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

import corelm
from corelm import Backend, LLMPolicy, Ragged
from corelm.kl import KLComputation, RetrieveLogProb
from helpers import oracle
from helpers.tiny_models import tiny_model

TEXTS = ["the cat", "a", "where is the sea", "it is so"]


@pytest.mark.parametrize("pad", [False, True], ids=["rows", "dense"])
def test_the_kl_between_two_engines_is_the_kl_of_their_models(shared: Backend, pad: bool) -> None:
    other = tiny_model(hidden_size=128, seed=1)
    policy = LLMPolicy(
        shared, input_mode="text", num_samples=2, pad_output=pad, sampling_params={"max_new_tokens": 12, "seed": 3}
    )
    with corelm.get_backend("transformers", other, tokenizer=shared.tokenizer) as reference:
        rollout = policy(TensorDict(text=TEXTS))
        RetrieveLogProb(LLMPolicy(reference))(rollout)
        KLComputation(add_to_reward=False)(rollout)
    kinds = rollout["log_probs"].provenance, rollout["ref_log_probs"].provenance
    assert [kind.backend for kind in kinds] == ["vllm", "transformers"] and kinds[0].matches(kinds[1])
    own = tiny_model(hidden_size=128)
    prompts, full = (corelm.ragged(rollout, ("tokens", name)).tolist() for name in ("prompt", "full"))
    found = dense_rows(rollout) if pad else corelm.ragged(rollout, ("kl_penalty", "full")).split()
    for ids, prompt, values in zip(full, prompts, found, strict=True):
        expected = oracle.logprobs(own, ids, 1.0) - oracle.logprobs(other, ids, 1.0)
        expected[: len(prompt)] = 0.0
        torch.testing.assert_close(values, expected, atol=1e-4, rtol=0)


def dense_rows(rollout: TensorDict) -> tuple[Tensor, ...]:
    mask = rollout["masks"].all_attention_mask
    return Ragged(rollout["kl_penalty"][mask], mask.sum(-1).flatten()).split()

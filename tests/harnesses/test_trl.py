"""TRL computes the same log-probs for our rollouts as our policies do, in the mode that docs/trl.md names."""

import pytest
import torch
from tensordict import TensorDict

import corelm
from corelm import History, LLMPolicy, ragged
from helpers.tiny_models import tiny_model, tiny_tokenizer
from helpers.trl_runs import make_trainer


@pytest.mark.parametrize(
    ("temperature", "mode", "agree"),
    [(1.0, "raw", True), (1.0, "processed", True), (0.5, "processed", True), (0.5, "raw", False)],
)
def test_trl_computes_the_log_probs_that_the_policy_returned(tmp_path, temperature, mode, agree):
    model = tiny_model()
    with corelm.get_backend("transformers", model, tokenizer=tiny_tokenizer()) as backend:
        sampling = {"max_new_tokens": 6, "temperature": temperature}
        policy = LLMPolicy(backend, sampling_params=sampling, log_probs_mode=mode, inplace=False)
        differences = []

        def rollout(prompts, trainer):
            row = policy(TensorDict(history=History.from_chats(prompts)))
            prompt, answer = (ragged(row, ("tokens", part)).tolist() for part in ("prompt", "response"))
            found = ragged(row, ("log_probs", "response")).split()
            for before, ids, ours in zip(prompt, answer, found, strict=True):
                tokens = torch.tensor([before + ids])
                theirs, *_ = trainer._get_per_token_logps_and_entropies(
                    trainer.model, tokens, torch.ones_like(tokens), len(ids)
                )
                differences.append((theirs[0].detach() - ours).abs().max().item())
            return {"prompt_ids": prompt, "completion_ids": answer, "logprobs": [row.tolist() for row in found]}

        make_trainer(model, rollout, tmp_path, temperature=temperature).train()
    assert len(differences) == 4
    assert max(differences) < 1e-4 if agree else min(differences) > 0.1

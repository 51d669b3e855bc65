"""TRL computes the same log-probs for our rollouts as our policies do, in the mode that docs/trl.md names."""

import pytest
import torch
import trl
from datasets import Dataset
from tensordict import TensorDict

import corelm
from corelm import History, LLMPolicy, ragged
from helpers.tiny_models import tiny_model, tiny_tokenizer

QUESTIONS = [[{"role": "user", "content": text}] for text in ("Hi", "Hello there, who are you?")]


def trainer(model, temperature, rollout, folder):
    args = trl.GRPOConfig(
        output_dir=str(folder),
        temperature=temperature,
        num_generations=2,
        per_device_train_batch_size=4,
        max_completion_length=64,
        max_steps=1,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    return trl.GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [float(len(said[0]["content"])) for said in completions],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": QUESTIONS}),
        processing_class=tiny_tokenizer(),
        rollout_func=rollout,
    )


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

        trainer(model, temperature, rollout, tmp_path).train()
    assert len(differences) == 4
    assert max(differences) < 1e-4 if agree else min(differences) > 0.1

"""Train on this machine, and sample on vLLM servers elsewhere at the same time.

    python examples/gpu/apart.py path/to/model http://node-1:8000 http://node-2:8000

Without URLs, two processes with transformers stand in for the servers. docs/gpus.md explains the steps.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import mkdtemp

import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, AutoTokenizer

import corelm
import corelm_fleet
from corelm import LLMPolicy
from corelm.kl import ImportanceCorrection, RetrieveLogProb, mismatch_report

GPU = torch.cuda.is_available()
STEPS, GROUP, NEW = (200, 8, 1024) if GPU else (3, 2, 8)
SAMPLED = ("masks", "all_response_mask")


def open_rollouts(model, urls):
    """Open all servers as one engine, or two processes on this machine if there are none."""
    if urls:
        return corelm.get_backend("vllm", base_url=urls, canary=True)
    return corelm.get_backend("transformers", model, python=sys.executable, replicas=2, dtype="float32", canary=True)


def reward(rollout):
    """Return float32[prompts, group]. This one likes short answers; yours will know what a good answer is."""
    lengths = [[len(text) for text in group] for group in rollout["text"].response]
    return -torch.tensor(lengths, dtype=torch.float32, device=rollout["tokens"].full.device)


def learn(trainer, optimizer, rollout):
    """Take one optimizer step on answers that older weights may have given."""
    rewards = reward(rollout)
    advantages = (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-4)
    # The weights correct for both: other weights, and another engine.
    RetrieveLogProb(trainer, log_probs_key="train_log_probs")(rollout)
    ImportanceCorrection(level="token", how="truncate", high=2.0, mask_key=SAMPLED)(rollout)
    current = trainer.log_prob(rollout)
    mask = rollout[SAMPLED]
    loss = -(rollout["importance_weights"] * advantages[..., None] * current)[mask].mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return mismatch_report(rollout, mask_key=SAMPLED)


def main(path, *urls):
    shared = Path(mkdtemp())  # on a disk that this machine and all servers mount at the same place
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32").to("cuda" if GPU else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6 if GPU else 1e-3)
    trainer = LLMPolicy(
        corelm.get_backend("transformers", model, tokenizer=tokenizer),
        input_mode="tokens",
        generate=False,
        pad_output=True,
    )
    rollouts = open_rollouts(path, list(urls))
    policy = LLMPolicy(
        rollouts, input_mode="text", sampling_params={"max_new_tokens": NEW}, num_samples=GROUP, pad_output=True
    )

    def sample(step):
        return policy(TensorDict(text=[f"Question {step}: who are", "What is your"]), seed=step)

    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(sample, 0)
        for step in range(STEPS):
            rollout, ahead = ahead.result(), pool.submit(sample, step + 1)  # the servers work while the trainer learns
            report = learn(trainer, optimizer, rollout)
            sampled_with = rollout["log_probs"].provenance.weight_version
            print(f"step {step}: sampled with {sampled_with}, mismatch {report.mean_abs:.4f}")

            folder = shared / f"step-{step % 2}"
            model.save_pretrained(folder)
            # It waits for the answers in flight. Every server has loaded before one of them answers again.
            rollouts.update_weights(folder, version=f"step-{step}", expect=corelm_fleet.probe_scores(model))
        ahead.result()
    rollouts.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

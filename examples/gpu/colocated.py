"""Sample and train in turns on the same GPUs: each rank has an engine that sleeps while the trainer works.

    VLLM_ALLOW_INSECURE_SERIALIZATION=1 torchrun --nproc-per-node 8 examples/gpu/colocated.py path/to/model

Without a GPU, transformers stands in for vLLM, and gloo for NCCL. docs/gpus.md explains the steps.
"""

import os
import sys

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM

import corelm
import corelm_fleet
from corelm import LLMPolicy, LogProbs
from corelm.kl import ImportanceCorrection

GPU = torch.cuda.is_available()
STEPS, GROUP, NEW = (200, 8, 1024) if GPU else (2, 2, 8)
SAMPLED = ("masks", "all_response_mask")


def open_engine(model, rank):
    """Open the rollout engine of this rank: vLLM on the GPU of the rank, or transformers where there is no GPU."""
    if not GPU:
        return corelm.get_backend("transformers", model, dtype="float32", canary=True)
    return corelm.get_backend(
        "vllm",
        model,
        devices=[rank],
        gpu_memory_utilization=0.4,
        enable_sleep_mode=True,
        weight_transfer_config={"backend": "ipc"},
        dtype="bfloat16",
        max_model_len=4096,
        canary=True,
    )


def open_trainer(model, rank):
    """Load the model and shard it over all ranks: float32 weights and optimizer states, bfloat16 work on a GPU."""
    trained = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    mesh = init_device_mesh("cuda" if GPU else "cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if GPU else MixedPrecisionPolicy()
    for layer in trained.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(trained, mesh=mesh, mp_policy=policy)


def log_probs(model, rollout):
    """Return the log-prob of every token, with gradients: float32[prompts, group, tokens]."""
    ids, mask = rollout["tokens"].full, rollout["masks"].all_attention_mask
    rows, real = ids.flatten(0, -2), mask.flatten(0, -2).long()
    positions = (real.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=rows, attention_mask=real, position_ids=positions, use_cache=False).logits
    found = logits[:, :-1].float().log_softmax(-1).gather(-1, rows[:, 1:, None])[..., 0]
    return pad(found, (1, 0)).view(ids.shape)


def reward(rollout):
    """Return float32[prompts, group]. This one likes short answers; yours will know what a good answer is."""
    lengths = [[len(text) for text in group] for group in rollout["text"].response]
    return -torch.tensor(lengths, dtype=torch.float32, device=rollout["tokens"].full.device)


def learn(model, optimizer, rollout):
    """Take one optimizer step. Every rank makes one forward, so no rank waits for another's."""
    rewards = reward(rollout)
    advantages = (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-4)
    current = log_probs(model, rollout)
    rollout["train_log_probs"] = LogProbs(full=current.detach(), batch_size=rollout.batch_size)
    # The engine and the trainer give the same token slightly different log-probs.
    ImportanceCorrection(level="token", how="truncate", high=2.0, mask_key=SAMPLED)(rollout)
    mask = rollout[SAMPLED]
    loss = -(rollout["importance_weights"] * advantages[..., None] * current)[mask].mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def main(path):
    rank = int(os.environ["LOCAL_RANK"])
    if GPU:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if GPU else "gloo")
    model = open_trainer(path, rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6 if GPU else 1e-3)
    engine = open_engine(path, rank)
    policy = LLMPolicy(
        engine, input_mode="text", sampling_params={"max_new_tokens": NEW}, num_samples=GROUP, pad_output=True
    )
    for step in range(STEPS):
        prompts = [f"Question {step * dist.get_world_size() + rank}: who are"] * 2  # other prompts on every rank
        rollout = policy(TensorDict(text=prompts), seed=step * dist.get_world_size() + rank)

        engine.sleep(level=2)  # the engine forgets its weights and its cache; new weights come anyway
        learn(model, optimizer, rollout.to("cuda") if GPU else rollout)
        expect = corelm_fleet.probe_scores(model)  # on every rank, as the model is sharded

        engine.wake(tags=["weights"])
        engine.update_weights(model.state_dict(), version=f"step-{step}", expect=expect)  # every rank gathers
        if GPU:
            torch.cuda.empty_cache()  # what gathering took
        engine.wake(tags=["kv_cache"])  # and the canary compares the engine with `expect`
        print(f"rank {rank}, step {step}: weights {engine.weight_version}, reward {reward(rollout).mean():.2f}")
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":  # vLLM starts processes that import this file
    main(sys.argv[1])

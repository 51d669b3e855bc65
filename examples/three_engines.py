"""Score one conversation with several engines, each in its own environment, and print how far they differ.

    python examples/three_engines.py MODEL engines.json

Engines pin different versions of torch, so they cannot share an environment. This script needs core alone: it opens
each engine in a process of the interpreter that `engines.json` names. An example of the file::

    {
      "transformers": {"python": "/envs/transformers/bin/python", "dtype": "float32"},
      "vllm":         {"python": "/envs/vllm/bin/python", "dtype": "float32"},
      "sglang":       {"python": "/envs/sglang/bin/python", "dtype": "float32"}
    }

What else stands there is passed to `get_backend`: `env`, and the options of the engine.
"""

from __future__ import annotations

import argparse
import json
from itertools import combinations
from pathlib import Path

import torch
from tensordict import TensorDict

import corelm
from corelm import History, LLMPolicy

CHAT = [
    {"role": "user", "content": "What is your name?"},
    {"role": "assistant", "content": "I am Pip, thank you. And you?"},
    {"role": "user", "content": "How big are you?"},
    {"role": "assistant", "content": "Very small: I have a few thousand weights."},
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the folder or hub name of a model")
    parser.add_argument("engines", type=Path, help="a JSON file, see above")
    arguments = parser.parse_args()

    scores: dict[str, torch.Tensor] = {}
    for name, options in json.loads(arguments.engines.read_text()).items():
        with corelm.get_backend(name, arguments.model, **options) as backend:
            policy = LLMPolicy(backend, generate=False, chat_template="chatml")
            result = policy(TensorDict(history=History.from_chats([CHAT])))
            log_probs = result["log_probs"]
            scores[name] = log_probs.full[0][log_probs.scored_mask[0]]
        total, mode = scores[name].sum().item(), log_probs.provenance.mode
        print(f"{name:12} {len(scores[name])} tokens, {total:.5f} nats ({mode} log-probs)")

    for (one, first), (other, second) in combinations(scores.items(), 2):
        print(f"{one} and {other}: largest difference {(first - second).abs().max().item():.2e} nats a token")


if __name__ == "__main__":
    main()

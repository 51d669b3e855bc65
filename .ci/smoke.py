"""What a user of the installed wheels does first: list the backends, open one, generate, score. No pytest is here.

    python .ci/smoke.py CHECKOUT

Fails if a module comes from the checkout instead of from the wheels.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import corelm
import transformers_backend
from corelm_testing.tiny import build_tiny

checkout = Path(sys.argv[1]).resolve()
for package in (corelm, transformers_backend):
    home = Path(package.__file__).resolve()
    assert checkout not in home.parents, f"{package.__name__} was imported from {home}, not from its wheel"

backends = {info.name: info for info in corelm.list_backends()}
assert backends.keys() == {"cassette", "openai", "ray", "sglang", "toy", "transformers", "vllm"}, backends
assert backends["transformers"].engine_available
for info in backends.values():
    assert info.problem is None, info
    print(info)

with corelm.get_backend("transformers", build_tiny("tiny", steps=2, progress=False), dtype="float32") as backend:
    prompts = backend.tokenize(["Who are you?", "Hello!"]).ids
    out = backend.generate(prompts, {"max_new_tokens": 8, "seed": 1})
    scores = backend.score_logprobs(prompts.join(out.ids), score_from=prompts.lengths)
    again = scores.logprobs.slice(prompts.lengths, scores.logprobs.lengths).values
    torch.testing.assert_close(out.logprobs.values, again, atol=1e-5, rtol=0)
    apart = (out.logprobs.values - again).abs().max()
    print(f"{len(again)} tokens sampled and scored; the two differ by {apart:.1e}")

"""``python -m benchmarks.budgets``: how much kernel there is, and how long the way through it. Exit with 1 if it grew.

Lines and files are those of ``core/corelm``. Calls are those of Python functions of this project in one warm call of
the toy backend with one row, counted with `sys.setprofile`; functions of the toy itself do not count. `BUDGETS` holds
what has been reached: lower a number in the commit that lowers what it measures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

import corelm
from corelm import History, LLMPolicy

ROOT = Path(__file__).parents[1]
#: Name → the most that is allowed.
BUDGETS = {
    "kernel, lines": 19_700,
    "kernel, files": 73,
    "Backend.generate, calls": 36,
    "Backend.generate, functions": 29,
    "Backend.generate, files": 8,
    "Backend.generate, deepest": 6,
    "Backend.score_logprobs, calls": 31,
    "Backend.score_logprobs, functions": 23,
    "Backend.score_logprobs, files": 6,
    "Backend.score_logprobs, deepest": 6,
    "LLMPolicy on text, calls": 104,
    "LLMPolicy on text, functions": 56,
    "LLMPolicy on text, files": 14,
    "LLMPolicy on text, deepest": 8,
    "LLMPolicy on tokens, calls": 102,
    "LLMPolicy on tokens, functions": 55,
    "LLMPolicy on tokens, files": 13,
    "LLMPolicy on tokens, deepest": 6,
    "LLMPolicy scoring tokens, calls": 119,
    "LLMPolicy scoring tokens, functions": 59,
    "LLMPolicy scoring tokens, files": 13,
    "LLMPolicy scoring tokens, deepest": 8,
    "LLMPolicy on history, calls": 143,
    "LLMPolicy on history, functions": 79,
    "LLMPolicy on history, files": 18,
    "LLMPolicy on history, deepest": 9,
}


def main() -> int:
    files = sorted((ROOT / "core" / "corelm").rglob("*.py"))
    found = {"kernel, lines": sum(len(file.read_text().splitlines()) for file in files), "kernel, files": len(files)}
    sampling = {"max_new_tokens": 4}
    with corelm.get_backend("toy") as backend:
        found |= measured("Backend.generate", lambda: backend.generate([[5, 6, 7]], sampling))
        found |= measured("Backend.score_logprobs", lambda: backend.score_logprobs([[5, 6, 7, 8]]))
        chats = History.from_chats([[{"role": "user", "content": "hi"}]])
        inputs = {"text": ["hi"], "tokens": torch.tensor([[5, 6, 7]]), "history": chats}
        for mode, given in inputs.items():
            policy = LLMPolicy(backend, input_mode=mode, sampling_params=sampling, chat_template="chatml")
            found |= measured(f"LLMPolicy on {mode}", partial(called, policy, mode, given))
        sampler = LLMPolicy(backend, input_mode="tokens", sampling_params=sampling)
        rollout = called(sampler, "tokens", inputs["tokens"])
        scorer = sampler.replace(generate=False, log_probs_key="ref_log_probs")
        found |= measured("LLMPolicy scoring tokens", lambda: scorer(rollout.clone()))
    over = [name for name, value in found.items() if value > BUDGETS[name]]
    for name, value in found.items():
        print(f"{'OVER ' if name in over else ''}{name}: {value:,} (at most {BUDGETS[name]:,})")
    return 1 if over else 0


def called(policy: LLMPolicy, mode: str, given: Any) -> TensorDictBase:
    return policy(TensorDict({mode: given}, batch_size=1))


def measured(name: str, function: Callable[[], Any]) -> dict[str, int]:
    """Return the measurements of a warm call of `function` under their names.

    Counted are the calls of this project's functions, the functions and their files, and how deep the calls nest.
    """
    for _ in range(5):
        function()
    inside = tuple(str(ROOT / folder) for folder in ("core", "kits", "apps"))
    functions: list[tuple[str, str]] = []
    depth = deepest = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal depth, deepest
        file = frame.f_code.co_filename
        if event not in ("call", "return") or not file.startswith(inside) or "toy" in Path(file).parts:
            return
        if event == "call":
            functions.append((file, frame.f_code.co_qualname))
        depth += 1 if event == "call" else -1
        deepest = max(deepest, depth)

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    found = {
        "calls": len(functions),
        "functions": len({*functions}),
        "files": len({file for file, _ in functions}),
        "deepest": deepest,
    }
    return {f"{name}, {what}": value for what, value in found.items()}


if __name__ == "__main__":
    sys.exit(main())

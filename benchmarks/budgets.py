"""``python -m benchmarks.budgets``: how much kernel there is, and how long the way through it. Exit with 1 if it grew.

Lines and files are those of ``core/corelm``. Calls are those of Python functions of this project in one warm call of
the toy backend with one row, counted with `sys.setprofile`; functions of the toy itself do not count. `BUDGETS` holds
what has been reached: lower a number in the commit that lowers what it measures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from tensordict import TensorDict

import corelm
from corelm import History, LLMPolicy

ROOT = Path(__file__).parents[1]
#: Name → the most that is allowed.
BUDGETS = {
    "kernel, lines": 21_426,
    "kernel, files": 76,
    "Backend.generate, calls": 49,
    "Backend.generate, deepest": 6,
    "LLMPolicy on a text, calls": 130,
    "LLMPolicy on a history, calls": 165,
    "LLMPolicy scoring tokens, calls": 92,
}


def main() -> int:
    files = sorted((ROOT / "core" / "corelm").rglob("*.py"))
    found = {"kernel, lines": sum(len(file.read_text().splitlines()) for file in files), "kernel, files": len(files)}
    sampling = {"max_new_tokens": 4}
    with corelm.get_backend("toy") as backend:
        calls, deepest = calls_of(lambda: backend.generate([[5, 6, 7]], sampling))
        found |= {"Backend.generate, calls": calls, "Backend.generate, deepest": deepest}
        chats = History.from_chats([[{"role": "user", "content": "hi"}]])
        inputs = {"text": TensorDict(text=["hi"]), "history": TensorDict(history=chats)}
        for mode, given in inputs.items():
            policy = LLMPolicy(backend, input_mode=mode, sampling_params=sampling, inplace=False)
            found[f"LLMPolicy on a {mode}, calls"], _ = calls_of(asked(policy, given))
        scorer = LLMPolicy(backend, input_mode="tokens", generate=False, inplace=False)
        rows = TensorDict(tokens=[[5, 6, 7]])
        found["LLMPolicy scoring tokens, calls"], _ = calls_of(asked(scorer, rows))
    over = [name for name, value in found.items() if value > BUDGETS[name]]
    for name, value in found.items():
        print(f"{'OVER ' if name in over else ''}{name}: {value:,} (at most {BUDGETS[name]:,})")
    return 1 if over else 0


def asked(policy: LLMPolicy, given: TensorDict) -> Callable[[], Any]:
    return lambda: policy(given)


def calls_of(function: Callable[[], Any]) -> tuple[int, int]:
    """Return how many calls of this project's functions a warm call of `function` makes, and how deep they nest."""
    for _ in range(5):
        function()
    inside = tuple(str(ROOT / folder) for folder in ("core", "kits", "apps"))
    calls = depth = deepest = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls, depth, deepest
        file = frame.f_code.co_filename
        if event not in ("call", "return") or not file.startswith(inside) or "toy" in Path(file).parts:
            return
        step = 1 if event == "call" else -1
        calls, depth = calls + max(step, 0), depth + step
        deepest = max(deepest, depth)

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls, deepest


if __name__ == "__main__":
    sys.exit(main())

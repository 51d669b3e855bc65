"""The report of `grpo_tiny.py`: a table while it runs, the numbers as JSON lines, and a picture of the curves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tqdm import tqdm

HEADER = f"{'steps':>9}{'weights':>9}{'reward':>9}{'KL':>9}{'mean |Δ log p|':>17}{'largest':>11}"


class Report:
    """Write every step to ``steps.jsonl`` in `folder` at once, and print the mean of every few steps as a table line.

    Attributes:
        steps: the numbers of each step.
        before: every question, its answer before training, and whether the answer is right.
        after: the same after training.
    """

    EVERY = 5

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[dict[str, Any]] = []
        self.before: list[tuple[str, str, bool]] = []
        self.after: list[tuple[str, str, bool]] = []
        self._shown = 0

    def __enter__(self) -> Report:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = (self.folder / "steps.jsonl").open("w", encoding="utf-8")
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def add(self, numbers: dict[str, Any], *, last: bool) -> None:
        self._file.write(json.dumps(numbers) + "\n")
        self._file.flush()
        self.steps.append(numbers)
        if last or len(self.steps) - self._shown == self.EVERY:
            if self._shown == 0:
                tqdm.write(HEADER)
            tqdm.write(_line(self.steps[self._shown :]))
            self._shown = len(self.steps)

    def summary(self) -> str:
        """Return the answers before and after training, side by side."""
        width = max(len(answer) for _, answer, _ in self.before)
        lines = [
            f"{question:32}{'✓' if was_right else '·'} {before:{width}}  {'✓' if is_right else '·'} {after}"
            for (question, before, was_right), (_, after, is_right) in zip(self.before, self.after, strict=True)
        ]
        right = [sum(ok for *_, ok in answers) for answers in (self.before, self.after)]
        lines.append(f"Likeliest answers that are right: {right[0]} of {len(lines)} before, {right[1]} after.")
        return "\n".join(["", *lines, ""])

    def draw(self) -> Path:
        """Draw reward, KL and mismatch of every step; return the path of ``curves.png``."""
        from matplotlib.figure import Figure

        path = self.folder / "curves.png"
        figure = Figure(figsize=(12, 3.6), layout="constrained")
        reward, kl, mismatch = figure.subplots(1, 3)
        at = [one["step"] for one in self.steps]
        rewards = [one["reward"] for one in self.steps]
        reward.plot(at, rewards, ".", color="tab:blue", alpha=0.4, label="a step")
        reward.plot(at, _smooth(rewards, self.EVERY), color="tab:blue", label=f"mean of the last {self.EVERY}")
        reward.set(title="reward", ylim=(-0.02, 1.02))
        kl.plot(at, [one["kl"] for one in self.steps], color="tab:orange")
        kl.set(title="KL to the reference, nats a token", ylim=(0, None))
        for name, label in (("max_abs", "largest"), ("mean_abs", "mean")):
            mismatch.plot(at, [one["mismatch"][name] for one in self.steps], label=label)
        mismatch.set(title="sampler and trainer: |Δ log p|, nats", yscale="log")
        for axes in (reward, kl, mismatch):
            axes.set_xlabel("step")
            axes.grid(alpha=0.3)
        reward.legend(loc="lower right")
        mismatch.legend()
        figure.savefig(path, dpi=120)
        return path


def _line(steps: list[dict[str, Any]]) -> str:
    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    first, last = steps[0]["step"] + 1, steps[-1]["step"] + 1
    return (
        f"{f'{first}–{last}':>9}{steps[-1]['weights']:>9}"
        f"{mean([one['reward'] for one in steps]):>9.2f}{mean([one['kl'] for one in steps]):>9.3f}"
        f"{mean([one['mismatch']['mean_abs'] for one in steps]):>17.1e}"
        f"{max(one['mismatch']['max_abs'] for one in steps):>11.1e}"
    )


def _smooth(values: list[float], over: int) -> list[float]:
    """Return the moving average over the last `over` values."""
    windows = (values[max(0, end - over) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]

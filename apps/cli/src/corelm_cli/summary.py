"""`Summary`: what a run did, for the person who typed the command and, with ``--json``, for a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from corelm_interop.timing import Timing


@dataclass(kw_only=True)
class Summary:
    """What a run did so far.

    Attributes:
        output: the file that is written; None for the standard output.
        errors: the file that lists the lines that failed, if there is one.
        settings: the settings of the answers.
        engine: what makes the answers, see `recorded_engine`; empty until it is open.
        status: `refused` until the engine is open; then `running`; in the end `finished`, `interrupted` or `failed`.
        finish_reasons: number of written answers by finish reason.
        tokens: number of sampled or scored tokens in the written answers.
        seconds: time spent on the lines: without opening the engine, and without waiting for input.
        timing: has measured the calls of the engine; None if that was not asked for.
    """

    command: str
    output: Path | None = None
    errors: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, str] = field(default_factory=dict)
    status: str = "refused"
    error: str | None = None
    written: int = 0
    present: int = 0
    failed: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    seconds: float = 0.0
    timing: Timing | None = None

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Count the rows that were written."""
        for row in rows:
            self.written += 1
            self.tokens += row["tokens"] if isinstance(row["tokens"], int) else sum(row["tokens"])
            if "finish_reason" in row:
                self.finish_reasons[row["finish_reason"]] += 1

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.seconds else None

    def lines(self) -> list[str]:
        """Return the summary as a person reads it."""
        scores = self.command == "score"
        done = f"{counted(self.written, 'line')} scored" if scores else f"{counted(self.written, 'answer')} written"
        said = f"{done}, {self.present} already present"
        if self.failed:
            where = "the messages above" if self.errors is None else self.errors
            said += f", {counted(self.failed, 'line')} failed (see {where})"
        told = [said]
        if self.finish_reasons:
            reasons = ", ".join(f"{reason} {count}" for reason, count in self.finish_reasons.most_common())
            told.append(f"finish reasons: {reasons}")
        if self.tokens_per_second is not None and self.tokens:
            tokens = f"{counted(self.tokens, 'token')} {'scored' if scores else 'sampled'}"
            told.append(f"{tokens} in {self.seconds:.1f} s, {self.tokens_per_second:,.0f} tokens/s")
        if self.timing is not None:
            told += repr(self.timing.summary()).splitlines()
        return told

    def to_dict(self) -> dict[str, Any]:
        """Return the summary in JSON types."""
        return {
            "command": self.command,
            "status": self.status,
            "error": self.error,
            "written": self.written,
            "present": self.present,
            "failed": self.failed,
            "finish_reasons": dict(self.finish_reasons),
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": None if self.tokens_per_second is None else round(self.tokens_per_second, 1),
            "output": None if self.output is None else str(self.output),
            "errors_file": None if self.errors is None or not self.failed else str(self.errors),
            "settings": self.settings,
            "engine": self.engine,
            **({} if self.timing is None else {"timing": self.timing.summary().to_dict()}),
        }


def counted(number: int, name: str) -> str:
    """Return a number with the name of what it counts: "1 line", "1,200 lines"."""
    return f"{number:,} {name}{'' if number == 1 else 's'}"

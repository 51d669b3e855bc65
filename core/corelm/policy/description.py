"""What an `LLMPolicy` prints: its engine, what it does, how it samples, and whether callers share calls."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from corelm.batching import DynamicBatcher
from corelm.errors import printable
from corelm.spec.sampling import SamplingParams

if TYPE_CHECKING:
    from corelm.backend.backend import Backend
    from corelm.policy.options import PolicyOptions

#: Options with a line of their own, or that say how an input is read and not what is done with it.
_ELSEWHERE = frozenset({"input_mode", "generate", "sampling_params", "num_samples", "log_probs_mode"})
_LONGEST = 60


def describe(backend: Backend, options: PolicyOptions) -> str:
    """Return a line each for the backend, the mode, the sampling, the batching, and the other options that were set."""
    batcher = backend if isinstance(backend, DynamicBatcher) else None
    closed = ", closed" if backend.closed else ""
    reads = {"history": "conversations", "text": "texts", "tokens": "token ids"}[options.input_mode]
    mode = f"generate from {reads}" if options.generate else f"score {reads}"
    lines = [
        f"backend: {backend.name}, model {_shown(backend.model_name)}, "
        f"weights {_shown(backend.weight_version)}{closed}",
        f"mode: {mode} (input_mode={options.input_mode!r}), {options.log_probs_mode} log-probs",
    ]
    if options.generate:
        lines.append(f"sampling: {_changes(options.sampling, always=('max_new_tokens', 'temperature'))}")
    lines.append("batching: off" if batcher is None else f"batching: on, {_fields(batcher.limits)}")
    others = _changes(options, leave_out=_ELSEWHERE)
    if others:
        lines.append(f"options: {others}")
    return "".join(f"\n    {line}" for line in lines) + "\n"


def _changes(record: Any, always: tuple[str, ...] = (), leave_out: frozenset[str] = frozenset()) -> str:
    """Return the fields of a dataclass that differ from their defaults, and those that are always shown."""
    plain = type(record)()
    names = [field.name for field in dataclasses.fields(record) if field.name not in leave_out]
    # do_sample follows from the temperature.
    hidden = {"do_sample"} if isinstance(record, SamplingParams) else set()
    return ", ".join(
        f"{name}={_shown(getattr(record, name))}"
        for name in names
        if name in always or (name not in hidden and getattr(record, name) != getattr(plain, name))
    )


def _fields(record: Any) -> str:
    return ", ".join(f"{field.name}={_shown(getattr(record, field.name))}" for field in dataclasses.fields(record))


def _shown(value: Any) -> str:
    text = printable(repr(value))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"

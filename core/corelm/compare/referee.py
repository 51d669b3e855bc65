"""`compare`: the same prompts through two or more engines. How far apart they are, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from corelm.backend.backend import Backend
from corelm.compare.records import Comparison
from corelm.spec.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SideSpec:
    """An engine to open, as `get_backend` does.

    Attributes:
        backend: the backend's name.
        model: a path, a model object, or None for an engine behind a URL.
        options: all other arguments of `get_backend`, such as ``python``, ``base_url``, ``dtype``.
        name: what to call it in the comparison; None for the backend's name.
        adapter: the adapter of its calls: a name, False for none, None for the engine's default.
    """

    backend: str
    model: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None
    adapter: str | Literal[False] | None = None


def compare(
    sides: Sequence[SideSpec | Backend],
    prompts: Sequence[str | Sequence[Mapping[str, Any]] | Sequence[int]],
    completions: Sequence[str | Sequence[int]] | None = None,
    *,
    oracle: str | Path | Literal["auto"] | None = "auto",
    sampling: SamplingParams | Mapping[str, Any] | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    timeout: float | None = None,
) -> Comparison:
    """Put the same prompts through two or more engines, and say how far apart they are and why.

    Args:
        sides: the engines: what to open, or backends that are open already, which stay open.
        prompts: texts, conversations (lists of messages) or ids; mixed if you like.
        completions: one per prompt, texts or ids; None has the first side that can sample them.
        oracle: the folder of the model, whose plain float32 forward says which side is wrong; "auto" takes the first
            side's model if that is a folder with weights, None goes without.
        sampling: how completions are sampled, and whose log-probs are checked; by default 24 tokens, with the model's
            own distribution.
        seed: of everything that is sampled.
        tolerance: mean |Δ| in nats below which two sides agree; None measures each side's distance to itself and its
            dtype.
        timeout: seconds that each call may take.

    Raises:
        InvalidRequestError: fewer than two sides, no prompts, or a prompt that no side can take; `field` names it.
        CapabilityError: a side can neither score nor return log-probs of what it samples.
    """
    raise NotImplementedError

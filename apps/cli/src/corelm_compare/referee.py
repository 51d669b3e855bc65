"""`compare`: the same prompts through two or more engines. How far apart they are, and why."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from corelm import Backend
from corelm.spec import Adapter, SamplingParams
from corelm.validate import count, invalid, positive, shown
from corelm_compare.built_in import built_in_prompts
from corelm_compare.material import DEFAULT, prepare
from corelm_compare.oracles import find_oracle
from corelm_compare.records import Comparison
from corelm_compare.sides import OpenSide, SideSpec
from corelm_compare.trial import run_trial
from corelm_fleet.probes import plain_modes


def compare(
    sides: Sequence[SideSpec | Backend],
    prompts: Sequence[str | Sequence[Mapping[str, Any]] | Sequence[int]] | None = None,
    completions: Sequence[str | Sequence[int]] | None = None,
    *,
    oracle: str | PathLike[str] | Literal["auto"] | None = "auto",
    checkpoints: Sequence[str | PathLike[str]] = (),
    sampling: SamplingParams | Mapping[str, Any] | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    adapter: Adapter = None,
    timeout: float | None = None,
) -> Comparison:
    """Put the same prompts through two or more engines, and say how far apart they are and why.

    All sides score the same ids, and each also samples, so that what it says when it samples can be compared with what
    it says when it scores. A difference counts if it is larger than each side's distance to itself. Then one thing at a
    time is changed, and the change that takes the difference away is the cause.

    With r rows, of which at most ten are examined closely: a side is asked to score about 12 + r times and to sample
    about 8 times. The plain forward reads the examined rows about three times if the sides agree, and about 40 times if
    they do not. "Agree" is said of the rows that were asked: an engine may still be wrong about others, such as those
    with prefixes that it kept from before an update of its weights.

    Args:
        sides: the engines: what to open, or backends that are open already, which stay open.
        prompts: texts, conversations (lists of messages) or ids; mixed if you like. None for those that core brings.
        completions: one per prompt, texts or ids; None has the first side that can sample them.
        oracle: the folder of the model, whose plain float32 forward says which side is wrong; "auto" takes the first
            side's model that is a folder with a model, None goes without. The forward runs on the CPU of this process.
        checkpoints: folders of other weights that a side may hold, such as those before an update.
        sampling: how completions are sampled; by default 24 tokens, with the model's own distribution.
        seed: of everything that is sampled.
        tolerance: mean `|Δ|` in nats up to which two sides agree; None measures each side's distance to itself.
        adapter: the adapter of all calls to sides whose `SideSpec` names none; it must be loaded.
        timeout: seconds that each call may take.

    Raises:
        InvalidRequestError: fewer than two sides, no prompts, or a prompt that no side can take; `field` names it.
        CapabilityError: a side can neither score nor return log-probs of what it samples, or two sides cannot score.
        EngineError: an engine failed; the message names the side.
    """
    started = time.monotonic()
    specs = [_checked(side) for side in sides]
    if len(specs) < 2:
        raise invalid("sides", f"expected at least two engines, got {len(specs)}")
    if tolerance is not None:
        positive("tolerance", tolerance)
    seed = count("seed", seed)
    for folder in checkpoints:
        if not (Path(folder) / "config.json").is_file():
            raise invalid("checkpoints", f"{str(folder)!r} is no folder with a model: it has no config.json")
    params = DEFAULT if sampling is None else SamplingParams.make(sampling)
    with ExitStack() as stack, plain_modes():
        opened = _opened(specs, stack, timeout, adapter)
        plain, why_not = find_oracle(oracle, _models(specs))
        if plain is not None and oracle == "auto" and any(side.adapter for side in opened):
            plain = None
            why_not = "the plain forward of the adapter is not known; pass oracle= a folder with the merged weights"
        asked = built_in_prompts(opened) if prompts is None else prompts
        material = prepare(opened, asked, completions, plain, params, seed)
        notes = [] if why_not is None else [why_not]
        return run_trial(opened, material, plain, tuple(checkpoints), seed, tolerance, notes, started)


def _checked(side: Any) -> SideSpec | Backend:
    if isinstance(side, (SideSpec, Backend)):
        return side
    raise invalid("sides", f"expected SideSpec(backend=…) or an open backend, got {shown(side)}")


def _opened(
    specs: Sequence[SideSpec | Backend], stack: ExitStack, timeout: float | None, adapter: Adapter
) -> list[OpenSide]:
    wanted = [spec.name if isinstance(spec, Backend) else spec.name or spec.backend for spec in specs]
    counts, numbers = Counter(wanted), dict.fromkeys(wanted, 0)
    opened = []
    for spec, name in zip(specs, wanted, strict=True):
        numbers[name] += 1
        label = f"{name} {numbers[name]}" if counts[name] > 1 else name
        backend = spec if isinstance(spec, Backend) else stack.enter_context(spec.open())
        opened.append(OpenSide(backend, label, None if isinstance(spec, Backend) else spec, timeout, adapter))
    return opened


def _models(specs: Sequence[SideSpec | Backend]) -> list[Any]:
    models = (spec.model_name if isinstance(spec, Backend) else spec.model for spec in specs)
    return list(itertools.filterfalse(lambda model: model in (None, ""), models))

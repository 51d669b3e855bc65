"""`compare`: the same prompts through two or more engines. How far apart they are, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from corelm import Backend
from corelm.spec import Adapter, SamplingParams
from corelm.validate import count, invalid, positive, shown
from corelm_compare.explaining import Explainer
from corelm_compare.findings import Clock, Findings, OnProgress
from corelm_compare.measurements import Measurements
from corelm_compare.oracles import find_oracle
from corelm_compare.prompts import (
    DEFAULT,
    QUICK_PROMPTS,
    QUICK_SECONDS,
    QUICK_TOKENS,
    built_in_prompts,
    compare_texts,
    prepare,
)
from corelm_compare.records import Comparison, Row, Verdict
from corelm_compare.sampling import compare_ends, probe_sampling
from corelm_compare.sides import OpenSide, SideSpec
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
    budget: float | None = None,
    quick: bool = False,
    on_progress: OnProgress | None = None,
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
        oracle: the folder of a model. Its plain float32 forward, on the CPU of this process, decides which side is
            wrong. "auto" takes the first side's model that is a folder with a model; None goes without.
        checkpoints: folders of other weights that a side may hold, such as those before an update.
        sampling: how completions are sampled; by default 24 tokens, with the model's own distribution.
        seed: of everything that is sampled.
        tolerance: mean `|Δ|` in nats up to which two sides agree; None measures each side's distance to itself.
        adapter: the adapter of all calls to sides whose `SideSpec` names none; it must be loaded.
        timeout: seconds that each call may take.
        budget: seconds after which nothing more is tried: `Comparison.not_tried` names what was left out. All rows are
            scored, however long that takes, and so many of them are examined as half of the time is enough for.
        quick: only four prompts, the first of `prompts`, and the rows made of their ids; at most 8 sampled tokens; and
            a budget of 60 seconds if none is given.
        on_progress: is called before each step with what is done now, and about how many seconds are left; None while
            that is not known: it is estimated once the rows have been scored.

    Raises:
        InvalidRequestError: fewer than two sides, no prompts, or a prompt that no side can take; `field` names it.
        CapabilityError: a side can neither score nor return log-probs of what it samples, or two sides cannot score.
        EngineError: an engine failed; the message names the side.
    """
    specs = [_checked(side) for side in sides]
    if len(specs) < 2:
        raise invalid("sides", f"expected at least two engines, got {len(specs)}")
    for name, value in (("tolerance", tolerance), ("budget", budget)):
        if value is not None:
            positive(name, value)
    seed = count("seed", seed)
    for folder in checkpoints:
        if not (Path(folder) / "config.json").is_file():
            raise invalid("checkpoints", f"{str(folder)!r} is no folder with a model: it has no config.json")
    params = DEFAULT if sampling is None else SamplingParams.make(sampling)
    if quick:
        budget = QUICK_SECONDS if budget is None else budget
        params = replace(params, max_new_tokens=min(params.max_new_tokens or QUICK_TOKENS, QUICK_TOKENS))
        prompts = None if prompts is None else prompts[:QUICK_PROMPTS]
        completions = None if completions is None else completions[:QUICK_PROMPTS]
    found = Findings(Clock(budget, on_progress))
    with ExitStack() as stack, plain_modes():
        found.clock.step("opening the sides")
        opened = _opened(specs, stack, timeout, adapter)
        plain, why_not = find_oracle(oracle, [_model(spec) for spec in specs])
        if plain is not None and oracle == "auto" and any(side.adapter for side in opened):
            plain = None
            why_not = "the plain forward of the adapter is not known; pass oracle= a folder with the merged weights"
        found.notes += [] if why_not is None else [why_not]
        found.clock.step("sampling completions")
        asked = built_in_prompts(opened, quick) if prompts is None else prompts
        encoded, sources = prepare(opened, asked, completions, plain, params, seed)
        of_texts = compare_texts(found, encoded, opened, plain)
        made = Measurements(opened, sources, plain, tolerance, found)
        for sentence in made.unanswered():
            found.unexplained = True
            found.note(sentence)
        gaps = made.gaps()
        Explainer(made, checkpoints).explain(gaps)
        asked_ids, limits = [each.ids for each in encoded], _limits(made, made.own_noise)
        _compare_sampling(made, asked_ids, seed, limits)
        # Not before: what sampling says of a side is about its scores, and not about its texts.
        found.causes = [*of_texts, *found.causes]
        samplers = [side for side in opened if side.samples]
        if len(samplers) > 1:
            compare_ends(found, samplers, asked_ids, plain, seed)
        if found.unexplained and not found.not_tried and any(gap.mean_abs > 0 for gap in gaps):
            found.note("scores differ in a way that none of the causes explains")
        return Comparison(
            sides=tuple(side.record() for side in opened),
            rows=tuple(_rows(made)),
            gaps=tuple(gaps),
            own=tuple(found.own),
            tolerances={side.name: made.allowed(side) for side in opened},
            divergences=tuple(found.divergences),
            experiments=tuple(found.experiments),
            causes=found.sorted_causes,
            ruled_out=found.ruled_out,
            not_tried=found.not_tried,
            notes=(*found.notes, *dict.fromkeys(note for side in opened for note in side.notes)),
            oracle=None if plain is None else str(plain.folder),
            seed=seed,
            seconds=found.clock.seconds,
            verdict=_verdict(found),
            limits=limits,
            oracle_limits=_limits(made, made.noise),
            settings={
                **{"tolerance": tolerance, "budget": budget, "quick": quick, "timeout": timeout},
                "sampling": _not_default(params),
            },
        )


def _not_default(params: SamplingParams) -> dict[str, Any]:
    given = {each.name: (getattr(params, each.name), getattr(SamplingParams(), each.name)) for each in fields(params)}
    always, never = ("max_new_tokens", "temperature"), ("engine_kwargs",)  # the last may hold secrets
    return {k: now for k, (now, default) in given.items() if k in always or (now != default and k not in never)}


def _limits(made: Measurements, noise: Mapping[str, float]) -> dict[str, float]:
    """Return mean |Δ| that each side rounds: its noise, or twice what it was found to round."""
    limits = dict(noise)
    for cause in made.found.causes:
        if cause.id == "dtype" and cause.side is not None:
            limits[cause.side] = max(limits[cause.side], 2 * cause.figures.get("mean_abs", 0.0))
    return limits


def _compare_sampling(made: Measurements, prompts: Sequence[list[int]], seed: int, limits: Mapping[str, float]) -> None:
    found = made.found
    scorers = [side for side in made.sides if side.can.score]
    for side in made.sides:
        scorer = side if side.can.score else next((each for each in scorers if each is not side), None)
        if scorer is None or "not-deterministic" in found.of(side.name):
            continue
        others = [each.score for each in scorers if each is not scorer and each is not side]
        arbiter = made.oracle.numbers if made.oracle is not None else others[0] if others else None
        wrong = probe_sampling(found, side, prompts, scorer, arbiter, made.oracle, seed, limits[side.name])
        if wrong and len(made.sides) == 2:
            # Its scores contradict what it says when it samples, and the other side agrees with the latter.
            found.causes = [
                cause if cause.id == "dtype" else replace(cause, side=cause.side or side.name) for cause in found.causes
            ]


def _rows(made: Measurements) -> Iterator[Row]:
    known = {token: made.sides[0].spell(token) for token in {token for row in made.rows for token in row}}
    for n, row in enumerate(made.sources):
        tokens = tuple(known[token] for token in row.ids)
        text = row.text or "".join(tokens[: row.prompt_length])
        numbers = {name: tuple(numbers[n].tolist()) for name, numbers in made.numbers.items()}
        yield replace(row, tokens=tokens, text=text, numbers=numbers)


def _verdict(found: Findings) -> Verdict:
    ids = {cause.id for cause in found.causes}
    if found.unexplained and not ids - {"dtype"}:
        return "unexplained"
    if not ids:
        return "agree"
    return "rounding" if ids == {"dtype"} else "differ"


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


def _model(spec: SideSpec | Backend) -> Any:
    return spec.model_name if isinstance(spec, Backend) else spec.model

"""`run_trial`: one comparison from the first question to the verdict."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike

from corelm_compare.ends import end_causes
from corelm_compare.explaining import Explainer, special_ids
from corelm_compare.findings import Findings
from corelm_compare.material import Material
from corelm_compare.measurements import Measurements
from corelm_compare.oracles import Oracle
from corelm_compare.records import Comparison, Row, Verdict
from corelm_compare.sampled import probe_sampling
from corelm_compare.sides import OpenSide
from corelm_compare.texts import text_causes


def run_trial(
    sides: Sequence[OpenSide],
    material: Material,
    oracle: Oracle | None,
    checkpoints: Sequence[str | PathLike[str]],
    seed: int,
    tolerance: float | None,
    notes: Sequence[str],
    started: float,
) -> Comparison:
    """Ask all sides, compare what they say, explain it, and return what was found.

    Args:
        sides: the engines.
        material: what they are asked.
        oracle: the plain forward, if there is one.
        checkpoints: folders of other weights that a side may hold.
        seed: of what is sampled.
        tolerance: the caller's; None to measure.
        notes: what is known already.
        started: when the comparison began, by `time.monotonic`.
    """
    found = Findings(notes=list(notes))
    divergences, of_texts = text_causes(material.prompts, sides, oracle)
    found.divergences += divergences
    made = Measurements(sides, material, oracle, tolerance, found)
    for sentence in made.unanswered():
        found.unexplained = True
        found.note(sentence)
    gaps = made.gaps(found)
    Explainer(made, found, checkpoints).explain(gaps)
    _sample(made, found, seed)
    # Not before: what sampling says of a side is about its scores, and not about its texts.
    found.causes = [*of_texts, *found.causes]
    _end(made, found, seed)
    if found.unexplained and any(gap.mean_abs > 0 for gap in gaps):
        found.note("scores differ in a way that none of the causes explains")
    return Comparison(
        sides=tuple(side.record() for side in sides),
        rows=tuple(_records(made)),
        gaps=tuple(gaps),
        own=tuple(found.own),
        tolerances={side.name: made.allowed(side) for side in sides},
        divergences=tuple(found.divergences),
        experiments=tuple(found.experiments),
        causes=found.sorted_causes,
        ruled_out=found.ruled_out,
        not_tried=found.not_tried,
        notes=(*found.notes, *dict.fromkeys(note for side in sides for note in side.notes)),
        oracle=None if oracle is None else str(oracle.folder),
        seed=seed,
        seconds=time.monotonic() - started,
        verdict=_verdict(found),
    )


def _sample(made: Measurements, found: Findings, seed: int) -> None:
    """Compare what each side says of tokens when it samples them with what it says when it scores them."""
    scorers = [side for side in made.sides if side.can.score]
    for side in made.sides:
        scorer = side if side.can.score else next((each for each in scorers if each is not side), None)
        if scorer is None or "not-deterministic" in found.of(side.name):
            continue
        others = [each.score for each in scorers if each is not scorer and each is not side]
        arbiter = made.oracle.numbers if made.oracle is not None else others[0] if others else None
        ids = special_ids(side, made.oracle)
        # A side that was found to round may be as far from itself.
        rounding = [c.figures.get("mean_abs", 0.0) for c in found.causes if c.side == side.name and c.id == "dtype"]
        noise = max(made.own_noise[side.name], 2 * max(rounding, default=0.0))
        sampled, scores_are_wrong = probe_sampling(
            side, made.material.prompt_ids, scorer, arbiter, made.oracle, seed, noise, ids
        )
        if scores_are_wrong and len(made.sides) == 2:
            # Its scores contradict what it says when it samples, and the other side agrees with the latter.
            found.causes = [
                cause if cause.id == "dtype" else replace(cause, side=cause.side or side.name) for cause in found.causes
            ]
        found.add(sampled)


def _end(made: Measurements, found: Findings, seed: int) -> None:
    """Compare where answers end."""
    samplers = [side for side in made.sides if side.samples]
    if len(samplers) > 1:
        divergences, causes, not_tried = end_causes(samplers, made.material.prompt_ids, made.oracle, seed)
        found.divergences += divergences
        found.causes += causes
        found.not_tried |= not_tried


def _records(made: Measurements) -> list[Row]:
    known = {token: made.sides[0].spell(token) for token in {token for row in made.rows for token in row}}
    return [
        Row(
            ids=tuple(source.ids),
            prompt_length=source.prompt_length,
            tokens=tuple(known[token] for token in source.ids),
            text=source.text or "".join(known[token] for token in source.ids[: source.prompt_length]),
            kind=source.kind,
            sampled_by=source.sampled_by,
            numbers={name: tuple(numbers[n].tolist()) for name, numbers in made.numbers.items()},
        )
        for n, source in enumerate(made.material.rows)
    ]


def _verdict(found: Findings) -> Verdict:
    ids = {cause.id for cause in found.causes}
    if found.unexplained and not ids - {"dtype"}:
        return "unexplained"
    if not ids:
        return "agree"
    return "rounding" if ids == {"dtype"} else "differ"

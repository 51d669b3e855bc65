"""Where answers end: do both sides stop at the same ids, and at the token that completes a stop string?"""

from __future__ import annotations

from collections.abc import Sequence

from corelm.errors import CapabilityError, InvalidRequestError
from corelm.spec import SamplingParams, StopStrings
from corelm_compare.oracles import Oracle
from corelm_compare.records import Cause, Divergence
from corelm_compare.sides import Answer, OpenSide

#: Prompts, and tokens after each.
_PROMPTS, _TOKENS = 4, 16


def end_causes(
    sides: Sequence[OpenSide], prompts: Sequence[Sequence[int]], oracle: Oracle | None, seed: int
) -> tuple[list[Divergence], list[Cause], dict[str, str]]:
    """Return where greedy answers differ, causes, and what could not be tried."""
    causes = list(_eos(sides, oracle))
    greedy = SamplingParams(max_new_tokens=_TOKENS, temperature=0.0)
    rows = [list(prompt) for prompt in prompts[:_PROMPTS]]
    answers: dict[str, list[Answer]] = {}
    not_tried: dict[str, str] = {}
    for side in sides:
        try:
            answers[side.name] = side.sample(rows, greedy, seed)
        except (CapabilityError, InvalidRequestError) as error:
            not_tried["stop-string"] = f"{side.name}: {error}"
    divergences = _divergences(sides, answers)
    for side in sides:
        if side.name in answers and "stop" in side.can.sampling:
            try:
                causes += _stops(side, rows, answers[side.name], seed)
            except (CapabilityError, InvalidRequestError) as error:
                not_tried["stop-string"] = f"{side.name}: {error}"
    return divergences, causes, not_tried


def _eos(sides: Sequence[OpenSide], oracle: Oracle | None) -> list[Cause]:
    known = {side.name: frozenset(side.backend.eos_token_ids) for side in sides}
    # A server may not say at which ids it ends answers. That is not the same as ending at none.
    known = {name: ids for name, ids in known.items() if ids}
    if len(set(known.values())) < 2:
        return []
    right = oracle.eos_ids() if oracle is not None else frozenset()
    if right not in known.values():
        right = frozenset()
    causes = []
    first = next(iter(known))
    for name, ids in known.items():
        against = right or known[first]
        if ids == against:
            continue
        reference = "the checkpoint" if right else first
        causes.append(
            Cause(
                id="ends",
                side=name if right else None,
                confidence="certain",
                evidence=f"answers of {name} end at the ids {sorted(ids)}, those of {reference} at {sorted(against)}",
                advice="pass stop_token_ids= with all of them, or open the side with the checkpoint's "
                "generation_config.json",
            )
        )
    return causes


def _stops(side: OpenSide, rows: Sequence[list[int]], answers: Sequence[Answer], seed: int) -> list[Cause]:
    """Sample one of the greedy answers again, with a text from its middle as a stop string."""
    for row, answer in zip(rows, answers, strict=True):
        for token in answer.ids[1:-4]:
            stop = side.spell(token).strip()
            if len(stop) < 2 or "\ufffd" in stop or stop.startswith("<"):
                continue
            sampling = SamplingParams(max_new_tokens=_TOKENS, temperature=0.0, stop=(stop,))
            due = StopStrings.of(sampling, side.backend.tokenizer).after(row).first_end(answer.ids)
            if due is None or due > len(answer.ids) - 4:
                continue
            (ended,) = side.sample([row], sampling, seed)
            if ended.ids[:due] != answer.ids[:due] or len(ended.ids) <= due:
                return []
            evidence = (
                f"{side.name} goes on for {len(ended.ids) - due} tokens after the one that completes the stop string "
                f"{stop!r}, which is number {due} of its answer"
            )
            return [
                Cause(
                    id="stop-string",
                    side=side.name,
                    confidence="certain",
                    evidence=evidence,
                    advice="pass stop_token_ids=, or compare answers up to the stop string only",
                    figures={"due": due, "ended": len(ended.ids)},
                )
            ]
    return []


def _divergences(sides: Sequence[OpenSide], answers: dict[str, list[Answer]]) -> list[Divergence]:
    found = []
    first = sides[0]
    for side in sides[1:]:
        if first.name not in answers or side.name not in answers:
            continue
        for row, (one, other) in enumerate(zip(answers[first.name], answers[side.name], strict=True)):
            if one.ids == other.ids:
                continue
            shorter = min(len(one.ids), len(other.ids))
            at = next((n for n in range(shorter) if one.ids[n] != other.ids[n]), shorter)
            found.append(
                Divergence(
                    what="answer",
                    one=first.name,
                    other=side.name,
                    row=row,
                    position=at,
                    first=one.ids[at] if at < len(one.ids) else None,
                    second=other.ids[at] if at < len(other.ids) else None,
                    text="".join(first.spell(token) for token in one.ids[max(0, at - 5) : at]),
                )
            )
    return found

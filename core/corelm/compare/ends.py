"""Where answers end: do both sides stop at the same ids, and at the token that completes a stop string?"""

from __future__ import annotations

from collections.abc import Sequence

from corelm.compare.oracles import Oracle
from corelm.compare.records import Cause, Divergence
from corelm.compare.sides import Answer, OpenSide
from corelm.errors import CapabilityError, InvalidRequestError
from corelm.spec.sampling import SamplingParams
from corelm.support.stop_strings import StopStrings

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
        if side.name not in answers or "stop" not in side.can.sampling:
            continue
        stop = _a_stop(side, answers[side.name])
        if stop is None:
            continue
        sampling = SamplingParams(max_new_tokens=_TOKENS, temperature=0.0, stop=(stop,))
        try:
            (ended,) = side.sample([rows[0]], sampling, seed)
        except (CapabilityError, InvalidRequestError) as error:
            not_tried["stop-string"] = f"{side.name}: {error}"
            continue
        free = answers[side.name][0].ids
        due = StopStrings.of(sampling, side.backend.tokenizer).first_end(free)
        if due is not None and ended.ids[:due] == free[:due] and len(ended.ids) > due:
            causes.append(
                Cause(
                    id="stop-string",
                    side=side.name,
                    confidence="certain",
                    evidence=f"{side.name} goes on for {len(ended.ids) - due} tokens after the one that completes the stop "
                    f"string {stop!r}, which is number {due} of its answer",
                    advice="pass stop_token_ids=, or compare answers up to the stop string only",
                    figures={"due": due, "ended": len(ended.ids)},
                )
            )
    return divergences, causes, not_tried


def _eos(sides: Sequence[OpenSide], oracle: Oracle | None) -> list[Cause]:
    known = {side.name: frozenset(side.backend.eos_token_ids) for side in sides}
    if len(set(known.values())) == 1:
        return []
    right = oracle.eos_ids() if oracle is not None else frozenset()
    if right not in known.values():
        right = frozenset()
    causes = []
    first = sides[0].name
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
                evidence=f"answers of {name} end at the ids {sorted(ids)}, and those of {reference} at {sorted(against)}",
                advice="pass stop_token_ids= with all of them, or open the side with the checkpoint's "
                "generation_config.json",
            )
        )
    return causes


def _a_stop(side: OpenSide, answers: Sequence[Answer]) -> str | None:
    """Return a text that the first greedy answer contains in its middle."""
    ids = answers[0].ids if answers else []
    for token in ids[1:-2]:
        text = side.spell(token).strip()
        if len(text) > 1 and "\ufffd" not in text and not text.startswith("<"):
            return text
    return None


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

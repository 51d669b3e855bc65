"""`Material`: the rows that all sides score: prompts, completions, and two long rows made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice
from typing import Any

from corelm.errors import CapabilityError, InvalidRequestError
from corelm.spec import SamplingParams
from corelm.validate import invalid, shown, token_ids
from corelm_compare.oracles import Oracle
from corelm_compare.sides import OpenSide
from corelm_compare.texts import Encoded, Kind, encode

#: Lengths of the long rows: more than a block of any cache of prefixes (128 in vLLM on a CPU).
_LONG = (192, 100)
#: Rows that are examined closely. All are scored.
EXAMINED = 10
#: What is sampled if the caller does not say.
DEFAULT = SamplingParams(max_new_tokens=24)


@dataclass(frozen=True, slots=True)
class RowSource:
    """A row before it was scored.

    Attributes:
        ids: prompt and completion.
        prompt_length: how many of them are the prompt.
        text, kind, sampled_by: as in `corelm_compare.Row`.
        numbers: what the side that sampled it said, from the end of the prompt on; empty if it was not sampled.
        made_of_others: whether its ids are those of other rows, one after another.
    """

    ids: list[int]
    prompt_length: int
    text: str
    kind: Kind
    sampled_by: str | None = None
    numbers: tuple[float, ...] = ()
    made_of_others: bool = False


@dataclass(frozen=True, slots=True)
class Material:
    """What is compared.

    Attributes:
        prompts: the prompts, as each side encodes them.
        rows: the rows; those at the end are made of the others.
    """

    prompts: list[Encoded]
    rows: list[RowSource]

    @property
    def prompt_ids(self) -> list[list[int]]:
        """The ids of each prompt."""
        return [prompt.ids for prompt in self.prompts]


def prepare(
    sides: Sequence[OpenSide],
    prompts: Sequence[Any],
    completions: Sequence[Any] | None,
    oracle: Oracle | None,
    sampling: SamplingParams,
    seed: int,
) -> Material:
    """Encode the prompts on every side, sample completions if there are none, and add long rows.

    Raises:
        InvalidRequestError: there are no prompts, another number of completions, or a prompt that is too long for a
            side; `field` names the argument.
        CapabilityError: completions are needed, and no side can sample any.
    """
    if isinstance(prompts, str) or not len(prompts):
        raise invalid("prompts", f"expected a list of texts, conversations or ids, got {shown(prompts)}")
    if completions is not None and len(completions) != len(prompts):
        raise invalid("completions", f"expected one for each of {len(prompts)} prompts, got {len(completions)}")
    encoded = [encode(prompt, sides, oracle, row) for row, prompt in enumerate(prompts)]
    sources = [RowSource(each.ids, len(each.ids), each.text, each.kind) for each in encoded]
    room = min((side.can.max_context for side in sides if side.can.max_context is not None), default=None)
    if completions is not None:
        sources = [_completed(source, each, sides[0]) for source, each in zip(sources, completions, strict=True)]
        _refuse_long(sources, room)
    else:
        sources = _sampled(sides, sources, sampling, seed, room)
    if all(side.can.score for side in sides):
        sources += _long_rows(sources, room)
    return Material(encoded, sources)


def _refuse_long(sources: Sequence[RowSource], room: int | None) -> None:
    problems = {row: f"{len(source.ids)} ids" for row, source in enumerate(sources) if len(source.ids) > (room or 1e18)}
    if problems:
        row = min(problems)
        raise InvalidRequestError(
            f"completions: row {row} has {problems[row]} with its prompt, and a side has a context of {room}; "
            "shorten it",
            field="completions",
            problems=problems,
        )


def _completed(source: RowSource, completion: Any, side: OpenSide) -> RowSource:
    if isinstance(completion, str):
        ids = side.encode(completion, add_special_tokens=False) if completion else []
    else:
        ids = list(token_ids("completions", completion))
    return replace(source, ids=[*source.ids, *ids])


def _sampled(
    sides: Sequence[OpenSide], sources: list[RowSource], sampling: SamplingParams, seed: int, room: int | None
) -> list[RowSource]:
    # A side that cannot score says something only about what it has sampled itself.
    silent = [side for side in sides if not side.can.score]
    sampler = next((side for side in (*silent, *sides) if side.samples), None)
    if len(silent) > 1:
        names = " and ".join(side.name for side in silent)
        raise CapabilityError(
            f"sides: {names} cannot score, so nothing can be said about what the other one samples; replace one of "
            "them by a backend that scores",
            capability="score",
        )
    if sampler is None:
        return sources
    if room is not None:
        most = min(sampling.max_new_tokens or room, room - max(len(source.ids) for source in sources))
        if most < 1:
            longest = max(range(len(sources)), key=lambda row: len(sources[row].ids))
            raise InvalidRequestError(
                f"prompts: row {longest} has {len(sources[longest].ids)} ids, which leaves no room for an answer in a "
                f"context of {room}; shorten it, or pass completions=",
                field="prompts",
                problems={longest: "too long"},
            )
        sampling = replace(sampling, max_new_tokens=most)
    answers = sampler.sample([source.ids for source in sources], sampling, seed)
    return [
        replace(
            source,
            ids=[*source.ids, *answer.ids],
            sampled_by=sampler.name,
            numbers=tuple(answer.numbers.tolist()),
        )
        for source, answer in zip(sources, answers, strict=True)
    ]


def _long_rows(sources: Sequence[RowSource], room: int | None) -> list[RowSource]:
    """Return a row of two ids and two long ones, made of the ids of the others."""
    ids = list(chain.from_iterable(source.ids for source in sources))
    if len(ids) < 2:
        return []
    rows = [ids[:2]]
    for length, start in zip(_LONG, (0, len(ids) // 2), strict=True):
        size = min(length, length if room is None else room)
        rows.append(list(islice(cycle(ids[start:] + ids[:start]), size)))
    return [RowSource(row, 1, "(made of the other rows)", "ids", made_of_others=True) for row in rows]

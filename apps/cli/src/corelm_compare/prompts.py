"""What is compared: prompts, those that core brings if the caller gives none, and the rows that are made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice
from typing import Any

from corelm.errors import CapabilityError, CoreLMError, InvalidRequestError
from corelm.spec import SamplingParams
from corelm.validate import invalid, shown, token_ids
from corelm_compare.oracles import Oracle
from corelm_compare.sides import OpenSide
from corelm_compare.texts import Encoded, Kind, encode

#: Plain words, numbers, code, other scripts, and whitespace at both ends: where tokenizers and templates go apart.
TEXTS = (
    "The quick brown fox jumps over the lazy dog, and",
    "Question: what is 17 + 26? Answer:",
    "def mean(values):\n    return sum(values) /",
    "In 1969, 3.14159 and 1,000,000 were",
    " a text that begins with a space",
    "Two lines\n\nand a line end\n",
    "Straße, façade, naïve, Αθήνα, 東京, مرحبا, 🙂",
    "a",
)
CONVERSATIONS = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "Is water wet?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "And dry ice?"},
    ],
)
#: What is sampled if the caller does not say.
DEFAULT = SamplingParams(max_new_tokens=24)
#: Lengths of the long rows: more than a block of any cache of prefixes (128 in vLLM on a CPU).
_LONG = (192, 100)
#: In a quick comparison: prompts, sampled tokens and the seconds that it may take.
QUICK_PROMPTS, QUICK_TOKENS, QUICK_SECONDS = 4, 8, 60.0


def built_in_prompts(sides: Sequence[OpenSide], quick: bool) -> list[Any]:
    """Return texts, and the conversations that the chat template of every side can render."""
    chats = [chat for chat in CONVERSATIONS if all(_renders(side, chat) for side in sides)]
    return [*TEXTS[: QUICK_PROMPTS - 1], *chats[:1]] if quick else [*TEXTS, *chats]


def _renders(side: OpenSide, chat: Sequence[Mapping[str, Any]]) -> bool:
    try:
        side.render(chat)
    except CoreLMError:
        return False
    return True


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


def prepare(
    sides: Sequence[OpenSide],
    prompts: Sequence[Any],
    completions: Sequence[Any] | None,
    oracle: Oracle | None,
    sampling: SamplingParams,
    seed: int,
) -> tuple[list[Encoded], list[RowSource]]:
    """Encode the prompts on every side, sample completions if there are none, and add long rows, which come last.

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
    return encoded, sources


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
        longest = max(range(len(sources)), key=lambda row: len(sources[row].ids))
        most = min(sampling.max_new_tokens or room, room - len(sources[longest].ids))
        if most < 1:
            raise InvalidRequestError(
                f"prompts: row {longest} has {len(sources[longest].ids)} ids, which leaves no room for an answer in a "
                f"context of {room}; shorten it, or pass completions=",
                field="prompts",
                problems={longest: "too long"},
            )
        sampling = replace(sampling, max_new_tokens=most)
    answers = sampler.sample([source.ids for source in sources], sampling, seed)
    return [
        replace(source, ids=[*source.ids, *ids], sampled_by=sampler.name, numbers=tuple(numbers.tolist()))
        for source, (ids, numbers) in zip(sources, answers, strict=True)
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

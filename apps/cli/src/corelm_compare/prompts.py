"""What is compared: prompts, the rows that are made of them, and whether sides agree about the ids of a text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, cycle, islice
from typing import Any, Literal

from corelm.errors import CapabilityError, CoreLMError, InvalidRequestError
from corelm.spec import SamplingParams
from corelm.validate import invalid, shown, token_ids
from corelm_compare.findings import Findings
from corelm_compare.oracles import Oracle
from corelm_compare.records import MADE_OF_OTHERS, Cause, Divergence, Row
from corelm_compare.sides import OpenSide

Kind = Literal["text", "conversation", "ids"]
#: A text that every tokenizer knows, to which special tokens are appended.
_LEAST_TEXT = "One, two. "
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
    return [*TEXTS[: QUICK_PROMPTS - len(chats[:1])], *chats[:1]] if quick else [*TEXTS, *chats]


def _renders(side: OpenSide, chat: Sequence[Mapping[str, Any]]) -> bool:
    try:
        side.render(chat)
    except CoreLMError:
        return False
    return True


def prepare(
    sides: Sequence[OpenSide],
    prompts: Sequence[Any],
    completions: Sequence[Any] | None,
    oracle: Oracle | None,
    sampling: SamplingParams,
    seed: int,
) -> tuple[list[Encoded], list[Row]]:
    """Encode the prompts on every side, sample completions if there are none, and add long rows, which come last.

    The rows have the texts of no tokens, and no numbers but those of the side that sampled.

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
    rows = [Row(ids=tuple(each.ids), prompt_length=len(each.ids), text=each.text, kind=each.kind) for each in encoded]
    room = min((side.can.max_context for side in sides if side.can.max_context is not None), default=None)
    if completions is not None:
        rows = [_completed(row, each, sides[0]) for row, each in zip(rows, completions, strict=True)]
        _refuse_long(rows, room)
    else:
        rows = _sampled(sides, rows, sampling, seed, room)
    if all(side.can.score for side in sides):
        rows += _long_rows(rows, room)
    return encoded, rows


def _refuse_long(rows: Sequence[Row], room: int | None) -> None:
    problems = {n: f"{len(row.ids)} ids" for n, row in enumerate(rows) if room is not None and len(row.ids) > room}
    if problems:
        first = min(problems)
        raise InvalidRequestError(
            f"completions: row {first} has {problems[first]} with its prompt, and a side has a context of {room}; "
            "shorten it",
            field="completions",
            problems=problems,
        )


def _completed(row: Row, completion: Any, side: OpenSide) -> Row:
    if isinstance(completion, str):
        ids = side.encode(completion, add_special_tokens=False) if completion else []
    else:
        ids = list(token_ids("completions", completion))
    return replace(row, ids=(*row.ids, *ids))


def _sampled(
    sides: Sequence[OpenSide], rows: list[Row], sampling: SamplingParams, seed: int, room: int | None
) -> list[Row]:
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
        return rows
    if room is not None:
        longest = max(range(len(rows)), key=lambda n: len(rows[n].ids))
        most = min(sampling.max_new_tokens or room, room - len(rows[longest].ids))
        if most < 1:
            raise InvalidRequestError(
                f"prompts: row {longest} has {len(rows[longest].ids)} ids, which leaves no room for an answer in a "
                f"context of {room}; shorten it, or pass completions=",
                field="prompts",
                problems={longest: "too long"},
            )
        sampling = replace(sampling, max_new_tokens=most)
    completed = []
    for row, (ids, numbers) in zip(rows, sampler.sample([list(row.ids) for row in rows], sampling, seed), strict=True):
        said = {sampler.name: (*[math.nan] * row.prompt_length, *numbers.tolist())}
        completed.append(replace(row, ids=(*row.ids, *ids), sampled_by=sampler.name, numbers=said))
    return completed


def _long_rows(rows: Sequence[Row], room: int | None) -> list[Row]:
    """Return a row of two ids and two long ones, made of the ids of the others."""
    ids = list(chain.from_iterable(row.ids for row in rows))
    if len(ids) < 2:
        return []
    made = [ids[:2]]
    for length, start in zip(_LONG, (0, len(ids) // 2), strict=True):
        size = min(length, length if room is None else room)
        made.append(list(islice(cycle(ids[start:] + ids[:start]), size)))
    return [Row(ids=tuple(each), prompt_length=1, text=MADE_OF_OTHERS, kind="ids") for each in made]


# Texts and conversations as ids -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Encoded:
    """One prompt.

    Attributes:
        kind: what the caller gave.
        text: the text, or the rendering of the first side; "" for ids.
        ids: the ids that are used: those of the checkpoint's tokenizer, else of the first side.
        by_side: the ids of each side; empty for ids.
        rendered: the rendering of each side, of conversations.
        expected: the ids of the checkpoint's own tokenizer; None without one.
        expected_text: its rendering of a conversation.
    """

    kind: Kind
    text: str
    ids: list[int]
    by_side: Mapping[str, list[int]] = field(default_factory=dict)
    rendered: Mapping[str, str] = field(default_factory=dict)
    expected: list[int] | None = None
    expected_text: str | None = None


def encode(prompt: Any, sides: Sequence[OpenSide], oracle: Oracle | None, row: int) -> Encoded:
    """Encode a prompt on every side.

    Raises:
        InvalidRequestError: it is neither a text, nor a conversation, nor ids; or no side can encode it.
    """
    if isinstance(prompt, str):
        by_side = {side.name: side.encode(prompt) for side in sides}
        expected = oracle.encode(prompt) if oracle is not None else None
        return Encoded("text", prompt, _chosen(expected, by_side, row), by_side, {}, expected)
    if isinstance(prompt, Sequence) and prompt and all(isinstance(each, Mapping) for each in prompt):
        made = {side.name: side.render(prompt) for side in sides}
        known = oracle.render(prompt) if oracle is not None else None
        by_side = {name: ids for name, (_, ids) in made.items()}
        texts = {name: text for name, (text, _) in made.items()}
        expected_text, expected = known or (None, None)
        text = expected_text if expected_text is not None else next(iter(texts.values()))
        return Encoded("conversation", text, _chosen(expected, by_side, row), by_side, texts, expected, expected_text)
    if isinstance(prompt, Sequence) and not prompt:
        raise invalid("prompts", f"row {row} is empty; pass a text, a list of messages, or ids")
    return Encoded("ids", "", list(token_ids("prompts", prompt)))


def _chosen(expected: list[int] | None, by_side: Mapping[str, list[int]], row: int) -> list[int]:
    found = expected or next((ids for ids in by_side.values() if ids), None)
    if not found:
        raise invalid("prompts", f"row {row} has no tokens; pass a longer text, or ids")
    return found


def compare_texts(
    found: Findings, prompts: Sequence[Encoded], sides: Sequence[OpenSide], oracle: Oracle | None
) -> list[Cause]:
    """Find where the ids of the same texts differ; return why: one cause of each kind for each side."""
    causes: dict[tuple[str, str | None], Cause] = {}
    first = sides[0]
    for row, prompt in enumerate(prompts):
        known = prompt.expected is not None
        reference = "the checkpoint's tokenizer" if known else first.name
        right = prompt.expected if prompt.expected is not None else prompt.by_side.get(first.name, [])
        right_text = prompt.expected_text if known else prompt.rendered.get(first.name)
        for side in sides:
            ids, text = prompt.by_side.get(side.name, right), prompt.rendered.get(side.name)
            if ids == right:
                continue
            found.divergences.append(ids_differ("ids", side, (reference, side.name), row, right, ids))
            if text is not None and right_text is not None and text != right_text:
                id, evidence, advice = _template_differs(side.name, reference, text, right_text)
            else:
                id, evidence, advice = _tokenization_differs(side, reference, ids, right)
            accused = side.name if known else None
            causes.setdefault((id, accused), Cause(id, accused, "certain", evidence, advice))
    for cause in _special_texts(sides, oracle):
        causes[cause.id, cause.side] = cause
        # Conversations have special tokens, so this is why their ids differ.
        causes.pop(("tokenization", cause.side), None)
    return list(causes.values())


def _tokenization_differs(side: OpenSide, reference: str, ids: list[int], right: list[int]) -> tuple[str, str, str]:
    bos = getattr(side.backend.tokenizer, "bos_token_id", None)
    for token in {*ids[:1], *right[:1], *([] if bos is None else [bos])}:
        shown = f"id {token} ({side.spell(token)!r})"
        if ids == [token, *right]:
            doubled = right[:1] == [token]
            evidence = f"{side.name} puts {shown} before the ids that {reference} has"
            return (
                "bos-doubled" if doubled else "bos-added",
                evidence + (", which begin with it already" if doubled else ""),
                "encode with add_special_tokens=False where the text, or the chat template, has a BOS already",
            )
        if right == [token, *ids]:
            evidence = f"{side.name} leaves out {shown}, with which the ids of {reference} begin"
            return "bos-missing", evidence, "open the engine with the checkpoint's own tokenizer, or set add_bos_token"
    at = _first_difference(ids, right)
    evidence = (
        f"{side.name} and {reference} agree on {at} ids of a text, then have {ids[at : at + 3]} and "
        f"{right[at : at + 3]} ({len(ids)} and {len(right)} ids in all)"
    )
    return "tokenization", evidence, "open both sides with one tokenizer: get_backend(…, tokenizer=PATH)"


def _template_differs(name: str, reference: str, text: str, right: str) -> tuple[str, str, str]:
    advice = "render with add_generation_prompt=True on both sides, or give both the same chat template"
    if right.startswith(text):
        return "generation-prompt", f"{name} leaves out {right[len(text) :]!r} at the end of a conversation", advice
    if text.startswith(right):
        evidence = f"{name} adds {text[len(right) :]!r} at the end of a conversation, which {reference} does not have"
        return "generation-prompt", evidence, advice
    at = _first_difference(text, right)
    evidence = (
        f"{name} renders a conversation as …{text[max(0, at - 10) : at + 20]!r}…, and {reference} as "
        f"…{right[max(0, at - 10) : at + 20]!r}…, from character {at} on"
    )
    return "chat-template", evidence, "give both sides one chat template: the tokenizer's, or chat_template="


def _special_texts(sides: Sequence[OpenSide], oracle: Oracle | None) -> list[Cause]:
    """Encode the text of a special token on every side: some read it as ordinary characters."""
    source = oracle.tokenizer if oracle is not None and oracle.tokenizer is not None else sides[0].backend.tokenizer
    texts = [text for text in getattr(source, "all_special_tokens", None) or () if isinstance(text, str)]
    if not texts:
        return []
    special = texts[0]
    asked = (_LEAST_TEXT, _LEAST_TEXT + special)
    made: dict[str, list[list[int]]] = {}
    for side in sides:
        try:
            made[side.name] = [side.encode(each, add_special_tokens=False) for each in asked]
        except CoreLMError:
            continue
    expected = [oracle.encode(each, add_special_tokens=False) for each in asked] if oracle is not None else [None, None]
    first: list[list[int]] = next(iter(made.values()), [[], []])
    ordinary, right = (known or own for known, own in zip(expected, first, strict=True))
    causes = []
    for name, (plain, ids) in made.items():
        # Where texts without special tokens differ already, this says nothing.
        if plain == ordinary and ids[-1:] != right[-1:] and len(ids) > len(right):
            evidence = f"{name} reads {special!r} as {len(ids) - len(right) + 1} ordinary tokens; it is id {right[-1]}"
            advice = "open the engine with the checkpoint's own tokenizer (split_special_tokens=False)"
            accused = name if expected[1] else None
            causes.append(Cause("special-tokens-as-text", accused, "certain", evidence, advice))
    return causes


def ids_differ(
    what: Literal["ids", "answer"],
    speller: OpenSide,
    names: tuple[str, str],
    row: int,
    first: Sequence[int],
    second: Sequence[int],
) -> Divergence:
    """Return where two lists of ids first differ."""
    at = _first_difference(first, second)
    return Divergence(
        what=what,
        one=names[0],
        other=names[1],
        row=row,
        position=at,
        first=first[at] if at < len(first) else None,
        second=second[at] if at < len(second) else None,
        text="".join(speller.spell(token) for token in first[max(0, at - 5) : at]),
    )


def _first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))

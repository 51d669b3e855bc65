"""Texts and conversations as ids: do the sides, and the checkpoint's own tokenizer, agree about them?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from corelm.errors import CoreLMError
from corelm.validate import invalid, token_ids
from corelm_compare.findings import Findings
from corelm_compare.oracles import Oracle
from corelm_compare.records import Cause, Divergence
from corelm_compare.sides import OpenSide

Kind = Literal["text", "conversation", "ids"]
#: A text that every tokenizer knows, to which special tokens are appended.
_LEAST_TEXT = "One, two. "


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
    """Return the id, the evidence and the advice of the cause."""
    bos = getattr(side.backend.tokenizer, "bos_token_id", None)
    for token in {bos, *ids[:1], *right[:1]} - {None}:
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
    """Return the id, the evidence and the advice of the cause."""
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
    first = next(iter(made.values()), [[], []])
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

"""Texts and conversations as ids: do the sides, and the checkpoint's own tokenizer, agree about them?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from corelm.errors import CoreLMError
from corelm.validate import invalid, shown, token_ids
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
    by_side: Mapping[str, list[int]]
    rendered: Mapping[str, str]
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
    ids = list(token_ids("prompts", prompt))
    return Encoded("ids", "", ids, {}, {})


def _chosen(expected: list[int] | None, by_side: Mapping[str, list[int]], row: int) -> list[int]:
    found = expected or next((ids for ids in by_side.values() if ids), None)
    if not found:
        raise invalid("prompts", f"row {row} has no tokens; pass a longer text, or ids")
    return found


def text_causes(
    prompts: Sequence[Encoded], sides: Sequence[OpenSide], oracle: Oracle | None
) -> tuple[list[Divergence], list[Cause]]:
    """Return where the ids of the same texts differ, and why: one cause of each kind for each side."""
    divergences: list[Divergence] = []
    causes: dict[tuple[str, str | None], Cause] = {}
    first = sides[0]
    for row, prompt in enumerate(prompts):
        if prompt.kind == "ids":
            continue
        expected = prompt.expected
        for side in sides:
            ids = prompt.by_side[side.name]
            against = expected if expected is not None else prompt.by_side[first.name]
            if ids == against:
                continue
            accused = side.name if expected is not None else None
            reference = "the checkpoint's tokenizer" if expected is not None else first.name
            divergences.append(_divergence(row, reference, side, against, ids))
            right_text = prompt.expected_text if expected is not None else prompt.rendered.get(first.name)
            cause = _cause(side, accused, reference, prompt, ids, against, right_text)
            causes.setdefault((cause.id, cause.side), cause)
    for cause in _special_texts(sides, oracle):
        causes[cause.id, cause.side] = cause
        # Conversations have special tokens, so this is why their ids differ.
        causes.pop(("tokenization", cause.side), None)
    return divergences, list(causes.values())


def _cause(
    side: OpenSide,
    accused: str | None,
    reference: str,
    prompt: Encoded,
    ids: list[int],
    against: list[int],
    right_text: str | None,
) -> Cause:
    if prompt.kind == "conversation":
        text = prompt.rendered[side.name]
        if right_text is not None and text != right_text:
            return _template(side, accused, reference, text, right_text)
    bos = getattr(side.backend.tokenizer, "bos_token_id", None)
    specials = {token for token in (bos, ids[0] if ids else None, against[0] if against else None) if token is not None}
    for token in specials:
        if ids == [token, *against]:
            doubled = bool(against) and against[0] == token
            return _made(
                "bos-doubled" if doubled else "bos-added",
                accused,
                f"{side.name} puts id {token} ({side.spell(token)!r}) before the ids that {reference} has"
                + (", which begin with it already" if doubled else ""),
                "encode with add_special_tokens=False where the text, or the chat template, has a BOS already",
            )
        if against == [token, *ids]:
            return _made(
                "bos-missing",
                accused,
                f"{side.name} leaves out id {token} ({side.spell(token)!r}), with which the ids of {reference} begin",
                "open the engine with the checkpoint's own tokenizer, or set add_bos_token",
            )
    at = _first(ids, against)
    return _made(
        "tokenization",
        accused,
        f"{side.name} and {reference} agree on {at} ids of a text, then have {ids[at : at + 3]} and "
        f"{against[at : at + 3]} ({len(ids)} and {len(against)} ids in all)",
        "open both sides with one tokenizer: get_backend(…, tokenizer=PATH)",
    )


def _template(side: OpenSide, accused: str | None, reference: str, text: str, right: str) -> Cause:
    if right.startswith(text) or text.startswith(right):
        missing = right.startswith(text)
        rest = right[len(text) :] if missing else text[len(right) :]
        return _made(
            "generation-prompt",
            accused,
            f"{side.name} {'leaves out' if missing else 'adds'} {rest!r} at the end of a conversation"
            f"{'' if missing else ', which ' + reference + ' does not have'}",
            "render with add_generation_prompt=True on both sides, or give both the same chat template",
        )
    at = _first(text, right)
    return _made(
        "chat-template",
        accused,
        f"{side.name} renders a conversation as …{text[max(0, at - 10) : at + 20]!r}…, and {reference} as "
        f"…{right[max(0, at - 10) : at + 20]!r}…, from character {at} on",
        "give both sides one chat template: the tokenizer's, or chat_template=",
    )


def _special_texts(sides: Sequence[OpenSide], oracle: Oracle | None) -> list[Cause]:
    """Encode the text of a special token on every side: some read it as ordinary characters."""
    source = oracle.tokenizer if oracle is not None and oracle.tokenizer is not None else sides[0].backend.tokenizer
    texts = [text for text in getattr(source, "all_special_tokens", None) or () if isinstance(text, str)][:1]
    causes = []
    for text in texts:
        expected = oracle.encode(_LEAST_TEXT + text, add_special_tokens=False) if oracle is not None else None
        found: dict[str, list[int]] = {}
        plain: dict[str, list[int]] = {}
        for side in sides:
            try:
                made = [side.encode(each, add_special_tokens=False) for each in (_LEAST_TEXT, _LEAST_TEXT + text)]
            except CoreLMError:
                continue
            plain[side.name], found[side.name] = made
        right = expected or next(iter(found.values()), [])
        own = oracle.encode(_LEAST_TEXT, add_special_tokens=False) if oracle is not None else None
        ordinary = own or next(iter(plain.values()), [])
        for name, ids in found.items():
            if plain[name] != ordinary:
                # Texts without special tokens differ already.
                continue
            if ids[-1:] != right[-1:] and len(ids) > len(right):
                causes.append(
                    _made(
                        "special-tokens-as-text",
                        name if expected else None,
                        f"{name} reads {text!r} as {len(ids) - len(right) + 1} ordinary tokens; it is id {right[-1]}",
                        "open the engine with the checkpoint's own tokenizer (split_special_tokens=False)",
                    )
                )
    return causes


def _made(id: str, accused: str | None, evidence: str, advice: str) -> Cause:
    return Cause(id=id, side=accused, confidence="certain", evidence=evidence, advice=advice)


def _divergence(row: int, reference: str, side: OpenSide, right: list[int], ids: list[int]) -> Divergence:
    at = _first(ids, right)
    before = "".join(side.spell(token) for token in right[max(0, at - 5) : at])
    return Divergence(
        what="ids",
        one=reference,
        other=side.name,
        row=row,
        position=at,
        first=right[at] if at < len(right) else None,
        second=ids[at] if at < len(ids) else None,
        text=shown(before),
    )


def _first(one: Sequence[Any], other: Sequence[Any]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))

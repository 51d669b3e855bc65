"""Conversations → token ids, without changing an id that was sampled.

A sampled turn keeps its ids: a placeholder stands for the whole turn while the template renders, the text around it is
tokenized, and the ids take its place. What stands before a sampled turn is what stood there when it was sampled. That
is not always what the template writes there now (it may drop thinking, or add an empty thinking block, once a turn is
in the past), so it is rendered from the messages before that turn, with the generation prompt, as it was then::

    prompt(turn 2) = prompt(turn 1) + ids(turn 1) + what the template writes after turn 1 when it asks for turn 2

This holds while the earlier messages, the template and its arguments stay the same. A template that reads the clock
does not. Pieces are tokenized apart from each other, so nothing merges across the edge of a sampled turn; a tokenizer
that puts a space before every text does so after a sampled turn as well.

The text of a special token inside a message is a segment of its own, read as ordinary characters. A conversation with
neither is one segment, tokenized as the tokenizer itself would.

Assistant masks: sampled ids are True, the EOS among them, and nothing else of a sampled turn is. Of other turns, the
tokens that touch the text in the template's ``{% generation %}`` blocks, exactly as it says; or, without such blocks,
from the generation prompt to the turn's EOS (see `masks_by_prefix`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from corelm.errors import CapabilityError
from corelm.rendering.segments import Segment, Segmenter, special_tokens
from corelm.rendering.template import Marks, Template, by_row, strings, words
from corelm.spec.message import Chat
from corelm.spec.records import TokenizeResult
from corelm.tensors.ragged import Ragged


class Tokenize(Protocol):
    """Texts → ids, one row a text: `Backend.tokenize`."""

    def __call__(
        self, texts: Sequence[str], *, add_special_tokens: bool, parse_special: bool = True, offsets: bool = False
    ) -> TokenizeResult: ...


@dataclass(frozen=True, slots=True, eq=False)
class RenderedChats:
    """Conversations as an engine takes them, one row each.

    Attributes:
        ids: int64.
        assistant: bool, as long as `ids`; None if it was not asked for.
        texts: the rendering in words, the text of sampled turns included.
        retokenized: True for a row with sampled turns that were rendered from their text.
    """

    ids: Ragged
    assistant: Ragged | None
    texts: tuple[str, ...]
    retokenized: tuple[bool, ...]


def render(
    chats: Sequence[Chat],
    tokenizer: Any,
    tokenize: Tokenize,
    *,
    add_generation_prompt: bool,
    eos_ids: Collection[int],
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    prefer_tokens: bool = True,
    want_assistant: bool = True,
) -> RenderedChats:
    """Render and tokenize conversations, sampled turns by their ids.

    Args:
        add_generation_prompt: True for a prompt to sample from. False for a conversation to score, which then ends with
            its last sampled id if a sampled turn comes last.
        eos_ids: what ends a turn. The template's copy of the id that a sampled turn already ends with is left out.
        chat_template: instead of the tokenizer's own. template_kwargs: its variables, as `tools`.
        prefer_tokens: False renders every turn from its text, as the template says.

    Raises:
        TemplateError: no template; one that fails; one that loses or alters a sampled turn; if masks are wanted, one
            without ``{% generation %}`` markers that rewrites earlier turns. `rows` has the conversations.
        CapabilityError: masks need character offsets and `tokenize` gives none.
    """
    template = Template.find(tokenizer, chat_template, template_kwargs or {})
    specials = special_tokens(tokenizer)
    messages = [[message.for_template() for message in chat] for chat in chats]
    contents = words(messages)
    marks = Marks.unused("\n".join([contents, *strings([template.source, template.kwargs, *specials.values()])]))
    cutter = Segmenter(
        template,
        marks,
        contents=contents,
        special_texts=[text for text in specials.values() if text],
        eos_texts=[text for eos in sorted(eos_ids) if (text := tokenizer.decode([eos]))],
        add_generation_prompt=add_generation_prompt,
        prefer_tokens=prefer_tokens,
        want_assistant=want_assistant,
    )
    cut = by_row(cutter.segments, cutter.plans(chats, messages))
    rows = [[segment for segment in row if segment.text or segment.ids] for row in cut]
    ids, assistant = _join(rows, tokenizer, tokenize, {*eos_ids, *specials}, want_assistant)
    return RenderedChats(
        ids=ids,
        assistant=assistant,
        texts=tuple(["".join([segment.text for segment in row]) for row in rows]),
        retokenized=tuple(not prefer_tokens and any(turn.token_ids is not None for turn in chat) for chat in chats),
    )


def _join(
    rows: list[list[Segment]], tokenizer: Any, tokenize: Tokenize, endings: Collection[int], want_assistant: bool
) -> tuple[Ragged, Ragged | None]:
    """All segments → ids and mask of every row. One call tokenizes every text, a second one those taken literally."""
    segments = [segment for row in rows for segment in row]
    kinds = [2 if segment.ids is not None else int(segment.literal) for segment in segments]
    texts, literals, turns = (
        [segment for segment, one in zip(segments, kinds, strict=True) if one == k] for k in range(3)
    )
    # Segments are encoded kind by kind; `place` says where each then is, in the order they are read.
    place = torch.tensor(kinds, dtype=torch.int64).argsort(stable=True).argsort() if literals or turns else None

    def in_order(*parts: Ragged) -> Ragged:
        return parts[0] if place is None else Ragged.cat(parts).select(place)

    encoded = _encode(tokenize, texts, offsets=any(segment.spans for segment in texts))
    as_typed = _encode(tokenize, literals, parse_special=False).ids
    sampled = Ragged.from_list([segment.ids or () for segment in turns])
    start = _closings(texts, encoded.ids, tokenizer, endings)
    ids = in_order(_from(start, encoded.ids), as_typed, sampled)
    row_of = torch.repeat_interleave(torch.tensor([len(row) for row in rows], dtype=torch.int64))
    lengths = torch.zeros(len(rows), dtype=torch.int64).index_add_(0, row_of, ids.lengths)
    if not want_assistant:
        return Ragged(ids.values, lengths), None

    inside = torch.tensor([bool(segment.spans) for segment in literals], dtype=torch.bool)
    assistant = in_order(
        _from(start, _touched(texts, encoded)),
        Ragged(inside[as_typed.row_index], as_typed.lengths),
        Ragged.full(sampled.lengths, True, torch.bool),
    )
    return Ragged(ids.values, lengths), Ragged(assistant.values, lengths)


def _from(start: Tensor, rows: Ragged) -> Ragged:
    return rows.slice(start, rows.lengths) if bool(start.any()) else rows


def _encode(
    tokenize: Tokenize, segments: list[Segment], *, parse_special: bool = True, offsets: bool = False
) -> TokenizeResult:
    if not segments:
        return TokenizeResult(ids=Ragged.from_list([]))
    texts = tuple(segment.text for segment in segments)
    batch = tokenize(texts, add_special_tokens=False, parse_special=parse_special, offsets=offsets)
    if offsets and batch.offsets is None:
        raise CapabilityError(
            "assistant masks of turns that were not sampled need the characters of every token, which this tokenizer "
            "does not give; use a fast tokenizer, or leave masks out",
            capability="offsets",
        )
    return batch


def _closings(segments: list[Segment], ids: Ragged, tokenizer: Any, endings: Collection[int]) -> Tensor:
    """int64[segments]: number of leading ids that only repeat the end-of-turn token of the sampled turn before them."""
    out = torch.zeros(len(segments), dtype=torch.int64)
    if all(segment.after is None for segment in segments):
        return out
    starts = ids.offsets.tolist()
    for row, segment in enumerate(segments):
        if segment.after not in endings:
            continue
        # Some templates write a space before the EOS. A token is at least a character, which bounds the search.
        blank = len(segment.text) - len(segment.text.lstrip())
        first = ids.values[starts[row] : min(starts[row] + blank + 1, starts[row + 1])].tolist()
        at = first.index(segment.after) if segment.after in first else -1
        if at == 0 or (at > 0 and not tokenizer.decode(first[:at]).strip()):
            out[row] = at + 1
    return out


def _touched(segments: list[Segment], batch: TokenizeResult) -> Ragged:
    """bool, as long as the ids: tokens with a character in a span of their segment, as in the tokenizer's own mask."""
    edges = Ragged.from_list([list(chain.from_iterable(segment.spans)) for segment in segments])
    if not edges.values.numel() or batch.offsets is None:
        return Ragged.full(batch.ids.lengths, False, torch.bool)
    # All texts one after another on one axis, on which spans are disjoint and ascending.
    lengths = torch.tensor([len(segment.text) for segment in segments], dtype=torch.int64)
    base = lengths.cumsum(0) - lengths
    begin, end = (edges.values + base[edges.row_index]).reshape(-1, 2).t().contiguous()
    shift = base[batch.ids.row_index]
    nearest = torch.searchsorted(end, batch.offsets[:, 0] + shift, right=True)
    # After the last span comes one that no token reaches.
    begin = torch.cat([begin, lengths.sum(0, keepdim=True)])
    return batch.ids.with_values(begin[nearest] < batch.offsets[:, 1] + shift)

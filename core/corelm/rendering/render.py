"""Conversations to token ids, without changing an id that was sampled.

A sampled turn keeps its ids. While the template renders, a placeholder stands for the whole turn; then the text around
the placeholder is tokenized, and the ids replace the placeholder.

The text before a sampled turn is the same as when that turn was sampled. The template may render it differently now: it
may drop the thinking of a past turn, or add an empty thinking block to it. So this text is rendered from the messages
before that turn, with the generation prompt, as it was then::

    prompt(turn 2) = prompt(turn 1) + ids(turn 1) + what the template writes after turn 1 when it prompts for turn 2

This holds as long as the earlier messages, the template and its variables stay the same; a template that reads the
clock breaks it. Segments are tokenized separately, so no token spans the edge of a sampled turn. A tokenizer that puts
a space before every text also puts one after a sampled turn.

If a message contains the text of a special token, that text is a separate segment and is read as ordinary characters. A
conversation without sampled turns and special tokens is one segment, tokenized exactly as the tokenizer would do it.

Assistant masks: in a sampled turn, exactly the sampled ids are True, the EOS included. In other turns, a token is True
if it has a character inside the template's ``{% generation %}`` blocks. A template without such blocks gives True from
the generation prompt to the turn's EOS (see `AssistantSpans`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from corelm.errors import CapabilityError
from corelm.rendering.segments import Segment, Segmenter, special_tokens
from corelm.rendering.template import Marks, Template, check_encodable, joined_strings, map_chats
from corelm.spec.message import Chat
from corelm.spec.records import TokenizeResult
from corelm.tensors.ragged import Ragged
from corelm.validate import nested_texts, unencodable


class Tokenize(Protocol):
    """Texts to ids, one row per text, as `Backend.tokenize` does it."""

    def __call__(
        self, texts: Sequence[str], *, add_special_tokens: bool, parse_special: bool = True, offsets: bool = False
    ) -> TokenizeResult: ...


@dataclass(frozen=True, slots=True, eq=False)
class RenderedChats:
    """Conversations as an engine takes them, one row each.

    Attributes:
        ids: int64.
        assistant: bool, as long as `ids`: True where a token is the assistant's; None if it was not asked for.
        texts: the rendering as text, including the text of sampled turns.
        retokenized: True for a row whose sampled turns were rendered from their text and lost their ids.
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
    """Render and tokenize conversations; sampled turns keep their ids.

    Args:
        add_generation_prompt: True for a prompt to sample from. False for a conversation to score: if its last turn is
            sampled, it ends with the last sampled id.
        eos_ids: the ids that end a turn. If a sampled turn already ends with the id that the template writes after it,
            the template's copy is left out.
        chat_template: the template to use instead of the tokenizer's own.
        template_kwargs: variables for the template, such as `tools`.
        prefer_tokens: False renders sampled turns from their text, like every other turn.
        want_assistant: False skips the assistant masks.

    Raises:
        TemplateError: there is no template, or it fails, or is stopped, or it loses or alters a sampled turn; or masks
            are wanted, and it has no ``{% generation %}`` markers and rewrites earlier turns. `rows` are the
            conversations at fault.
        InvalidRequestError: text cannot be encoded: that of a conversation (`rows` are those at fault), of the
            template, or of its variables.
        CapabilityError: masks need character offsets, and `tokenize` returns none.
    """
    cut = getattr(tokenizer, "render_segments", None) or partial(segments_of, tokenizer=tokenizer)
    segments = cut(
        chats,
        add_generation_prompt=add_generation_prompt,
        eos_ids=eos_ids,
        chat_template=chat_template,
        template_kwargs=template_kwargs,
        prefer_tokens=prefer_tokens,
        want_assistant=want_assistant,
    )
    rows = [[segment for segment in row if segment.text or segment.ids] for row in segments]
    ids, assistant = _join(rows, tokenizer, tokenize, {*eos_ids, *special_tokens(tokenizer)}, want_assistant)
    return RenderedChats(
        ids=ids,
        assistant=assistant,
        texts=tuple(["".join([segment.text for segment in row]) for row in rows]),
        retokenized=tuple(not prefer_tokens and any(turn.token_ids is not None for turn in chat) for chat in chats),
    )


def segments_of(
    chats: Sequence[Chat],
    tokenizer: Any,
    *,
    add_generation_prompt: bool,
    eos_ids: Collection[int],
    chat_template: str | None,
    template_kwargs: Mapping[str, Any] | None,
    prefer_tokens: bool,
    want_assistant: bool,
) -> list[list[Segment]]:
    """Render conversations and cut them into segments, which are still to be tokenized. See `render`.

    A tokenizer in another process has a method `render_segments` with the same arguments: it renders a whole batch
    there.
    """
    template = Template.find(tokenizer, chat_template, template_kwargs or {})
    specials = special_tokens(tokenizer)
    messages = [[message.for_template() for message in chat] for chat in chats]
    contents = joined_strings(messages)
    if unencodable(contents):
        check_encodable(messages)
    others = nested_texts("template_kwargs", [template.source, template.kwargs, list(specials.values())])
    marks = Marks.find_unused("\n".join([contents, *others]), messages)
    segmenter = Segmenter(
        template,
        marks,
        contents=contents,
        special_texts=[text for text in specials.values() if text],
        eos_texts=[text for eos in sorted(eos_ids) if (text := tokenizer.decode([eos]))],
        add_generation_prompt=add_generation_prompt,
        prefer_tokens=prefer_tokens,
        want_assistant=want_assistant,
    )
    return template.watch.run(lambda: map_chats(segmenter.segments, segmenter.prepare(chats, messages)))


def _join(
    rows: list[list[Segment]], tokenizer: Any, tokenize: Tokenize, end_ids: Collection[int], want_assistant: bool
) -> tuple[Ragged, Ragged | None]:
    """Join the segments of every row to its ids and mask. One call tokenizes all texts, a second all literal ones."""
    segments = [segment for row in rows for segment in row]
    kinds = [2 if segment.ids is not None else int(segment.literal) for segment in segments]
    texts, literals, turns = (
        [segment for segment, one in zip(segments, kinds, strict=True) if one == kind] for kind in range(3)
    )
    # Segments are encoded kind by kind: all texts, all literals, all turns. Segment i is at `position[i]` of these.
    position = torch.tensor(kinds, dtype=torch.int64).argsort(stable=True).argsort() if literals or turns else None

    def in_order(*parts: Ragged) -> Ragged:
        return parts[0] if position is None else Ragged.cat(parts).select(position)

    encoded = _encode(tokenize, texts, offsets=any(segment.spans for segment in texts))
    literal_ids = _encode(tokenize, literals, parse_special=False).ids
    sampled = Ragged.from_list([segment.ids or () for segment in turns])
    repeated = _repeated_end_ids(texts, encoded.ids, tokenizer, end_ids)
    ids = in_order(_drop_first(repeated, encoded.ids), literal_ids, sampled)
    row_of = torch.repeat_interleave(torch.tensor([len(row) for row in rows], dtype=torch.int64))
    lengths = torch.zeros(len(rows), dtype=torch.int64).index_add_(0, row_of, ids.lengths)
    if not want_assistant:
        return Ragged(ids.values, lengths), None

    inside = torch.tensor([bool(segment.spans) for segment in literals], dtype=torch.bool)
    assistant = in_order(
        _drop_first(repeated, _assistant_mask(texts, encoded)),
        Ragged(inside[literal_ids.row_index], literal_ids.lengths),
        Ragged.full(sampled.lengths, True, torch.bool),
    )
    return Ragged(ids.values, lengths), Ragged(assistant.values, lengths)


def _drop_first(counts: Tensor, rows: Ragged) -> Ragged:
    """Drop the first ``counts[r]`` positions of every row r."""
    return rows.slice(counts, rows.lengths) if bool(counts.any()) else rows


def _encode(
    tokenize: Tokenize, segments: list[Segment], *, parse_special: bool = True, offsets: bool = False
) -> TokenizeResult:
    if not segments:
        return TokenizeResult(ids=Ragged.from_list([]))
    texts = tuple(segment.text for segment in segments)
    batch = tokenize(texts, add_special_tokens=False, parse_special=parse_special, offsets=offsets)
    if offsets and batch.offsets is None:
        raise CapabilityError(
            "the assistant mask of a turn that was not sampled needs the character offsets of every token, and this "
            "tokenizer returns none; use a fast tokenizer, or do not ask for masks",
            capability="offsets",
        )
    return batch


def _repeated_end_ids(segments: list[Segment], ids: Ragged, tokenizer: Any, end_ids: Collection[int]) -> Tensor:
    """int64[segments]: number of leading ids that only repeat the end-of-turn token of the sampled turn before them."""
    out = [0] * len(segments)
    if all(segment.after is None for segment in segments):
        return torch.tensor(out, dtype=torch.int64)
    # All at once: there are as many segments as sampled turns, and a slice of a tensor costs as much as 100 ids here.
    starts, flat = ids.offsets.tolist(), ids.values.tolist()
    for row, segment in enumerate(segments):
        if segment.after not in end_ids:
            continue
        # Some templates write whitespace before the EOS. Every token has at least one character, so the EOS is among
        # the first `blank + 1` ids.
        blank = len(segment.text) - len(segment.text.lstrip())
        first = flat[starts[row] : min(starts[row] + blank + 1, starts[row + 1])]
        at = first.index(segment.after) if segment.after in first else -1
        if at == 0 or (at > 0 and not tokenizer.decode(first[:at]).strip()):
            out[row] = at + 1
    return torch.tensor(out, dtype=torch.int64)


def _assistant_mask(segments: list[Segment], batch: TokenizeResult) -> Ragged:
    """bool, as long as the ids: True where a token has a character in a span of its segment.

    The assistant mask of transformers follows the same rule, but takes only the first token of a span's last character.
    """
    edges = Ragged.from_list([list(chain.from_iterable(segment.spans)) for segment in segments])
    if not edges.values.numel() or batch.offsets is None:
        return Ragged.full(batch.ids.lengths, False, torch.bool)
    # Lay all texts one after another on one axis. Spans are disjoint and ascending on it.
    lengths = torch.tensor([len(segment.text) for segment in segments], dtype=torch.int64)
    base = lengths.cumsum(0) - lengths
    begin, end = (edges.values + base[edges.row_index]).reshape(-1, 2).t().contiguous()
    shift = base[batch.ids.row_index]
    nearest = torch.searchsorted(end, batch.offsets[:, 0] + shift, right=True)
    # A sentinel after the last span, which no token reaches.
    begin = torch.cat([begin, lengths.sum(0, keepdim=True)])
    return batch.ids.with_values(begin[nearest] < batch.offsets[:, 1] + shift)

"""Conversations to token ids, without changing an id that was sampled.

The template writes the whole conversation, with all that its messages say. If that text begins with the prompt of the
last sampled turn and what was sampled, the new prompt is the ids of that prompt, the sampled ids, and the tokenized
rest of the text::

    prompt(turn 2) = prompt(turn 1) + ids(turn 1) + what the template writes after turn 1

The text may begin otherwise: a template may drop the thinking of a past turn, or write calls in its own form. Then the
rest begins where the text of that turn ends (`Layout.turn`). ``prefer_tokens=False`` renders every turn from its text.

The end of a turn is written once: where the sampled ids end with an EOS or another special token, that stands for the
template's own end of turn. Segments are tokenized separately, so no token spans the edge of a sampled turn. The text of
a special token in a message is a separate segment and is read as ordinary characters.

Assistant masks: in a sampled turn, exactly the sampled ids are True. In other turns, a token is True if it has a
character inside the template's ``{% generation %}`` blocks, or, in a template without such blocks, between the
generation prompt and the end of the turn, as `Layout.turn` finds them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from corelm.errors import CapabilityError
from corelm.rendering.encoding import Tokenize
from corelm.rendering.segments import Segment, memory, segments_of, special_tokens
from corelm.spec.message import Chat
from corelm.spec.records import TokenizeResult
from corelm.tensors.ragged import Ragged
from corelm.validate import nested_texts, shown

#: The ids of a segment, int64, and which of them are the assistant's, bool.
_Encoded = tuple[Tensor, Tensor]

_log = logging.getLogger(__name__)
#: The special tokens that `_warn_of_spelled` has warned about.
_warned: set[str] = set()


@dataclass(frozen=True, slots=True, eq=False)
class RenderedChats:
    """Conversations as an engine takes them, one row each.

    Attributes:
        ids: int64.
        assistant: bool, as long as `ids`: True where a token is the assistant's; None if it was not asked for.
        texts: the rendering as text, including the text of sampled turns.
    """

    ids: Ragged
    assistant: Ragged | None
    texts: tuple[str, ...]


def render(
    chats: Sequence[Chat],
    tokenizer: Any,
    tokenize: Tokenize,
    *,
    add_generation_prompt: bool,
    continue_final_message: bool = False,
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
        continue_final_message: True for a prompt whose answer continues its last turn: it ends with what the template
            writes up to the end of that turn's content, or with the turn's ids if it was sampled.
        eos_ids: the ids that end a turn. Where a sampled turn ends with one of them, or with another special token, the
            template's own end of that turn is left out.
        chat_template: the template to use instead of the tokenizer's own.
        template_kwargs: variables for the template, such as `tools`.
        prefer_tokens: False renders sampled turns from their text.
        want_assistant: False skips the assistant masks.

    Raises:
        TemplateError: there is no template, or it fails, or it leaves out what a message says, or does not show where a
            turn is that was sampled or belongs in a mask. `rows` are the conversations at fault.
        InvalidRequestError: text cannot be encoded: that of a conversation (`rows` are those at fault), of the
            template, or of its variables.
        CapabilityError: masks need character offsets, and `tokenize` returns none.
    """
    cut = getattr(tokenizer, "render_segments", None) or partial(segments_of, tokenizer=tokenizer)
    segments = cut(
        chats,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        eos_ids=eos_ids,
        chat_template=chat_template,
        template_kwargs=template_kwargs,
        prefer_tokens=prefer_tokens,
        want_assistant=want_assistant,
    )
    # With tokens added to the tokenizer, texts have other ids.
    added = len(getattr(tokenizer, "added_tokens_decoder", ()))
    known: dict[Segment, _Encoded] = memory.of(getattr(tokenize, "__self__", tokenize)).setdefault(added, {})
    if new := list({each: None for row in segments for each in row if each not in known}):
        _learn(known, new, tokenize)
        if any(each.literal for each in new):
            _warn_of_spelled(chats, special_tokens(tokenizer).values(), prefer_tokens)
    ids, masks = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.bool)]
    lengths: list[int] = []
    texts: list[str] = []
    for row in segments:
        before = len(ids)
        for each in row:
            one, mask = known[each]
            ids.append(one)
            masks.append(mask)
        lengths.append(sum(map(len, ids[before:])))
        texts.append("".join([each.text for each in row]))
    rows = Ragged(torch.cat(ids), torch.tensor(lengths, dtype=torch.int64))
    return RenderedChats(rows, rows.with_values(torch.cat(masks)) if want_assistant else None, tuple(texts))


def _warn_of_spelled(chats: Sequence[Chat], specials: Collection[str], prefer_tokens: bool) -> None:
    """Warn, once per special token, that it is read as characters where an assistant's turn spells it out."""
    special = re.compile("|".join(map(re.escape, sorted(filter(None, specials), key=len, reverse=True))))
    for number, message in ((at, each) for chat in chats for at, each in enumerate(chat) if each.role == "assistant"):
        if prefer_tokens and message.token_ids is not None:
            continue
        for text in nested_texts("history", message.for_template()):
            for found in set(special.findall(text)) - _warned:
                _warned.add(found)
                _log.warning(
                    "message %d: the assistant's turn %s spells out the special token %s, which is read as ordinary "
                    "characters; if the token is meant, give the turn its token_ids, or give what the token encloses "
                    "as reasoning_content or tool_calls and let the template write it",
                    number,
                    shown(text),
                    found,
                )


def _learn(known: dict[Segment, _Encoded], new: Sequence[Segment], tokenize: Tokenize) -> None:
    """Add the ids and masks of segments. One call tokenizes all texts, a second all literal ones."""
    for each in new:
        if each.ids is not None:
            known[each] = torch.tensor(each.ids, dtype=torch.int64), torch.ones(len(each.ids), dtype=torch.bool)
    for literal in (False, True):
        if texts := [each for each in new if each.ids is None and each.literal is literal]:
            offsets = any(each.spans for each in texts)
            spelled = [each.text for each in texts]
            batch = tokenize(spelled, add_special_tokens=False, parse_special=not literal, offsets=offsets)
            if offsets and batch.offsets is None:
                raise CapabilityError(
                    "the assistant mask of a turn that was not sampled needs the character offsets of every token, and "
                    "this tokenizer returns none; use a fast tokenizer, or do not ask for masks",
                    capability="offsets",
                )
            both = zip(batch.ids.split(), _assistant_mask(texts, batch).split(), strict=True)
            known.update(zip(texts, both, strict=True))
    memory.grow(sum(1_000 + 8 * len(known[each][0]) for each in new))


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

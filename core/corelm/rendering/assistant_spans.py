"""Locate the assistant's turns in the rendering of a template that does not mark them, by comparing renderings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from corelm.errors import TemplateError
from corelm.rendering.template import with_placeholder

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class AssistantSpans:
    """Locates turns by comparing renderings of the same conversation.

    A turn starts where the rendering of the messages before it, with the generation prompt, ends. It stops at its EOS:
    where the rendering of the messages up to and including it ends, minus the text after the EOS.

    Some templates render a turn differently once others follow: they drop the thinking of earlier turns, say. Those two
    renderings are then not prefixes of the whole, and the turn is the part that changes when a placeholder replaces it.

    Attributes:
        render: maps messages, and whether to add the generation prompt, to text.
        placeholder: maps the index of a message to a text that the template writes unchanged.
        eos_texts: the texts that end a turn.
    """

    render: Callable[[Sequence[dict[str, Any]], bool], str]
    placeholder: Callable[[int], str]
    eos_texts: Sequence[str]

    def find(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool, text: str, turns: Iterable[int]
    ) -> list[Span]:
        """Return ``[start, stop)`` of each of `turns`, ascending, in `text`, which is the rendering of `messages`.

        Raises:
            TemplateError: the template rewrites earlier turns, and a turn cannot be told from the text around it.
        """
        return [self._span(messages, add_generation_prompt, text, turn) for turn in turns]

    def _span(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool, text: str, turn: int) -> Span:
        before = self._try_render(messages[:turn], True)
        through = self._try_render(messages[: turn + 1], False)
        eos = "|".join(map(re.escape, self.eos_texts)) or "(?!)"
        if before is not None and through is not None and through.startswith(before) and text.startswith(through):
            end = re.compile(rf"({eos})\s*\Z").search(through, len(before))
            return len(before), end.end(1) if end else len(through)
        replaced = [*messages[:turn], with_placeholder(messages[turn], self.placeholder(turn)), *messages[turn + 1 :]]
        rendering = self._try_render(replaced, add_generation_prompt) or ""
        head, found, tail = rendering.partition(self.placeholder(turn))
        start = next((len(part) for part in (before, head) if part is not None and text.startswith(part)), None)
        stop = len(text) - len(tail)
        if not found or start is None or start > stop or not text.endswith(tail):
            raise TemplateError(
                f"message {turn}: the chat template has no {{% generation %}} markers and renders earlier turns "
                "differently once others follow, so the assistant's text cannot be located; pass chat_template= with "
                "such markers, or give this turn its token_ids"
            )
        end = re.compile(rf"\s*(?:{eos})").match(text, stop)
        return start, end.end() if end else stop

    def _try_render(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool) -> str | None:
        """Return None if the template refuses this part of the conversation; most refuse an empty one."""
        try:
            return self.render(messages, add_generation_prompt)
        except TemplateError:
            return None

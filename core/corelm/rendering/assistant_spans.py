"""Where the assistant's turns are where the template does not say: by rendering up to a turn, and without it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from corelm.errors import TemplateError
from corelm.rendering.template import stand_in

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class AssistantSpans:
    """Finds turns by comparing renderings.

    A turn starts where the conversation before it, with the generation prompt, ends. It stops at its EOS: where the
    conversation up to and with it ends, less what follows the EOS. A template that writes a turn differently once
    others follow (one that drops the thinking of earlier turns, say) has no such prefix; then the turn is what changes
    when a placeholder takes its place.

    Attributes:
        render: messages, and whether to add the generation prompt → text.
        placeholder: message index → a text that the template writes as it is.
        eos_texts: what ends a turn.
    """

    render: Callable[[Sequence[dict[str, Any]], bool], str]
    placeholder: Callable[[int], str]
    eos_texts: Sequence[str]

    def find(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool, text: str, turns: Iterable[int]
    ) -> list[Span]:
        """``[start, stop)`` of every one of `turns`, ascending, in `text`, which is the rendering of `messages`.

        Raises:
            TemplateError: the template rewrites earlier turns, so that a turn cannot be told from the rest.
        """
        return [self._span(messages, add_generation_prompt, text, turn) for turn in turns]

    def _span(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool, text: str, turn: int) -> Span:
        before = self._part(messages[:turn], True)
        through = self._part(messages[: turn + 1], False)
        eos = "|".join(map(re.escape, self.eos_texts)) or "(?!)"
        if before is not None and through is not None and through.startswith(before) and text.startswith(through):
            ending = re.compile(rf"({eos})\s*\Z").search(through, len(before))
            return len(before), ending.end(1) if ending else len(through)
        without = [*messages[:turn], stand_in(messages[turn], self.placeholder(turn)), *messages[turn + 1 :]]
        head, found, tail = (self._part(without, add_generation_prompt) or "").partition(self.placeholder(turn))
        start = next((len(part) for part in (before, head) if part is not None and text.startswith(part)), None)
        stop = len(text) - len(tail)
        if not found or start is None or start > stop or not text.endswith(tail):
            raise TemplateError(
                f"message {turn}: the chat template has no {{% generation %}} markers and writes earlier turns "
                "differently once others follow, so what is the assistant's cannot be told; pass chat_template= with "
                "such markers, or give the turn its token_ids"
            )
        ending = re.compile(rf"\s*(?:{eos})").match(text, stop)
        return start, ending.end() if ending else stop

    def _part(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool) -> str | None:
        """None where the template refuses this part of a conversation, as most do an empty one."""
        try:
            return self.render(messages, add_generation_prompt)
        except TemplateError:
            return None

"""The prompts that are compared if the caller gives none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from corelm.errors import CoreLMError
from corelm_compare.sides import OpenSide

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


def built_in_prompts(sides: Sequence[OpenSide]) -> list[Any]:
    """Return texts, and the conversations that the chat template of every side can render."""
    return [*TEXTS, *(chat for chat in CONVERSATIONS if all(_renders(side, chat) for side in sides))]


def _renders(side: OpenSide, chat: Sequence[Mapping[str, Any]]) -> bool:
    try:
        side.render(chat)
    except CoreLMError:
        return False
    return True

"""The prompts that are compared if the caller gives none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from corelm.compare.sides import OpenSide

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
    """Return texts, and conversations if every side has a chat template."""
    chat = all(getattr(side.backend.tokenizer, "chat_template", None) for side in sides)
    return [*TEXTS, *(CONVERSATIONS if chat else ())]

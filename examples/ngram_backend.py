"""A backend of your own in one file: a trigram model of bytes in numpy, on `LogitsEngine` of the engine kit.

What knows of the engine is `Trigram`. `TrigramBackend` says what every backend says: how to open it, its tokenizer and
its logits. The kit samples, scores, stops and streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from corelm_engine_kit import LogitsEngine, TemplateTokenizer

SPECIALS = {"<|bos|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Trigram:
    """Counts which id follows the last two, the last one, and none; rarer contexts borrow from shorter ones."""

    def __init__(self, ids: Sequence[int], vocab_size: int) -> None:
        self.counts: dict[tuple[int, ...], np.ndarray] = {}
        self.vocab_size = vocab_size
        for length in (0, 1, 2):
            for at in range(length, len(ids)):
                context = tuple(ids[at - length : at])
                self.counts.setdefault(context, np.zeros(vocab_size))[ids[at]] += 1

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        chances = np.full(self.vocab_size, 1 / self.vocab_size)
        for length in range(min(len(ids), 2) + 1):
            counts = self.counts.get(tuple(ids[len(ids) - length :]))
            if counts is not None:
                chances = (counts + 4 * chances) / (counts.sum() + 4)
        return np.log(chances)


class TrigramBackend(LogitsEngine):
    @classmethod
    def open(cls, model: str, *, max_context: int = 512) -> TrigramBackend:
        """Open the model of a text file, in which empty lines are between documents."""
        tokenizer = TemplateTokenizer(
            encode=lambda text: list(text.encode()),
            decode=lambda ids: bytes(ids).decode(errors="replace"),
            specials=SPECIALS,
            template=CHATML,
            size=259,
            eos="<|im_end|>",
            bos="<|bos|>",
        )
        backend = cls(tokenizer, max_context=max_context, empty_prompt=True)
        documents = Path(model).read_text(encoding="utf-8").split("\n\n")
        ids = tokenizer([text + "<|im_end|>" for text in documents])["input_ids"]
        backend.trigram = Trigram([token for row in ids for token in row], len(tokenizer))
        return backend

    def logits(self, rows: Sequence[list[int]], caches: Sequence[dict[str, Any]]) -> np.ndarray:
        return np.stack([self.trigram.logits(row) for row in rows])

"""A tokenizer that needs no training: one id for each UTF-8 byte, four special tokens and a ChatML template."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SPECIALS = ("<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>")


class ByteTokenizer:
    """Ids 0 to 255 are bytes; the special tokens follow. Decoding returns every encoded text unchanged."""

    pad_token, bos_token, eos_token = SPECIALS[0], SPECIALS[1], SPECIALS[3]
    pad_token_id, bos_token_id, eos_token_id = 256, 257, 259
    all_special_tokens = SPECIALS
    all_special_ids = tuple(range(256, 260))

    def __len__(self) -> int:
        return 260

    def __call__(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        split_special_tokens: bool = False,
        return_offsets_mapping: bool = False,
    ) -> dict[str, list[Any]]:
        """Return `input_ids`, one list for each text, and `offset_mapping` if asked for.

        `add_special_tokens` puts a BOS in front of each text.
        """
        rows = [list(self._encode(text, parse=not split_special_tokens)) for text in texts]
        if add_special_tokens:
            rows = [[(self.bos_token_id, (0, 0)), *row] for row in rows]
        encoded: dict[str, list[Any]] = {"input_ids": [[token for token, _ in row] for row in rows]}
        if return_offsets_mapping:
            encoded["offset_mapping"] = [[span for _, span in row] for row in rows]
        return encoded

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        out = b""
        for token in map(int, ids):
            if token < 256:
                out += bytes([token])
            elif not skip_special_tokens:
                out += SPECIALS[token - 256].encode()
        return out.decode(errors="replace")

    def batch_decode(self, rows: Iterable[Iterable[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(row, skip_special_tokens) for row in rows]

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False, **options: Any
    ) -> str:
        """Return the conversation as ChatML text. Other options change nothing."""
        turns = [f"<|im_start|>{turn['role']}\n{turn.get('content') or ''}<|im_end|>\n" for turn in conversation]
        return "".join(turns) + ("<|im_start|>assistant\n" if add_generation_prompt else "")

    def _encode(self, text: str, parse: bool) -> Iterable[tuple[int, tuple[int, int]]]:
        start = 0
        for part in re.split(f"({'|'.join(map(re.escape, SPECIALS))})", text) if parse else [text]:
            if parse and part in SPECIALS:
                yield 256 + SPECIALS.index(part), (start, start + len(part))
            else:
                for position, character in enumerate(part, start):
                    for byte in character.encode():
                        yield byte, (position, position + 1)
            start += len(part)

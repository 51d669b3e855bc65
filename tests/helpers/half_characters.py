"""`Pieces`: a tokenizer of four tokens, two of which end or begin inside a character."""

from typing import Any


class Pieces:
    """Decodes ids 0 to 3 as ``a``, ``x`` with the first half of ``ä``, the second half of ``ä``, and ``x``.

    All others, which are those of prompts, are a dot.
    """

    PIECES = (b"a", b"x\xc3", b"\xa4", b"x")

    def decode(self, ids: list[int], **_: Any) -> str:
        return b"".join(dict(enumerate(self.PIECES)).get(token, b".") for token in ids).decode(errors="replace")

"""`LeftContexts`: what ids add to the text of the ids before them.

Some decoders make another text of ids that stand alone: those of SentencePiece drop the first space of a text, and a
character may have bytes on both sides. So an answer is decoded together with the end of its prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

#: Ids to text, with ``skip_special_tokens`` already decided: of one row, and of several.
Decode = Callable[[list[int]], str]
DecodeRows = Callable[[list[list[int]]], Sequence[str]]

#: What an incomplete character decodes to.
HALF_CHARACTER = "\ufffd"
#: As many ids before a text change what it decodes to, unless they have no text, or begin within a character.
_CONTEXT = 16


class LeftContexts:
    """Decodes rows of ids, each after other ids.

    An incomplete character at the end of these other ids counts as text of the row: the row may complete it.

    Args:
        decode_rows: returns the texts of rows.
        before: the ids before each row, for example its prompt; a row without any is decoded by itself.
    """

    def __init__(self, decode_rows: DecodeRows, before: Sequence[Sequence[int]]) -> None:
        self._decode_rows = decode_rows
        self._contexts = [list(ids[-_CONTEXT:]) for ids in before]
        leads = list(decode_rows(self._contexts))
        for row, (ids, lead) in enumerate(zip(before, leads, strict=True)):
            if len(ids) > _CONTEXT and (not lead or HALF_CHARACTER in lead):
                self._contexts[row] = list(ids)
                (leads[row],) = decode_rows([list(ids)])
        self._leads = [lead.rstrip(HALF_CHARACTER) for lead in leads]

    def texts(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return what each row adds to the text of the ids before it."""
        wholes = self._decode_rows([[*ids, *row] for ids, row in zip(self._contexts, rows, strict=True)])
        found = []
        for row, lead, whole in zip(rows, self._leads, wholes, strict=True):
            if not whole.startswith(lead):
                # The decoder has changed the text before, for example a space before a comma.
                lead, (whole,) = "", self._decode_rows([list(row)])
            found.append(whole[len(lead) :] if row else "")
        return found


def decoder_after(decode: Decode, before: Sequence[int]) -> Decode:
    """Return a decoder of ids that follow the ids `before`, which it reads when it is first used."""
    if not before:
        return decode
    contexts: LeftContexts | None = None

    def decode_after(ids: list[int]) -> str:
        nonlocal contexts
        contexts = contexts or LeftContexts(lambda rows: [decode(row) for row in rows], [before])
        return contexts.texts([ids])[0]

    return decode_after

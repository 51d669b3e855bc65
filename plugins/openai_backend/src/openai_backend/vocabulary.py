"""`Vocabulary`: the ids of the tokens that a server names, and the texts that a server reads as the ids of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from corelm_engine_kit import RowError

#: What stands before the id in the name of a token, if a server names tokens by their ids.
BY_ID = "token_id:"
#: How a server names a token: ``token_id:5``, the text that its id decodes to alone, or its entry in the vocabulary.
Naming = Literal["id", "text", "entry"]
#: What an incomplete character decodes to.
_HALF_CHARACTER = "\ufffd"


class Vocabulary:
    """The tokenizer that the caller says is the server's, as far as names and texts of tokens go."""

    def __init__(self, tokenizer: Any, size: int) -> None:
        self.tokenizer, self.size = tokenizer, size
        self._tables: dict[Naming, dict[str, int]] = {}

    def text(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return what ids decode to."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def encode(self, text: str, add_special_tokens: bool = False, **options: Any) -> list[int]:
        """Return the ids of a text."""
        ids: list[int] = self.tokenizer([text], add_special_tokens=add_special_tokens, **options)["input_ids"][0]
        return ids

    def answer_ids(self, text: str) -> list[int]:
        """Return the ids of an answer's text. A special token in it was written letter by letter: servers leave out
        those that were sampled.
        """
        special = [token for token in getattr(self.tokenizer, "all_special_tokens", ()) if token and token in text]
        return self.encode(text, **({"split_special_tokens": True} if special else {}))

    def prompt_text(self, ids: list[int], adds_special_tokens: bool) -> str | None:
        """Return a text that a server reads as exactly these ids; None if there is no such text."""
        added = self.encode("", add_special_tokens=True) if adds_special_tokens else []
        # What a tokenizer adds to an empty text it puts before a text, or after it. The last line finds out.
        start = len(added) if ids[: len(added)] == added else 0
        text = self.text(ids[start:])
        return text if self.encode(text, add_special_tokens=adds_special_tokens) == ids else None

    def table(self, naming: Naming) -> dict[str, int]:
        """Return the id that each name stands for; -1 for a name that several ids have."""
        if naming not in self._tables:
            # A model may have more outputs than its tokenizer has entries.
            named = self.size if naming == "id" or not hasattr(self.tokenizer, "__len__") else len(self.tokenizer)
            table: dict[str, int] = {}
            for token in range(min(self.size, named)):
                name = self.name(token, naming)
                table[name] = -1 if name in table else token
            # Other threads may read it from here on.
            self._tables[naming] = table
        return self._tables[naming]

    def ids_of(self, names: Sequence[str], naming: Naming) -> list[int]:
        """Return the id of each token that a server names.

        Raises:
            RowError: a name stands for no id, or for several.
        """
        table = self.table(naming)
        for position, name in enumerate(names):
            if table.get(name, -1) < 0:
                what = f"is not {BY_ID} and an id below {self.size}"
                if naming != "id":
                    what = f"is the name of {'several tokens' if name in table else 'no token'} of the tokenizer"
                raise RowError(f"it names token {position} {name[:40]!r}, which {what}")
        return [table[name] for name in names]

    def are_names(self, names: Sequence[str], ids: Sequence[int], naming: Naming) -> int | None:
        """Return the first position where a server's name is not that of the id; None if all are.

        Servers show a token that is not whole characters in different ways, so such a name says nothing.
        """
        for position, (name, token) in enumerate(zip(names, ids, strict=True)):
            if name == self.name(token, naming):
                continue
            if naming == "text" and _HALF_CHARACTER in self.text([token]):
                continue
            return position
        return None

    def name(self, token: int, naming: Naming) -> str:
        """Return how a server names an id."""
        if naming == "id":
            return f"{BY_ID}{token}"
        entry = getattr(self.tokenizer, "convert_ids_to_tokens", None)
        return self.text([token]) if naming == "text" or entry is None else str(entry(token) or "")

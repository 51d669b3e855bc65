"""`TextEncoder`: texts to ids with BOS where lm-eval's model `hf` has it, many texts in one call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from lm_eval.models.utils import has_bos_prefix

from corelm import Backend
from corelm.validate import invalid


class TextEncoder:
    """Encodes texts.

    Args:
        prefix: the id that precedes a text without a context.
        add_bos_token: whether a text begins with BOS; None leaves it to the tokenizer.

    Raises:
        InvalidRequestError: `add_bos_token` is True, and the tokenizer has no BOS.
    """

    def __init__(self, engine: Backend, prefix: int, add_bos_token: bool | None) -> None:
        self._engine = engine
        self._add_bos = add_bos_token
        self._bos = getattr(engine.tokenizer, "bos_token_id", None)
        if add_bos_token and self._bos is None:
            raise invalid("add_bos_token", "the tokenizer has no BOS; leave it out")
        self._prefix = engine.detokenize([[prefix]], skip_special_tokens=False)[0]
        self._known: dict[tuple[str, bool], list[int]] = {}

    def encode(self, texts: Sequence[str], add_special_tokens: bool | None = None) -> list[list[int]]:
        """Return the ids of each text. Equal texts are encoded once."""
        keys = [(text, self._adds_special(text, add_special_tokens)) for text in texts]
        found = {key: self._known.get(key) for key in keys}
        for special in (True, False):
            missing = [text for (text, flag), ids in found.items() if ids is None and flag is special]
            if missing:
                rows = self._engine.tokenize(missing, add_special_tokens=special).ids.tolist()
                if special and self._add_bos:
                    # Most tokenizers add it by themselves, but some name a BOS and leave it out.
                    rows = [ids if ids[:1] == [self._bos] else [self._bos, *ids] for ids in rows]
                found.update({(text, special): ids for text, ids in zip(missing, rows, strict=True)})
        return [list(found[key] or ()) for key in keys]

    @contextmanager
    def remembering(self, texts: Iterable[str], add_special_tokens: bool | None = None) -> Iterator[None]:
        """Encode the texts at once, and know them until the block ends."""
        unique = list(dict.fromkeys(texts))
        keys = [(text, self._adds_special(text, add_special_tokens)) for text in unique]
        self._known.update(zip(keys, self.encode(unique, add_special_tokens), strict=True))
        try:
            yield
        finally:
            for key in keys:
                self._known.pop(key, None)

    def _adds_special(self, text: str, asked: bool | None) -> bool:
        if asked is not None:
            return asked
        # A chat template, for example, has written it already.
        return self._add_bos is not False and not has_bos_prefix(text, self._prefix)

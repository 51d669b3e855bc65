"""The ids with which a model ends an answer, read from the files that name them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def eos_token_ids(*sources: Any, vocab_size: int) -> frozenset[int]:
    """Return every EOS id that the sources name, for `Capabilities.eos_token_ids`.

    Three files can name EOS ids, and models use different ones: the generation config (often a list: the end
    of a text and the end of a turn), the model's configuration, and the tokenizer. Pass those that the engine itself
    honours.

    >>> eos_token_ids({"eos_token_id": [2, 7]}, None, 3, vocab_size=5)
    frozenset({2, 3})

    Args:
        sources: each an object or a mapping with ``eos_token_id``, or ids themselves: one id, several, or None.
        vocab_size: ids from here on are left out. A configuration class may have the EOS of a larger vocabulary as its
            default, and a model cannot sample that.
    """
    found = {token for source in sources for token in _ids(source)}
    return frozenset(token for token in found if 0 <= token < vocab_size)


def _ids(source: Any) -> Iterable[int]:
    if source is None:
        return ()
    if isinstance(source, int):
        return (source,)
    if isinstance(source, (list, tuple, set, frozenset)):
        return source
    return _ids(source.get("eos_token_id") if isinstance(source, Mapping) else getattr(source, "eos_token_id", None))

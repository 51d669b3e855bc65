"""`Secrets`: keeps what a client must not show out of messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

E = TypeVar("E", bound=Exception)

#: What replaces a secret.
MASK = "***"
#: A shorter text is not a secret. Masking it would make messages unreadable.
_SHORTEST = 4
#: A text this long is masked wherever it occurs. A shorter one is masked only as a whole word: a key may be "token".
_ANYWHERE = 8
#: Words of a header's value that are not secret.
_SCHEMES = frozenset({"basic", "bearer", "digest"})
#: Names of headers that certainly hold a secret.
_SECRET_NAME = re.compile("auth|cookie|credential|key|passw|secret|token", re.IGNORECASE)


class Secrets:
    """Texts that no message may repeat: the key, and the values of the headers that a caller passes.

    A server may echo them in a body, a reason phrase or a malformed header, with or without the word ``Bearer``. So
    each word of a header's value is masked, too.

    >>> Secrets(["sk-0123456789"]).masked("wrong key: sk-0123456789")
    'wrong key: ***'

    Args:
        key: texts that are secret as a whole.
        headers: headers whose values may be secret.

    Attributes:
        longest: the number of characters of the longest secret.
    """

    def __init__(self, key: Iterable[str | None] = (), headers: Mapping[str, str] | None = None) -> None:
        keys, headers = [text for text in key if text], headers or {}
        texts = _words([*keys, *headers.values()])
        self.longest = max(map(len, texts), default=0)
        self._pattern = _pattern(texts)
        self._certain = _words([*keys, *(value for name, value in headers.items() if _SECRET_NAME.search(name))])
        self._certain_pattern = _pattern(self._certain)

    def masked(self, text: str) -> str:
        """Return `text` without the secrets."""
        return self._pattern.sub(MASK, text) if self._pattern else text

    def masked_error(self, error: E) -> E:
        """Mask the message of `error` in place and return it."""
        error.args = tuple(self.masked(arg) if isinstance(arg, str) else arg for arg in error.args)
        return error

    def masked_reply(self, reply: Any, content: bytes | bytearray) -> Any:
        """Return a reply without the secrets in its strings. Numbers and the names of fields are kept.

        Only keys are masked, and headers whose names say that they hold one. Another header may hold the name of a
        model, for example, which the reply has to keep.

        Args:
            reply: decoded JSON, or a text.
            content: what the reply was decoded from.
        """
        # Most replies hold no secret, and a search is much faster than a walk.
        return self._walked(reply) if any(text.encode() in content for text in self._certain) else reply

    def _walked(self, value: Any) -> Any:
        if isinstance(value, str) and self._certain_pattern:
            return self._certain_pattern.sub(MASK, value)
        if isinstance(value, list):
            return [self._walked(item) for item in value]
        if isinstance(value, dict):
            return {name: self._walked(item) for name, item in value.items()}
        return value


def _words(values: Iterable[str]) -> list[str]:
    """Return the values and their words, without those that are not secret; the longest first.

    So a secret that contains another one is masked whole.
    """
    texts = {text for value in values for text in (value, *value.split()) if text.lower() not in _SCHEMES}
    return sorted((text for text in texts if len(text) >= _SHORTEST), key=len, reverse=True)


def _pattern(texts: Iterable[str]) -> re.Pattern[str] | None:
    patterns = [
        re.escape(text) if len(text) >= _ANYWHERE else rf"(?<![\w-]){re.escape(text)}(?![\w-])" for text in texts
    ]
    return re.compile("|".join(patterns)) if patterns else None

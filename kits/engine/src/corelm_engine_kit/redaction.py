"""`Secrets`: keeps what a client must not show out of messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from corelm.errors import CoreLMError

E = TypeVar("E", bound=Exception)

#: What replaces a secret.
MASK = "***"
#: A shorter text is not a secret. Masking it would make messages unreadable.
_SHORTEST = 4
#: A text this long is masked wherever it occurs. A shorter one is masked only as a whole word: a key may be "token".
_ANYWHERE = 8
#: An option is a secret if its name ends like this, or contains one of these.
_SECRET = re.compile("(key|token)$|secret|passw|passphrase|pwd|auth|credential|cookie|bearer")
#: Texts are secrets under these names too, but numbers are not: max_num_batched_tokens, num_key_value_heads.
_SECRET_TEXT = re.compile("(keys|tokens)$|(^|[_-])(key|token)s?([_-]|$)|keyfile|header")
#: These name tokens of the tokenizer, which change answers: `bos_token`, `add_eos_token`, `additional_special_tokens`.
_TOKENIZER_TOKEN = re.compile(r"(.*_)?((bos|eos|pad|unk|sep|cls|mask)_token|special_tokens)")
#: Words of a header's value that are not secret.
_SCHEMES = frozenset({"basic", "bearer", "digest"})


class Secrets:
    """Texts that no message may repeat: the key, and the values of the headers that a caller passes.

    A server may echo them in a body, a reason phrase or a malformed header, with or without the word ``Bearer``. So
    each word of a header's value is masked, too.

    Mask messages, and never a reply: the name of a model or the label of a token may equal a header's value.

    >>> Secrets(["sk-0123456789"]).masked("wrong key: sk-0123456789")
    'wrong key: ***'

    Args:
        key: texts that are secret as a whole.
        headers: headers whose values may be secret.

    Attributes:
        longest: the number of characters of the longest secret.
    """

    def __init__(self, key: Iterable[str | None] = (), headers: Mapping[str, str] | None = None) -> None:
        words = (word for value in (headers or {}).values() for word in (value, *value.split()))
        known = {text for text in (*key, *words) if text and len(text) >= _SHORTEST and text.lower() not in _SCHEMES}
        # The longest first, so that a secret that contains another one is masked whole.
        texts = sorted(known, key=len, reverse=True)
        self.longest = max(map(len, texts), default=0)
        patterns = [
            re.escape(text) if len(text) >= _ANYWHERE else rf"(?<![\w-]){re.escape(text)}(?![\w-])" for text in texts
        ]
        self._pattern = re.compile("|".join(patterns)) if patterns else None

    def masked(self, text: str) -> str:
        """Return `text` without the secrets."""
        return self._pattern.sub(MASK, text) if self._pattern else text

    def masked_error(self, error: E) -> E:
        """Mask the message of `error` in place and return it."""
        error.args = tuple(self.masked(arg) if isinstance(arg, str) else arg for arg in error.args)
        return error

    @contextmanager
    def masking_errors(self) -> Iterator[None]:
        """Mask the messages of the errors that the ``with`` block raises: they may repeat a part of a reply."""
        try:
            yield
        except CoreLMError as error:
            # A traceback prints the cause, too.
            cause = repr(error.__cause__ or error.__context__)
            if self.masked(cause) != cause:
                raise self.masked_error(error) from None
            self.masked_error(error)
            raise


def is_secret(name: str, value: Any) -> bool:
    """Return whether an option is a secret, by its name.

    >>> is_secret("api_key", "abc"), is_secret("max_num_batched_tokens", 8), is_secret("bos_token", "<s>")
    (True, False, False)
    """
    name = name.lower()
    if isinstance(value, bool) or _TOKENIZER_TOKEN.fullmatch(name):
        return False
    texts = value if isinstance(value, (list, tuple)) and value else [value]
    is_text = all(isinstance(text, str) for text in texts)
    return bool(_SECRET.search(name) or (is_text and _SECRET_TEXT.search(name)))

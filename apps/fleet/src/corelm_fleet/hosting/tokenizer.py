"""The tokenizer of a hosted engine: a stand-in here, and what the host does for it.

This process needs no tokenizer library. What core reads of a tokenizer for every batch is copied when the engine opens;
the rest is asked of the host. Core asks for a whole batch at a time: `render_segments` renders all conversations in one
call, and `decode_rows` decodes all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from corelm.application import Segment, segments_of
from corelm.errors import CapabilityError
from corelm.spec import Chat, TokenizeRequest, TokenizeResult

#: What core reads of a tokenizer, if the tokenizer has it.
_COPIED = (
    "eos_token_id",
    "pad_token_id",
    "bos_token_id",
    "unk_token_id",
    "eos_token",
    "pad_token",
    "bos_token",
    "unk_token",
    "all_special_tokens",
    "all_special_ids",
    "clean_up_tokenization_spaces",
    "split_special_tokens",
    "chat_template",
    "name_or_path",
    "vocab_size",
)
#: The names of methods that change the copied attributes begin with one of these.
_CHANGING = ("add_", "set_")
#: How many short texts a stand-in remembers. Core decodes the same few ids again and again, such as EOS.
_REMEMBERED = 4096
#: The most ids of a short text.
_SHORT = 8
#: Types of which an attribute must be made, to be copied.
_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that was added to a vocabulary, as ``added_tokens_decoder`` of transformers lists it."""

    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = True

    def __str__(self) -> str:
        return self.content


class Ask(Protocol):
    """Asks the host to call a function of `TokenizerServer`, and returns its result."""

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> Any: ...


class HostedTokenizer:
    """The tokenizer of a hosted engine, as this process sees it. Every method asks the host.

    Args:
        copied: attributes of the tokenizer, as `TokenizerServer` returns ``copied_attributes``.
    """

    def __init__(self, ask: Ask, copied: Mapping[str, Any]) -> None:
        self._ask = ask
        self.__dict__.update(copied)
        self._decode_short = lru_cache(_REMEMBERED)(
            lambda ids, options: self._ask("decode_rows", [list(ids)], dict(options))[0]
        )

    def __call__(self, *texts: Any, **options: Any) -> dict[str, Any]:
        """Return what the tokenizer returns for the texts, as a dict."""
        encoded: dict[str, Any] = self._ask("encode", texts, options)
        return encoded

    def decode(self, *ids: Any, **options: Any) -> Any:
        """Return the text of some ids. Arguments are those of the tokenizer."""
        row: Any = ids[0] if len(ids) == 1 else None
        row = row.tolist() if hasattr(row, "tolist") else row
        plain = isinstance(row, (list, tuple)) and all(type(each) is int for each in row)
        if not plain or options.keys() - {"skip_special_tokens"}:
            return self._ask("method", "decode", ids if row is None else (row,), options)
        if len(row) > _SHORT:
            return self._ask("decode_rows", [row], options)[0]
        return self._decode_short(tuple(row), tuple(options.items()))

    def decode_rows(self, rows: Sequence[Sequence[int]], **options: Any) -> list[str]:
        """Return one text per row of ids. It takes as long as one call of `decode`."""
        texts: list[str] = self._ask("decode_rows", rows, options)
        return texts

    def render_segments(self, chats: Sequence[Chat], **options: Any) -> list[list[Segment]]:
        """Render conversations with the chat template. See `corelm.rendering.render.segments_of`."""
        rows: list[list[Segment]] = self._ask("render_segments", chats, options)
        return rows

    def __getattr__(self, name: str) -> Any:
        # Called for what is not here. A copied attribute that the tokenizer lacks, is lacking here.
        if name.startswith("_") or name in (*_COPIED, "added_tokens_decoder", "backend_tokenizer"):
            raise AttributeError(f"the hosted tokenizer has no attribute {name!r}", name=name, obj=self)
        is_method, value = self._ask("attribute", name)
        if not is_method:
            return value

        def method(*args: Any, **options: Any) -> Any:
            result = self._ask("method", name, args, options)
            if name.startswith(_CHANGING):
                self._copy_again()
            return result

        self.__dict__[name] = method
        return method

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            self.__dict__[name] = value
        else:
            self._ask("set", name, value)
            self._copy_again()

    def _copy_again(self) -> None:
        # One attribute may follow from another one: a new `pad_token` has another `pad_token_id`.
        self.__dict__.update(self._ask("copied_attributes"))
        self._decode_short.cache_clear()

    def __reduce__(self) -> Any:
        raise TypeError("the tokenizer of a hosted engine cannot be copied or pickled: it belongs to another process")

    def __len__(self) -> int:
        length: int = self._ask("method", "__len__", (), {})
        return length

    def __bool__(self) -> bool:
        # Otherwise Python would ask for the length.
        return True

    def __repr__(self) -> str:
        return f"HostedTokenizer({self.__dict__.get('name_or_path', '')!r})"


class TokenizerServer:
    """Does for a `HostedTokenizer` what it asks for, with the engine's tokenizer and its hook `tokenize`."""

    def __init__(self, tokenizer: Any, tokenize: Callable[[TokenizeRequest], TokenizeResult]) -> None:
        self._tokenizer = tokenizer
        self._tokenize = tokenize

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, f"_do_{name}")(*args, **kwargs)

    def _do_copied_attributes(self) -> dict[str, Any]:
        """Return what core reads of the tokenizer, by name. Attributes that it lacks are left out."""
        copied = {}
        for name in _COPIED:
            # A property may raise anything.
            with suppress(Exception):
                copied[name] = _checked(name, getattr(self._tokenizer, name))
        added = getattr(self._tokenizer, "added_tokens_decoder", None)
        if isinstance(added, Mapping):
            copied["added_tokens_decoder"] = {int(i): _added(token) for i, token in added.items()}
        return copied

    def _do_encode(self, texts: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
        flags = {"add_special_tokens", "split_special_tokens", "return_offsets_mapping"}
        # How core's `tokenize` calls a tokenizer; every other call gets all that the tokenizer returns.
        batch = texts[0] if len(texts) == 1 and "add_special_tokens" in options and options.keys() <= flags else None
        if not isinstance(batch, list) or not all(isinstance(text, str) for text in batch):
            return {name: _plain(value) for name, value in self._tokenizer(*texts, **options).items()}
        # The engine's own hook may be faster, or may do something else than its tokenizer.
        request = TokenizeRequest(
            texts=tuple(batch),
            add_special_tokens=options["add_special_tokens"],
            parse_special=not options.get("split_special_tokens", False),
            offsets=options.get("return_offsets_mapping", False),
        )
        result = self._tokenize(request)
        encoded: dict[str, Any] = {"input_ids": result.ids.tolist()}
        if request.offsets:
            if result.offsets is None:
                raise CapabilityError("the engine's tokenizer returns no character offsets", capability="offsets")
            parts = result.offsets.split(result.ids.lengths.tolist())
            encoded["offset_mapping"] = [[tuple(pair) for pair in part.tolist()] for part in parts]
        return encoded

    def _do_decode_rows(self, rows: Sequence[list[int]], options: dict[str, Any]) -> list[str]:
        return [self._tokenizer.decode(row, **options) for row in rows]

    def _do_render_segments(self, chats: Sequence[Chat], options: dict[str, Any]) -> list[list[Segment]]:
        return segments_of(chats, self._tokenizer, **options)

    def _do_attribute(self, name: str) -> tuple[bool, Any]:
        value = getattr(self._tokenizer, name)
        try:
            return (True, None) if callable(value) else (False, _checked(name, value))
        except TypeError as error:
            # So that `hasattr` and a default of `getattr` work.
            raise AttributeError(str(error)) from None

    def _do_set(self, name: str, value: Any) -> None:
        setattr(self._tokenizer, name, value)

    def _do_method(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return _checked(name, getattr(self._tokenizer, name)(*args, **options))


def _added(token: Any) -> AddedToken:
    flags = ("special", "lstrip", "rstrip", "single_word", "normalized")
    return AddedToken(str(getattr(token, "content", token)), **{name: bool(getattr(token, name, 0)) for name in flags})


def _checked(name: str, value: Any) -> Any:
    if not _is_plain(value):
        raise TypeError(f"{name} of the tokenizer is a {type(value).__name__}, which stays in the host")
    return _plain(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, [*value.keys(), *value.values()]))
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN) or hasattr(value, "tolist")


def _plain(value: Any) -> Any:
    """Return the value without classes of the tokenizer's library: a mapping as a dict, a str as a str."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        kind = next(each for each in (list, tuple, set, frozenset) if isinstance(value, each))
        return kind(map(_plain, value))
    if isinstance(value, str):
        return str(value)
    return value

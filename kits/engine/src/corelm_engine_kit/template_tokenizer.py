"""`TemplateTokenizer`: the tokenizer of an engine that has only a vocabulary, with all that core reads of one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from corelm.errors import TemplateError
from corelm.validate import invalid

_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")


class TemplateTokenizer:
    """Turns text into ids and back with the engine's own two functions, and conversations into text with a template.

    >>> plain = {"encode": lambda text: list(text.encode()), "decode": lambda ids: bytes(ids).decode(errors="replace")}
    >>> tokenizer = TemplateTokenizer(**plain, specials={"<s>": 256, "</s>": 257}, size=258, bos="<s>", eos="</s>")
    >>> tokenizer(["Hi</s>", ""])["input_ids"]
    [[256, 72, 105, 257], [256]]
    >>> tokenizer.decode([256, 72, 105], skip_special_tokens=True)
    'Hi'

    Args:
        encode: returns the ids of a text. The texts of special tokens are ordinary characters to it, and it adds none.
        decode: returns the text of ids that are not special, with U+FFFD for a character that is not complete. It
            returns what was encoded, and drops no space at the beginning.
        specials: the ids of special tokens by their texts.
        template: the chat template, jinja as in transformers; None for a model without one. What the assistant writes
            should be in ``{% generation %}`` blocks, which masks of its tokens are made from.
        size: how many ids there are.
        eos, bos, pad: special tokens that end an answer, begin a text, and fill rows. `pad` is by default `eos`.

    Raises:
        InvalidRequestError: `eos`, `bos` or `pad` is not among the special tokens, or one of these has an id that is
            not below `size`; or `encode` puts a space before a text.
    """

    def __init__(
        self,
        encode: Callable[[str], Sequence[int]],
        decode: Callable[[list[int]], str],
        specials: Mapping[str, int],
        template: str | None = None,
        *,
        size: int,
        eos: str | None = None,
        bos: str | None = None,
        pad: str | None = None,
    ) -> None:
        self._encode, self._decode = encode, decode
        self._ids, self._texts = dict(specials), {token: text for text, token in specials.items()}
        # The longest first, so that none is read as the beginning of another.
        longest_first = sorted(specials, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._size = size
        self.chat_template = template
        self.eos_token, self.bos_token, self.pad_token = eos, bos, eos if pad is None else pad
        self.eos_token_id, self.bos_token_id, self.pad_token_id = map(
            self._id_of, ("eos", "bos", "pad"), (self.eos_token, self.bos_token, self.pad_token)
        )
        self.all_special_tokens, self.all_special_ids = [*self._ids], [*self._ids.values()]
        if any(not 0 <= token < size for token in self.all_special_ids):
            raise invalid("specials", f"expected ids from 0 to {size - 1}, got {max(self.all_special_ids)}")
        if decode(list(encode("a"))) == " a":
            raise invalid("encode", "it puts a space before a text, as some vocabularies do; expected the text alone")

    def __len__(self) -> int:
        return self._size

    def __call__(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        split_special_tokens: bool = False,
        return_offsets_mapping: bool = False,
    ) -> dict[str, list[Any]]:
        """Return `input_ids`, a list for each text.

        Args:
            add_special_tokens: put the BOS, if there is one, before each text.
            split_special_tokens: read the texts of special tokens as ordinary characters.
            return_offsets_mapping: also return `offset_mapping`: the characters [start, end) of each id.
        """
        rows = [list(self._parts(text, not split_special_tokens)) for text in texts]
        if add_special_tokens and self.bos_token_id is not None:
            rows = [[("", 0, [self.bos_token_id]), *row] for row in rows]
        encoded: dict[str, list[Any]] = {"input_ids": [[token for *_, ids in row for token in ids] for row in rows]}
        if return_offsets_mapping:
            encoded["offset_mapping"] = [[span for part in row for span in self._spans(*part)] for row in rows]
        return encoded

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Return the text of the ids."""
        text = ""
        for special, run in groupby(map(int, ids), self._texts.__contains__):
            if not special:
                text += self._decode(list(run))
            elif not skip_special_tokens:
                text += "".join(self._texts[token] for token in run)
        return text

    def batch_decode(self, rows: Iterable[Iterable[int]], skip_special_tokens: bool = False) -> list[str]:
        """Return the text of each row of ids."""
        return [self.decode(row, skip_special_tokens) for row in rows]

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> Any:
        """Return the text of a conversation, or its ids if `tokenize`.

        Args:
            chat_template: takes the place of the tokenizer's own.
            add_generation_prompt: end with what comes before an answer of the assistant.
            variables: for the template.

        Raises:
            TemplateError: there is no template, or it refuses the conversation.
        """
        source = self.chat_template if chat_template is None else chat_template
        if source is None:
            raise TemplateError("the tokenizer has no chat template; pass chat_template=")
        specials = {"eos_token": self.eos_token or "", "bos_token": self.bos_token or ""}
        given = {"messages": conversation, "add_generation_prompt": add_generation_prompt, **specials, **variables}
        text = _compiled(source).render(**given)
        return self([text], add_special_tokens=False)["input_ids"][0] if tokenize else text

    def _id_of(self, name: str, text: str | None) -> int | None:
        if text is not None and text not in self._ids:
            raise invalid(name, f"{text!r} is not among the special tokens")
        return None if text is None else self._ids[text]

    def _parts(self, text: str, parse: bool) -> Iterator[tuple[str, int, Sequence[int]]]:
        """Yield the pieces of a text: ordinary text or one special token, where it begins, and its ids."""
        at = 0
        for found in self._special.finditer(text) if parse else ():
            if found.start() > at:
                yield text[at : found.start()], at, self._encode(text[at : found.start()])
            at = found.end()
            yield found[0], found.start(), [self._ids[found[0]]]
        if at < len(text):
            yield text[at:], at, self._encode(text[at:])

    def _spans(self, text: str, start: int, ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the characters of each id of a piece. Ids that are parts of one character share it."""
        if len(ids) == 1:
            yield start, start + len(text)
            return
        at = first = 0
        for end in range(1, len(ids) + 1):
            piece = self._decode(list(ids[first:end]))
            if end == len(ids):
                piece = text[at:]
            if text.startswith(piece, at):
                yield from [(start + at, start + at + len(piece))] * (end - first)
                at, first = at + len(piece), end


@lru_cache(maxsize=32)
def _compiled(source: str) -> jinja2.Template:
    """Return a template in the environment that transformers gives them, in which a generation block does nothing."""

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _as_json
    environment.globals["raise_exception"] = refuse

    def plain(tag: re.Match[str]) -> str:
        left, end, right = tag.groups()
        return f"{left}{'endif' if end else 'if true'}{right}"

    return environment.from_string(_GENERATION.sub(plain, source))


def _as_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)

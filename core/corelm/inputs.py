"""A user's TensorDict → flat rows that an engine takes. Nothing here runs a model.

Three input modes read three places: `history` and `text` are rendered and tokenized, `tokens` are taken as they are.
In each the value is either a container with a `prompt` (to generate from) and a `full` (to score), or bare: the thing
itself at the top key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from corelm import checks
from corelm.arguments import rows_of_ids
from corelm.containers import ChatHistory, Text, Tokens, ragged
from corelm.errors import InvalidRequestError, MissingKeyError
from corelm.history import Chat, History
from corelm.messages import Columns, Parts
from corelm.render import render
from corelm.rows import Ragged

if TYPE_CHECKING:
    from corelm.backend import Backend

InputMode = Literal["history", "text", "tokens"]
Part = Literal["prompt", "full"]


@dataclass(frozen=True, slots=True)
class Keys:
    """Where a policy reads and writes its containers."""

    text: NestedKey = "text"
    tokens: NestedKey = "tokens"
    masks: NestedKey = "masks"
    log_probs: NestedKey = "log_probs"
    history: NestedKey = "history"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InputRows:
    """What was read, one row per prompt or sequence, in C order of `batch_size`.

    Attributes:
        ids: the prompts, or the whole sequences.
        prompt_lengths: int64[rows], where sequences tell prompt and response apart.
        columns: the dense layout the sequences came in.
        retokenized: whether sampled turns of a row lost their ids to a rendering from text; None where that cannot be.
    """

    batch_size: tuple[int, ...]
    ids: Ragged
    texts: tuple[str, ...] | None = None
    chats: tuple[Chat, ...] | None = None
    assistant: Ragged | None = None
    prompt_lengths: Tensor | None = None
    columns: Columns | None = None
    retokenized: tuple[bool, ...] | None = None

    @property
    def tokens(self) -> Parts[Ragged]:
        """The ids, as prompt and response too where they are told apart."""
        if self.prompt_lengths is None:
            return Parts(None, None, self.ids)
        start = torch.zeros_like(self.prompt_lengths)
        prompt = self.ids.slice(start, self.prompt_lengths)
        return Parts(prompt, self.ids.slice(self.prompt_lengths, self.ids.lengths), self.ids)

    def repeat(self, n: int) -> InputRows:
        """Every prompt `n` times, under a new last batch dimension."""

        def each(values: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
            return None if values is None else tuple(value for value in values for _ in range(n))

        return replace(
            self,
            batch_size=(*self.batch_size, n),
            ids=self.ids.repeat(n),
            texts=each(self.texts),
            chats=each(self.chats),
            assistant=None if self.assistant is None else self.assistant.repeat(n),
            retokenized=each(self.retokenized),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class InputReader:
    """Reads rows in one input mode."""

    mode: InputMode
    keys: Keys = field(default_factory=Keys)
    chat_template: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_kwargs: Mapping[str, Any] = field(default_factory=dict)
    prefer_tokens: bool = True

    def key(self, part: Part) -> tuple[str, ...]:
        """The key that is read, as in ``("history", "prompt")``."""
        return (*_parts(getattr(self.keys, self.mode)), part)

    def read(self, td: TensorDictBase, part: Part, backend: Backend, *, want_assistant: bool = True) -> InputRows:
        """The prompts or the whole sequences of `td`, as token ids.

        Raises:
            MissingKeyError: the key is not there.
            InvalidRequestError: what is there is not what this mode reads.
            TemplateError: a conversation cannot be rendered.
        """
        readers: dict[InputMode, Callable[..., InputRows]] = {
            "history": self._chats,
            "text": self._texts,
            "tokens": self._tokens,
        }
        return readers[self.mode](td, part, backend, want_assistant)

    def _chats(self, td: TensorDictBase, part: Part, backend: Backend, want_assistant: bool) -> InputRows:
        history = self._value(td, part, bare=History)
        if not isinstance(history, History):
            raise self._wrong(part, "a History (see History.from_chats)", history)
        shape = _batch(td, tuple(history.batch_size), self.key(part))
        rendered = render(
            history.chats,
            backend.tokenizer,
            backend.tokenize,
            add_generation_prompt=part == "prompt",
            chat_template=self.chat_template,
            template_kwargs=self.template_kwargs,
            prefer_tokens=self.prefer_tokens,
            want_assistant=want_assistant,
            eos_ids=backend.eos_token_ids,
        )
        return InputRows(
            batch_size=shape,
            ids=rendered.ids,
            texts=rendered.texts,
            chats=history.chats,
            assistant=rendered.assistant,
            retokenized=None if self.prefer_tokens else rendered.retokenized,
        )

    def _texts(self, td: TensorDictBase, part: Part, backend: Backend, want_assistant: bool) -> InputRows:
        value = self._value(td, part, bare=(str, list, Tensor))
        if isinstance(value, Tensor) and value.numel() == 0:
            # What tensordict makes of an empty list.
            value = []
        texts, shape = _flatten(value)
        wrong = {
            row: f"expected a str, got {type(t).__name__}" for row, t in enumerate(texts) if not isinstance(t, str)
        }
        checks.refuse(wrong, ".".join(self.key(part)))
        options = {"add_special_tokens": True, **self.tokenizer_kwargs}
        return InputRows(
            batch_size=_batch(td, shape, self.key(part)),
            ids=backend.tokenize(texts, **options).ids,
            texts=tuple(texts),
        )

    def _tokens(self, td: TensorDictBase, part: Part, backend: Backend, want_assistant: bool) -> InputRows:
        value = self._value(td, part, bare=(Tensor, list))
        container = td.get(self.keys.tokens, None)
        if isinstance(container, Tokens):
            return self._own_tokens(td, container, part)
        key = ".".join(self.key(part))
        if not isinstance(value, Tensor):
            ids = rows_of_ids(value, key)
            return InputRows(batch_size=_batch(td, (len(ids),), self.key(part)), ids=ids)
        if value.ndim == 0:
            raise self._wrong(part, "token ids along the last dimension", value)
        mask = td.get((*_parts(self.keys.masks), "all_attention_mask"), None)
        if mask is None or mask.shape != value.shape:
            # A bare tensor comes without a mask; then there are no pads in it.
            mask = torch.ones_like(value, dtype=torch.bool)
        mask = mask.reshape(mask.shape[:-1].numel(), mask.shape[-1])
        ids = rows_of_ids(Ragged.from_padded(value.reshape(mask.shape), mask), key)
        shape = _batch(td, tuple(value.shape[:-1]), self.key(part))
        return InputRows(batch_size=shape, ids=ids, columns=Columns(mask, None))

    def _own_tokens(self, td: TensorDictBase, tokens: Tokens, part: Part) -> InputRows:
        """From `Tokens`: the sequences keep their split and, if dense, their columns."""
        read = lambda key, name: ragged(td, (*_parts(key), name), masks=self.keys.masks)  # noqa: E731
        shape = _batch(td, tuple(tokens.batch_size), self.key(part))
        rows = InputRows(batch_size=shape, ids=read(self.keys.tokens, part))
        if part == "prompt":
            return rows
        split = tokens.prompt is not None
        lengths = read(self.keys.tokens, "prompt").lengths if split else None
        masks = td.get(self.keys.masks, None)
        columns = None
        if tokens.padded:
            mask = masks.all_attention_mask
            flat = mask.reshape(mask.shape[:-1].numel(), mask.shape[-1])
            columns = Columns(flat, tokens.prompt.shape[-1] if split else None)
        # Scoring cannot tell whose words these are, but must not forget it where the input says so.
        known = masks is not None and masks.all_assistant_mask is not None
        assistant = read(self.keys.masks, "all_assistant_mask") if known else None
        return replace(rows, prompt_lengths=lengths, columns=columns, assistant=assistant)

    def _value(self, td: TensorDictBase, part: Part, bare: type | tuple[type, ...]) -> Any:
        """What stands at the key: the container's `part`, or the bare thing at the container's own key."""
        top = getattr(self.keys, self.mode)
        value = td[top] if top in td.keys(include_nested=True) else None
        if value is None:
            raise MissingKeyError(
                f"the TensorDict has no {'.'.join(self.key(part))!r}; it has: {_listing(td)}",
                field=".".join(self.key(part)),
            )
        if isinstance(value, bare):
            return value
        if isinstance(value, (ChatHistory, Text, Tokens)):
            found = getattr(value, part)
        elif isinstance(value, TensorDictBase):
            found = value[part] if part in value.keys() else None
        else:
            raise self._wrong(part, f"{self.mode} or a container of it", value)
        if found is None:
            raise MissingKeyError(
                f"{top!r} holds no {part!r}, which this policy reads; the TensorDict has: {_listing(td)}",
                field=".".join(self.key(part)),
            )
        return found

    def _wrong(self, part: Part, expected: str, value: Any) -> InvalidRequestError:
        key = ".".join(self.key(part))
        return InvalidRequestError(f"{key}: expected {expected}, got {type(value).__name__}", field=key)


def truncate_left(rows: InputRows, limit: int, backend: Backend) -> InputRows:
    """Keep the last `limit` tokens of every prompt. The text of one that was cut is decoded anew, to tell the truth."""
    cut = rows.ids.lengths > limit
    if not bool(cut.any()):
        return rows
    start = (rows.ids.lengths - limit).clamp_min(0)
    ids = rows.ids.slice(start, rows.ids.lengths)
    texts = rows.texts
    if texts is not None:
        decoded = iter(backend.detokenize(ids.select(cut.nonzero().flatten()), skip_special_tokens=False))
        texts = tuple(next(decoded) if was else text for was, text in zip(cut.tolist(), texts, strict=True))
    assistant = None if rows.assistant is None else rows.assistant.slice(start, rows.ids.lengths)
    return replace(rows, ids=ids, texts=texts, assistant=assistant)


def _parts(key: NestedKey) -> tuple[str, ...]:
    return key if isinstance(key, tuple) else (key,)


def _listing(td: TensorDictBase) -> str:
    return ", ".join(sorted(".".join(_parts(key)) for key in td.keys(include_nested=True))) or "nothing"


def _batch(td: TensorDictBase, found: tuple[int, ...], key: tuple[str, ...]) -> tuple[int, ...]:
    """The batch is the TensorDict's; one without a batch takes it from the data."""
    batch = tuple(td.batch_size)
    if batch and batch != found:
        raise InvalidRequestError(
            f"{'.'.join(key)}: its batch is {found}, but the TensorDict's is {batch}", field=".".join(key)
        )
    return found


def _flatten(value: Any) -> tuple[list[Any], tuple[int, ...]]:
    """Nested lists → the leaves in C order, and the shape; lists of unequal length are left as leaves."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [value], ()
    parts = [_flatten(item) for item in value]
    shapes = {shape for _, shape in parts}
    if len(shapes) > 1:
        return list(value), (len(value),)
    return [leaf for leaves, _ in parts for leaf in leaves], (len(value), *(shapes.pop() if shapes else ()))

"""From a user's TensorDict to flat rows of token ids. Nothing here runs a model.

The three input modes read three keys. `history` and `text` are rendered and tokenized; `tokens` are taken as they are.
The value is a container with a `prompt` (to generate from) or a `full` (to score), or a bare value at the top key.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from corelm.backend.arguments import not_texts, refuse_unreadable, rows_of_ids
from corelm.backend.skipping import OnError, ServedRows
from corelm.containers.classes import ChatHistory, Masks, Text, Tokens, ragged
from corelm.containers.history import History
from corelm.containers.keys import key_parts, list_keys
from corelm.errors import InvalidRequestError, MissingKeyError, Problems, TemplateError, refuse
from corelm.policy.values import (
    batch_of,
    find_value,
    hides_tokens,
    kind_of,
    leaves,
    masks_in_rows,
    nested_field,
    two_dimensional,
    unmasked,
)
from corelm.rendering.render import render
from corelm.spec.message import Chat
from corelm.spec.records import Columns, Parts
from corelm.tensors.masks import as_mask
from corelm.tensors.ragged import Ragged

if TYPE_CHECKING:
    from corelm.backend.backend import Backend

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
    """The rows that were read, one per prompt or sequence, in C order of `batch_size`.

    Attributes:
        batch_size: the shape of the batch.
        ids: the prompts, or the whole sequences.
        texts: the texts that were tokenized; None where tokens were read.
        chats: the conversations that were rendered; None where no history was read.
        assistant: bool, as long as `ids`: tokens that the assistant said; None where this is not known.
        prompt_lengths: int64[rows], if the input tells prompt and response apart.
        columns: the dense layout that the sequences came in.
        retokenized: whether sampled turns of a row were rendered from their text and so lost their ids; None where this
            cannot happen.
        problems: rows that could not be read, and why. These rows are empty.
    """

    batch_size: tuple[int, ...]
    ids: Ragged
    texts: tuple[str, ...] | None = None
    chats: tuple[Chat, ...] | None = None
    assistant: Ragged | None = None
    prompt_lengths: Tensor | None = None
    columns: Columns | None = None
    retokenized: tuple[bool, ...] | None = None
    problems: Mapping[int, str] = field(default_factory=dict)

    @property
    def tokens(self) -> Parts[Ragged]:
        """The ids, split into prompt and response if the input tells them apart."""
        if self.prompt_lengths is None:
            return Parts(None, None, self.ids)
        start = torch.zeros_like(self.prompt_lengths)
        prompt = self.ids.slice(start, self.prompt_lengths)
        return Parts(prompt, self.ids.slice(self.prompt_lengths, self.ids.lengths), self.ids)

    def repeat(self, n: int) -> InputRows:
        """Return every prompt `n` times, under a new last batch dimension."""

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
    input_key: NestedKey | None = None
    attention_mask_key: NestedKey | None = None
    chat_template: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_kwargs: Mapping[str, Any] = field(default_factory=dict)
    prefer_tokens: bool = True

    @property
    def top(self) -> NestedKey:
        """The key of the container, or of the bare value, that is read."""
        return getattr(self.keys, self.mode) if self.input_key is None else self.input_key

    def key(self, part: Part) -> tuple[str, ...]:
        """Return the key that is read, for example ``("history", "prompt")``."""
        own = key_parts(self.top)
        return (*own, part) if self.input_key is None else own

    def read(
        self,
        td: TensorDictBase,
        part: Part,
        backend: Backend,
        *,
        want_assistant: bool = True,
        on_error: OnError = "raise",
    ) -> InputRows:
        """Return the prompts or the whole sequences of `td`, as token ids on the CPU.

        Sequences that are rendered or tokenized here may also be in `td` as tokens. If the ids are equal, the sequences
        keep the layout and the split of those tokens, so that two scorings of one batch line up.

        Args:
            td: the TensorDict to read.
            part: "prompt" to generate, "full" to score.
            backend: tokenizes and knows the special tokens.
            want_assistant: whether the mask of the assistant's tokens is needed.
            on_error: "skip" leaves a row that cannot be read empty and adds it to `problems`.

        Raises:
            MissingKeyError: `td` lacks the key.
            InvalidRequestError: the value is not what this mode reads, or is text that cannot be encoded.
            TemplateError: a conversation cannot be rendered.
        """
        if self.mode == "tokens":
            return self._tokens(td, part)
        rows = (
            self._chats(td, part, backend, want_assistant, on_error)
            if self.mode == "history"
            else self._texts(td, part, backend, on_error)
        )
        return self._as_it_stands(td, rows) if part == "full" else rows

    def _chats(
        self, td: TensorDictBase, part: Part, backend: Backend, want_assistant: bool, on_error: OnError
    ) -> InputRows:
        history = self._value(td, part, bare=History)
        if not isinstance(history, History):
            raise self._wrong(part, "a History (see History.from_chats)", history)
        shape = batch_of(td, tuple(history.batch_size), self.key(part))
        apply = partial(
            render,
            tokenizer=backend.tokenizer,
            tokenize=backend.tokenize,
            add_generation_prompt=part == "prompt",
            chat_template=self.chat_template,
            template_kwargs=self.template_kwargs,
            prefer_tokens=self.prefer_tokens,
            want_assistant=want_assistant,
            eos_ids=backend.eos_token_ids,
        )
        chats, rendered = history.chats, None
        problems: Problems = {}
        while rendered is None:
            served = [row for row in range(len(chats)) if row not in problems]
            try:
                rendered = apply([chats[row] for row in served])
            except (InvalidRequestError, TemplateError) as error:
                if on_error == "raise" or not error.problems:
                    raise
                # Conversations are refused for several reasons, each with an error of its own.
                problems |= {served[row]: what for row, what in error.problems.items()}
        read = ServedRows.without(problems, len(chats))
        return InputRows(
            batch_size=shape,
            ids=read.ragged(rendered.ids),
            texts=read.values(rendered.texts, ""),
            chats=chats,
            assistant=None if rendered.assistant is None else read.ragged(rendered.assistant),
            retokenized=None if self.prefer_tokens else read.values(rendered.retokenized, False),
            problems=problems,
        )

    def _texts(self, td: TensorDictBase, part: Part, backend: Backend, on_error: OnError) -> InputRows:
        value = self._value(td, part, bare=(str, list, Tensor))
        if isinstance(value, Tensor) and value.numel() == 0:
            # tensordict turns an empty list into an empty tensor.
            value = []
        texts, shape = leaves(value)
        container = td.get(self.top, None)
        if isinstance(container, Text):
            # Empty nested lists do not show their shape.
            shape = tuple(container.batch_size)
        problems = not_texts(texts)
        if on_error == "raise":
            refuse(problems, ".".join(self.key(part)))
        read = ServedRows.without(problems, len(texts))
        good = [text for row, text in enumerate(texts) if row not in problems]
        options = {"add_special_tokens": True, **self.tokenizer_kwargs}
        return InputRows(
            batch_size=batch_of(td, shape, self.key(part)),
            ids=read.ragged(backend.tokenize(good, **options).ids),
            texts=read.values(good, ""),
            problems=problems,
        )

    def _tokens(self, td: TensorDictBase, part: Part) -> InputRows:
        container = find_value(td, self.top)
        if isinstance(container, Tokens) and part in container.keys():
            value = nested_field(container, part)
            if value is None:
                return self._own_tokens(td, self.top, container, part)
        else:
            value = self._value(td, part, bare=(Tensor, list))
        key = ".".join(self.key(part))
        mask = self._mask(td)
        if not isinstance(value, Tensor) or value.is_nested:
            ids = rows_of_ids(value, key)
            return InputRows(batch_size=batch_of(td, (len(ids),), self.key(part)), ids=unmasked(ids, mask, key))
        refuse_unreadable(value, key)
        if value.ndim == 0:
            raise self._wrong(part, "token ids along the last dimension", value)
        if mask is None:
            # A bare tensor without a mask is taken to have no pads.
            mask = torch.ones_like(value, dtype=torch.bool)
        if not isinstance(mask, Tensor) or mask.shape != value.shape:
            found = tuple(mask.shape) if isinstance(mask, Tensor) else "rows of unequal length"
            raise InvalidRequestError(
                f"{key}: tokens are {tuple(value.shape)}, but their attention mask is {found}", field=key
            )
        mask = two_dimensional(as_mask(mask, self._mask_name)).cpu()
        ids = rows_of_ids(Ragged.from_padded(two_dimensional(value).cpu(), mask), key)
        shape = batch_of(td, tuple(value.shape[:-1]), self.key(part))
        return InputRows(batch_size=shape, ids=ids, columns=Columns(mask, None))

    def _as_it_stands(self, td: TensorDictBase, rows: InputRows) -> InputRows:
        tokens = find_value(td, self.keys.tokens)
        if not isinstance(tokens, Tokens) or tokens.full is None or tuple(tokens.batch_size) != rows.batch_size:
            return rows
        if tokens.padded and td.get(self.keys.masks, None) is None:
            return rows
        own = self._own_tokens(td, self.keys.tokens, tokens, "full")
        same = torch.equal(own.ids.lengths, rows.ids.lengths) and torch.equal(own.ids.values, rows.ids.values)
        return replace(rows, prompt_lengths=own.prompt_lengths, columns=own.columns) if same else rows

    def _own_tokens(self, td: TensorDictBase, top: NestedKey, tokens: Tokens, part: Part) -> InputRows:
        """Read `Tokens`. The sequences keep their split and, if dense, their columns."""
        masks = self._masks(td, tokens)
        held = {"tokens": tokens, **({} if masks is None else {"masks": masks})}
        given = TensorDict(held, batch_size=tokens.batch_size)

        def read(container: str, name: str) -> Ragged:
            return ragged(given, (container, name)).to("cpu")

        shape = batch_of(td, tuple(tokens.batch_size), self.key(part))
        rows = InputRows(batch_size=shape, ids=read("tokens", part))
        if part == "prompt":
            return rows
        split = "prompt" in tokens.keys()
        lengths = read("tokens", "prompt").lengths if split else None
        columns = None
        if tokens.padded and masks is not None:
            # Rows that are padded to different widths have no common columns.
            with suppress(InvalidRequestError):
                mask = two_dimensional(as_mask(masks.all_attention_mask, self._mask_name)).cpu()
                columns = Columns(mask, tokens.prompt.shape[-1] if split else None)
        # Scoring cannot find out which tokens are the assistant's, so it keeps what the input says.
        known = masks is not None and "all_assistant_mask" in masks.keys()
        assistant = read("masks", "all_assistant_mask") if known else None
        if assistant is not None:
            assistant = assistant.with_values(as_mask(assistant.values, "masks.all_assistant_mask"))
        return replace(rows, prompt_lengths=lengths, columns=columns, assistant=assistant)

    @property
    def _mask_name(self) -> str:
        own = (*key_parts(self.keys.masks), "all_attention_mask")
        return ".".join(own if self.attention_mask_key is None else key_parts(self.attention_mask_key))

    def _mask(self, td: TensorDictBase) -> Any:
        """Return the attention mask of bare tokens, or None."""
        if self.attention_mask_key is None:
            return find_value(td, (*key_parts(self.keys.masks), "all_attention_mask"))
        mask = find_value(td, self.attention_mask_key)
        if mask is None:
            raise MissingKeyError(
                f"the TensorDict has no {self.attention_mask_key!r}, which attention_mask_key names; "
                f"it has: {list_keys(td)}",
                field="attention_mask_key",
            )
        return mask

    def _masks(self, td: TensorDictBase, tokens: Tokens) -> Masks | None:
        """Return the masks of a `Tokens` container. They may be in a plain TensorDict."""
        found = find_value(td, self.keys.masks)
        if isinstance(found, Masks) and self.attention_mask_key is None:
            if not tokens.padded and hides_tokens(found, self._mask_name):
                raise self._no_pads()
            return found
        given = {"all_attention_mask": self._mask(td)}
        if self.attention_mask_key is None and isinstance(found, TensorDictBase):
            given["all_assistant_mask"] = find_value(found, "all_assistant_mask")
        given = {name: mask for name, mask in given.items() if mask is not None}
        if not given:
            return None
        if not tokens.padded and "all_attention_mask" in given:
            raise self._no_pads()
        if tokens.padded and all(isinstance(mask, Tensor) and not mask.is_nested for mask in given.values()):
            return Masks(**given, batch_size=tokens.batch_size)
        return None if 0 in tokens.batch_size else masks_in_rows(given, tokens)

    def _no_pads(self) -> InvalidRequestError:
        return InvalidRequestError(
            f"{self._mask_name}: tokens in rows of unequal length (padded=False) have no pads; leave their attention "
            "mask out, or, if the rows do hold pads, make the Tokens with padded=True",
            field="masks",
        )

    def _value(self, td: TensorDictBase, part: Part, bare: type | tuple[type, ...]) -> Any:
        """Return the container's `part`, or the bare value at the container's own key."""
        value = find_value(td, self.top)
        if value is None:
            raise MissingKeyError(
                f"the TensorDict has no {'.'.join(self.key(part))!r}; it has: {list_keys(td)}",
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
                f"{self.top!r} holds no {part!r}, which this policy reads; the TensorDict has: {list_keys(td)}",
                field=".".join(self.key(part)),
            )
        return found

    def _wrong(self, part: Part, expected: str, value: Any) -> InvalidRequestError:
        key = ".".join(self.key(part))
        return InvalidRequestError(f"{key}: expected {expected}, got {kind_of(value)}", field=key)


def truncate_left(rows: InputRows, limit: int, backend: Backend) -> InputRows:
    """Keep the last `limit` tokens of every prompt. The text of a prompt that was cut is decoded again."""
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

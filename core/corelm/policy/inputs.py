"""From a user's TensorDict to flat rows of token ids. Nothing here runs a model.

The three input modes read three keys. `history` and `text` are rendered and tokenized; `tokens` are taken as they are.
The value is a container with a `prompt` (to generate from) or a `full` (to score), or a bare value at the top key. A
`Text` or `Tokens` with `prompt` and `response`, but no `full`, is scored as completions: `corelm.policy.completions`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from corelm.backend.arguments import not_texts, refuse_pads, refuse_unreadable, rows_of_ids
from corelm.backend.skipping import OnError, ServedRows
from corelm.containers.classes import ChatHistory, Masks, Text, Tokens
from corelm.containers.history import History
from corelm.containers.keys import key_parts, list_keys
from corelm.containers.reading import ragged
from corelm.errors import InvalidRequestError, MissingKeyError, TemplateError, refuse
from corelm.policy.completions import are_completions, read_texts, spelled_by, unscorable, with_full, with_one_bos
from corelm.policy.conversations import ChatRenderer, tools_of
from corelm.policy.mask_keys import mask_next_to, no_pads
from corelm.policy.mistakes import hint_for, input_hint
from corelm.policy.rows import InputRows
from corelm.policy.values import (
    PADS_ADVICE,
    batch_of,
    dense_rows,
    differing_rows,
    differing_splits,
    find_input_ids,
    find_value,
    hides_tokens,
    ids_of_tensor,
    kind_of,
    leaves,
    masks_in_rows,
    masks_without_pads,
    nested_field,
    refuse_pads_of,
    two_dimensional,
    unmasked,
    unnested,
)
from corelm.rendering.completions import Boundary
from corelm.spec.records import Columns
from corelm.tensors.masks import as_mask
from corelm.tensors.ragged import Ragged
from corelm.validate import as_list

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
    completion_boundary: Boundary = "joint"
    continue_final_message: bool | None = False
    tools_key: NestedKey | None = None

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

        Sequences may also be in `td` as `Tokens`, next to what is read. If the ids are equal, or a text was sampled as
        those ids, the sequences keep the ids, the layout and the split of those tokens, so that two scorings of one
        batch line up; if not, `conflicts` says where.

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
            rows = self._tokens(td, part, backend, on_error)
        elif self.mode == "history":
            rows = self._chats(td, part, backend, want_assistant, on_error)
        else:
            rows = self._texts(td, part, backend, on_error)
        own = self.mode == "tokens" and self.input_key is None
        return rows if part == "prompt" or own else self._as_it_stands(td, rows, backend)

    def _chats(
        self, td: TensorDictBase, part: Part, backend: Backend, want_assistant: bool, on_error: OnError
    ) -> InputRows:
        history = self._value(td, part, bare=History)
        if not isinstance(history, History):
            raise self._wrong(part, "a History (see History.from_chats)", history)
        shape = batch_of(td, tuple(history.batch_size), self.key(part))
        apply = ChatRenderer(
            backend=backend,
            prompt=part == "prompt",
            continue_final_message=self.continue_final_message,
            prefer_tokens=self.prefer_tokens,
            template_kwargs=self.template_kwargs,
            options={"chat_template": self.chat_template, "want_assistant": want_assistant},
        )
        chats, rendered = history.chats, None
        tools, bad_tools = tools_of(td, self.tools_key, shape)
        begun, problems = apply.begin(chats)
        if on_error == "raise":
            refuse(bad_tools, ".".join(key_parts(self.tools_key or ())))
            refuse(problems, ".".join(self.key(part)))
        problems |= bad_tools
        while rendered is None:
            served = [row for row in range(len(chats)) if row not in problems]
            own = None if tools is None else [tools[row] for row in served]
            try:
                rendered = apply([chats[row] for row in served], own, [begun[row] for row in served])
            except (InvalidRequestError, TemplateError) as error:
                if on_error == "raise" or not error.problems:
                    raise
                # Conversations are refused for several reasons, each with an error of its own.
                problems |= {served[row]: what for row, what in error.problems.items()}
        read = ServedRows.without(problems, len(chats))
        sampled = {row for row in served if any(turn.token_ids is not None for turn in chats[row])}
        return InputRows(
            batch_size=shape,
            ids=read.ragged(rendered.ids),
            texts=read.values(rendered.texts, ""),
            chats=chats,
            begun=tuple(begun) if any(turn is not None for turn in begun) else None,
            tools=None if tools is None else tuple(tools),
            assistant=None if rendered.assistant is None else read.ragged(rendered.assistant),
            retokenized=None if self.prefer_tokens else tuple(row in sampled for row in range(len(chats))),
            problems=problems,
        )

    def _texts(self, td: TensorDictBase, part: Part, backend: Backend, on_error: OnError) -> InputRows:
        options = {"add_special_tokens": True, **self.tokenizer_kwargs}
        held = find_value(td, self.top)
        if part == "full" and not isinstance(held, Tokens) and are_completions(held):
            boundary, key = self.completion_boundary, key_parts(self.top)
            return read_texts(td, key, held, with_one_bos(backend), boundary, options, on_error)
        value = self._value(td, part, bare=(str, list, Tensor))
        if isinstance(value, Tensor) and value.numel() == 0:
            # tensordict turns an empty list into an empty tensor.
            value = []
        texts, shape = leaves(value)
        container = td.get(self.top, None)
        if isinstance(container, Text):
            # Empty nested lists do not show their shape.
            shape = tuple(container.batch_size)
            if len(texts) != math.prod(shape):
                found = f"{len(texts)} texts do not fill a batch of shape {shape}"
                raise InvalidRequestError(f"{'.'.join(self.key(part))}: {found}", field=".".join(self.key(part)))
        problems = not_texts(texts)
        if on_error == "raise":
            refuse(problems, ".".join(self.key(part)))
        read = ServedRows.without(problems, len(texts))
        good = [text for row, text in enumerate(texts) if row not in problems]
        return InputRows(
            batch_size=batch_of(td, shape, self.key(part)),
            ids=read.ragged(with_one_bos(backend)(good, **options).ids),
            texts=read.values(good, ""),
            problems=problems,
        )

    def _tokens(self, td: TensorDictBase, part: Part, backend: Backend, on_error: OnError = "raise") -> InputRows:
        container = find_value(td, self.top)
        completions = part == "full" and not isinstance(container, Text) and are_completions(container)
        if completions:
            container = with_full(container, ".".join(key_parts(self.top)))
        encoded = None if self.input_key is not None else find_input_ids(td, key_parts(self.top), container, part)
        if encoded is not None:
            found, ids_key = encoded
            rows = replace(self, input_key=ids_key)._tokens(found, part, backend)
            return replace(rows, batch_size=batch_of(td, rows.batch_size, ids_key))
        if (mask_key := self._mask_next_to(td, part)) is not None:
            return replace(self, attention_mask_key=mask_key)._tokens(td, part, backend, on_error)
        if isinstance(container, Tokens) and part in container.keys():
            value = nested_field(container, part)
            if value is None:
                rows = self._own_tokens(td, self.top, container, part, backend)
                if completions:
                    problems = unscorable(rows)
                    if on_error == "raise":
                        refuse(problems, ".".join((*key_parts(self.top), "response")))
                    rows = replace(rows, only_response=True, problems=problems)
                return replace(rows, conflicts={}) if key_parts(self.top) == key_parts(self.keys.tokens) else rows
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
            refuse_pads(dense_rows(value), backend.tokenizer, backend.eos_token_ids, key, PADS_ADVICE)
            mask = torch.ones_like(value, dtype=torch.bool)
        shape = batch_of(td, tuple(value.shape[:-1]), self.key(part))
        ids, columns = ids_of_tensor(value, mask, key, self._mask_name)
        rows = InputRows(batch_size=shape, ids=ids, columns=Columns(columns, None))
        assistant = find_value(td, (*key_parts(self.keys.masks), "all_assistant_mask"))
        if part == "prompt" or not isinstance(assistant, Tensor) or assistant.shape != value.shape:
            return rows
        shown = two_dimensional(as_mask(assistant, "masks.all_assistant_mask")).cpu()
        return replace(rows, assistant=ids.with_values(shown[columns]))

    def _as_it_stands(self, td: TensorDictBase, rows: InputRows, backend: Backend) -> InputRows:
        tokens = find_value(td, self.keys.tokens)
        if not isinstance(tokens, Tokens):
            return rows
        if "full" not in tokens.keys():
            return replace(rows, conflicts={0: "tokens are there, but not their `full`"})
        if tuple(tokens.batch_size) != rows.batch_size:
            return replace(rows, conflicts={0: f"tokens of batch {tuple(tokens.batch_size)} are there"})
        # The mask under attention_mask_key is that of the input.
        try:
            own = replace(self, attention_mask_key=None)._own_tokens(td, self.keys.tokens, tokens, "full")
        except InvalidRequestError as error:
            return replace(rows, conflicts={0: str(error)})
        conflicts = differing_rows(own.ids, rows.ids) or differing_splits(own.prompt_lengths, rows.prompt_lengths)
        sampled = self.mode == "text" and self.prefer_tokens and not rows.only_response
        if conflicts and sampled and len(own.ids) == len(rows.ids):
            held = find_value(td, self.top)
            if spelled_by(held, rows, own, conflicts, backend, {"add_special_tokens": True, **self.tokenizer_kwargs}):
                rows, conflicts = replace(rows, ids=own.ids), {}
        if conflicts:
            return replace(rows, conflicts=conflicts)
        return replace(rows, prompt_lengths=own.prompt_lengths, columns=own.columns, conflicts={})

    def _own_tokens(
        self, td: TensorDictBase, top: NestedKey, tokens: Tokens, part: Part, backend: Backend | None = None
    ) -> InputRows:
        """Read `Tokens`. The sequences keep their split and, if dense, their columns.

        Dense tokens without a mask are taken to have no pads. With `backend`, those that begin or end with one are
        refused.
        """
        tokens = unnested(tokens)
        masks = self._masks(td, tokens)
        if masks is None and tokens.padded:
            if backend is not None:
                refuse_pads_of(tokens, key_parts(top), backend.tokenizer, backend.eos_token_ids)
            masks = masks_without_pads(tokens, part)
        # Errors name the mask by its key.
        held = {"tokens": tokens, **({} if masks is None else {self._mask_name: masks})}
        given = TensorDict(held, batch_size=tokens.batch_size)

        def read(container: str, name: str) -> Ragged:
            return ragged(given, (container, name), masks=self._mask_name).to("cpu")

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
        assistant = read(self._mask_name, "all_assistant_mask") if known else None
        if assistant is not None:
            assistant = assistant.with_values(as_mask(assistant.values, "masks.all_assistant_mask"))
        return replace(rows, prompt_lengths=lengths, columns=columns, assistant=assistant)

    def _mask_next_to(self, td: TensorDictBase, part: Part) -> tuple[str, ...] | None:
        """Return the key of the mask next to the ids, if it is to be read as if attention_mask_key named it."""
        if self.attention_mask_key is not None:
            return None
        top, own = key_parts(self.top), find_value(td, (*key_parts(self.keys.masks), "all_attention_mask"))
        if own is not None and self.input_key is None:
            return None
        return mask_next_to(td, top, part, rather=own is None)

    @property
    def _mask_name(self) -> str:
        own = (*key_parts(self.keys.masks), "all_attention_mask")
        return ".".join(own if self.attention_mask_key is None else key_parts(self.attention_mask_key))

    def _mask(self, td: TensorDictBase) -> Any:
        """Return the attention mask, or None."""
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
                raise no_pads(self._mask_name)
            return found
        given = {"all_attention_mask": self._mask(td)}
        if isinstance(found, (TensorDictBase, Masks)) and (
            self.attention_mask_key is None or "all_attention_mask" not in found.keys()
        ):
            given["all_assistant_mask"] = find_value(td, (*key_parts(self.keys.masks), "all_assistant_mask"))
        given = {name: mask for name, mask in given.items() if mask is not None}
        if not given:
            return None
        if not tokens.padded and "all_attention_mask" in given:
            raise no_pads(self._mask_name)
        if tokens.padded and all(isinstance(mask, Tensor) and not mask.is_nested for mask in given.values()):
            return Masks(**given, batch_size=tokens.batch_size)
        return None if 0 in tokens.batch_size else masks_in_rows(given, tokens)

    def _value(self, td: TensorDictBase, part: Part, bare: type | tuple[type, ...]) -> Any:
        """Return the container's `part`, or the bare value at the container's own key."""
        value = find_value(td, self.top)
        if self.mode != "history" and not isinstance(value, (TensorDictBase, Text, Tokens)):
            value = as_list(value)
        if value is None:
            raise MissingKeyError(
                f"the TensorDict has no {'.'.join(self.key(part))!r}; it has: {list_keys(td)}"
                f"{input_hint(td, self.mode, part)}",
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
        hint = hint_for(value, ".".join(key_parts(self.top)), self.mode)
        return InvalidRequestError(f"{key}: expected {expected}, got {kind_of(value)}{hint}", field=key)

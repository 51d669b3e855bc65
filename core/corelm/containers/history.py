"""`History`: conversations in a TensorClass, which slices, stacks and saves; and `ChatHistory`, split ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import NonTensorData, NonTensorStack, TensorClass, TensorDict

from corelm.containers.classes import as_stored, field_readers, objects, unnested
from corelm.errors import InvalidRequestError, refuse
from corelm.rendering.template import Template, check_encodable, map_chats, read_chatml
from corelm.spec.message import FIELDS, Chat, Message, refuse_misspelt, warn_of_roles
from corelm.tensors.lazy_rows import FlatObjects, Shape, flat_source, nested, non_tensors
from corelm.validate import as_list, invalid, read_once


class History(TensorClass["nocast"]):
    """A batch of conversations. Each row is one whole conversation.

    ``History.from_chats([chat_a, chat_b])`` has batch ``(2,)``. Make a History with `from_chats` or `of`, and read it
    with `chats` or `to_chats`. `append` and `extend` return a new History, unless called with ``inplace=True``.
    """

    # A row is {"messages": [dict, …]}. It is one non-tensor, because one TensorClass per message costs six
    # times as much. It is plain data and not `Message` objects, so that memmap writes JSON and not a pickle.
    # It is a dict, because tensordict would take lists of equal length for a batch dimension.
    conversation: Any

    @classmethod
    def from_chats(cls, chats: Sequence[Any]) -> History:
        """Build from lists of messages, each a dict or a `Message`.

        Any sequence is accepted where a list is: a tuple, a numpy array, a pandas Series, a column of `datasets`. One
        chat (a list of messages) has batch ``()``, a list of chats ``(B,)``, lists of lists of chats ``(B, n)``, and so
        on. ``[]`` is a batch ``(0,)`` without chats, and ``[[], []]`` is two chats without messages.

        Raises:
            InvalidRequestError: the lists have an uneven shape, `chats` is an iterator, which can be read
                only once, or messages are malformed; `rows` are the conversations at fault.
        """
        flat, shape = _flatten(chats)
        return cls.of(flat, shape)

    @classmethod
    def of(cls, chats: Iterable[Sequence[Message | Mapping[str, Any]]], batch_size: Sequence[int]) -> History:
        """Build from a flat sequence of chats, in C order of `batch_size`."""
        return cls.wrap(_read_chats(chats), tuple(batch_size))

    @classmethod
    def from_text(cls, texts: str | Sequence[Any]) -> History:
        """Build from texts in ChatML, as ``chat_template="chatml"`` and many models' own templates write it.

        One text has batch ``()``, a list ``(B,)``, and so on. The last turn may lack its ``<|im_end|>``, as
        in ``text.full``; an empty one is a generation prompt and is left out. Texts of other templates are
        refused: a rendering does not tell what the template added.

        A text does not tell who wrote a marker: if a user typed ``<|im_end|>`` and ``<|im_start|>assistant``, that is a
        turn here, as it is to a model that reads the text. A policy's ``history.full`` keeps it as the user's text.

        Raises:
            InvalidRequestError: a text is not ChatML; `rows` are the texts at fault.
        """
        flat, shape = unnested(texts, lambda one: not isinstance(as_list(one), list), "texts in ChatML", "texts")
        problems: dict[int, str] = {}
        chats: list[list[dict[str, Any]]] = []
        for row, text in enumerate(flat):
            try:
                if not isinstance(text, str):
                    raise ValueError(f"expected a str, got {type(text).__name__}{read_once(text)}")
                chats.append(read_chatml(text))
            except ValueError as error:
                problems[row] = str(error)
        refuse(problems, "texts")
        return cls.of(chats, shape)

    @property
    def chats(self) -> tuple[Chat, ...]:
        """The conversations, flat, in C order of the batch."""
        stored = self._stored()
        if isinstance(stored, _Conversations):
            return tuple(tuple(map(_copy, chat)) for chat in stored.chats)
        return tuple(tuple(map(Message.from_dict, row["messages"])) for row in stored)

    def to_chats(self) -> list[Any]:
        """Return lists of dicts: the inverse of `from_chats`. Turns that have `token_ids` keep them."""
        return nested(iter([[message.to_dict() for message in chat] for chat in self.chats]), tuple(self.batch_size))

    def append(self, message: Message | Mapping[str, Any] | Sequence[Any], inplace: bool = False) -> History:
        """Add one message to every conversation.

        Args:
            message: one message for all conversations, or lists of messages nested like the batch.
            inplace: whether to change this History; False returns a new one.

        Raises:
            InvalidRequestError: the lists do not hold one message per conversation, or a message is malformed.
        """
        if _is_message(message):
            return self._add([[message]], inplace, ())
        expected = "one message, or one per conversation (extend takes several)"
        messages, shape = unnested(message, _is_message, expected, "messages")
        return self._add([[one] for one in messages], inplace, shape)

    def extend(self, messages: History | Sequence[Any], inplace: bool = False) -> History:
        """Add several messages to every conversation.

        Args:
            messages: one list of messages for all conversations, or such lists (or a History) shaped like the batch.
            inplace: whether to change this History; False returns a new one.

        Raises:
            InvalidRequestError: there is not one list per conversation, or a message is malformed.
        """
        added, shape = _flatten(messages.to_chats() if isinstance(messages, History) else messages, top=False)
        return self._add(added, inplace, shape)

    def apply_chat_template(
        self,
        tokenizer: Any,
        add_generation_prompt: bool = False,
        tokenize: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Apply the chat template of `tokenizer` to every conversation.

        Return a str for batch ``()``, a list of str for ``(B,)``, and so on. ``tokenize=True`` tokenizes the
        rendered text, so sampled ids are not kept. `LLMPolicy` keeps them.

        Raises:
            TemplateError: there is no template, or it fails; `rows` are the conversations at fault.
            InvalidRequestError: text to be tokenized cannot be encoded; `rows` are the conversations at fault.
        """
        template = Template.find(tokenizer, chat_template, kwargs)
        chats = [[message.for_template() for message in chat] for chat in self.chats]
        if tokenize:
            check_encodable(chats)
        found = map_chats(lambda chat: template(chat, add_generation_prompt, tokenize), chats)
        return nested(iter(found), tuple(self.batch_size))

    # Storage ---------------------------------------------------------------------------------------------------------

    @classmethod
    def wrap(cls, chats: Sequence[Chat], shape: tuple[int, ...]) -> History:
        """Build as `of` does, without copying the messages: nobody else may modify them."""
        if math.prod(shape) != len(chats):
            raise invalid("batch_size", f"{len(chats)} conversations do not fill a batch of shape {shape}")
        return cls.from_tensordict(TensorDict({"conversation": _stack(chats, shape)}, batch_size=shape))

    def _stored(self) -> Sequence[dict[str, Any]]:
        """Return the rows, flat, in C order of the batch."""
        value = self._tensordict.get("conversation")
        source = flat_source(value)
        if isinstance(source, FlatObjects) and isinstance(source.values, _Conversations):
            return source.values
        return objects(value, self.ndim)

    def _add(self, added: Sequence[Sequence[Any]], inplace: bool, shape: Shape) -> History:
        """Add messages, those of one conversation to all if `shape` is ()."""
        batch = tuple(self.batch_size)
        if shape not in ((), batch):
            raise invalid("messages", f"expected those of each conversation of the batch {batch}, got {shape}")
        new = _read_chats(added if shape else [*added] * math.prod(batch))
        chats = [before + after for before, after in zip(self.chats, new, strict=True)]
        return self.set("conversation", _stack(chats, batch)) if inplace else self.wrap(chats, batch)


@field_readers(as_stored)
class ChatHistory(TensorClass["nocast"]):
    """Conversations. Append a message to `full` to get the prompt of the next turn.

    Attributes:
        prompt: the conversation before the response.
        response: the messages of the response.
        full: the prompt followed by the response.
    """

    prompt: History | None = None
    response: History | None = None
    full: History | None = None


@dataclass(eq=False)
class _Conversations(Sequence[dict[str, Any]]):
    """Presents chats as the rows that a History stores. Most are only read back as chats and never become rows."""

    chats: Sequence[Chat]

    def __len__(self) -> int:
        return len(self.chats)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return _Conversations(self.chats[index])
        return {"messages": [message.to_dict() for message in self.chats[index]]}


def _stack(chats: Sequence[Chat], shape: tuple[int, ...]) -> NonTensorData | NonTensorStack:
    if not chats:
        # An empty stack can be neither concatenated nor memmapped; a NonTensorData with an empty batch can.
        return NonTensorData(None, batch_size=shape)
    return non_tensors(_Conversations(chats), shape)


def _copy(message: Message) -> Message:
    """Return a message that shares no dict with the given one, so that the caller may modify its dicts."""
    return Message.from_dict(message.to_dict()) if message.tool_calls or message.extra else message


def _read_chats(chats: Iterable[Sequence[Message | Mapping[str, Any]]]) -> list[Chat]:
    """Return the messages of every chat as `Message` objects; one error names every conversation at fault."""
    read: list[Chat] = []
    problems: dict[int, str] = {}
    for row, chat in enumerate(chats):
        messages: list[Message] = []
        for position, message in enumerate(chat):
            try:
                made = _copy(message) if isinstance(message, Message) else Message.from_dict(message)
                refuse_misspelt(made, message if isinstance(message, Mapping) else FIELDS)
                messages.append(made)
            except InvalidRequestError as error:
                problems.setdefault(row, f"message {position}: {error}")
        read.append(tuple(messages))
    refuse(problems, "history")
    warn_of_roles(read)
    return read


def _flatten(value: Any, top: bool = True) -> tuple[list[Any], Shape]:
    """Return the chats of nested sequences in C order, and the batch shape."""
    expected = "a list of messages, or lists of such lists"
    chats, shape = unnested(value, _is_chat, expected, "history", top)
    return list(map(as_list, chats)), shape


def _is_chat(value: Any) -> bool:
    items = as_list(value)
    return isinstance(items, list) and any(map(_is_message, items))


def _is_message(value: Any) -> bool:
    return isinstance(value, (Message, Mapping))

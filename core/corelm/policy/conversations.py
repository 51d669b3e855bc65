"""Conversations as rows of ids: each with its own tools, as a new turn or as the continuation of the last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase

from corelm.backend.backend import Backend
from corelm.backend.skipping import renumbered
from corelm.containers.reading import key_parts
from corelm.errors import InvalidRequestError, Problems, TemplateError
from corelm.policy.rows import find_value
from corelm.rendering.render import RenderedChats, render
from corelm.spec.message import Chat, Message
from corelm.tensors.ragged import Ragged
from corelm.validate import as_list, shown

Tools = list[Any] | None
_ENDED = (
    "the conversation ends with an assistant turn; give the policy continue_final_message=True to continue that turn, "
    "or add the turn that the next answer replies to"
)


def tools_of(td: TensorDictBase, key: NestedKey | None, shape: tuple[int, ...]) -> tuple[list[Tools] | None, Problems]:
    """Return the tools of each conversation, flat, or None if the TensorDict has none; and the rows that are at fault.

    Raises:
        InvalidRequestError: there is not one list of tools, or None, for each conversation.
    """
    value = None if key is None else find_value(td, key)
    if key is None or value is None:
        return None, {}
    field = ".".join(key_parts(key))

    def flat(one: Any, sizes: tuple[int, ...]) -> list[Any]:
        if not sizes:
            return [one]
        one = as_list(one)
        shared = isinstance(one, list) and one and all(isinstance(each, Mapping) or callable(each) for each in one)
        if shared or not isinstance(one, list) or len(one) != sizes[0]:
            found = f"{len(one)} of them" if isinstance(one, list) else type(one).__name__
            advice = "if it holds something else, give the policy tools_key=None"
            if shared or isinstance(one, Mapping):
                found = "the tools themselves"
                advice = "if all conversations have these, give the policy template_kwargs={'tools': […]} instead"
            raise InvalidRequestError(
                f"{field}: expected a list of tools, or None, for each of the {shape} conversations, got {found}; "
                f"{advice}",
                field=field,
            )
        return [leaf for part in one for leaf in flat(part, sizes[1:])]

    found = [as_list(one) for one in flat(value, shape)]
    problems: Problems = {row: what for row, one in enumerate(found) if (what := _not_tools(one))}
    # Tensordict's own lists are not JSON, and some templates write tools as JSON.
    good = [None if one is None or row in problems else [dict(each) for each in one] for row, one in enumerate(found)]
    return good, problems


def _not_tools(one: Any) -> str:
    """Return why a conversation's tools cannot be read, and how to convert them; "" if they can."""
    if one is None:
        return ""
    odd, where = one, ""
    if isinstance(one, list):
        odd, where = next(((each, "a list with ") for each in one if not isinstance(each, Mapping)), (None, ""))
        if not where:
            return ""
    advice = ""
    if isinstance(odd, str):
        advice = "; if it is JSON, pass json.loads(…) of it"
    elif callable(odd):
        advice = "; pass transformers.utils.get_json_schema(…) of a function"
    return f"expected a list of dicts or None, got {where}{shown(odd)}{advice}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRenderer:
    """Renders conversations, as many at a time as are rendered in the same way.

    Attributes:
        backend: tokenizes and knows the special tokens.
        prompt: whether the assistant's next turn, or the rest of its last one, is to be sampled.
        continue_final_message: whether a prompt may end with an assistant turn, which the answer then continues; None
            lets the answer be a new turn after it.
        prefer_tokens: whether sampled turns keep their ids.
        template_kwargs: variables for the template, for all conversations.
        options: the other arguments of `render`.
    """

    backend: Backend
    prompt: bool
    continue_final_message: bool | None
    prefer_tokens: bool
    template_kwargs: Mapping[str, Any]
    options: Mapping[str, Any]

    def __call__(self, chats: Sequence[Chat], tools: Sequence[Tools] | None, begun: Sequence[Message | None]) -> Any:
        """Return the `RenderedChats`.

        Args:
            tools: the tools of each conversation; None if no conversation has its own.
            begun: for each conversation the turn to continue, as `begin` returned it, or None.

        Raises:
            InvalidRequestError, TemplateError: those of `render`; rows are numbered as in `chats`.
        """
        groups: dict[tuple[bool, str], list[int]] = {}
        for row in range(len(chats)):
            own = "" if tools is None else repr(tools[row])
            groups.setdefault((begun[row] is not None, own), []).append(row)
        if len(groups) <= 1:
            return self._alike(chats, None if not tools else tools[0], begun)
        parts = []
        for rows in groups.values():
            try:
                shared = None if tools is None else tools[rows[0]]
                parts.append(self._alike([chats[row] for row in rows], shared, [begun[row] for row in rows]))
            except (InvalidRequestError, TemplateError) as error:
                raise renumbered(error, torch.tensor(rows)) from error
        places = [row for rows in groups.values() for row in rows]
        order = sorted(range(len(places)), key=places.__getitem__)

        texts = [text for part in parts for text in part.texts]
        masks = [part.assistant for part in parts if part.assistant is not None]
        return RenderedChats(
            ids=Ragged.cat([part.ids for part in parts]).select(order),
            assistant=Ragged.cat(masks).select(order) if len(masks) == len(parts) else None,
            texts=tuple(texts[at] for at in order),
        )

    def begin(self, chats: Sequence[Chat]) -> tuple[list[Message | None], Problems]:
        """Return the assistant turns that end a prompt, without their EOS, and the prompts that cannot be continued."""
        begun: list[Message | None] = [None] * len(chats)
        problems: Problems = {}
        if not self.prompt or self.continue_final_message is None:
            return begun, problems
        if not self.continue_final_message:
            ended = [row for row, chat in enumerate(chats) if chat and chat[-1].role == "assistant"]
            return begun, dict.fromkeys(ended, _ENDED)
        for row, chat in enumerate(chats):
            if not chat or chat[-1].role != "assistant":
                continue
            last = chat[-1]
            if last.content is None or last.tool_calls:
                problems[row] = "its last turn calls tools or has no text, so it cannot be continued; remove that turn"
                continue
            ids = last.token_ids if self.prefer_tokens else None
            while ids and ids[-1] in self.backend.eos_token_ids:
                ids = ids[:-1]
            begun[row] = replace(last, token_ids=ids)
        return begun, problems

    def _alike(self, chats: Sequence[Chat], tools: Tools, begun: Sequence[Message | None]) -> RenderedChats:
        kwargs = self.template_kwargs if tools is None else {**self.template_kwargs, "tools": tools}
        continues = bool(begun) and begun[0] is not None
        given = [chat if turn is None else (*chat[:-1], turn) for chat, turn in zip(chats, begun, strict=True)]
        return render(
            given,
            tokenizer=self.backend.tokenizer,
            tokenize=self.backend.tokenize,
            eos_ids=self.backend.eos_token_ids,
            add_generation_prompt=self.prompt and not continues,
            continue_final_message=continues,
            template_kwargs=kwargs,
            prefer_tokens=self.prefer_tokens,
            **self.options,
        )

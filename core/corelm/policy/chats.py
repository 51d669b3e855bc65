"""Conversations and their tools, and how they are rendered to prompts and to sequences."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from corelm.backend.backend import Backend
from corelm.backend.skipping import renumbered
from corelm.errors import InvalidRequestError, Problems, TemplateError
from corelm.rendering.render import RenderedChats, render
from corelm.spec.message import Chat, Message
from corelm.tensors.ragged import Ragged
from corelm.validate import as_list, invalid, shown

Tools = list[Any] | None


def tools_of(given: Any, field: str, shape: tuple[int, ...]) -> tuple[list[Tools], Problems]:
    """Return the tools of each conversation, flat, and the rows whose tools cannot be read.

    Raises:
        InvalidRequestError: there is not one list of tools, or None, for each conversation.
    """

    def flat(one: Any, sizes: tuple[int, ...]) -> list[Any]:
        if not sizes:
            return [one]
        one = as_list(one)
        shared = isinstance(one, list) and one and all(isinstance(each, Mapping) or callable(each) for each in one)
        if shared or not isinstance(one, list) or len(one) != sizes[0]:
            raise invalid(
                field,
                f"expected a list of tools, or None, for each of the {shape} conversations, got {shown(one)}. Tools of "
                "all conversations are given as template_kwargs={'tools': […]}; tools_key=None reads none",
            )
        return [leaf for part in one for leaf in flat(part, sizes[1:])]

    found = [as_list(one) for one in flat(given, shape)]
    problems: Problems = {}
    for row, one in enumerate(found):
        if one is not None and not (isinstance(one, list) and all(isinstance(each, Mapping) for each in one)):
            problems[row] = (
                f"expected a list of dicts or None, got {shown(one)}; json.loads reads JSON, and "
                "transformers.utils.get_json_schema describes a function"
            )
    # Tensordict's own lists are not JSON, and some templates write tools as JSON.
    good = [None if one is None or row in problems else [dict(each) for each in one] for row, one in enumerate(found)]
    return good, problems


#: Why a prompt that ends with an assistant turn is refused unless that turn is to be continued.
_ENDED = (
    "the conversation ends with an assistant turn; give the policy continue_final_message=True to continue that turn, "
    "None to sample a new one after it, or add the turn that the next answer replies to"
)


def final_turns(
    chats: Sequence[Chat], continues: bool, eos_ids: Collection[int] | None, ended: str = _ENDED
) -> tuple[list[Message | None], Problems]:
    """Return the assistant turn that ends each prompt, or None, and the prompts that cannot be answered.

    Args:
        continues: whether the answer continues such a turn. If not, a prompt that has one is refused.
        ended: what is said about it.
        eos_ids: what the ids of a sampled turn may end with, to be left out; None leaves out the ids.
    """
    begun: list[Message | None] = []
    problems: Problems = {}
    for row, chat in enumerate(chats):
        last = chat[-1] if chat and chat[-1].role == "assistant" else None
        if last is not None and not continues:
            problems[row], last = ended, None
        if last is not None and (last.content is None or last.tool_calls):
            problems[row] = "its last turn calls tools or has no text, so it cannot be continued; remove that turn"
            last = None
        if last is not None:
            ids = None if eos_ids is None else last.token_ids
            while ids and eos_ids and ids[-1] in eos_ids:
                ids = ids[:-1]
            last = replace(last, token_ids=ids)
        begun.append(last)
    return begun, problems


def render_chats(
    backend: Backend,
    chats: Sequence[Chat],
    tools: Sequence[Tools] | None = None,
    begun: Sequence[Message | None] | None = None,
    *,
    prompt: bool,
    template_kwargs: Mapping[str, Any],
    **options: Any,
) -> RenderedChats:
    """Render conversations, as many at a time as are rendered in the same way.

    Args:
        tools: the tools of each conversation; None if no conversation has its own.
        begun: for each conversation the turn that the answer continues, as `final_turns` returned it, or None.
        prompt: whether the assistant's next turn, or the rest of its last one, is to be sampled.
        options: the other arguments of `render`.

    Raises:
        InvalidRequestError, TemplateError: those of `render`; rows are numbered as in `chats`.
    """

    engine = backend.engine
    options |= {"tokenizer": engine.tokenizer, "tokenize": backend.tokenize, "eos_ids": engine.eos_token_ids}
    if tools is None and begun is None:
        return render(chats, add_generation_prompt=prompt, template_kwargs=template_kwargs, **options)
    tools, begun = tools or [None] * len(chats), begun or [None] * len(chats)
    groups: dict[tuple[bool, str], list[int]] = {}
    for row, own in enumerate(tools):
        groups.setdefault((begun[row] is not None, "" if own is None else repr(own)), []).append(row)
    parts = []
    for (continues, _), rows in groups.items():
        some, own = [chats[row] for row in rows], tools[rows[0]]
        if continues:
            turns = zip(some, [begun[row] for row in rows], strict=True)
            some = [(*chat[:-1], turn) for chat, turn in turns if turn is not None]
        try:
            made = render(
                some,
                add_generation_prompt=prompt and not continues,
                continue_final_message=continues,
                template_kwargs=template_kwargs if own is None else {**template_kwargs, "tools": own},
                **options,
            )
        except (InvalidRequestError, TemplateError) as error:
            raise renumbered(error, torch.tensor(rows)) from error
        parts.append(made)
    places = [row for rows in groups.values() for row in rows]
    order = sorted(range(len(places)), key=places.__getitem__)
    texts = [text for part in parts for text in part.texts]
    masks = [part.assistant for part in parts if part.assistant is not None]
    return RenderedChats(
        ids=Ragged.cat([part.ids for part in parts]).select(order),
        assistant=Ragged.cat(masks).select(order) if len(masks) == len(parts) else None,
        texts=tuple([texts[at] for at in order]),
    )

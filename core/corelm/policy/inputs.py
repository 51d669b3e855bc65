"""From a user's TensorDict to flat rows of token ids. Nothing here runs a model.

The three input modes read three keys. `history` and `text` are rendered and tokenized; `tokens` are taken as
they are. The value is a container with a `prompt` (to generate from) or a `full` (to score), or a bare value at
the top key. A `Text` or `Tokens` with `prompt` and `response`, but no `full`, holds completions: only the responses
are scored, as loglikelihoods, multiple choice and preference pairs need it.

A pad is never guessed: dense ids without a mask are taken to have no pads, and refused if a row begins or ends
with the tokenizer's pad id.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, is_non_tensor
from torch import Tensor

from corelm.backend.arguments import not_texts, refuse_pads, rows_of_ids
from corelm.backend.backend import Backend
from corelm.backend.skipping import ServedRows, renumbered
from corelm.containers.classes import Masks, Text, Tokens, is_padded, must_have_lengths, ragged_rows, read_rows
from corelm.containers.classes import rows as rows_of
from corelm.containers.history import ChatHistory, History
from corelm.containers.reading import key_parts, list_keys
from corelm.errors import (
    InvalidRequestError,
    MissingKeyError,
    Problems,
    TemplateError,
    TokenBoundaryWarning,
    first_few,
    level_of_caller,
    refuse,
)
from corelm.policy.options import PolicyOptions
from corelm.policy.rows import InputRows
from corelm.rendering.encoding import NO_COMPLETION, NO_PROMPT, encode_completions
from corelm.rendering.render import RenderedChats, render
from corelm.spec.message import Chat, Message
from corelm.spec.records import Columns, TokenizeRequest, TokenizeResult
from corelm.tensors.ragged import Ragged, as_mask, is_integer, unreadable
from corelm.validate import as_list, invalid, read_once, shown

Part = Literal["prompt", "full"]
Key = tuple[str, ...]
Tools = list[Any] | None
#: How each mode's input is passed.
PASSED = {"history": "history=History.from_chats(…)", "text": "text=[…]", "tokens": "tokens=[…]"}
#: What to do about pads without a mask; follows "…, pads would be read as tokens; ".
_PADS_ADVICE = (
    "put the tokenizer's attention_mask into the TensorDict, next to the ids or under a key that you pass as "
    "attention_mask_key; or pass rows without pads: Tokens.from_rows(prompt=[[…], […]]). If these ids are tokens, pass "
    "a mask of ones: torch.ones_like(ids)"
)
#: Why an attention mask that hides tokens is not applied; follows its name, for which "{0}" stands.
_NO_PADS = (
    "tokens in rows of unequal length (padded=False) have no pads; leave their attention mask out, or, if the rows do "
    "hold pads, make the Tokens with padded=True"
)
_UNCLEAR = (
    "it has the shape of the answers that the TensorDict holds, but may be that of their prompts; give the policy "
    "attention_mask_key={0!r} to apply it, or delete it"
)
_REPEAT = "give each response a prompt, in a batch of the same shape: repeat the prompt for every one of its responses"


def find_value(td: TensorDictBase, key: NestedKey) -> Any:
    """Return the value at the key, or None. Bare rows of different lengths, stacked lazily, come back as a list."""
    try:
        value = td.get(key, None)
    except RuntimeError:
        return td.get(key, as_list=True) if key in td.keys(include_nested=True) else None
    except ValueError:
        if key in td.keys(include_nested=True):
            raise
        return None  # the first part of the key is that of a tensor
    return td[key] if is_non_tensor(value) else value


class InputReader:
    """Reads rows as the options of a policy say.

    Attributes:
        keys: by part, the key that is read, for example ``("history", "prompt")``.
        read: returns the rows of a part, with ids on the CPU. A row that cannot be read is left empty and
            added to `problems` if such are skipped.
    """

    def __init__(self, options: PolicyOptions) -> None:
        self._options, mode = options, options.input_mode
        self.read = {"history": self._chats, "text": self._texts, "tokens": self._tokens}[mode]
        #: Whether the container's own key is read, and the key of the container, or of the bare value.
        self._own_key = options.input_key is None
        self._top = key_parts(getattr(options.keys, mode) if options.input_key is None else options.input_key)
        self.keys: dict[str, tuple[str, ...]] = {
            part: (*self._top, part) if self._own_key else self._top for part in ("prompt", "full")
        }
        self._tokens_key, self._masks_key = key_parts(options.keys.tokens), key_parts(options.keys.masks)
        given = options.attention_mask_key
        self._given_mask = None if given is None else key_parts(given)
        self._tokenizing = {"add_special_tokens": True, **options.tokenizer_kwargs}
        self._skips = options.on_error == "skip"

    def sequences(self, td: TensorDictBase, backend: Backend, want_assistant: bool) -> InputRows:
        """Return the whole sequences of `td`.

        They may also be in `td` as `Tokens`, next to what is read. If the ids are equal, or a text was sampled as those
        ids, the sequences keep the ids, the layout and the split of those tokens, so that two scorings of one batch
        line up; if not, `conflicts` says where.
        """
        rows = self.read(td, "full", backend, want_assistant)
        if self._options.input_mode == "tokens" and self._own_key:
            return rows
        return self._joining_tokens(td, rows, backend)

    # Conversations ---------------------------------------------------------------------------------------------------

    def _chats(self, td: TensorDictBase, part: Part, backend: Backend, want_assistant: bool) -> InputRows:
        options, name = self._options, ".".join(self.keys[part])
        history = self._value(td, find_value(td, self._top), part, name, bare=History)
        if not isinstance(history, History):
            raise _wrong(name, "a History (see History.from_chats)", history)
        shape, chats = tuple(history.batch_size), history.chats
        if td.batch_dims and tuple(td.batch_size) != shape:
            raise _other_batch(td, shape, name)
        tools: list[Any] | None = None
        begun: list[Message | None] | None = None
        problems: Problems = {}
        if options.tools_key is not None and (given := find_value(td, options.tools_key)) is not None:
            tools, problems = tools_of(given, ".".join(key_parts(options.tools_key)), shape)
            self._refuse_unless_skipped(problems, ".".join(key_parts(options.tools_key)))
        if part == "prompt" and options.continue_final_message is not None:
            eos_ids = backend.engine.eos_token_ids if options.prefer_tokens else None
            begun, bad = final_turns(chats, options.continue_final_message, eos_ids)
            self._refuse_unless_skipped(bad, name)
            problems = bad | problems
            begun = begun if any(begun) else None
        rendered = render_chats(
            backend,
            chats,
            tools,
            begun,
            prompt=part == "prompt",
            problems=problems if self._skips else None,
            prefer_tokens=options.prefer_tokens,
            template_kwargs=options.template_kwargs,
            chat_template=options.chat_template,
            want_assistant=want_assistant,
        )
        retokenized = None
        if not options.prefer_tokens:
            sampled = [any(turn.token_ids is not None for turn in chat) for chat in chats]
            retokenized = tuple(some and row not in problems for row, some in enumerate(sampled))
        return InputRows(
            batch_size=shape,
            ids=rendered.ids,
            texts=rendered.texts,
            chats=chats,
            begun=None if begun is None else tuple(begun),
            tools=None if tools is None else tuple(tools),
            assistant=rendered.assistant,
            retokenized=retokenized,
            problems=problems,
        )

    # Texts -----------------------------------------------------------------------------------------------------------

    def _texts(self, td: TensorDictBase, part: Part, backend: Backend, want_assistant: bool) -> InputRows:
        held, name = find_value(td, self._top), ".".join(self.keys[part])
        fields = {*held.keys()} if isinstance(held, (Text, TensorDictBase)) else set()
        if part == "full" and "full" not in fields and fields >= {"prompt", "response"}:
            return self._completions(td, held, backend)
        if isinstance(held, list) and {*map(type, held)} == {str}:
            texts: list[Any] = list(held)
            shape: tuple[int, ...] = (len(held),)
        else:
            texts, shape = _leaves(self._value(td, held, part, name, bare=(str, list, Tensor)))
        if isinstance(held, Text):
            # Empty nested lists do not show their shape.
            shape = tuple(held.batch_size)
            if len(texts) != math.prod(shape):
                raise invalid(name, f"{len(texts)} texts do not fill a batch of shape {shape}")
        if td.batch_dims and tuple(td.batch_size) != shape:
            raise _other_batch(td, shape, name)
        if problems := not_texts(texts):
            self._refuse_unless_skipped(problems, name)
            read = ServedRows.without(problems, len(texts))
            texts = [text for row, text in enumerate(texts) if row not in problems]
        ids, good = _tokenized(backend, texts, **self._tokenizing).ids, tuple(texts)
        if problems:
            ids, good = read.ragged(ids), read.values(texts, "")
        return InputRows(batch_size=shape, ids=ids, texts=good, problems=problems)

    def _completions(self, td: TensorDictBase, held: Any, backend: Backend) -> InputRows:
        """Return the rows of prompts and responses.

        Responses may have more batch dimensions than prompts: each prompt then has several responses.
        """
        name = ".".join((*self._top, "response"))
        (prompts, outer), (responses, shape) = _leaves(_field(held, "prompt")), _leaves(_field(held, "response"))
        if 0 in held.batch_size:
            outer = shape = tuple(held.batch_size)
        if any(isinstance(one, list) for one in responses):
            raise invalid(name, f"prompts have different numbers of responses; {_REPEAT}")
        if shape[: len(outer)] != outer:
            raise invalid(name, f"prompts are {outer}, responses {shape}; {_REPEAT}")
        if td.batch_dims and tuple(td.batch_size) != shape[: td.batch_dims]:
            raise _other_batch(td, shape[: td.batch_dims], name)
        prompts = [prompt for prompt in prompts for _ in range(math.prod(shape[len(outer) :]))]
        problems = {row: f"response: {what}" for row, what in not_texts(responses).items()}
        problems |= {row: f"prompt: {what}" for row, what in not_texts(prompts).items()}
        read = ServedRows.without(problems, len(responses))
        number = read.index.tolist()
        first, rest = ([texts[row] for row in number] for texts in (prompts, responses))
        tokenize, boundary = partial(_tokenized, backend), self._options.completion_boundary
        encoded = encode_completions(tokenize, first, rest, boundary, self._tokenizing)
        problems |= {number[row]: what for row, what in encoded.problems.items()}
        self._refuse_unless_skipped(problems, name)
        if encoded.merged:
            rows = first_few([str(number[row]) for row in encoded.merged])
            warnings.warn(
                f"{name}: rows {rows}: a token holds the end of the prompt and the beginning of the response, and is "
                "not scored, as in lm-eval. Begin the responses with a space, or pass completion_boundary='separate'",
                TokenBoundaryWarning,
                stacklevel=level_of_caller(),
            )
        starts = torch.zeros(len(responses), dtype=torch.int64).index_copy(0, read.index, encoded.starts)
        asked, said = read.values(first, ""), read.values(rest, "")
        return InputRows(
            batch_size=shape,
            ids=read.ragged(encoded.ids),
            texts=tuple(one + other for one, other in zip(asked, said, strict=True)),
            prompt_lengths=starts,
            only_response=True,
            parts=(asked, said),
            problems=problems,
        )

    # Tokens ----------------------------------------------------------------------------------------------------------

    def _tokens(self, td: TensorDictBase, part: Part, backend: Backend, want_assistant: bool) -> InputRows:
        holder, top, name, own_key = td, self._top, ".".join(self.keys[part]), self._own_key
        held = find_value(td, top)
        plain = isinstance(held, TensorDictBase)
        fields = {*held.keys()} if plain or isinstance(held, Tokens) else set()
        completions = part == "full" and "full" not in fields and fields >= {"prompt", "response"}
        bare = own_key and not completions and not isinstance(held, (Tensor, Tokens))
        if bare and (batch := input_ids_of(td, top, held, part)):
            holder, top = batch
            held, name, own_key, plain, fields = find_value(holder, top), ".".join(top), False, False, set()
        found = held
        if plain and completions:
            parts = {each: as_list(find_value(held, each)) for each in ("prompt", "response")}
            if any(isinstance(ids, list) for ids in parts.values()):
                # tensordict makes a tensor of rows that happen to be equally long.
                found = Tokens.from_rows(**{each: list(ids) for each, ids in parts.items()})
            else:
                found = Tokens(**parts, batch_size=held.batch_size or parts["prompt"].shape[:-1])
        elif not isinstance(held, Tensor) and not (isinstance(held, Tokens) and (completions or part in fields)):
            found = self._value(holder, held, part, name, bare=(Tensor, list))
        cells = _cells(found, part, name)
        masks, mask_key = find_value(holder, self._masks_key), self._given_mask
        has_masks = isinstance(masks, (Masks, TensorDictBase)) and "all_attention_mask" in masks.keys()
        if mask_key is not None and mask_key not in holder.keys(include_nested=True):
            given = ".".join(mask_key)
            raise MissingKeyError(
                f"the TensorDict has no {given!r}, which attention_mask_key names{list_keys(holder, mask_key)}",
                field="attention_mask_key",
            )
        # In the plain TensorDict that holds the ids, or next to it. The name may begin as that of the ids does:
        # ``chosen_attention_mask`` for ``chosen_input_ids``.
        *path, own = top
        stem = own.removesuffix("input_ids") if own.endswith("input_ids") else own.removesuffix("ids")
        near: list[Key] = [(*top, "attention_mask")] if plain else []
        near += [(*path, f"{stem}attention_mask")] if stem not in (own, "") else []
        near = list(filter(holder.keys(include_nested=True).__contains__, [*near, (*path, "attention_mask")]))
        if near and mask_key is None and not (has_masks and own_key):
            whole = cells.ids
            if part == "prompt" and "full" in fields:
                whole = _cells(find_value(held, "full") if plain else held, "full", name).ids
            unsure = _UNCLEAR if {"response", "full"} <= fields else _NO_PADS if cells.in_rows and not plain else None
            mask_key, misfit = _mask_among(near, holder, top, whole.lengths.tolist(), unsure)
            if misfit is not None and not has_masks:
                if fields:
                    raise InvalidRequestError(
                        f"{'.'.join(misfit)}: its rows are not as wide as those of the tokens under {'.'.join(top)!r}; "
                        "give the mask of prompt and response together if both are read, or delete it",
                        field="masks",
                    )
                mask_key = misfit
        rows = read_ids(
            cells,
            part,
            masks,
            None if mask_key is None else find_value(holder, mask_key),
            top=".".join(top),
            name=name,
            mask_name=".".join(mask_key or (*self._masks_key, "all_attention_mask")),
            backend=backend,
        )
        if completions:
            rows = self._scorable(rows)
        if cells.container is not None and top == self._tokens_key:
            rows = replace(rows, conflicts={})
        if td.batch_dims and tuple(td.batch_size) != rows.batch_size:
            raise _other_batch(td, rows.batch_size, name)
        return rows

    def _scorable(self, rows: InputRows) -> InputRows:
        """Return completions, with those that have nothing to score among their problems."""
        prompts = rows.prompt_lengths
        assert prompts is not None
        problems: Problems = dict.fromkeys((rows.ids.lengths <= prompts).nonzero().flatten().tolist(), NO_COMPLETION)
        problems |= dict.fromkeys((prompts == 0).nonzero().flatten().tolist(), NO_PROMPT)
        self._refuse_unless_skipped(problems, ".".join((*self._top, "response")))
        return replace(rows, only_response=True, problems=problems)

    def _joining_tokens(self, td: TensorDictBase, rows: InputRows, backend: Backend) -> InputRows:
        """Return the rows with the layout of the `Tokens` next to them, or with what keeps them from joining these."""
        tokens = find_value(td, self._tokens_key)
        if not isinstance(tokens, Tokens):
            return rows
        if "full" not in tokens.keys():
            return replace(rows, conflicts={0: "tokens are there, but not their `full`"})
        if tuple(tokens.batch_size) != rows.batch_size:
            return replace(rows, conflicts={0: f"tokens of batch {tuple(tokens.batch_size)} are there"})
        # The mask under attention_mask_key is that of the input.
        try:
            mask_name = ".".join((*self._masks_key, "all_attention_mask"))
            cells = _cells(tokens, "full", "tokens.full")
            own = read_ids(cells, "full", find_value(td, self._masks_key), mask_name=mask_name)
        except InvalidRequestError as error:
            return replace(rows, conflicts={0: str(error)})
        conflicts, starts = _differing(own.ids, rows.ids), rows.prompt_lengths
        if not conflicts and starts is not None:
            if own.prompt_lengths is None:
                conflicts = {0: "the tokens that are there are not split into prompt and response"}
            else:
                others = (own.prompt_lengths != starts).nonzero().flatten().tolist()
                conflicts = dict.fromkeys(others, "the prompt that is there has another length")
        options = self._options
        is_text = options.input_mode == "text" and options.prefer_tokens and not rows.only_response
        if conflicts and is_text and self._spelled_by(find_value(td, self._top), rows, own, conflicts, backend):
            rows, conflicts = replace(rows, ids=own.ids), {}
        if conflicts:
            return replace(rows, conflicts=conflicts)
        return replace(rows, prompt_lengths=own.prompt_lengths, columns=own.columns, conflicts={})

    def _spelled_by(self, held: Any, read: InputRows, own: InputRows, at: Collection[int], backend: Backend) -> bool:
        """Return whether a text was sampled as these ids: its prompt's own ids, and ids that decode to its response.

        Tokenized again, a response may become other ids: the text has no EOS, and one text has many spellings. Only a
        `Text` with a prompt and a response can tell; the rows `at` are looked at.
        """
        parts = own.tokens
        if not isinstance(held, Text) or not {"prompt", "response"} <= set(held.keys()) or parts.prompt is None:
            return False
        rows = torch.tensor(sorted(at), dtype=torch.int64)
        prompts, responses = ([_leaves(each)[0][row] for row in rows.tolist()] for each in (held.prompt, held.response))
        if not_texts(prompts) or not_texts(responses) or read.texts is None:
            return False
        if [one + other for one, other in zip(prompts, responses, strict=True)] != [read.texts[row] for row in rows]:
            return False
        again = _tokenized(backend, prompts, **self._tokenizing).ids
        if _differing(parts.prompt.select(rows), again):
            return False
        assert parts.response is not None
        decoded = (
            backend.detokenize(parts.response.select(rows), skip_special_tokens=skip, before=before)
            for skip in (True, False)
            for before in (parts.prompt.select(rows), None)
        )
        spellings = zip(*decoded, strict=True)
        return all(response in found for response, found in zip(responses, spellings, strict=True))

    def _refuse_unless_skipped(self, problems: Problems, field: str) -> None:
        if problems and not self._skips:
            refuse(problems, field)

    # Values ----------------------------------------------------------------------------------------------------------

    def _value(self, td: TensorDictBase, held: Any, part: Part, name: str, bare: type | tuple[type, ...]) -> Any:
        """Return the `part` of the container `held`, or `held` itself if it is a bare value."""
        mode = self._options.input_mode
        if mode != "history" and not isinstance(held, (Tensor, TensorDictBase, Text, Tokens)):
            held = as_list(held)
        if held is None:
            # A whole sequence under the key of its prompt would be scored without its response.
            other_key = " or input_key" if part == "prompt" else ""
            raise MissingKeyError(
                f"the TensorDict has no {name!r}{list_keys(td, name)}. Pass TensorDict({PASSED[mode]}), or give "
                f"the policy another input_mode{other_key}",
                field=name,
            )
        if isinstance(held, bare):
            return held
        if not isinstance(held, (ChatHistory, Text, Tokens, TensorDictBase)):
            raise _wrong(name, f"{PASSED[mode]}, or a container of {mode}", held)
        found = _field(held, part)
        if found is None:
            raise MissingKeyError(
                f"{'.'.join(self._top)!r} holds no {part!r}, which this policy reads{list_keys(td, name)}",
                field=name,
            )
        return found


# Conversations -------------------------------------------------------------------------------------------------------


def tools_of(given: Any, field: str, shape: tuple[int, ...]) -> tuple[list[Tools], Problems]:
    """Return the tools of each conversation, flat, and the rows whose tools cannot be read."""

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
    problems: Problems | None = None,
    **options: Any,
) -> RenderedChats:
    """Render conversations, as many at a time as are rendered in the same way.

    Args:
        tools: the tools of each conversation; None if no conversation has its own.
        begun: for each conversation the turn that the answer continues, as `final_turns` returned it, or None.
        prompt: whether the assistant's next turn, or the rest of its last one, is to be sampled.
        problems: conversations that are left empty. Those that cannot be rendered are added; None refuses them.
        options: the others of `render` and `segments_of`. So are the errors, with rows as in `chats`.
    """
    engine = backend.engine
    options |= {"tokenizer": engine.tokenizer, "tokenize": backend.tokenize, "eos_ids": engine.eos_token_ids}
    if tools is None and begun is None and problems is None:
        return render(chats, add_generation_prompt=prompt, template_kwargs=template_kwargs, **options)
    tools, begun = tools or [None] * len(chats), begun or [None] * len(chats)
    groups: dict[tuple[bool, str], list[int]] = {}
    for row, own in enumerate(tools):
        if row not in (problems or ()):
            groups.setdefault((begun[row] is not None, "" if own is None else repr(own)), []).append(row)
    parts, numbers = list[RenderedChats](), list[int]()
    for (continues, _), group in (groups or {(False, ""): []}).items():
        own = tools[group[0]] if group else None
        made: RenderedChats | None = None
        while made is None:
            rows = [row for row in group if row not in (problems or ())]
            some = [(*chats[row][:-1], begun[row]) if continues else chats[row] for row in rows]
            try:
                made = render(
                    some,  # type: ignore[arg-type]  # where the answers continue turns, each row has begun one
                    add_generation_prompt=prompt and not continues,
                    continue_final_message=continues,
                    template_kwargs=template_kwargs if own is None else {**template_kwargs, "tools": own},
                    **options,
                )
            except (InvalidRequestError, TemplateError) as error:
                if problems is None or not error.problems:
                    raise renumbered(error, torch.tensor(rows)) from error
                # Conversations are refused for several reasons, each with an error of its own.
                problems |= {rows[at]: what for at, what in error.problems.items()}
        parts.append(made)
        numbers += rows
    read = ServedRows.without(problems or (), len(chats))
    order = sorted(range(len(numbers)), key=numbers.__getitem__)
    texts = [text for part in parts for text in part.texts]
    masks = [part.assistant for part in parts if part.assistant is not None]
    return RenderedChats(
        ids=read.ragged(Ragged.cat([part.ids for part in parts]).select(order)),
        assistant=read.ragged(Ragged.cat(masks).select(order)) if len(masks) == len(parts) else None,
        texts=read.values([texts[at] for at in order], ""),
    )


# Values --------------------------------------------------------------------------------------------------------------


def _wrong(name: str, expected: str, value: Any) -> InvalidRequestError:
    kind, advice = type(value), read_once(value)
    if kind.__module__.partition(".")[0] == "torchrl":
        advice = f" of {kind.__module__}; convert it with corelm_interop.torchrl.from_torchrl, or use its EnvPolicy"
    return invalid(name, f"expected {expected}, got {kind.__name__}{advice}")


def _other_batch(td: TensorDictBase, found: tuple[int, ...], name: str) -> InvalidRequestError:
    return invalid(name, f"its batch is {found}, but the TensorDict's is {tuple(td.batch_size)}")


def _field(held: Any, name: str) -> Any:
    """Return a field of a container or of a plain TensorDict; None if it is not there."""
    return find_value(held, name) if isinstance(held, TensorDictBase) else getattr(held, name)


def _leaves(value: Any) -> tuple[list[Any], tuple[int, ...]]:
    """Return the leaves of nested sequences in C order, and the shape. Sequences of unequal length are leaves."""
    if isinstance(value, Tensor) and value.numel() == 0:
        # tensordict turns an empty list into an empty tensor.
        return [], (0,)
    value = as_list(value)
    if not isinstance(value, list):
        return [value], ()
    if {*map(type, value)} <= {str}:
        return value, (len(value),)
    parts = [_leaves(item) for item in value]
    shapes = {shape for _, shape in parts}
    if len(shapes) > 1:
        return value, (len(value),)
    return [leaf for flat, _ in parts for leaf in flat], (len(value), *(shapes.pop() if shapes else ()))


def _tokenized(backend: Backend, texts: Sequence[str], **options: Any) -> TokenizeResult:
    """Tokenize texts. One that begins with BOS itself, as rendered prompts do, does not get a second."""
    batch: TokenizeResult = backend.engine.convert("tokenize", TokenizeRequest(texts=tuple(texts), **options))
    bos = getattr(backend.engine.tokenizer, "bos_token_id", None)
    if bos is None:
        return batch
    values, lengths = batch.ids.values, batch.ids.lengths
    if not bool(((values[1:] == bos) & (values[:-1] == bos)).any()):
        return batch
    starts = batch.ids.offsets[:-1]
    long = (lengths > 1).nonzero()[:, 0]
    twice = long[(values[starts[long]] == bos) & (values[starts[long] + 1] == bos)]
    return replace(batch, ids=batch.ids.slice(torch.zeros_like(lengths).index_fill(0, twice, 1)))


def _differing(there: Ragged, ours: Ragged) -> Problems:
    """Return how rows of ids differ; an empty dict if they are equal. Both are on the CPU, with as many rows."""
    if torch.equal(there.lengths, ours.lengths) and torch.equal(there.values, ours.values):
        return {}
    pairs = enumerate(zip(there.tolist(), ours.tolist(), strict=True))
    return {
        row: f"{len(one)} tokens are there, and {len(other)} other ones were read"
        for row, (one, other) in pairs
        if one != other
    }


# Ids and their pads --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Cells:
    """Ids as they are held, pads included, on the CPU.

    Attributes:
        ids: the rows, in C order of `shape`.
        shape: the batch size.
        width: that of a dense tensor; None if the ids are in rows.
        container: the `Tokens` that hold them; None for bare ids.
        in_rows: whether that is not padded.
        padded: whether rows may have pads.
    """

    ids: Ragged
    shape: tuple[int, ...]
    width: int | None
    container: Tokens | None
    in_rows: bool
    padded: bool


def _cells(held: Any, part: str, name: str) -> _Cells:
    """Return the ids in a field of `Tokens`, in a tensor ``[*batch, width]``, a nested tensor or rows in a list.

    The `full` of `Tokens` that have none is their prompt, followed by their response.
    """
    container = held if isinstance(held, Tokens) else None
    value, shape, in_rows = held, None, False
    if container is not None:
        if part not in container.keys():
            key = name.removesuffix(".full")
            first, rest = (_cells(container, each, f"{key}.{each}") for each in ("prompt", "response"))
            if first.shape != rest.shape:
                raise invalid(f"{key}.response", f"prompts are {first.shape}, responses {rest.shape}; {_REPEAT}")
            width = None if first.width is None or rest.width is None else first.width + rest.width
            return replace(first, ids=first.ids.join(rest.ids), width=width)
        shape, in_rows = tuple(container.batch_size), not is_padded(container)
        if in_rows:
            ids = ragged_rows(container, part)
            if ids.values.dtype != torch.int64 or ids.values.ndim != 1 or ids.values.is_meta:
                ids = rows_of_ids(ids, name)
            return _Cells(ids.to("cpu"), shape, None, container, True, False)
        value = _field_or_rows(container, part)
    if isinstance(value, Tensor) and not value.is_nested:
        if why := unreadable(value):
            raise invalid(name, f"expected a dense tensor, got {why}")
        if value.ndim == 0:
            raise invalid(name, "expected token ids along the last dimension, got a single number")
        if value.dtype != torch.int64 and not is_integer(value):
            raise invalid(name, f"expected one integer per token, got {value.dtype}{list(value.shape)}")
        # A copy, because the caller may write to the tensor while a request waits.
        values, shape, width = value.to("cpu", torch.int64, copy=True), tuple(value.shape[:-1]), value.shape[-1]
        lengths = torch.full((math.prod(shape),), width)
        return _Cells(Ragged(values.reshape(-1), lengths), shape, width, container, False, True)
    ids = rows_of_ids(value, name).to("cpu")
    nested = isinstance(value, Tensor)
    shape = (len(ids),) if shape is None or nested else shape
    return _Cells(ids, shape, None, container, False, container is not None and not nested)


def _field_or_rows(container: Any, name: str) -> Any:
    """Return a field of a dense container; a list of its rows, if they are padded to different widths."""
    try:
        return getattr(container, name)
    except InvalidRequestError:
        return [getattr(row, name) for row in rows_of(container)]


def read_ids(
    cells: _Cells,
    part: Part,
    masks: Any,
    attention: Any = None,
    *,
    top: str = "tokens",
    name: str = "tokens.full",
    mask_name: str = "masks.all_attention_mask",
    backend: Backend | None = None,
) -> InputRows:
    """Return ids without their pads. Sequences keep their split and, if dense, their columns.

    Args:
        part: "full" reads the mask of the assistant's tokens as well.
        masks: what is under the key of the masks: `Masks` or a plain TensorDict, or nothing that is read.
        attention: an attention mask that is read instead of theirs; None reads theirs.
        backend: refuses dense ids without a mask that begin or end with its pad id; None looks for no pads.
    """
    container, ids = cells.container, cells.ids
    at_fault = name if container is None else mask_name
    theirs = masks.keys() if isinstance(masks, (Masks, TensorDictBase)) else ()
    mask = said = None
    in_rows, others = False, attention is not None and isinstance(masks, Masks) and "all_attention_mask" in theirs
    if isinstance(masks, Masks):
        with suppress(InvalidRequestError):  # a stack of both layouts
            in_rows = not is_padded(masks)
    if attention is not None:
        mask = _mask_rows(attention, at_fault)
    elif "all_attention_mask" in theirs:
        mask = _mask_rows(masks, at_fault, "all_attention_mask", in_rows)
    if part == "full" and "all_assistant_mask" in theirs and not others:
        said = _mask_rows(masks, "masks.all_assistant_mask", "all_assistant_mask", in_rows)
    if cells.in_rows:
        # `Masks` of another length that hide nothing are those of other tokens, and replaced or refused later.
        loose = attention is None and isinstance(masks, Masks)
        if mask is not None and not (bool(mask.values.all()) and (loose or torch.equal(mask.lengths, ids.lengths))):
            raise InvalidRequestError(f"{mask_name}: {_NO_PADS}", field="masks")
        mask = None
    elif mask is None and backend is not None:
        # Of `Tokens` all fields are looked at.
        looked_at = {name: cells}
        if container is not None:
            parts = [each for each in ("prompt", "response", "full") if each in container.keys()]
            looked_at = {f"{top}.{each}": _cells(container, each, name) for each in parts}
        for key, each in looked_at.items():
            if each.padded:
                refuse_pads(each.ids, backend.tokenizer, backend.eos_token_ids, key, _PADS_ADVICE)
    if mask is not None:
        if container is not None and part == "prompt" and len(mask) == len(ids):
            # The mask may be that of prompt and response.
            mask = mask.slice(stop=ids.lengths)
        must_have_lengths(mask.lengths, ids.lengths, at_fault, has="the mask has")
    width, lengths, prompt_width = cells.width, None, None
    if container is not None and part == "full" and "prompt" in container.keys():
        if cells.in_rows:
            lengths = ragged_rows(container, "prompt").lengths
        else:
            prompts = _cells(container, "prompt", f"{top}.prompt")
            lengths, prompt_width = prompts.ids.lengths, prompts.width
            width = None if prompt_width is None else width
            if mask is not None:
                lengths = mask.sums(mask.values & (mask.positions < lengths[mask.row_index]))
    columns = None
    if width is not None:
        marks = torch.ones_like(ids.values, dtype=torch.bool) if mask is None else mask.values
        columns = Columns(marks.reshape(-1 if width else len(ids), width), prompt_width)
    if said is not None and not torch.equal(said.lengths, ids.lengths):
        if container is not None:
            must_have_lengths(said.lengths, ids.lengths, "masks.all_assistant_mask", has="the mask has")
        said = None
    return InputRows(
        batch_size=cells.shape,
        ids=ids if mask is None else _select(ids, mask),
        prompt_lengths=lengths,
        columns=columns,
        # Scoring cannot find out which tokens are the assistant's, so it keeps what the input says.
        assistant=said if said is None or mask is None else _select(said, mask),
    )


def _mask_rows(held: Any, name: str, field: str | None = None, in_rows: bool = False) -> Ragged:
    """Return a mask as bool, on the CPU: `held`, or this field of `Masks` or of a plain TensorDict."""
    value = held
    if in_rows and field is not None:
        rows = ragged_rows(held, field)
        return rows.with_values(as_mask(rows.values, name).cpu())
    if field is not None:
        value = _field_or_rows(held, field) if isinstance(held, Masks) else find_value(held, field)
    if isinstance(value, Tensor) and value.ndim and not value.is_nested:
        mask = as_mask(value, name).cpu()
        return Ragged(mask.reshape(-1), torch.full((math.prod(mask.shape[:-1]),), mask.shape[-1]))
    return read_rows(value, torch.bool, name)[0].to("cpu")


def _select(values: Ragged, mask: Ragged) -> Ragged:
    return Ragged(values.values[mask.values], mask.sums())


def input_ids_of(td: TensorDictBase, top: Key, value: Any, part: str) -> tuple[TensorDictBase, Key] | None:
    """Return where the `input_ids` of a tokenizer's batch are: a TensorDict and the key in it; None if there are none.

    The batch is the value under the key `top` that is read, or, if there is no such key, `td` itself.
    """
    if isinstance(value, TensorDictBase) and not isinstance(value, Tokens):
        return (td, (*top, "input_ids")) if part not in value.keys() and "input_ids" in value.keys() else None
    if isinstance(value, Mapping) and "input_ids" in value:
        # tensordict holds a BatchEncoding as one object.
        batch = {name: value[name] for name in ("input_ids", "attention_mask") if name in value}
        return TensorDict(batch), ("input_ids",)
    return (td, ("input_ids",)) if value is None and "input_ids" in td.keys() else None


def _mask_among(
    keys: Sequence[Key], td: TensorDictBase, top: Key, lengths: list[int], unsure: str | None
) -> tuple[Key | None, Key | None]:
    """Return the key of the mask that belongs to the ids under the key `top`, and that of one that may.

    A mask of another shape belongs to the `input_ids` next to it if it has theirs.

    Args:
        lengths: those of the rows of ids, with their pads.
        unsure: why no mask may be applied, so that one which would hide tokens is refused; None if one may.
    """
    misfit = None
    for key in keys:
        given, name = find_value(td, key), ".".join(key)
        found = _lengths(given, torch.bool)
        other = (*key[:-1], "input_ids")
        if unsure is not None:
            if found == lengths and not bool(_mask_rows(given, name).values.all()):
                raise InvalidRequestError(f"{name}: {unsure.format(name)}", field="masks")
            continue
        if found == lengths:
            return key, None
        is_of_others = key[-1] == "attention_mask" and other != top and found is not None
        if not (is_of_others and found == _lengths(find_value(td, other), torch.int64)):
            misfit = misfit or key
    return None, misfit


def _lengths(value: Any, dtype: torch.dtype) -> list[int] | None:
    """Return the lengths of rows in a tensor or in lists; None if these are no rows."""
    if isinstance(value, Tensor) and value.ndim and not value.is_nested:
        return [value.shape[-1]] * math.prod(value.shape[:-1])
    with suppress(InvalidRequestError):
        return read_rows(value, dtype, "")[0].lengths.tolist()
    return None

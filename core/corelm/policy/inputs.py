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
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from corelm.backend.arguments import not_texts, refuse_pads, rows_of_ids
from corelm.backend.backend import Backend
from corelm.backend.skipping import ServedRows
from corelm.containers.classes import Masks, Text, Tokens
from corelm.containers.classes import rows as rows_of
from corelm.containers.history import ChatHistory, History
from corelm.containers.reading import has_rows, key_parts, list_keys, ragged_rows
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
from corelm.policy.chats import final_turns, render_chats, tools_of
from corelm.policy.options import PolicyOptions
from corelm.policy.rows import InputRows
from corelm.rendering.encoding import NO_COMPLETION, NO_PROMPT, encode_completions
from corelm.spec.message import Message
from corelm.spec.records import Columns, TokenizeResult
from corelm.tensors.ragged import Ragged, as_mask, as_tensor, is_integer, not_a_mask, unreadable
from corelm.validate import as_list, invalid, read_once, shown

Part = Literal["prompt", "full"]
Key = tuple[str, ...]
#: How each mode's input is passed.
_PASSED = {"history": "history=History.from_chats(…)", "text": "text=[…]", "tokens": "tokens=[…]"}
#: What to do about pads without a mask; follows "…, pads would be read as tokens; ".
_PADS_ADVICE = (
    "put the tokenizer's attention_mask into the TensorDict, next to the ids or under a key that you pass as "
    "attention_mask_key; or pass rows without pads: Tokens.from_rows(prompt=[[…], […]]). If these ids are tokens, pass "
    "a mask of ones: torch.ones_like(ids)"
)
_REPEAT = "give each response a prompt, in a batch of the same shape: repeat the prompt for every one of its responses"


def find_value(td: TensorDictBase, key: NestedKey) -> Any:
    """Return the value at the key, or None. Bare rows of different lengths, stacked lazily, come back as a list."""
    if key not in td.keys(include_nested=True):
        return None
    try:
        return td[key]
    except RuntimeError:
        return td.get(key, as_list=True)


class InputReader:
    """Reads rows as the options of a policy say.

    Attributes:
        keys: by part, the key that is read, for example ``("history", "prompt")``.
    """

    def __init__(self, options: PolicyOptions) -> None:
        self._options, mode = options, options.input_mode
        #: Whether the container's own key is read, and the key of the container, or of the bare value.
        self._own_key = options.input_key is None
        self._top = key_parts(getattr(options.keys, mode) if options.input_key is None else options.input_key)
        self.keys: dict[str, tuple[str, ...]] = {
            part: (*self._top, part) if self._own_key else self._top for part in ("prompt", "full")
        }
        self._names = {part: ".".join(key) for part, key in self.keys.items()}
        self._tokens_key, self._masks_key = key_parts(options.keys.tokens), key_parts(options.keys.masks)
        given = options.attention_mask_key
        self._given_mask = None if given is None else key_parts(given)
        self._tokenizing = {"add_special_tokens": True, **options.tokenizer_kwargs}
        self._skips = options.on_error == "skip"

    def read(self, td: TensorDictBase, part: Part, backend: Backend, *, want_assistant: bool = True) -> InputRows:
        """Return the prompts or the whole sequences of `td`, as token ids on the CPU.

        Sequences may also be in `td` as `Tokens`, next to what is read. If the ids are equal, or a text was
        sampled as those ids, the sequences keep the ids, the layout and the split of those tokens, so that
        two scorings of one batch line up; if not, `conflicts` says where. A row that cannot be read is left
        empty and added to `problems` if such rows are skipped.

        Args:
            td: the TensorDict to read.
            part: "prompt" to generate, "full" to score.
            backend: tokenizes and knows the special tokens.
            want_assistant: whether the mask of the assistant's tokens is needed.

        Raises:
            MissingKeyError: `td` lacks the key.
            InvalidRequestError: the value is not what this mode reads, or is text that cannot be encoded.
            TemplateError: a conversation cannot be rendered.
        """
        mode = self._options.input_mode
        if mode == "tokens":
            rows = self._tokens(td, part, backend)
        elif mode == "history":
            rows = self._chats(td, part, backend, want_assistant)
        else:
            rows = self._texts(td, part, backend)
        if part == "prompt" or (mode == "tokens" and self._own_key):
            return rows
        return self._joining_tokens(td, rows, backend)

    # Conversations ---------------------------------------------------------------------------------------------------

    def _chats(self, td: TensorDictBase, part: Part, backend: Backend, want_assistant: bool) -> InputRows:
        options, name = self._options, self._names[part]
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
            if problems and not self._skips:
                refuse(problems, ".".join(key_parts(options.tools_key)))
        if part == "prompt" and options.continue_final_message is not None:
            eos_ids = backend.engine.eos_token_ids if options.prefer_tokens else None
            begun, bad = final_turns(chats, options.continue_final_message, eos_ids)
            if bad and not self._skips:
                refuse(bad, name)
            problems = bad | problems
            begun = begun if any(begun) else None
        rendered = None
        while rendered is None:
            served = [row for row in range(len(chats)) if row not in problems] if problems else range(len(chats))
            try:
                rendered = render_chats(
                    backend,
                    [chats[row] for row in served] if problems else chats,
                    None if tools is None else [tools[row] for row in served],
                    None if begun is None else [begun[row] for row in served],
                    prompt=part == "prompt",
                    prefer_tokens=options.prefer_tokens,
                    template_kwargs=options.template_kwargs,
                    chat_template=options.chat_template,
                    want_assistant=want_assistant,
                )
            except (InvalidRequestError, TemplateError) as error:
                if not self._skips or not error.problems:
                    raise
                # Conversations are refused for several reasons, each with an error of its own.
                problems |= {served[row]: what for row, what in error.problems.items()}
        ids, texts, assistant = rendered.ids, rendered.texts, rendered.assistant
        if problems:
            read = ServedRows.without(problems, len(chats))
            ids, texts = read.ragged(ids), read.values(texts, "")
            assistant = None if assistant is None else read.ragged(assistant)
        retokenized = None
        if not options.prefer_tokens:
            sampled = [any(turn.token_ids is not None for turn in chat) for chat in chats]
            retokenized = tuple(some and row not in problems for row, some in enumerate(sampled))
        return InputRows(
            batch_size=shape,
            ids=ids,
            texts=texts,
            chats=chats,
            begun=None if begun is None else tuple(begun),
            tools=None if tools is None else tuple(tools),
            assistant=assistant,
            retokenized=retokenized,
            problems=problems,
        )

    # Texts -----------------------------------------------------------------------------------------------------------

    def _texts(self, td: TensorDictBase, part: Part, backend: Backend) -> InputRows:
        held, name = find_value(td, self._top), self._names[part]
        fields = {*held.keys()} if isinstance(held, (Text, TensorDictBase)) else set()
        if part == "full" and "full" not in fields and fields >= {"prompt", "response"}:
            return self._completions(td, held, backend)
        texts, shape = _leaves(self._value(td, held, part, name, bare=(str, list, Tensor)))
        if isinstance(held, Text):
            # Empty nested lists do not show their shape.
            shape = tuple(held.batch_size)
            if len(texts) != math.prod(shape):
                raise invalid(name, f"{len(texts)} texts do not fill a batch of shape {shape}")
        if td.batch_dims and tuple(td.batch_size) != shape:
            raise _other_batch(td, shape, name)
        if not (problems := not_texts(texts)):
            ids = _with_one_bos(backend, backend.tokenize(texts, **self._tokenizing)).ids
            return InputRows(batch_size=shape, ids=ids, texts=tuple(texts))
        if not self._skips:
            refuse(problems, name)
        read = ServedRows.without(problems, len(texts))
        good = [text for row, text in enumerate(texts) if row not in problems]
        return InputRows(
            batch_size=shape,
            ids=read.ragged(_with_one_bos(backend, backend.tokenize(good, **self._tokenizing)).ids),
            texts=read.values(good, ""),
            problems=problems,
        )

    def _completions(self, td: TensorDictBase, held: Any, backend: Backend) -> InputRows:
        """Return the rows of prompts and responses.

        Responses may have more batch dimensions than prompts: each prompt then has several responses.
        """
        name = ".".join((*self._top, "response"))
        (prompts, outer), (responses, shape) = (_leaves(_field(held, part)) for part in ("prompt", "response"))
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
        boundary = self._options.completion_boundary

        def tokenize(texts: Sequence[str], **options: Any) -> TokenizeResult:
            return _with_one_bos(backend, backend.tokenize(texts, **options))

        encoded = encode_completions(tokenize, first, rest, boundary, self._tokenizing)
        problems |= {number[row]: what for row, what in encoded.problems.items()}
        if not self._skips:
            refuse(problems, name)
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

    def _tokens(self, td: TensorDictBase, part: Part, backend: Backend) -> InputRows:
        holder, top, name, own_key = td, self._top, self._names[part], self._own_key
        held = found = find_value(td, top)
        plain = isinstance(held, TensorDictBase)
        fields = {*held.keys()} if plain or isinstance(held, Tokens) else set()
        completions = part == "full" and "full" not in fields and fields >= {"prompt", "response"}
        if completions:
            held = with_full(held, ".".join(top))
        batch = None
        if own_key and not isinstance(held, (Tensor, Tokens)):
            batch = input_ids_of(td, top, held, part)
        if batch is not None:
            holder, top = batch
            name, own_key = ".".join(top), False
            held = found = find_value(holder, top)
            plain, fields = False, set()
        container = isinstance(held, Tokens) and part in held.keys()
        ids = held if container else self._value(holder, held, part, name, bare=(Tensor, list))
        masks, mask_key = find_value(holder, self._masks_key), self._given_mask
        has_masks = isinstance(masks, (Masks, TensorDictBase)) and "all_attention_mask" in masks.keys()
        if mask_key is not None and mask_key not in holder.keys(include_nested=True):
            given = ".".join(mask_key)
            raise MissingKeyError(
                f"the TensorDict has no {given!r}, which attention_mask_key names; it has: {list_keys(holder)}",
                field="attention_mask_key",
            )
        if mask_key is None and not (has_masks and own_key):
            *path, own = top
            stem = own.removesuffix("input_ids") if own.endswith("input_ids") else own.removesuffix("ids")
            likely = [(*top, "attention_mask")] if plain else []
            likely += [(*path, f"{stem}attention_mask")] if stem not in (own, "") else []
            present = holder.keys(include_nested=True)
            near = list(filter(present.__contains__, (*likely, (*path, "attention_mask"))))
            if near:
                mask_key = mask_next_to(
                    holder,
                    top,
                    near,
                    find_value(held, "full") if plain and not container and "full" in fields else ids,
                    plain=plain,
                    answered={"response", "full"} <= fields,
                    in_rows=isinstance(found, Tokens) and not found.padded,
                    has_masks=has_masks,
                )
        rows = read_ids(
            ids,
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
        if container and top == self._tokens_key:
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
        if not self._skips:
            refuse(problems, ".".join((*self._top, "response")))
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
            own = read_ids(tokens, "full", find_value(td, self._masks_key), mask_name=mask_name)
        except InvalidRequestError as error:
            return replace(rows, conflicts={0: str(error)})
        conflicts = _differing_rows(own.ids, rows.ids) or _differing_splits(own.prompt_lengths, rows.prompt_lengths)
        options = self._options
        is_text = options.input_mode == "text" and options.prefer_tokens and not rows.only_response
        if conflicts and is_text and self._spelled_by(find_value(td, self._top), rows, own, conflicts, backend):
            rows, conflicts = replace(rows, ids=own.ids), {}
        if conflicts:
            return replace(rows, conflicts=conflicts)
        return replace(rows, prompt_lengths=own.prompt_lengths, columns=own.columns, conflicts={})

    def _spelled_by(self, held: Any, read: InputRows, own: InputRows, at: Collection[int], backend: Backend) -> bool:
        """Return whether a text was sampled as these ids: its prompt's own ids, and ids that decode to its response.

        Tokenized again, a response may become other ids: the text has no EOS, and one text has many spellings.

        Args:
            held: the value that is read; only a `Text` with a prompt and a response can tell.
            read: the whole texts, tokenized.
            own: the ids, split into prompts and responses.
            at: the rows to look at.
            backend: tokenizes and decodes.
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
        again = _with_one_bos(backend, backend.tokenize(prompts, **self._tokenizing)).ids
        if _differing_rows(parts.prompt.select(rows), again):
            return False
        assert parts.response is not None
        decoded = (
            backend.detokenize(parts.response.select(rows), skip_special_tokens=skip, before=before)
            for skip in (True, False)
            for before in (parts.prompt.select(rows), None)
        )
        spellings = zip(*decoded, strict=True)
        return all(response in found for response, found in zip(responses, spellings, strict=True))

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
                f"the TensorDict has no {name!r}; it has: {list_keys(td)}. Pass TensorDict({_PASSED[mode]}), or give "
                f"the policy another input_mode{other_key}",
                field=name,
            )
        if isinstance(held, bare):
            return held
        if not isinstance(held, (ChatHistory, Text, Tokens, TensorDictBase)):
            raise _wrong(name, f"{_PASSED[mode]}, or a container of {mode}", held)
        found = _field(held, part)
        if found is None:
            raise MissingKeyError(
                f"{'.'.join(self._top)!r} holds no {part!r}, which this policy reads; the TensorDict has: "
                f"{list_keys(td)}",
                field=name,
            )
        return found


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


def _with_one_bos(backend: Backend, batch: TokenizeResult) -> TokenizeResult:
    """Drop the second BOS of texts that begin with one themselves, as rendered prompts and `text.full` do."""
    bos = getattr(backend.engine.tokenizer, "bos_token_id", None)
    if bos is None:
        return batch
    values, lengths = batch.ids.values, batch.ids.lengths
    if not bool(((values[1:] == bos) & (values[:-1] == bos)).any()):
        return batch
    starts = batch.ids.offsets[:-1]
    long = (lengths > 1).nonzero()[:, 0]
    twice = long[(values[starts[long]] == bos) & (values[starts[long] + 1] == bos)]
    drop = torch.zeros_like(lengths)
    drop[twice] = 1
    kept = torch.ones_like(values, dtype=torch.bool)
    kept[starts[twice]] = False
    offsets = None if batch.offsets is None else batch.offsets[kept]
    return replace(batch, ids=batch.ids.slice(drop, lengths), offsets=offsets)


def _differing_rows(there: Ragged, ours: Ragged) -> Problems:
    """Return how rows of ids differ; an empty dict if they are equal. Both are on the CPU, with as many rows."""
    if torch.equal(there.lengths, ours.lengths) and torch.equal(there.values, ours.values):
        return {}
    problems: Problems = {}
    for row, (one, other) in enumerate(zip(there.tolist(), ours.tolist(), strict=True)):
        if one != other:
            same = min(len(one), len(other))
            at = next((t for t in range(same) if one[t] != other[t]), same)
            problems[row] = f"{len(one)} tokens are there, {len(other)} were read; they differ from position {at} on"
    return problems


def _differing_splits(there: Tensor | None, ours: Tensor | None) -> Problems:
    """Return where prompts end at other tokens; an empty dict if ours are not split. int64[rows] each."""
    if ours is None:
        return {}
    if there is None:
        return {0: "the tokens that are there are not split into prompt and response"}
    pairs = enumerate(zip(there.tolist(), ours.tolist(), strict=True))
    return {row: f"the prompt has {one} tokens there, {other} were read" for row, (one, other) in pairs if one != other}


# Ids and their pads --------------------------------------------------------------------------------------------------


def read_ids(
    held: Any,
    part: Part,
    masks: Any,
    attention: Any = None,
    *,
    top: str = "tokens",
    name: str = "tokens.full",
    mask_name: str = "masks.all_attention_mask",
    backend: Backend | None = None,
) -> InputRows:
    """Read ids, without their pads. Sequences keep their split and, if dense, their columns.

    Args:
        held: `Tokens`, a tensor ``[*batch, width]``, a nested tensor, or rows in a list.
        part: the field of the container to read; "full" reads the mask of the assistant's tokens as well.
        masks: what is under the key of the masks: `Masks` or a plain TensorDict, or nothing that is read.
        attention: an attention mask that is read instead of theirs; None reads theirs.
        top: the key of the ids or of their container, for errors.
        name: the key of the field, for errors.
        mask_name: that of the attention mask.
        backend: refuses dense ids without a mask that begin or end with its pad id; None looks for no pads.

    Raises:
        InvalidRequestError: these are no ids, their mask does not fit, or they have pads and no mask.
    """
    container = held if isinstance(held, Tokens) else None
    cells, shape, dense, in_rows = _cells(held, part, name)
    depth, at_fault = (1, name) if container is None else (len(shape), mask_name)
    theirs = masks.keys() if isinstance(masks, (Masks, TensorDictBase)) else ()
    names: dict[str, str] = {}
    if attention is None and "all_attention_mask" in theirs:
        names["all_attention_mask"] = at_fault
    others = isinstance(masks, Masks) and attention is not None and "all_attention_mask" in theirs
    if part == "full" and "all_assistant_mask" in theirs and not others:
        names["all_assistant_mask"] = "masks.all_assistant_mask"
    found = _fields_of_masks(masks, names, depth) if names else {}
    mask, said = found.get("all_attention_mask"), found.get("all_assistant_mask")
    if attention is not None:
        mask = _as_rows(attention, depth, at_fault)
    if in_rows:
        # `Masks` of another length that hide nothing are those of other tokens, and replaced or refused later.
        loose = attention is None and isinstance(masks, Masks)
        if mask is not None and not (bool(mask.values.all()) and (loose or torch.equal(mask.lengths, cells.lengths))):
            raise _no_pads(mask_name)
        mask = None
    elif mask is None and backend is not None:
        # Of `Tokens` all fields are looked at. Bare rows that are no dense tensor have no pads.
        looked_at = {name: cells} if dense else {}
        if container is not None:
            parts = [each for each in ("prompt", "response", "full") if each in container.keys()]
            parts = [each for each in parts if not _is_nested(container, each)]
            looked_at = {f"{top}.{each}": _cells(container, each, name)[0] for each in parts}
        for key, ids in looked_at.items():
            refuse_pads(ids, backend.tokenizer, backend.eos_token_ids, key, _PADS_ADVICE)
    if mask is not None:
        if container is not None and part == "prompt" and len(mask) == len(cells):
            # The mask may be that of prompt and response.
            mask = mask.slice(torch.zeros_like(cells.lengths), torch.minimum(mask.lengths, cells.lengths))
        if not torch.equal(cells.lengths, mask.lengths):
            _must_be_as_long(cells, mask, at_fault)
    columns, lengths, prompt_width = None, None, None
    if container is not None and part == "full" and "prompt" in container.keys():
        if in_rows:
            lengths = ragged_rows(container, "prompt").lengths
        else:
            prompts, _, prompts_are_dense, _ = _cells(container, "prompt", f"{top}.prompt")
            lengths = prompts.lengths
            if mask is not None:
                lengths = mask.sums(mask.values & (mask.positions < lengths[mask.row_index]))
            dense = dense and prompts_are_dense
            prompt_width = container.prompt.shape[-1] if dense else None
    if dense:
        width = held.shape[-1] if container is None else getattr(container, part).shape[-1]
        marks = torch.ones_like(cells.values, dtype=torch.bool) if mask is None else mask.values
        columns = Columns(marks.reshape(-1 if width else len(cells), width), prompt_width)
    if said is not None and not torch.equal(said.lengths, cells.lengths):
        if container is not None:
            _must_be_as_long(cells, said, "masks.all_assistant_mask")
        said = None
    return InputRows(
        batch_size=shape,
        ids=cells if mask is None else _select(cells, mask),
        prompt_lengths=lengths,
        columns=columns,
        # Scoring cannot find out which tokens are the assistant's, so it keeps what the input says.
        assistant=said if said is None or mask is None else _select(said, mask),
    )


def _cells(held: Any, part: str, name: str) -> tuple[Ragged, tuple[int, ...], bool, bool]:
    """Return ids with their pads, on the CPU; the batch size; whether they are one dense tensor; whether they are in
    `Tokens` that are not padded.
    """
    value, shape = held, None
    if isinstance(held, Tokens):
        shape = tuple(held.batch_size)
        if has_rows(held):
            ids = ragged_rows(held, part)
            if ids.values.dtype != torch.int64 or ids.values.ndim != 1 or ids.values.is_meta:
                ids = rows_of_ids(ids, name)
            return ids.to("cpu"), shape, False, True
        try:
            value = getattr(held, part)
        except InvalidRequestError:  # rows that are padded to different widths
            value = [getattr(row, part) for row in rows_of(held)]
    if isinstance(value, Tensor) and not value.is_nested:
        if why := unreadable(value):
            raise invalid(name, f"expected a dense tensor, got {why}")
        if value.ndim == 0:
            raise invalid(name, "expected token ids along the last dimension, got a single number")
        if value.dtype != torch.int64 and not is_integer(value):
            raise invalid(name, f"expected one integer per token, got {value.dtype}{list(value.shape)}")
        # A copy, because the caller may write to the tensor while a request waits.
        values, shape = value.to("cpu", torch.int64, copy=True), tuple(value.shape[:-1])
        lengths = torch.full((math.prod(shape),), value.shape[-1])
        return Ragged(values.reshape(-1), lengths), shape, True, False
    ids = rows_of_ids(value, name).to("cpu")
    return ids, (len(ids),) if shape is None or isinstance(value, Tensor) else shape, False, False


def _is_nested(container: Tokens, name: str) -> bool:
    with suppress(InvalidRequestError):  # rows that are padded to different widths
        return bool(getattr(getattr(container, name), "is_nested", False))
    return False


def _fields_of_masks(masks: Any, names: Mapping[str, str], depth: int) -> dict[str, Ragged]:
    """Return the rows of fields of `Masks`, or of a plain TensorDict, as bool and on the CPU.

    Args:
        names: the fields, and what is at fault if they are malformed.
        depth: how deep rows are in nested lists.
    """
    are_rows, found = False, {}
    with suppress(InvalidRequestError):  # a stack of both layouts
        are_rows = isinstance(masks, Masks) and has_rows(masks)
    for which, name in names.items():
        if are_rows:
            rows = ragged_rows(masks, which)
            is_bool = rows.values.dtype == torch.bool and not rows.values.is_meta
            values = rows.values if is_bool else as_mask(rows.values, name)
            found[which] = rows.with_values(values.cpu())
            continue
        try:
            value = getattr(masks, which) if isinstance(masks, Masks) else find_value(masks, which)
        except InvalidRequestError:  # rows that are padded to different widths, or a stack of both layouts
            value, depth = [getattr(row, which) for row in rows_of(masks)], 1
        found[which] = _as_rows(value, depth, name)
    return found


def _as_rows(mask: Any, depth: int, name: str, why_not: Callable[[Any], str] = not_a_mask) -> Ragged:
    """Return the rows of a mask as bool, on the CPU; refuse those for which `why_not` returns a reason."""
    if isinstance(mask, Tensor) and mask.ndim and not mask.is_nested and not why_not(mask):
        count, width = math.prod(mask.shape[:-1]), mask.shape[-1]
        return Ragged(mask.to("cpu", torch.bool).reshape(-1), torch.full((count,), width))
    if isinstance(mask, Tensor) and mask.ndim:
        given = list(mask.unbind() if mask.is_nested else mask.flatten(0, -2))
    else:
        try:
            given = _at_depth(mask, depth)
        except TypeError:  # fewer dimensions than the batch
            raise invalid(name, f"expected one mask for each row, got {shown(mask)}") from None
    found, problems = [], {}
    for row, one in enumerate(given):
        try:
            tensor = as_tensor(one)
            why = why_not(tensor) or ("" if tensor.ndim == 1 else f"a mask of shape {tuple(tensor.shape)}")
        except (TypeError, ValueError, RuntimeError):  # texts, None, lists of unequal length
            why = shown(one)
        if why:
            problems[row] = f"expected a mask of True and False, or 1 and 0; got {why}"
        else:
            found.append(tensor.cpu())
    refuse(problems, name)
    return Ragged.from_list(found, torch.bool)


def _at_depth(value: Any, depth: int) -> list[Any]:
    return [leaf for part in as_list(value) for leaf in _at_depth(part, depth - 1)] if depth else [value]


def _must_be_as_long(cells: Ragged, mask: Ragged, name: str) -> None:
    """Refuse a mask whose rows are not as long as those of the ids."""
    lengths = zip(cells.lengths.tolist(), mask.lengths.tolist(), strict=False)
    problems = {row: f"{n} tokens, but a mask of {m}" for row, (n, m) in enumerate(lengths) if n != m}
    if len(mask) != len(cells):
        problems = {len(mask): "no mask"} if len(mask) < len(cells) else {len(cells): "a mask, but no tokens"}
    refuse(problems, name)


def _select(values: Ragged, mask: Ragged) -> Ragged:
    """Return the values where a mask of the same lengths is True."""
    return Ragged(values.values[mask.values], mask.sums())


def input_ids_of(td: TensorDictBase, top: Key, value: Any, part: str) -> tuple[TensorDictBase, Key] | None:
    """Return where the `input_ids` of a tokenizer's batch are: a TensorDict and the key in it; None if there are none.

    The batch is the value under the key `top` that is read, or, if there is no such key, `td` itself.
    """
    if isinstance(value, TensorDictBase) and not isinstance(value, Tokens):
        return (td, (*top, "input_ids")) if part not in value.keys() and "input_ids" in value.keys() else None
    if isinstance(value, Mapping) and "input_ids" in value:
        # tensordict holds a BatchEncoding as one object.
        return TensorDict({name: value[name] for name in ("input_ids", "attention_mask") if name in value}), (
            "input_ids",
        )
    return (td, ("input_ids",)) if value is None and "input_ids" in td.keys() else None


def with_full(tokens: Any, key: str) -> Tokens:
    """Return `Tokens` of prompts and responses with their `full`, in the layout that they have.

    Args:
        tokens: `Tokens`, or a plain TensorDict with a ``prompt`` and a ``response``.
        key: the key that holds them, for errors.

    Raises:
        InvalidRequestError: their shapes do not fit.
    """
    if isinstance(tokens, TensorDictBase):
        given = {name: as_list(find_value(tokens, name)) for name in ("prompt", "response")}
        if any(isinstance(ids, list) for ids in given.values()):
            # tensordict makes a tensor of rows that happen to be equally long.
            return Tokens.from_rows(**{name: list(ids) for name, ids in given.items()})
        ids = given["prompt"]
        shape = tokens.batch_size if not isinstance(ids, Tensor) or ids.is_nested else ids.shape[:-1]
        tokens = Tokens(**given, batch_size=shape)
    try:
        prompt, response = tokens.prompt, tokens.response
    except InvalidRequestError:  # dense rows of different widths
        return lazy_stack([with_full(row, key) for row in tokens.unbind(0)])
    if not tokens.padded:
        return Tokens.from_rows(prompt=prompt, response=response)
    if prompt.is_nested or response.is_nested:
        nested = {"prompt": rows_of_ids(prompt, f"{key}.prompt"), "response": rows_of_ids(response, f"{key}.response")}
        return Tokens.from_rows(**{name: list(ids.split()) for name, ids in nested.items()})
    if prompt.ndim == 0 or prompt.shape[:-1] != response.shape[:-1]:
        shapes = f"prompts are {list(prompt.shape)}, responses {list(response.shape)}"
        raise invalid(f"{key}.response", f"{shapes}; {_REPEAT}")
    return Tokens(
        prompt=prompt, response=response, full=torch.cat([prompt, response], -1), batch_size=tokens.batch_size
    )


def _no_pads(mask: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{mask}: tokens in rows of unequal length (padded=False) have no pads; leave their attention mask out, or, if "
        "the rows do hold pads, make the Tokens with padded=True",
        field="masks",
    )


def mask_next_to(
    td: TensorDictBase,
    top: Key,
    near: Sequence[Key],
    held: Any,
    *,
    plain: bool,
    answered: bool,
    in_rows: bool,
    has_masks: bool,
) -> Key | None:
    """Return the key of the `attention_mask` that belongs to the ids under the key `top`; None if there is none.

    It is in the plain TensorDict that holds the ids, or next to `top`. Its name may begin as that of the ids does:
    ``chosen_attention_mask`` for ``chosen_input_ids``. A mask of another shape belongs to the `input_ids` next to it if
    it has theirs, and it may be that of the prompts whose answers a container without pads or with responses holds.

    Args:
        td: holds the ids.
        top: the key of the ids, or of the container that holds them.
        near: the keys of the masks that there are.
        held: the ids, or `Tokens`.
        plain: whether a plain TensorDict holds the ids.
        answered: whether they are held with responses to them.
        in_rows: whether they are in rows of unequal length, which have no pads.
        has_masks: whether there is an attention mask in the `Masks`, which is read if this one has another shape.

    Raises:
        InvalidRequestError: the mask has another shape, or would hide tokens of rows that should have no
            pads, or of an answer, to which it need not belong.
    """
    container = isinstance(held, Tokens)
    misfit = None
    for key in near:
        given = find_value(td, key)
        name, depth = ".".join(key), len(held.batch_size) if container else 1
        lengths = _lengths(held)
        mask = None
        with suppress(InvalidRequestError):
            mask = _as_rows(given, depth, name, why_not=unreadable)
        fits = mask is not None and mask.lengths.tolist() == lengths
        if answered or in_rows:
            if mask is not None and fits and not bool(mask.values.all()):
                raise _unclear(name) if answered else _no_pads(name)
        elif fits:
            return key
        elif key[-1] != "attention_mask" or mask is None or not _is_of_input_ids(td, key, mask, top):
            misfit = misfit or key
    if misfit is None or has_masks:
        return None
    if container or plain:
        raise InvalidRequestError(
            f"{'.'.join(misfit)}: its rows are not as wide as those of the tokens under {'.'.join(top)!r}; give the "
            "mask of prompt and response together if both are read, or delete it",
            field="masks",
        )
    return misfit


def _is_of_input_ids(td: TensorDictBase, key: Key, mask: Ragged, top: Key) -> bool:
    """Return whether a mask belongs to `input_ids` next to it, where the policy reads something else."""
    other = (*key[:-1], "input_ids")
    return other != top and mask.lengths.tolist() == _lengths(find_value(td, other))


def _lengths(held: Any) -> list[int] | None:
    """Return the lengths of rows of ids with their pads; None if these are no ids."""
    part = "full" if isinstance(held, Tokens) and "full" in held.keys() else "prompt"
    try:
        return _cells(held, part, "")[0].lengths.tolist()
    except InvalidRequestError:
        return None


def _unclear(mask: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{mask}: it has the shape of the answers that the TensorDict holds, but may be that of their prompts; give "
        f"the policy attention_mask_key={mask!r} to apply it, or delete it",
        field="masks",
    )

"""From a user's TensorDict to flat rows of token ids. Nothing here runs a model.

The three input modes read three keys. `history` and `text` are rendered and tokenized; `tokens` are taken as they are:
`corelm.policy.tokens`. The value is a container with a `prompt` (to generate from) or a `full` (to score), or a bare
value at the top key. A `Text` or `Tokens` with `prompt` and `response`, but no `full`, holds completions: only the
responses are scored, as loglikelihoods, multiple choice and preference pairs need it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor

from corelm.backend.arguments import not_texts
from corelm.backend.backend import Backend
from corelm.backend.skipping import ServedRows, renumbered
from corelm.containers.classes import ChatHistory, Text, Tokens
from corelm.containers.history import History
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
from corelm.policy.rows import InputRows, find_value
from corelm.policy.tokens import REPEAT, MaskKeys, input_ids_of, mask_next_to, nested_field, read_ids, with_full
from corelm.rendering.encoding import NO_COMPLETION, NO_PROMPT, Tokenize, encode_completions
from corelm.rendering.render import RenderedChats, render
from corelm.spec.message import Chat, Message
from corelm.spec.records import TokenizeResult
from corelm.tensors.ragged import Ragged
from corelm.validate import as_list, invalid, read_once, shown

Part = Literal["prompt", "full"]
Tools = list[Any] | None
#: How each mode's input is passed.
_PASSED = {"history": "history=History.from_chats(…)", "text": "text=[…]", "tokens": "tokens=[…]"}


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
        self._tokens_key = key_parts(options.keys.tokens)
        self._names = {part: ".".join(key) for part, key in self.keys.items()}
        given = options.attention_mask_key
        self._masks = MaskKeys(key_parts(options.keys.masks), None if given is None else key_parts(given))
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
        _must_be_batch_of(td, shape, name)
        tools: list[Tools] | None = None
        begun: list[Message | None] | None = None
        problems: Problems = {}
        if options.tools_key is not None and (given := find_value(td, options.tools_key)) is not None:
            tools, problems = _tools_of(given, ".".join(key_parts(options.tools_key)), shape)
            if not self._skips:
                refuse(problems, ".".join(key_parts(options.tools_key)))
        if part == "prompt" and options.continue_final_message is not None:
            eos_ids = backend.engine.eos_token_ids if options.prefer_tokens else None
            begun, bad = final_turns(chats, options.continue_final_message, eos_ids)
            if not self._skips:
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
        if part == "full" and isinstance(held, (Text, TensorDictBase)) and _are_completions(held.keys()):
            return self._completions(td, held, partial(_with_one_bos, backend))
        texts, shape = _leaves(self._value(td, held, part, name, bare=(str, list, Tensor)))
        if isinstance(held, Text):
            # Empty nested lists do not show their shape.
            shape = tuple(held.batch_size)
            if len(texts) != math.prod(shape):
                raise invalid(name, f"{len(texts)} texts do not fill a batch of shape {shape}")
        _must_be_batch_of(td, shape, name)
        if not (problems := not_texts(texts)):
            ids = _with_one_bos(backend, texts, **self._tokenizing).ids
            return InputRows(batch_size=shape, ids=ids, texts=tuple(texts))
        if not self._skips:
            refuse(problems, name)
        read = ServedRows.without(problems, len(texts))
        good = [text for row, text in enumerate(texts) if row not in problems]
        return InputRows(
            batch_size=shape,
            ids=read.ragged(_with_one_bos(backend, good, **self._tokenizing).ids),
            texts=read.values(good, ""),
            problems=problems,
        )

    def _completions(self, td: TensorDictBase, held: Any, tokenize: Tokenize) -> InputRows:
        """Return the rows of prompts and responses.

        Responses may have more batch dimensions than prompts: each prompt then has several responses.
        """
        name = ".".join((*self._top, "response"))
        (prompts, outer), (responses, shape) = (_leaves(_field(held, part)) for part in ("prompt", "response"))
        if 0 in held.batch_size:
            outer = shape = tuple(held.batch_size)
        if any(isinstance(one, list) for one in responses):
            raise invalid(name, f"prompts have different numbers of responses; {REPEAT}")
        if shape[: len(outer)] != outer:
            raise invalid(name, f"prompts are {outer}, responses {shape}; {REPEAT}")
        _must_be_batch_of(td, shape[: td.batch_dims], name)
        prompts = [prompt for prompt in prompts for _ in range(math.prod(shape[len(outer) :]))]
        problems = {row: f"response: {what}" for row, what in not_texts(responses).items()}
        problems |= {row: f"prompt: {what}" for row, what in not_texts(prompts).items()}
        read = ServedRows.without(problems, len(responses))
        number = read.index.tolist()
        first, rest = ([texts[row] for row in number] for texts in (prompts, responses))
        encoded = encode_completions(tokenize, first, rest, self._options.completion_boundary, self._tokenizing)
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
        held = find_value(td, top)
        plain = isinstance(held, TensorDictBase)
        fields = set(held.keys()) if plain or isinstance(held, Tokens) else set()
        in_rows = isinstance(held, Tokens) and not held.padded
        completions = part == "full" and _are_completions(fields)
        if completions:
            held = with_full(held, ".".join(top))
        if own_key and (batch := input_ids_of(td, top, held, part)) is not None:
            holder, top = batch
            name, own_key = ".".join(top), False
            held, plain, in_rows, fields = find_value(holder, top), False, False, set()
        container = isinstance(held, Tokens) and part in held.keys()
        ids = held if container else self._value(holder, held, part, name, bare=(Tensor, list))
        masks = self._masks
        if masks.given is None:
            has_masks = masks.attention(holder) is not None
            if not (has_masks and own_key):
                whole = find_value(held, "full") if plain and not container and "full" in fields else ids
                key = mask_next_to(
                    holder,
                    top,
                    whole,
                    plain=plain,
                    answered={"response", "full"} <= fields,
                    in_rows=in_rows,
                    has_masks=has_masks,
                )
                masks = MaskKeys(masks.masks, key)
        rows = read_ids(holder, ids, part, masks, ".".join(top), name, backend)
        if completions:
            rows = self._scorable(rows)
        # Nested tensors are read like bare ones, and replaced by rows.
        if container and top == self._tokens_key and (in_rows or nested_field(ids, part) is None):
            rows = replace(rows, conflicts={})
        _must_be_batch_of(td, rows.batch_size, name)
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
            own = read_ids(td, tokens, "full", MaskKeys(self._masks.masks), "tokens", "tokens.full")
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
        if _differing_rows(parts.prompt.select(rows), _with_one_bos(backend, prompts, **self._tokenizing).ids):
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
        if mode != "history" and not isinstance(held, (TensorDictBase, Text, Tokens)):
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
            raise _wrong(name, f"{mode} or a container of it", held)
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


def _must_be_batch_of(td: TensorDictBase, found: tuple[int, ...], name: str) -> None:
    """Refuse data of another batch than the TensorDict's, if it has one."""
    batch = tuple(td.batch_size)
    if batch and batch != found:
        raise invalid(name, f"its batch is {found}, but the TensorDict's is {batch}")


def _are_completions(fields: Any) -> bool:
    """Return whether there are prompts and responses under these keys, and no whole sequences."""
    return "prompt" in fields and "response" in fields and "full" not in fields


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


def _with_one_bos(backend: Backend, texts: Sequence[str], **options: Any) -> TokenizeResult:
    """Tokenize texts. One that begins with the BOS itself, as rendered prompts and `text.full` do, gets no second."""
    batch = backend.tokenize(texts, **options)
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


# Conversations --------------------------------------------------------------------------------------------------------


def _tools_of(given: Any, field: str, shape: tuple[int, ...]) -> tuple[list[Tools], Problems]:
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

    found = [as_list(one) for one in flat(given, shape)]
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
        backend: tokenizes and knows the special tokens.
        tools: the tools of each conversation; None if no conversation has its own.
        begun: for each conversation the turn that the answer continues, as `final_turns` returned it, or None.
        prompt: whether the assistant's next turn, or the rest of its last one, is to be sampled.
        template_kwargs: variables for the template, for all conversations.
        options: the other arguments of `render`.

    Raises:
        InvalidRequestError, TemplateError: those of `render`; rows are numbered as in `chats`.
    """

    def alike(some: Sequence[Chat], own: Tools, turns: Sequence[Message | None] | None) -> RenderedChats:
        if turns is not None:
            some = [(*chat[:-1], turn) for chat, turn in zip(some, turns, strict=True) if turn is not None]
        engine = backend.engine
        return render(
            some,
            tokenizer=engine.tokenizer,
            tokenize=backend.tokenize,
            eos_ids=engine.eos_token_ids,
            add_generation_prompt=prompt and turns is None,
            continue_final_message=turns is not None,
            template_kwargs=template_kwargs if own is None else {**template_kwargs, "tools": own},
            **options,
        )

    if tools is None and begun is None:
        return alike(chats, None, None)
    tools, begun = tools or [None] * len(chats), begun or [None] * len(chats)
    groups: dict[tuple[bool, str], list[int]] = {}
    for row, own in enumerate(tools):
        groups.setdefault((begun[row] is not None, "" if own is None else repr(own)), []).append(row)
    parts = []
    for (continues, _), rows in groups.items():
        try:
            turns = [begun[row] for row in rows] if continues else None
            parts.append(alike([chats[row] for row in rows], tools[rows[0]], turns))
        except (InvalidRequestError, TemplateError) as error:
            raise renumbered(error, torch.tensor(rows)) from error
    places = [row for rows in groups.values() for row in rows]
    order = sorted(range(len(places)), key=places.__getitem__)
    texts = [text for part in parts for text in part.texts]
    masks = [part.assistant for part in parts if part.assistant is not None]
    return RenderedChats(
        ids=Ragged.cat([part.ids for part in parts]).select(order),
        assistant=Ragged.cat(masks).select(order) if len(masks) == len(parts) else None,
        texts=tuple([texts[at] for at in order]),
    )

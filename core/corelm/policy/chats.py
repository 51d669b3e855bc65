"""Conversations: how they are rendered to prompts, and how answers become the messages that they add to them.

A message holds the ids that were sampled, also if a parser changes their text.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch

from corelm.backend.backend import Backend
from corelm.backend.skipping import renumbered
from corelm.errors import (
    InvalidRequestError,
    Problems,
    ResponseParserWarning,
    TemplateError,
    described,
    level_of_caller,
    spelled_out,
)
from corelm.policy.options import ResponseParser
from corelm.policy.rows import InputRows
from corelm.rendering.encoding import answer_texts
from corelm.rendering.render import RenderedChats, render, special_tokens
from corelm.rendering.response_parsers import NamedParser, parser_named
from corelm.spec.answer_text import HALF_CHARACTER
from corelm.spec.message import Chat, Message
from corelm.spec.records import GenerateResult
from corelm.spec.sampling import SamplingParams
from corelm.tensors.ragged import Ragged
from corelm.validate import as_list, invalid, shown

Tools = list[Any] | None

_log = logging.getLogger(__name__)

#: Characters that Unicode keeps for use inside programs.
_NONCHARACTERS = range(0xFDD0, 0xFDF0)

# Prompts --------------------------------------------------------------------------------------------------------------


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
        backend: tokenizes and knows the special tokens.
        tools: the tools of each conversation; None if no conversation has its own.
        begun: for each conversation the turn that the answer continues, as `final_turns` returned it, or None.
        prompt: whether the assistant's next turn, or the rest of its last one, is to be sampled.
        template_kwargs: variables for the template, for all conversations.
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


# Answers --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerReader:
    """Makes an assistant message of every answer.

    Attributes:
        parser: turns an answer into a message; None keeps its text.
        tools: those of conversations that have no others, for a parser that takes them; None if they are not known.
    """

    parser: ResponseParser | None = None
    tools: Sequence[Any] | None = ()

    @classmethod
    def of(cls, parser: ResponseParser | str | None, tools: Any, backend: Backend) -> AnswerReader:
        """Return the reader for a policy's options.

        Args:
            parser: the name of a format, for one thing.
            tools: those in the policy's `template_kwargs`, for which anything may have been given.
            backend: has the tokenizer.

        Raises:
            InvalidRequestError: the tokenizer does not say how to parse answers.
            BackendNotInstalledError: transformers is missing.
        """
        found = parser_named(parser, backend.tokenizer) if isinstance(parser, str) else parser
        return cls(parser=found, tools=() if tools is None else tools if isinstance(tools, (list, tuple)) else None)

    def sampling(self, sampling: SamplingParams) -> SamplingParams:
        """Return how to sample answers that are read here."""
        return self.parser.sampling(sampling) if isinstance(self.parser, NamedParser) else sampling

    def read(
        self,
        rows: InputRows,
        asked: tuple[str, ...],
        said: tuple[str, ...],
        batch: GenerateResult,
        sampling: SamplingParams,
        backend: Backend,
    ) -> tuple[tuple[Message, ...], Problems]:
        """Return one message per answer, with its ids, and the problems of answers that did not parse.

        The message of an answer that did not parse holds its plain text.

        Args:
            rows: the conversations, one for each answer.
            asked: the texts of the prompts.
            said: the texts of the answers.
            batch: the answers.
            sampling: how they were sampled.
            backend: decodes them.
        """
        turns = _turns(rows, said, batch)
        parser = self.parser
        if parser is None:
            return turns, {}
        if isinstance(parser, NamedParser):
            # Some formats have special tokens for marks. The EOS is not part of what was said.
            texts, typed = _whole_turns(rows, batch, sampling, backend, parser)
            prefixes = _before_turns(rows, asked, backend)
            own = [self.tools if each is None else each for each in rows.tools or (None,) * len(turns)]
            parse: list[Callable[[], Message | Mapping[str, Any]]] = [
                partial(parser.parse, text, prefix=prefix, tools=tools, typed=typed)
                for text, prefix, tools in zip(texts, prefixes, own, strict=True)
            ]
        else:
            parse = [partial(parser, turn.content or "") for turn in turns]
        messages, problems = [], {}
        for row, (turn, parsed) in enumerate(zip(turns, parse, strict=True)):
            try:
                made = Message.from_dict(parsed())
                # What was given with the beginning of a turn, such as its thinking, is not in the text of the answer.
                extra = {**turn.extra, **made.extra}
                messages.append(replace(made, token_ids=turn.token_ids, begun=turn.begun, extra=extra))
            except Exception as error:
                problems[row] = described(error)
                messages.append(turn)
        return tuple(messages), problems


def _turns(rows: InputRows, said: Sequence[str], batch: GenerateResult) -> tuple[Message, ...]:
    """Return the turns that the answers make, those that they continue included, with their texts as the contents."""
    turns = []
    for turn, text, ids in zip(rows.begun or (None,) * len(said), said, batch.ids.tolist(), strict=True):
        if turn is None:
            turns.append(Message("assistant", text, token_ids=tuple(ids)))
            continue
        # The answer's text begins with a character that the turn left incomplete.
        before = (turn.content or "").rstrip(HALF_CHARACTER) if ids else turn.content or ""
        begun = turn.to_dict() if turn.token_ids is None else turn.begun
        turns.append(replace(turn, content=before + text, token_ids=(*(turn.token_ids or ()), *ids), begun=begun))
    return tuple(turns)


def without_eos(batch: GenerateResult, backend: Backend) -> GenerateResult:
    """Return ids, to be decoded, of answers without the EOS at their end, and nothing of their texts."""
    ended = [bool(ids) and ids[-1] in backend.eos_token_ids for ids in batch.ids.tolist()]
    lengths = batch.ids.lengths
    ids = batch.ids.slice(torch.zeros_like(lengths), lengths - torch.tensor(ended, dtype=lengths.dtype))
    return replace(batch, ids=ids, texts=None)


def whole_texts(
    batch: GenerateResult,
    sampling: SamplingParams,
    backend: Backend,
    parser: NamedParser,
    prompts: Ragged | None = None,
) -> tuple[tuple[str, ...], str]:
    """Return the texts of answers for a parser, with the special tokens that are its marks, and a character.

    What looks like a special token and is none has this character in it; it is "" if there is no such text.

    Args:
        prompts: as for `answer_texts`.
    """
    batch = without_eos(batch, backend)
    said = list(answer_texts(batch, replace(sampling, skip_special_tokens=False), backend.tokenizer, prompts))
    before = [[]] * len(said) if prompts is None else prompts.tolist()
    specials = special_tokens(backend.tokenizer)
    longest_first = sorted(filter(None, specials.values()), key=len, reverse=True)
    special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
    everything = "".join(said)
    mark = next(each for each in map(chr, _NONCHARACTERS) if each not in everything)
    typed = ""
    for row, ids in enumerate(batch.ids.tolist()):
        left = len(said[row])  # without a stop string
        if special.search(said[row]) is None:
            continue
        parts = []
        at = 0
        for is_special, group in groupby(ids, specials.__contains__):
            run = list(group)
            for part in [[each] for each in run] if is_special else [run]:
                (text,) = backend.detokenize([part], skip_special_tokens=False, before=[before[row] + ids[:at]])
                text, left, at = text[:left], left - len(text[:left]), at + len(part)
                if not is_special:
                    if special.search(text):
                        typed = mark
                    text = special.sub(lambda found: found[0][:1] + mark + found[0][1:], text)
                parts.append("" if is_special and text in parser.specials else text)
        said[row] = "".join(parts)
    return tuple(said), typed


def _whole_turns(
    rows: InputRows, batch: GenerateResult, sampling: SamplingParams, backend: Backend, parser: NamedParser
) -> tuple[tuple[str, ...], str]:
    """Return the texts of whole turns, those that answers continue included, as `whole_texts` has them."""
    said, typed = whole_texts(batch, sampling, backend, parser, rows.continued)
    turns = _turns(rows, said, without_eos(batch, backend))
    return tuple(turn.content or "" for turn in turns), typed


def _before_turns(rows: InputRows, asked: tuple[str, ...], backend: Backend) -> tuple[str, ...]:
    """Return the texts of the prompts, without the turns that answers continue."""
    if rows.begun is None:
        return asked
    ids = rows.ids.tolist()
    before = {
        row: ids[row][: max(len(ids[row]) - len(turn.token_ids), 0)]
        for row, turn in enumerate(rows.begun)
        if turn is not None and turn.token_ids is not None and row not in rows.problems
    }
    texts = dict(zip(before, backend.detokenize(list(before.values()), skip_special_tokens=False), strict=True))
    given = ("" if turn is None or turn.token_ids is not None else (turn.content or "").strip() for turn in rows.begun)
    return tuple(
        texts.get(row, text.rstrip().removesuffix(said) if said else text)
        for row, (text, said) in enumerate(zip(asked, given, strict=True))
    )


def warn_unparsed(problems: Problems) -> None:
    """Warn about answers that the parser did not parse. To be called when the answers are where the caller finds them.

    This never raises, not even where warnings are errors: the answers have been paid for, and `errors` says the same.
    """
    if not problems:
        return
    try:
        warnings.warn(
            f"response_parser: {spelled_out(problems)}. The message of such an answer holds its plain text, and "
            "'errors' says why",
            ResponseParserWarning,
            stacklevel=level_of_caller(),
        )
    except ResponseParserWarning:
        _log.warning("response_parser raised on %d answers; 'errors' says why", len(problems))

"""From an engine's answers to their texts, and to the messages that they add to conversations.

The text of an answer is cut before a stop string. A message holds the ids that were sampled, also if a parser
changes their text.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch

from corelm.backend.backend import Backend
from corelm.errors import Problems, ResponseParserWarning, described, level_of_caller, spelled_out
from corelm.policy.options import ResponseParser
from corelm.policy.rows import InputRows
from corelm.rendering.encoding import decoded
from corelm.rendering.response_parsers import NamedParser, parser_named
from corelm.rendering.segments import special_tokens
from corelm.spec.answer_text import HALF_CHARACTER, text_before_stop
from corelm.spec.message import Message
from corelm.spec.records import GenerateResult
from corelm.spec.sampling import SamplingParams
from corelm.tensors.ragged import Ragged

_log = logging.getLogger(__name__)

#: Characters that Unicode keeps for use inside programs.
_NONCHARACTERS = range(0xFDD0, 0xFDF0)


def answer_texts(
    batch: GenerateResult,
    sampling: SamplingParams,
    backend: Backend,
    prompts: Ragged | None = None,
) -> tuple[str, ...]:
    """Return one text per answer: the engine's own, or the decoded ids, without the stop string that ended it.

    Args:
        prompts: int64, the ids whose text each answer continues, as `InputRows.continued` has them; None for none.
    """
    texts = batch.texts
    if texts and not sampling.stop:
        return texts
    rows = batch.ids.tolist()
    # The prompt of a row that failed may be illegal.
    before = None if prompts is None else [p if row else [] for p, row in zip(prompts.tolist(), rows, strict=True)]
    tokenizer, skip = backend.engine.tokenizer, sampling.skip_special_tokens
    if not texts:
        texts = tuple(decoded(tokenizer, rows, skip, before))
    if not sampling.stop:
        return texts
    olds = decoded(tokenizer, [row[:-1] for row in rows], skip, before)
    return tuple(
        text_before_stop(text, old, sampling.stop) if reason == "stop" else text
        for text, old, reason in zip(texts, olds, batch.finish_reasons, strict=True)
    )


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
    said = list(answer_texts(batch, replace(sampling, skip_special_tokens=False), backend, prompts))
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
        for at, (is_special, run) in _runs(ids, specials):
            (text,) = backend.detokenize([run], skip_special_tokens=False, before=[before[row] + ids[:at]])
            text, left = text[:left], left - len(text[:left])
            if not is_special:
                if special.search(text):
                    typed = mark
                text = special.sub(lambda found: found[0][:1] + mark + found[0][1:], text)
            elif text in parser.specials:
                text = ""
            parts.append(text)
        said[row] = "".join(parts)
    return tuple(said), typed


def _runs(ids: Sequence[int], specials: Mapping[int, str]) -> Iterator[tuple[int, tuple[bool, list[int]]]]:
    """Yield each special token and each run of other tokens, with the number of tokens before it."""
    at = 0
    for is_special, group in groupby(ids, specials.__contains__):
        run = list(group)
        for part in [[each] for each in run] if is_special else [run]:
            yield at, (is_special, part)
            at += len(part)


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

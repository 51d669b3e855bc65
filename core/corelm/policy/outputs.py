"""From an engine's result to the containers in a TensorDict, and from these to answers that go on.

Generating in place writes a new answer: its containers replace those of an earlier one. Scoring in place adds to what
is there: fields that are there stay as they are, and missing ones are added. What cannot be put next to it (scores of
other tokens, log-probs under a key that has some) is refused before the engine is asked.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import add
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase

from corelm.backend.backend import Backend
from corelm.containers.assemble import assemble
from corelm.containers.classes import NO_ID, LogProbs, Masks, Text, Tokens, flat, is_padded, objects
from corelm.containers.history import ChatHistory
from corelm.containers.reading import entries, key_parts, provenance_of_rows
from corelm.containers.turns import REQUEST_FIELDS, sampled_log_probs, sampled_tokens
from corelm.errors import (
    InvalidRequestError,
    MissingKeyError,
    Problems,
    ProvenanceMismatchError,
    ResponseParserWarning,
    described,
    level_of_caller,
    refuse,
    spelled_out,
)
from corelm.policy.inputs import find_value
from corelm.policy.options import Keys, PolicyOptions, ResponseParser
from corelm.policy.rows import InputRows, labelled
from corelm.rendering.render import special_tokens
from corelm.rendering.response_parsers import NamedParser, parser_named
from corelm.rendering.template import any_of
from corelm.spec.answer_text import HALF_CHARACTER, answer_texts, decoded
from corelm.spec.message import Message
from corelm.spec.records import ContainerRequest, GenerateResult, Parts, ScoreResult
from corelm.spec.sampling import SamplingParams
from corelm.spec.version_runs import with_runs
from corelm.tensors.ragged import Ragged
from corelm.tensors.token_sets import TokenSets
from corelm.validate import invalid

_log = logging.getLogger(__name__)

#: Characters that Unicode keeps for use inside programs.
_NONCHARACTERS = range(0xFDD0, 0xFDF0)
_DEFAULT = Keys()
_CONTAINERS: dict[str, Any] = {
    "text": Text,
    "tokens": Tokens,
    "masks": Masks,
    "log_probs": LogProbs,
    "history": ChatHistory,
}


# Before the engine is asked ------------------------------------------------------------------------------------------


def must_have_room(td: TensorDictBase, rows: InputRows, options: PolicyOptions) -> dict[str, Any]:
    """Refuse a call whose results cannot go where `inplace` says; return the containers that scores join."""
    here, samples, size = options.writes_in_place is True, options.num_samples, rows.batch_size
    if options.writes_in_place is False:
        return {}
    if here and td.is_locked:
        raise invalid("inplace", "the TensorDict is locked; unlock it, or pass inplace=False")
    size = size if samples is None else (*size, samples)
    if tuple(td.batch_size) != size:
        rest = td.exclude(*_replaced_keys(td, options)) if here else td.empty()
        try:
            rest.batch_size = torch.Size(size)
        except RuntimeError as error:
            raise invalid(
                "inplace", f"the results' batch {size} does not fit the input; pass inplace=False: {error}"
            ) from error
    if not here or not options.generate:
        return _joined(td, rows, options) if here else {}
    # A container of an earlier answer may not be left next to a new one.
    for name in _CONTAINERS:
        if name in options.fields or (name == "history" and options.input_mode != "history"):
            continue
        there = find_value(td, getattr(options.keys, name))
        response = "all_response_mask" if name == "masks" else "response"
        if isinstance(there, _CONTAINERS[name]) and response in there.keys():
            raise invalid(
                f"return_{name}",
                f"{_dotted(options, name)!r} holds that of an earlier answer, which this call would not replace; leave "
                f"return_{name}=False out, delete it from the TensorDict, or pass inplace=False",
            )
    if options.keys.tokens == _DEFAULT.tokens and len(td.keys()) > 1:  # not the input alone
        held = [(key, one) for key, one in entries(td) if isinstance(one, (Tokens, LogProbs))]
        kinds = {key: type(one) for key, one in held if "response" in one.keys() and key != (_DEFAULT.tokens,)}
        # Next to tokens of another policy, log-probs may be those of that one.
        _refuse_outdated(td, options, "a new answer", *([] if Tokens in kinds.values() else kinds))
    return {}


def _replaced_keys(td: TensorDictBase, options: PolicyOptions) -> list[NestedKey]:
    """Return the key of a bare input, which the container that holds the input replaces."""
    key = getattr(options.keys, options.input_mode)
    merged = not options.generate and isinstance(find_value(td, key), _CONTAINERS[options.input_mode])
    return [] if merged or options.input_key is not None else [key]


def _refuse_outdated(td: TensorDictBase, options: PolicyOptions, new: str, *others: NestedKey) -> None:
    """Refuse a call that replaces tokens, but neither the sampler's log-probs, which are as long, nor these `others`.

    A policy that writes log-probs elsewhere leaves those of the sampler, which are under the default key.
    """
    keys = options.keys
    sampled = [_DEFAULT.log_probs] if keys.tokens == _DEFAULT.tokens else []
    written = [key_parts(getattr(keys, name)) for name in options.fields]
    for key in map(key_parts, (*sampled, *others)):
        there = None if key in written else find_value(td, key)
        if isinstance(there, (LogProbs, Masks, Tokens)) and (others or "response" in there.keys()):
            raise invalid(
                ".".join(key),
                f"it belongs to the tokens that are there, and would stay next to {new}; delete it from the "
                "TensorDict, write it as well, or pass inplace=False",
            )


def _joined(td: TensorDictBase, rows: InputRows, options: PolicyOptions) -> dict[str, Any]:
    """Return the containers that scores in place join, by name, and refuse to replace what is there."""
    joins = not options.overwrite or rows.conflicts == {}
    if rows.conflicts and options.overwrite:
        _refuse_outdated(td, options, "scores of other tokens", options.keys.tokens, options.keys.masks)
    elif rows.conflicts:
        raise InvalidRequestError(
            f"{_dotted(options, 'tokens')}: {spelled_out(rows.conflicts)}. Scores of other tokens are not put next to "
            "them: another tokenizer or chat template made them, or the input was cut or has changed since. Pass "
            'input_mode="tokens" to score the tokens that are there, id for id; or inplace=False; or write elsewhere: '
            'keys=Keys(text="ref_text", tokens="ref_tokens", masks="ref_masks", log_probs="ref_log_probs"); or '
            "overwrite=True to replace them",
            field="tokens",
            problems=rows.conflicts,
        )
    found: dict[str, Any] = {}
    for name in _CONTAINERS:
        there, read = find_value(td, getattr(options.keys, name)), _reads(name, options)
        if there is None:
            continue
        if name in options.fields and not options.overwrite and not _kept(name, there, rows, read):
            kind = "list" if isinstance(there, list) else type(there).__name__
            instead = f"keys=Keys({name}=…) or return_{name}=False; or inplace=False; or overwrite=True to replace it"
            if name == "log_probs":
                instead = 'log_probs_key="ref_log_probs"; or inplace=False; or overwrite=True to replace it'
                if options.keys.log_probs != _DEFAULT.log_probs:
                    # Scored before, as when a cell of a notebook is run again.
                    instead = "overwrite=True to score again; or another log_probs_key; or inplace=False"
            raise InvalidRequestError(
                f"{_dotted(options, name)}: a {kind} is there, and nothing shows that it says the same. Scoring in "
                f"place replaces nothing: pass {instead}",
                field=name,
            )
        if name != "log_probs" and (joins or read):
            found[name] = there
    if options.overwrite:
        return found
    for name in ("argmax", "is_greedy") if options.return_argmax else ():
        if find_value(td, name) is not None:
            raise invalid(
                name,
                "the TensorDict holds one already, and scoring in place replaces nothing; pass inplace=False, or "
                "overwrite=True to replace it",
            )
    there = find_value(td, "errors") if options.on_error == "skip" else None
    if there is not None and [type(one) for one in flat(there)] != [str] * len(rows.ids):
        raise invalid("errors", "the TensorDict holds something else under that key; pass inplace=False")
    return found


def _kept(name: str, there: Any, rows: InputRows, read: bool) -> bool:
    """Return whether scoring in place keeps a container that is there, or would write the same.

    The container that is read, and those of the tokens that are there, say the same, whatever their texts: that of an
    answer lacks the special tokens and the stop string that its ids have.
    """
    if name == "log_probs":
        return False
    if isinstance(there, TensorDictBase):
        written = {"full", "input_ids", "attention_mask"} if read else set()
        if read and rows.only_response:
            written |= {"prompt", "response"}
        if name == "masks":
            written = {"all_attention_mask"} | ({"all_assistant_mask"} if rows.assistant is not None else set())
        return set(there.keys()) <= written
    if read or not isinstance(there, _CONTAINERS[name]):
        return read
    if rows.conflicts is not None:
        return True
    if name == "masks":
        return _fit(there, rows)
    if "full" not in there.keys():
        return True
    return bool(there.full.chats == rows.chats if name == "history" else tuple(flat(there.full)) == rows.texts)


def _fit(masks: Masks, rows: InputRows) -> bool:
    fields = [getattr(masks, name) for name in masks.keys() if name != "padded"]
    if masks.padded is not (rows.columns is not None):
        return False
    if rows.columns is not None:
        shape = (*rows.batch_size, rows.columns.mask.shape[-1])
        return all(field.shape == shape for field in fields)
    lengths = rows.ids.lengths.tolist()
    return all([len(row) for row in flat(field)] == lengths for field in fields)


def _reads(name: str, options: PolicyOptions) -> bool:
    """Return whether the container of this name is what the policy reads."""
    return name == options.input_mode and options.input_key is None


def _dotted(options: PolicyOptions, name: str) -> str:
    return ".".join(key_parts(getattr(options.keys, name)))


# Answers -------------------------------------------------------------------------------------------------------------


def generated(
    rows: InputRows, batch: GenerateResult, options: PolicyOptions, reader: AnswerReader, backend: Backend
) -> tuple[ContainerRequest, Problems]:
    """Return prompts and their answers, and the answers that the reader did not parse.

    Every token of an answer is scored and the assistant's; no prompt is scored.
    """
    fields, sampling = options.fields, options.sampling
    if sampling.num_samples is not None:
        rows = rows.repeat(sampling.num_samples)
    texts = chats = None
    problems: Problems = {}
    errors = batch.errors or ("",) * len(batch.finish_reasons)
    if "text" in fields or "history" in fields:
        said = answer_texts(batch, sampling, backend.tokenizer, rows.ids if rows.chats is None else _continued(rows))
        # The text of an answer begins with a character that its prompt left incomplete.
        begun = list(rows.texts or _given_texts(rows.ids, batch.errors, backend))
        for at, length in enumerate(batch.ids.lengths.tolist()):
            if length:
                begun[at] = begun[at].rstrip(HALF_CHARACTER)
        asked = rows.texts or tuple(begun)
        if rows.chats is not None:
            messages, problems = reader.read(rows, asked, said, batch, sampling, backend)
            if problems:
                errors = tuple([error or problems.get(row, "") for row, error in enumerate(errors)])
            replies = tuple(zip(messages, strict=True))
            asked_before = rows.chats
            if rows.begun is not None:
                pairs = zip(rows.chats, rows.begun, strict=True)
                asked_before = tuple([chat if turn is None else chat[:-1] for chat, turn in pairs])
            chats = Parts(rows.chats, replies, tuple(map(add, asked_before, replies)))
        if "text" in fields:
            after = said if rows.chats is None else answer_texts(batch, sampling, backend.tokenizer, rows.ids)
            texts = Parts(asked, said, tuple(map(add, begun, after)))
    # True where the answers are: those positions are scored, and they are the assistant's.
    answered = rows.ids.join_mask(batch.ids)
    assistant = answered
    if rows.assistant is not None:
        marks = answered.values.clone().masked_scatter_(~answered.values, rows.assistant.values)
        assistant = answered.with_values(marks)
    scores: dict[str, Any] = {}
    if batch.logprobs is not None:
        scores = {"scored": answered, "provenance": backend.provenance(batch)}
        for name in REQUEST_FIELDS.values():
            # As long as prompt and answer.
            if isinstance(values := getattr(batch, name), Ragged):
                where = answered.values.to(values.values.device).reshape(-1, *[1] * (values.values.ndim - 1))
                filled = values.values.new_full((len(where), *values.values.shape[1:]), NO_ID.get(name, 0))
                scores[name] = answered.with_values(filled.masked_scatter_(where, values.values))
            elif values is not None:
                device = values.ids.values.device
                scores[name] = TokenSets.empty(rows.ids.lengths).to(device).join(values)
    request = ContainerRequest(
        batch_size=rows.batch_size,
        fields=fields,
        tokens=Parts(rows.ids, batch.ids, rows.ids.join(batch.ids, answered)),
        texts=texts,
        chats=chats,
        assistant=assistant,
        finish_reasons=batch.finish_reasons,
        errors=errors,
        retokenized=rows.retokenized,
        pad_id=backend.engine.pad_id if options.pad_output else 0,
        pad_output=options.pad_output,
        **scores,
    )
    return request, problems


def scored(
    rows: InputRows,
    batch: ScoreResult,
    options: PolicyOptions,
    backend: Backend,
    fields: frozenset[str],
) -> ContainerRequest:
    """Return whole sequences and their scores, in the columns that they came in."""
    texts, support, provenance = None, rows.support, backend.provenance(batch)
    if "text" in fields:
        prompts, responses = rows.parts or (None, None)
        texts = Parts(prompts, responses, rows.texts or _given_texts(rows.ids, batch.errors, backend))
    pad_output = options.pad_output
    if not options.overwrite or rows.conflicts == {}:
        # In place, scores have the layout of the tokens there.
        for name in ("masks", "tokens"):
            if isinstance(rows.there.get(name), _CONTAINERS[name]):
                pad_output = rows.columns is not None
    return ContainerRequest(
        batch_size=rows.batch_size,
        fields=fields,
        tokens=rows.tokens,
        texts=texts,
        chats=None if rows.chats is None else Parts(None, None, rows.chats),
        logprobs=batch.logprobs,
        scored=batch.scored,
        kept_ids=support,
        top_ids=batch.top_ids,
        top_logprobs=batch.top_logprobs,
        tail_log_mass=batch.tail_log_mass,
        argmax=batch.argmax,
        greedy=None if batch.argmax is None else _greedy(rows, batch.scored, batch.argmax),
        provenance=provenance if support is None else labelled(provenance, support, batch.temperature),
        assistant=rows.assistant,
        errors=(batch.errors or ("",) * len(rows.ids)) if options.on_error == "skip" else None,
        retokenized=rows.retokenized,
        pad_output=pad_output,
        pad_id=backend.engine.pad_id if pad_output else 0,
        columns=rows.columns,
    )


def _greedy(rows: InputRows, scored: Ragged, argmax: Ragged) -> tuple[bool, ...]:
    """Return whether each row's scored tokens, those of its response if it is split, are the most probable ones."""
    ids, counted = rows.ids.values, scored.values.cpu()
    if rows.prompt_lengths is not None:
        counted = counted & (rows.ids.positions >= rows.prompt_lengths[rows.ids.row_index])
    others = counted & (argmax.values.cpu() != ids)
    number, wrong = (
        torch.zeros_like(rows.ids.lengths).index_add_(0, rows.ids.row_index, some.long()) for some in (counted, others)
    )
    return tuple(((number > 0) & (wrong == 0)).tolist())


def _given_texts(ids: Ragged, errors: tuple[str, ...] | None, backend: Backend) -> tuple[str, ...]:
    """Return the texts that prompts or sequences decode to. Illegal ids, which only skipped rows have, are left out."""
    rows, size = ids.tolist(), backend.capabilities.vocab_size
    if errors is not None:
        rows = [[one for one in row if 0 <= one < size] for row in rows]
    return tuple(decoded(backend.tokenizer, rows, skip_special_tokens=False))


# Answers as messages --------------------------------------------------------------------------------------------------


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
        """Return the reader for a policy's options. `tools` may be anything that `template_kwargs` have for them."""
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

        The message of an answer that did not parse holds its plain text. `asked` are the texts of the prompts, `said`
        those of the answers.
        """
        turns = _turns(rows, said, batch)
        parser = self.parser
        if parser is None:
            return turns, {}
        if isinstance(parser, NamedParser):
            # Some formats have special tokens for marks. The EOS is not part of what was said.
            texts, typed = whole_texts(batch, sampling, backend, parser, _continued(rows))
            whole = _turns(rows, texts, without_eos(batch, backend))
            own = [self.tools if each is None else each for each in rows.tools or (None,) * len(turns)]
            parse: list[Callable[[], Message | Mapping[str, Any]]] = [
                partial(parser.parse, turn.content or "", prefix=prefix, tools=tools, typed=typed)
                for turn, prefix, tools in zip(whole, _before_turns(rows, asked, backend), own, strict=True)
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


def _continued(rows: InputRows) -> Ragged | None:
    """Return the ids whose text each answer continues, empty where it is a new message; None where all are."""
    if rows.chats is None:
        return rows.ids
    if rows.begun is None:
        return None
    begun = torch.tensor([turn is not None for turn in rows.begun], dtype=torch.int64)
    return rows.ids.slice(stop=rows.ids.lengths * begun)


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
    ids = batch.ids.slice(stop=batch.ids.lengths - torch.tensor(ended, dtype=torch.int64))
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
    `prompts` are those of `answer_texts`.
    """
    batch = without_eos(batch, backend)
    said = list(answer_texts(batch, replace(sampling, skip_special_tokens=False), backend.tokenizer, prompts))
    before = [[]] * len(said) if prompts is None else prompts.tolist()
    specials = special_tokens(backend.tokenizer)
    special = any_of(specials.values())
    mark = next(each for each in map(chr, _NONCHARACTERS) if each not in "".join(said))
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
    try:
        warnings.warn(
            f"response_parser: {spelled_out(problems)}. The message of such an answer holds its plain text, and "
            "'errors' says why",
            ResponseParserWarning,
            stacklevel=level_of_caller(),
        )
    except ResponseParserWarning:
        _log.warning("response_parser raised on %d answers; 'errors' says why", len(problems))


# Writing -------------------------------------------------------------------------------------------------------------


def lacking(rows: InputRows, options: PolicyOptions) -> dict[str, set[str]]:
    """Return the containers that scores make, and for each that joins one which is there the fields that it adds."""
    split = rows.prompt_lengths is not None
    parts = {"prompt", "response", "full"}
    masks = {"all_attention_mask", *(["all_response_mask"] if split else [])}
    made = {
        "text": parts if rows.parts else {"full"},
        "tokens": parts if split else {"full"},
        "masks": masks if rows.assistant is None else {*masks, "all_assistant_mask"},
        "history": {"full"},
    }
    found: dict[str, set[str]] = {}
    for name in options.fields:
        there = rows.there.get(name)
        if not isinstance(there, _CONTAINERS[name]):
            found[name] = set()
            continue
        # Completions that get a `full` would be scored as whole sequences the next time.
        without = {"full"} if rows.only_response and _reads(name, options) else set()
        missing = made[name] - without - set(there.keys())
        looked_at = isinstance(there, Tokens) or (isinstance(there, Masks) and missing)
        if looked_at and rows.columns is None and is_padded(there):
            # Scores are rows, which do not fit into nested tensors or dense ones of several widths: these are replaced.
            found[name] = set()
        elif missing:
            found[name] = missing
    return found


def deliver(
    td: TensorDictBase,
    rows: InputRows,
    options: PolicyOptions,
    reader: AnswerReader,
    backend: Backend,
    result: GenerateResult | ScoreResult,
) -> TensorDictBase:
    """Return the result of a call as containers under the policy's keys, where `inplace` says."""
    where, keys = options.writes_in_place, options.keys
    unparsed: Problems = {}
    added: dict[str, set[str]] = {}
    if isinstance(result, GenerateResult):
        request, unparsed = generated(rows, result, options, reader, backend)
    else:
        added = lacking(rows, options)
        request = scored(rows, result, options, backend, frozenset(added))
        if where is True and request.errors is not None and "errors" in td.keys():
            pairs = zip(flat(find_value(td, "errors")), request.errors, strict=True)
            request = replace(request, errors=tuple("; ".join(dict.fromkeys(filter(None, pair))) for pair in pairs))
    made: TensorDictBase = backend.engine.convert("to_containers", request, assemble)
    device = options.device or td.device
    if device is not None:
        made = made.to(device)
    if where is False:
        # Not what the hook returned: a wrapper may keep it, or have given it another batch size.
        out = TensorDict({}, batch_size=request.batch_size, device=device)
    else:
        out = td if where is True else td.empty()
    if tuple(out.batch_size) != tuple(request.batch_size):
        out.exclude(*_replaced_keys(td, options), inplace=True)
        out.batch_size = torch.Size(request.batch_size)
    for name, value in made.items():
        if fields := added.get(name):
            for field in filter(fields.__contains__, value.keys()):
                # Fields without rows read as empty lists, which have no type.
                new = value.get(field) if 0 in value.batch_size else getattr(value, field)
                rows.there[name].set(field, new)
            continue
        if rows.only_response and name in rows.there and _reads(name, options):
            value = value.exclude("full")
        out.set(getattr(keys, name, name), value)
    if unparsed:
        warn_unparsed(unparsed)
    return out


# Answers that go on --------------------------------------------------------------------------------------------------


def partial_answers(found: Any, rows: InputRows, options: PolicyOptions) -> GenerateResult:
    """Return the answers to `rows` in what a policy has returned, as `generate(continue_from=)` takes them."""
    keys, name = options.keys, "continue_from"
    if not isinstance(found, TensorDictBase):
        raise invalid(name, f"expected the TensorDict that a policy returned, got a {type(found).__name__}")
    if "finish_reason" not in found.keys():
        raise MissingKeyError("continue_from: it has no finish_reason, as answers do", field=name)
    ids, start = sampled_tokens(found, name, name, tokens=keys.tokens, masks=keys.masks)
    prompts, stop = ids.slice(stop=start), ids.lengths
    wanted = rows.ids.repeat(options.num_samples or 1)
    if len(prompts) != len(wanted):
        raise invalid(name, f"has {len(prompts)} answers, but the policy is asked for {len(wanted)}")
    pairs = enumerate(zip(prompts.tolist(), wanted.tolist(), strict=True))
    refuse({row: "answers another prompt" for row, (one, other) in pairs if one != other}, name)
    answers: dict[str, Any] = {
        "ids": ids.slice(start, stop),
        "logprobs": None,
        "finish_reasons": tuple(objects(found.get("finish_reason"), len(found.batch_size))),
        "adapter": options.adapter,
    }
    if not (values := sampled_log_probs(found, keys.log_probs, keys.masks)):
        return GenerateResult(**answers)
    answers |= {given: values[name].slice(start, stop) for name, given in REQUEST_FIELDS.items() if name in values}
    labels = provenance_of_rows(found.get(keys.log_probs), len(ids))
    refuse({row: "its provenance is not known" for row, one in enumerate(labels) if one is None}, name)
    known = [one for one in labels if one is not None]
    if len({(one.distribution, one.adapter) for one in known}) > 1:
        raise ProvenanceMismatchError("continue_from: its rows are of several distributions; continue them apart")
    if known:
        first = known[0]
        answers |= {
            "mode": first.mode,
            "temperature": first.temperature,
            "support": first.support,
            "adapter": first.adapter,
            "sampling": SamplingParams.make(dict(first.penalties), temperature=first.temperature),
        }
    runs = [one.version_runs or ((one.weight_version, 0),) for one in known]
    return with_runs(GenerateResult(**answers), runs)

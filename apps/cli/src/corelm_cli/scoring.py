"""What ``corelm score`` asks the engine for: log-probs of given tokens, and which fields of them it writes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import compress
from typing import Any

from corelm import Ragged
from corelm.application import encode_completions
from corelm.errors import InvalidRequestError
from corelm.spec import Chat, Message
from corelm_cli.batch import Outcome, Worker, id_fields, provenance_of_row, rendered_rows
from corelm_cli.lines import ToScore

#: Lines that every working engine can score.
HARMLESS_TEXT = ToScore(line=0, id=0, digest="", text="Hello, hello")
HARMLESS_CHAT = ToScore(line=0, id=0, digest="", chat=(Message("user", "Hello"), Message("assistant", "Hello")))


@dataclass(frozen=True, slots=True)
class Scorable:
    """A sequence of token ids, and which of its tokens count."""

    ids: list[int]
    counted: list[bool]


@dataclass(frozen=True, slots=True)
class _Scored:
    """The tokens of a sequence that count, with their log-probs; `is_greedy` is False unless it was asked for.

    `other_ids` holds what was asked for of other ids, see `id_fields`.
    """

    ids: list[int]
    log_probs: list[float]
    provenance: dict[str, Any]
    is_greedy: bool
    other_ids: dict[str, list[Any]]


#: The sequences of a line, or why there are none.
Encoded = list[Scorable] | str

_ENDED = (
    "messages: the conversation ends with an assistant turn, and a completion is scored as the assistant's next turn; "
    "add the turn that it replies to, or put the beginning of the turn and the completion into one"
)
_NO_TEXT = "--window: it splits a `text`, and this line has none; leave the flag out, or give the line as `text`"
_EMPTY = "text: it has no tokens to score; leave it out, or give a longer one"
_TOO_SHORT = (
    "text: it has fewer than two tokens, and only a token after another one has a log-prob; give a longer one, or "
    "--window without --stride, which puts BOS (or EOS) before it"
)


@dataclass(kw_only=True)
class Scorer(Worker[ToScore]):
    """Scores texts, completions and conversations.

    Attributes:
        window: the most ids of a text that the model reads at once; None for all. See `windows`.
        stride: see `windows`.
    """

    temperature: float = 1.0
    per_token: bool = False
    is_greedy: bool = False
    return_tokens: bool = False
    top_k: int = 0
    window: int | None = None
    stride: int | None = None

    def __post_init__(self) -> None:
        # Here, so that a window that no line fits is said once.
        most = self.engine.capabilities.max_context
        if self.window is not None and most is not None and self.window > most:
            raise InvalidRequestError(f"--window: the context of the model is {most}; give --window {most} or less")

    def ask_harmless(self, *, chat: bool) -> bool:
        lines = [HARMLESS_TEXT] + [HARMLESS_CHAT] * chat
        self.ask(lines)
        encoded = [found for found in self._encode(lines) if not isinstance(found, str)]
        return self.reached([each.ids for found in encoded for each in found])

    def ask(self, lines: list[ToScore]) -> Outcome:
        encoded = self._encode(lines)
        errors = {at: found for at, found in enumerate(encoded) if isinstance(found, str)}
        sequences = [(at, each) for at, found in enumerate(encoded) if not isinstance(found, str) for each in found]
        if not sequences:
            return [], self.failed(lines, errors)
        batch = self.engine.score_logprobs(
            Ragged.from_list([each.ids for _, each in sequences]),
            temperature=self.temperature,
            score_from=[each.counted.index(True) for _, each in sequences],
            return_argmax=self.is_greedy,
            top_k=self.top_k,
            on_error="skip",
            adapter=self.options.adapter,
        )
        provenance, other_ids = self.engine.provenance(batch), id_fields(batch)
        best = None if batch.argmax is None else batch.argmax.tolist()
        made: dict[int, list[_Scored]] = {}
        for row, ((at, each), log_probs) in enumerate(zip(sequences, batch.logprobs.tolist(), strict=True)):
            if batch.errors and batch.errors[row]:
                errors.setdefault(at, batch.errors[row])
            ids = list(compress(each.ids, each.counted))
            scored = _Scored(
                ids,
                list(compress(log_probs, each.counted)),
                provenance_of_row(provenance, row),
                best is not None and ids == list(compress(best[row], each.counted)),
                {name: list(compress(values, each.counted)) for name, values in other_ids[row].items()},
            )
            made.setdefault(at, []).append(scored)
        for at, parts in made.items():
            if any(part.provenance != parts[0].provenance for part in parts):
                errors.setdefault(at, "the weights of the engine changed while it scored this line; run it again")
        rows = [self._row(lines[at], parts) for at, parts in made.items() if at not in errors]
        return rows, self.failed(lines, errors)

    def _row(self, line: ToScore, parts: list[_Scored]) -> dict[str, Any]:
        if line.text is not None:
            parts = [_joined(parts)]
        fields: dict[str, list[Any]] = {
            "log_prob": [math.fsum(part.log_probs) for part in parts],
            "tokens": [len(part.ids) for part in parts],
        }
        if line.text is not None:
            fields["perplexity"] = [_perplexity(part) for part in parts]
            if self.window is not None:
                fields |= {"window": [self.window], "stride": [self.stride]}
        if self.is_greedy:
            fields["is_greedy"] = [part.is_greedy for part in parts]
        if self.return_tokens:
            fields["token_ids"] = [part.ids for part in parts]
        if self.per_token:
            fields["log_probs"] = [part.log_probs for part in parts]
        fields |= {name: [part.other_ids[name] for part in parts] for name in parts[0].other_ids}
        values = {name: each[0] if line.single else each for name, each in fields.items()}
        return self.row(line, **values, provenance=parts[0].provenance)

    # Lines to ids -----------------------------------------------------------------------------------------------------

    def _encode(self, lines: list[ToScore]) -> list[Encoded]:
        asked = dict(enumerate(lines))
        found: dict[int, Encoded] = {}
        if self.window is not None:
            found = {at: _NO_TEXT for at, line in asked.items() if line.text is None}
            asked = {at: line for at, line in asked.items() if line.text is not None}
        how = self.options.tokenizer_kwargs
        texts = {at: line.text for at, line in asked.items() if line.text is not None}
        for at, ids in zip(texts, self.engine.tokenize(list(texts.values()), **how).ids.tolist(), strict=True):
            rolling = self.window is not None and self.stride is None
            if rolling and ids[:1] != [first := self._prefix()]:
                ids = [first, *ids]
            too_short = _EMPTY if rolling else _TOO_SHORT
            found[at] = windows(ids, self.window or len(ids), self.stride) if len(ids) > 1 else too_short
        continued = {at: line.prompt for at, line in asked.items() if line.prompt is not None}
        pairs = [(prompt, each) for at, prompt in continued.items() for each in lines[at].completions]
        encoded = encode_completions(
            self.engine.tokenize,
            [one for one, _ in pairs],
            [other for _, other in pairs],
            self.options.completion_boundary,
            how,
        )
        wholes = zip(encoded.ids.tolist(), encoded.starts.tolist(), strict=True)
        made = iter([encoded.problems.get(row) or _after(*whole) for row, whole in enumerate(wholes)])
        for at in continued:
            each = [next(made) for _ in lines[at].completions]
            if not lines[at].single:
                each = [f"completions[{n}]: {one}" if isinstance(one, str) else one for n, one in enumerate(each)]
            found[at] = _all(each)
        found |= self._encode_chats({at: line for at, line in asked.items() if line.chat is not None})
        return [found[at] for at in range(len(lines))]

    def _prefix(self) -> int:
        """Return the id before the first token of a text, so that this token has a log-prob, too."""
        tokenizer = self.engine.tokenizer
        found = [getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id")]
        if not (known := [each for each in found if each is not None]):
            raise InvalidRequestError("--window: the tokenizer has neither BOS nor EOS to begin a text; give --stride")
        return int(known[0])

    def _encode_chats(self, lines: dict[int, ToScore]) -> dict[int, Encoded]:
        wholes: list[tuple[int, Chat]] = []
        for at, line in lines.items():
            chat = line.chat or ()
            wholes += [(at, (*chat, Message("assistant", each))) for each in line.completions] or [(at, chat)]
        asked = {at: (line.chat or (), line.tools) for at, line in lines.items() if line.completions}
        prompts, _, unread = rendered_rows(self.engine, list(asked.values()), self.options, ended=_ENDED)
        before = {at: (ids, unread.get(row)) for row, (at, ids) in enumerate(zip(asked, prompts, strict=True))}
        after = [(chat, lines[at].tools) for at, chat in wholes]
        rendered, assistant, problems = rendered_rows(self.engine, after, self.options)
        found: dict[int, list[Scorable | str]] = {at: [] for at in lines}
        for row, (at, _) in enumerate(wholes):
            prompt, problem = before.get(at, ([], None))
            problem = problem or problems.get(row)
            found[at].append(problem or _turns(rendered[row], assistant[row], prompt))
        return {at: _all(each) for at, each in found.items()}


def windows(ids: list[int], size: int, stride: int | None) -> list[Scorable]:
    """Return parts of a sequence of at most `size` ids, in which each id but the first counts once.

    Args:
        ids: the sequence.
        size: the most ids of a part.
        stride: each part begins so many ids after the one before, and counts the ids that this one did not have, as in
            transformers' guide to perplexity. None lets each part but the last count all ids but its first, and the
            last one have as much context as fits, as lm-eval does.
    """
    found: list[Scorable] = []
    done, begin = 1, 0
    while done < len(ids):
        end = min((done - 1 if stride is None else begin) + size, len(ids))
        begin = max(end - size, 0) if stride is None else begin
        found.append(_after(ids[begin:end], done - begin))
        done, begin = end, begin + (stride or 0)
    return found


def _perplexity(part: _Scored) -> float | None:
    """Return the perplexity of the tokens that count; None if no float is as large, which JSON does not have."""
    try:
        return math.exp(-math.fsum(part.log_probs) / len(part.ids))
    except OverflowError:
        return None


def _joined(parts: list[_Scored]) -> _Scored:
    """Return the windows of a text as one."""
    return _Scored(
        [token for part in parts for token in part.ids],
        [log_prob for part in parts for log_prob in part.log_probs],
        parts[0].provenance,
        all(part.is_greedy for part in parts),
        {name: [value for part in parts for value in part.other_ids[name]] for name in parts[0].other_ids},
    )


def _turns(ids: list[int], assistant: list[bool], prompt: list[int]) -> Scorable | str:
    """Return a conversation with the assistant's tokens after `prompt` counted."""
    if ids[: len(prompt)] != prompt:
        return "messages: the chat template changes the conversation when the completion is added, so they do not join"
    # No log-prob exists for the first token.
    counted = [mine and position >= max(len(prompt), 1) for position, mine in enumerate(assistant)]
    return Scorable(ids, counted) if any(counted) else "messages: no turn of the assistant to score"


def _after(ids: list[int], start: int) -> Scorable:
    return Scorable(ids, [position >= start for position in range(len(ids))])


def _all(found: Iterable[Scorable | str]) -> Encoded:
    sequences: list[Scorable] = []
    problem = None
    for each in found:
        if isinstance(each, str):
            problem = problem or each
        else:
            sequences.append(each)
    return problem or sequences

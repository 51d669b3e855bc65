"""Sessions that a server recorded (`corelm serve`, ``GET /sessions/{id}``) as containers, to score and to train on.

A session is a tree: requests that begin alike share messages, and a client that rewrites its history forks it. `load`
returns a row for each conversation in it, `tree` shows it as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
from tensordict import TensorDict

from corelm import Ragged, validate
from corelm.application import SampledPart, assemble, disagreement, non_tensors, provenance_of_parts
from corelm.errors import InvalidRequestError, ProvenanceMismatchError, spelled_out
from corelm.spec import Chat, ContainerRequest, Message, Parts
from corelm.validate import invalid, shown
from corelm_serve.session_records import NodeRecord, Row, SessionRecord

#: A URL, a path, what the JSON of a session says, or a session; or a list of them.
Source = Any

#: How many characters of a message `tree` shows.
_SHOWN = 60


def load(
    source: Source,
    *,
    key: str | None = None,
    rows: Literal["leaves", "calls"] = "leaves",
    pad_output: bool = False,
    pad_id: int = 0,
) -> TensorDict:
    """Return the conversations of recorded sessions, one row each.

    Args:
        source: the URL of a session, a path of a file with its JSON, a dict that such JSON holds, or a `SessionRecord`;
            or a list of them.
        key: the key of the server, sent as a bearer token.
        rows: "leaves" for a row for each answer that no other answer follows. It holds the ids that the engine read
            for this answer, and those that it sampled. Earlier answers count as sampled, with their log-probs, as far
            as these ids are the ones that were sampled then, after the same ids. What a chat template or a client
            rewrote is part of the prompt. "calls" for a row for each answer, in which only this answer counts.
        pad_output: dense tensors (prompts padded left, responses right) instead of one row a conversation.
        pad_id: the id in the pads of dense tokens.

    Returns:
        A TensorDict with batch ``(rows,)``:

        - `tokens`: `prompt` ends before the first token that counts as sampled; `response` begins there.
        - `masks`: `all_assistant_mask` is True where a token counts as sampled, the loss mask of a trainer.
        - `log_probs`, if a session has some: `scored_mask` is True where a sampled token has one. The provenance of a
          row whose answers were sampled with different weights names all of them, such as "3, 4".
        - `history`, if a session has messages: the conversation. Answers carry the ids that were sampled, also where
          the engine later read others.
        - `finish_reason`: why the answer of the row ended.
        - `session`: the session's name. `node`: int64, the number of the answer in it.
        - `turns`: the numbers of the answers that count, and `weight_versions`: the version of the weights of each.

    Raises:
        InvalidRequestError: a source cannot be read, or the server refused the request.
        ProvenanceMismatchError: the log-probs of a row are of different distributions, because a client changed its
            sampling parameters; the message names the rows.
        BackendNotInstalledError: `source` is a URL, and httpx2 is not installed.
        EngineError: the server could not be reached, or its reply is not a session.
    """
    validate.one_of("rows", rows, ("leaves", "calls"))
    found: list[_Row] = []
    for session in _sessions(source, key):
        answers = session.last_answers() if rows == "leaves" else [n for n in session.nodes if n.kind == "answer"]
        found += [_Row.of(session, node, alone=rows == "calls") for node in answers]
    problems = {number: what for number, row in enumerate(found) if (what := disagreement(row.scored_parts()))}
    if problems:
        raise ProvenanceMismatchError(
            f"the log-probs of answers to one conversation are of different distributions: {spelled_out(problems)}; "
            'pass rows="calls" for a row for each answer, or sample with the same sampling parameters'
        )
    return _assembled(found, pad_output=pad_output, pad_id=pad_id)


def tree(source: Source, *, key: str | None = None) -> str:
    """Return recorded sessions as text, a line for each node; messages and answers are shortened.

    Args:
        source: see `load`.
        key: see `load`.

    Raises:
        InvalidRequestError, BackendNotInstalledError, EngineError: as for `load`.
    """
    lines: list[str] = []
    for session in _sessions(source, key):
        lines.append(f"session {session.id}")
        children: dict[int | None, list[NodeRecord]] = {}
        for node in session.nodes:
            children.setdefault(node.parent, []).append(node)
        waiting = [(node, 0) for node in reversed(children.get(None, []))]
        while waiting:
            node, depth = waiting.pop()
            lines.append(f"{'  ' * depth}{node.id} {_described(node)}")
            # A conversation goes on at the same depth; where it forks, its branches are indented.
            following = children.get(node.id, [])
            waiting += [(child, depth + (len(following) > 1)) for child in reversed(following)]
    return "\n".join(lines)


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """A conversation up to an answer.

    Attributes:
        session: the session.
        node: the answer.
        read: what the engine had read and sampled at its end.
        parts: where the answers are that count, in order: the number of each, and its place.
    """

    session: SessionRecord
    node: NodeRecord
    read: Row
    parts: tuple[tuple[int, SampledPart], ...]

    @classmethod
    def of(cls, session: SessionRecord, node: NodeRecord, *, alone: bool) -> _Row:
        """Return the row of an answer. With `alone`, no earlier answer counts."""
        read = session.row(node)
        if alone:
            own = [one if one == node.id else None for one in read.sampled_by]
            read = Row(read.token_ids, own, read.log_probs)
        parts, start = [], 0
        for number, group in groupby(read.sampled_by):
            stop = start + len(list(group))
            if number is not None:
                parts.append((number, SampledPart(session.by_id[number].provenance, start, stop)))
            start = stop
        return cls(session, node, read, tuple(parts))

    @property
    def scored(self) -> list[bool]:
        """Whether each token has a log-prob that counts."""
        pairs = zip(self.read.sampled_by, self.read.log_probs, strict=True)
        return [number is not None and log_prob is not None for number, log_prob in pairs]

    def scored_parts(self) -> list[SampledPart]:
        """Return the parts that have log-probs."""
        scored = self.scored
        return [part for _, part in self.parts if any(scored[part.start : part.stop])]

    @property
    def prompt_length(self) -> int:
        """How many tokens there are before the first one that counts as sampled."""
        return self.parts[0][1].start if self.parts else len(self.read.token_ids)

    @property
    def weight_versions(self) -> tuple[str, ...]:
        return tuple("" if (one := part.provenance) is None else one.weight_version for _, part in self.parts)

    def chat(self) -> Chat:
        """Return the conversation; without messages if the client sent ids."""
        path = self.session.path(self.node)
        return () if path[0].kind == "prompt" else tuple(map(_message, path))


def _message(node: NodeRecord) -> Message:
    message = node.message or Message("assistant", "")
    if node.kind != "answer":
        return message
    pairs = zip(node.token_ids or (), node.sampled or (), strict=True)
    return replace(message, token_ids=tuple(token_id for token_id, sampled in pairs if sampled))


def _assembled(rows: Sequence[_Row], *, pad_output: bool, pad_id: int) -> TensorDict:
    full = Ragged.from_list([row.read.token_ids for row in rows])
    prompt_lengths = torch.tensor([row.prompt_length for row in rows], dtype=torch.int64)
    scored = full.with_values(torch.tensor([one for row in rows for one in row.scored], dtype=torch.bool))
    log_probs = [0.0 if one is None else one for row in rows for one in row.read.log_probs]
    sampled = [one is not None for row in rows for one in row.read.sampled_by]
    chats = [row.chat() for row in rows]
    has_log_probs, has_messages = bool(scored.values.any()), any(chats)
    fields = (
        {"tokens", "masks"} | ({"log_probs"} if has_log_probs else set()) | ({"history"} if has_messages else set())
    )
    shape = (len(rows),)
    request = ContainerRequest(
        batch_size=shape,
        fields=frozenset(fields),
        tokens=Parts(
            full.slice(torch.zeros_like(full.lengths), prompt_lengths), full.slice(prompt_lengths, full.lengths), full
        ),
        chats=Parts(tuple(chat[:-1] for chat in chats), tuple(chat[-1:] for chat in chats), tuple(chats)),
        logprobs=full.with_values(torch.tensor(log_probs, dtype=torch.float32)),
        scored=scored,
        provenance=tuple(provenance_of_parts(row.scored_parts()) for row in rows),
        assistant=full.with_values(torch.tensor(sampled, dtype=torch.bool)),
        finish_reasons=tuple(row.node.finish_reason or "" for row in rows),
        pad_output=pad_output,
        pad_id=pad_id,
    )
    out = assemble(request)
    out["node"] = torch.tensor([row.node.id for row in rows], dtype=torch.int64)
    columns: dict[str, list[Any]] = {
        "session": [row.session.id for row in rows],
        "turns": [tuple(number for number, _ in row.parts) for row in rows],
        "weight_versions": [row.weight_versions for row in rows],
    }
    for name, values in columns.items():
        out.set(name, non_tensors(values, shape))
    return out


def _described(node: NodeRecord) -> str:
    said = "" if node.message is None else str(node.message.content or node.message.tool_calls or "")
    text = json.dumps(said if len(said) <= _SHOWN else f"{said[: _SHOWN - 1]}…", ensure_ascii=False)
    if node.kind == "prompt":
        return f"prompt: {node.shared + len(node.token_ids or ())} ids"
    if node.kind == "message":
        return f"{node.role}: {text}"
    ended = f"{sum(node.sampled or ())} ids, {node.finish_reason or 'unknown end'}"
    return f"answer: {ended}" if node.message is None else f"{node.role}: {text} ({ended})"


def _sessions(source: Source, key: str | None) -> list[SessionRecord]:
    if isinstance(source, SessionRecord):
        return [source]
    if isinstance(source, Mapping):
        return [SessionRecord.from_json(source)]
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        return _sessions(_fetched(source, key), None)
    if isinstance(source, (str, PathLike)):
        return _sessions(_read(Path(source)), None)
    given = validate.as_list(source)
    if not isinstance(given, list):
        raise invalid("source", f"expected a URL, a path, a dict or a list of them, got {shown(source)}")
    return [session for one in given for session in _sessions(one, key)]


def _fetched(url: str, key: str | None) -> Any:
    # Needs httpx2.
    from corelm_engine_kit.http import HttpClient

    parts = urlsplit(url)
    client = HttpClient(f"{parts.scheme}://{parts.netloc}", key, max_reply_bytes=2**31)
    try:
        return client.get(f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}")
    finally:
        client.close()


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        advice = "; a URL begins with http:// or https://" if isinstance(error, FileNotFoundError) else ""
        raise InvalidRequestError(f"source: cannot read {path} as JSON: {error}{advice}", field="source") from error

"""`SessionRecord`: a recorded session as plain values, and as JSON that other programs can read.

The JSON is an object with ``"format": "corelm.session"``, ``"version": 1``, the session's `id`, `created` and
`updated`, and `nodes`, a list in which parents come before their children. `NodeRecord` says what each node has. All
times are seconds since 1970 (UTC). A float that JSON has no number for is a string: "NaN", "Infinity" or "-Infinity".

What the engine read and sampled is stored once, as the part by which a node extends an earlier one::

    row(node) = row(nodes[node.after])[: node.shared] + node.token_ids      # if `after` is null: node.token_ids

`sampled` and `log_probs` are extended in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

from corelm.application import as_provenance
from corelm.errors import InvalidRequestError
from corelm.spec import Message, Provenance
from corelm.validate import shown

FORMAT = "corelm.session"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """One node of a session's tree.

    Attributes:
        id: its number, unique in the session.
        parent: the number of the node before it; None where a conversation begins.
        kind: "message": a message that a client sent. "prompt": ids that a client sent. "answer": what was sampled.
        role: the role of the message; None if there is no message.
        message: the message, without ids: the client's, or what the client was told.
        tools: the tools of the request, at the first node of a conversation.
        created: when it was recorded.
        began: for an answer, when its request arrived.
        choice: for an answer, its index among the answers to the same request.
        finish_reason: for an answer, why it ended; "abort" if its client left.
        provenance: for an answer, which distribution its log-probs are of, and which weights sampled it.
        after: the number of the node whose row this node's row begins with; None for no such row.
        shared: how many positions of that row it begins with.
        token_ids: the ids that follow: of an answer, the rest of the prompt as the engine read it, then the sampled
            ids. None for a message, whose ids are in the prompts of the answers that follow it.
        sampled: as long as `token_ids`: True where an id was sampled by this answer.
        log_probs: as long as `token_ids`: None where nothing was sampled. None as a whole without log-probs.
    """

    id: int
    parent: int | None
    kind: str
    role: str | None = None
    message: Message | None = None
    tools: tuple[Mapping[str, Any], ...] | None = None
    created: float = 0.0
    began: float | None = None
    choice: int | None = None
    finish_reason: str | None = None
    provenance: Provenance | None = None
    after: int | None = None
    shared: int = 0
    token_ids: tuple[int, ...] | None = None
    sampled: tuple[bool, ...] | None = None
    log_probs: tuple[float | None, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the attributes by name, in values that JSON has."""
        return {field.name: _jsonable(getattr(self, field.name)) for field in fields(self)}


class Row(NamedTuple):
    """What the engine had read and sampled at the end of a node, all of one length.

    Attributes:
        token_ids: the ids.
        sampled_by: the number of the answer that sampled each id; None for an id of a prompt.
        log_probs: None where there is none.
    """

    token_ids: list[int]
    sampled_by: list[int | None]
    log_probs: list[float | None]


@dataclass(frozen=True)
class SessionRecord:
    """A session as it was at one moment.

    Attributes:
        id: its name, or the random id that it was given.
        created: when it began.
        updated: when it was last used.
        nodes: parents come before their children.
    """

    id: str
    created: float
    updated: float
    nodes: tuple[NodeRecord, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the session in values that JSON has: the inverse of `from_json`."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "id": self.id,
            "created": self.created,
            "updated": self.updated,
            "nodes": [node.to_json() for node in self.nodes],
        }

    @classmethod
    def from_json(cls, session: Any) -> SessionRecord:
        """Read what `to_json` returned. Keys that this version does not know are ignored.

        Raises:
            InvalidRequestError: it is not a recorded session, or of another version, or a node is malformed.
        """
        if not isinstance(session, Mapping) or session.get("format") != FORMAT:
            raise _malformed(f"expected an object with 'format': '{FORMAT}', got {shown(session)}")
        if session.get("version") != VERSION:
            raise _malformed(f"version {shown(session.get('version'))} is not one that this corelm reads ({VERSION})")
        try:
            nodes = tuple(map(_read_node, session["nodes"]))
            record = cls(str(session["id"]), float(session["created"]), float(session["updated"]), nodes)
        except InvalidRequestError:
            raise
        except Exception as error:
            raise _malformed(f"cannot be read ({type(error).__name__}: {error})") from error
        record._check()
        return record

    @cached_property
    def by_id(self) -> Mapping[int, NodeRecord]:
        """The nodes by their number."""
        return {node.id: node for node in self.nodes}

    def path(self, node: NodeRecord) -> list[NodeRecord]:
        """Return the nodes from the beginning of a conversation to `node`."""
        path = [node]
        while path[-1].parent is not None:
            path.append(self.by_id[path[-1].parent])
        return path[::-1]

    def last_answers(self) -> list[NodeRecord]:
        """Return the answers that no other answer follows, in the order in which they were recorded."""
        followed: set[int] = set()
        for node in self.nodes:
            before = node.parent if node.kind == "answer" else None
            while before is not None and before not in followed:
                followed.add(before)
                before = self.by_id[before].parent
        return [node for node in self.nodes if node.kind == "answer" and node.id not in followed]

    def row(self, node: NodeRecord) -> Row:
        """Return what the engine had read and sampled at the end of an answer."""
        parts: list[Row] = []
        found: NodeRecord | None = node
        end = node.shared + len(node.token_ids or ())
        while found is not None:
            count = max(end - found.shared, 0)
            ids, sampled = list(found.token_ids or ())[:count], (found.sampled or ())[:count]
            by = [found.id if one else None for one in sampled]
            parts.append(Row(ids, by, list(found.log_probs or (None,) * len(ids))[:count]))
            end = min(end, found.shared)
            found = None if found.after is None else self.by_id[found.after]
        parts.reverse()
        return Row(
            [token_id for part in parts for token_id in part.token_ids],
            [node_id for part in parts for node_id in part.sampled_by],
            [log_prob for part in parts for log_prob in part.log_probs],
        )

    def _check(self) -> None:
        """Refuse what `row` and `path` could not follow.

        Raises:
            InvalidRequestError: a node refers to one that does not come before it, or its values do not fit.
        """
        ends: dict[int, int] = {}
        for node in self.nodes:
            before = 0 if node.after is None else ends.get(node.after, -1)
            lengths = {len(values) for values in (node.token_ids or (), node.sampled or ())}
            if node.log_probs is not None:
                lengths.add(len(node.log_probs))
            if node.id in ends or not (node.parent is None or node.parent in ends):
                raise _malformed(f"node {node.id} occurs twice, or its parent does not come before it")
            if not 0 <= node.shared <= before or len(lengths) > 1:
                raise _malformed(f"node {node.id}: after, shared, token_ids, sampled and log_probs do not fit together")
            ends[node.id] = node.shared + len(node.token_ids or ())


def _read_node(node: Mapping[str, Any]) -> NodeRecord:
    given = {field.name: node[field.name] for field in fields(NodeRecord) if field.name in node}
    given["message"] = None if node.get("message") is None else Message.from_dict(node["message"])
    given["provenance"] = None if node.get("provenance") is None else as_provenance(node["provenance"])
    for name in ("tools", "token_ids", "sampled", "log_probs"):
        given[name] = None if node.get(name) is None else tuple(node[name])
    if given["log_probs"] is not None:
        # float() reads the names that stand for what JSON has no number for.
        given["log_probs"] = tuple(None if value is None else float(value) for value in given["log_probs"])
    return NodeRecord(**given)


def _jsonable(value: Any) -> Any:
    """Return values that JSON has. Nothing is shared with what is given."""
    if isinstance(value, float):
        return value if math.isfinite(value) else "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if isinstance(value, (Message, Provenance)):
        return _jsonable(value.to_dict())
    return value if value is None or isinstance(value, (str, int)) else str(value)


def _malformed(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"session: {what}", field="session")

"""`SessionTree`: what was said in one session, each message once, and what the engine read and sampled for it.

A node is a message that a client sent, ids that a client sent, or an answer. Requests with the same beginning share its
nodes; where they differ, the tree forks. `digest` stands for a node and all before it: that of a message is made from
its tools and the messages up to it, that of a client's ids from all ids up to their end.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeAlias

from corelm.spec import Message, Provenance
from corelm_serve.chat_messages import MessageKey
from corelm_serve.session_records import NodeRecord, SessionRecord

#: What a node has in common with its record.
_RECORDED = ("id", "kind", "message", "tools", "created", "began", "choice", "finish_reason", "provenance")
#: Of type code "q". Python 3.11 cannot subscript the class.
Ids: TypeAlias = "array[int]"


@dataclass(slots=True, eq=False)
class Reading:
    """The ids of a node, as the part by which they extend those of an earlier node. See `session_records`.

    Attributes:
        after: the node with which the ids begin; None for no node.
        shared: how many ids of that node they begin with.
        ids: the ids that follow.
        prompt_length: how many ids, the shared ones included, were not sampled by this node.
        log_probs: of the sampled ids; None without log-probs.
    """

    after: Node | None
    shared: int
    ids: Ids
    prompt_length: int
    log_probs: tuple[float, ...] | None = None

    @property
    def length(self) -> int:
        """How many ids there are, the shared ones included."""
        return self.shared + len(self.ids)

    @property
    def sampled(self) -> Ids:
        """The ids that this node sampled."""
        return self.ids[self.prompt_length - self.shared :]

    def all_ids(self) -> Ids:
        """Return all ids, the shared ones included."""
        parts = []
        found: Reading | None = self
        end = self.length
        while found is not None:
            parts.append(found.ids[: max(end - found.shared, 0)])
            end = min(end, found.shared)
            found = None if found.after is None else found.after.reading
        ids = array("q")
        for part in reversed(parts):
            ids += part
        return ids


@dataclass(slots=True, eq=False, kw_only=True)
class Node:
    """A node of the tree. `NodeRecord` describes what it has in common with that.

    Attributes:
        key: what the message says; None without a message.
        digest: stands for this node and all before it.
        asked: how many requests that are in progress, or were answered, end here.
        children: in the order in which they were added.
        reading: the ids of an answer, or of a client's prompt.
    """

    id: int
    parent: Node | None
    kind: str
    created: float
    digest: bytes = b""
    message: Message | None = None
    key: MessageKey | None = None
    tools: tuple[Mapping[str, Any], ...] | None = None
    asked: int = 0
    children: list[Node] = field(default_factory=list)
    reading: Reading | None = None
    began: float | None = None
    choice: int | None = None
    finish_reason: str | None = None
    provenance: Provenance | None = None

    def upwards(self) -> Iterator[Node]:
        """Yield this node, its parent, and so on."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def with_ids(self, message: Message) -> Message:
        """Return the answer that a client sent back, with the ids that were sampled; any other message as it came."""
        if self.kind != "answer" or self.message is None or self.reading is None or not self.reading.sampled:
            return message
        return replace(self.message, token_ids=tuple(self.reading.sampled))

    def record(self) -> NodeRecord:
        """Return the node as plain values."""
        reading, ids, sampled, log_probs = self.reading, None, None, None
        if reading is not None:
            ids, own = tuple(reading.ids), reading.prompt_length - reading.shared
            sampled = tuple(position >= own for position in range(len(ids)))
            if reading.log_probs is not None:
                log_probs = (*(None,) * own, *reading.log_probs)
        return NodeRecord(
            **{name: getattr(self, name) for name in _RECORDED},
            parent=None if self.parent is None else self.parent.id,
            role=None if self.message is None else self.message.role,
            after=None if reading is None or reading.after is None else reading.after.id,
            shared=0 if reading is None else reading.shared,
            token_ids=ids,
            sampled=sampled,
            log_probs=log_probs,
        )


class SessionIndex:
    """The nodes of all sessions of a store, by digest.

    Attributes:
        nodes: for each digest, the nodes of each session that has some, in the order in which they were added.
        prompt_lengths: how long the prompts are that clients sent as ids, and how many have this length.
        tokens: how many ids all sessions hold.
    """

    def __init__(self) -> None:
        self.nodes: dict[bytes, dict[SessionTree, list[Node]]] = {}
        self.prompt_lengths: Counter[int] = Counter()
        self.tokens = 0

    def add(self, session: SessionTree, node: Node) -> None:
        """Add a node."""
        self.tokens += 0 if node.reading is None else len(node.reading.ids)
        if node.digest:
            self.nodes.setdefault(node.digest, {}).setdefault(session, []).append(node)
        if node.kind == "prompt" and node.reading is not None:
            self.prompt_lengths[node.reading.length] += 1

    def remove(self, session: SessionTree, node: Node) -> None:
        """Remove a node."""
        self.tokens -= 0 if node.reading is None else len(node.reading.ids)
        if found := self.nodes.get(node.digest):
            found[session].remove(node)
            if not found[session]:
                del found[session]
            if not found:
                del self.nodes[node.digest]
        if node.kind == "prompt" and node.reading is not None:
            self.prompt_lengths[node.reading.length] -= 1
            if not self.prompt_lengths[node.reading.length]:
                del self.prompt_lengths[node.reading.length]


class SessionTree:
    """The tree of one session. It is not thread-safe; its store is.

    Attributes:
        used: a number that is larger the later it was used.
        nodes: by their number; parents come before their children.
        open: how many turns are open.
    """

    def __init__(self, session_id: str, *, named: bool, now: float, index: SessionIndex) -> None:
        self.id, self.named = session_id, named
        self.created = self.updated = now
        self.used = self.open = 0
        self._index = index
        self.nodes: dict[int, Node] = {}
        self._next_id = 0

    def add(self, parent: Node | None, kind: str, now: float, **values: Any) -> Node:
        """Add a node and return it."""
        node = Node(id=self._next_id, parent=parent, kind=kind, created=now, **values)
        self._next_id += 1
        self.nodes[node.id] = node
        if parent is not None:
            parent.children.append(node)
        self._index.add(self, node)
        return node

    def remove_unasked(self, node: Node | None) -> None:
        """Remove a node, and those before it, as far as no answer and no request in progress needs them."""
        while node is not None and not node.asked and not node.children and node.kind != "answer":
            self._index.remove(self, node)
            del self.nodes[node.id]
            if node.parent is not None:
                node.parent.children.remove(node)
            node = node.parent

    def clear(self) -> None:
        """Take all nodes out of the index."""
        for node in self.nodes.values():
            self._index.remove(self, node)

    def _with(self, digest: bytes) -> Sequence[Node]:
        return self._index.nodes.get(digest, {}).get(self, ())

    def reader(self) -> Callable[[], SessionRecord]:
        """Return a function that returns the session, as it is now, as plain values.

        It may be called later and on any thread: a node's values do not change. It takes a second for ten million ids,
        in which the store can serve others.
        """
        head, nodes = (self.id, self.created, self.updated), [*self.nodes.values()]
        return lambda: SessionRecord(*head, tuple(node.record() for node in nodes))

    # Beginnings ------------------------------------------------------------------------------------------------------

    def is_continued_by(self, path: Sequence[Node]) -> bool:
        """Return whether a request without a name that begins with these nodes belongs to the session."""
        answered = any(node.kind == "answer" for node in path)
        return answered or (not self.named and any(node.asked for node in path))

    def path_of(self, digest: bytes, keys: Sequence[MessageKey]) -> list[Node] | None:
        """Return the nodes of a conversation: of those that say the same, the most alike; None if there are none."""
        best: tuple[tuple[int, int, int], list[Node]] | None = None
        for node in self._with(digest):
            path = [*node.upwards()][::-1]
            answers = likeness = 0
            for one, key in zip(path, keys, strict=True):
                assert one.key is not None
                if not (key.repeats(one.key) if one.kind == "answer" else key.same(one.key)):
                    break
                answers += one.kind == "answer"
                likeness += key.likeness(one.key)
            else:
                rank = (answers, likeness, node.id)
                if best is None or rank > best[0]:
                    best = rank, path
        return None if best is None else best[1]

    def place_after(self, digest: bytes, ids: Ids, length: int) -> tuple[Node, int] | None:
        """Return the node that a client's ids follow, and how many of its own and earlier ids they repeat.

        That is the answer to their first `length` ids that they repeat the longest, or the node where these ids end.

        Args:
            digest: that of the first `length` ids.
        """
        node = next(iter(self._with(digest)), None)
        if node is None:
            return None
        best, same = node, length
        for answer in node.children:
            if answer.kind != "answer" or answer.reading is None or same == len(ids):
                continue
            own = answer.reading.prompt_length - answer.reading.shared
            last = own + same - length
            # Most answers are passed over by one comparison.
            if last < len(answer.reading.ids) and answer.reading.ids[last] == ids[same]:
                found = length + common_length(answer.reading.ids[own:], ids[length:])
                best, same = (answer, found) if found > same else (best, same)
        return best, same

    def reading_after(self, node: Node, prompt: Ids) -> tuple[Node | None, int]:
        """Return the node with which a prompt after `node` begins, and how many of its ids are the same.

        Candidates are the ids before `node` in the tree, and the prompts of other answers to it. So an id counts as
        sampled only if an answer in this conversation sampled it after the same ids.
        """
        rows = [(other, other.reading.length) for other in node.upwards() if other.reading is not None]
        answers = (child for child in reversed(node.children) if child.kind == "answer")
        rows += [(other, other.reading.prompt_length) for other in islice(answers, 1) if other.reading is not None]
        best: tuple[Node | None, int] = (None, 0)
        for other, length in rows:
            # Earlier rows are mostly the beginnings of later ones, and then not longer than what is known to be equal.
            if min(length, len(prompt)) > best[1] and other.reading is not None:
                same = common_length(other.reading.all_ids()[:length], prompt)
                best = (other, same) if same > best[1] else best
        return best


def common_length(one: Ids, other: Ids) -> int:
    """Return how many first ids are equal."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    # The first `low` are equal, the first `high` are not.
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def digests_of_beginnings(ids: Ids, lengths: Sequence[int]) -> list[tuple[int, bytes]]:
    """Return the digest of the first n ids for each of `lengths` that is not too long, the longest first."""
    state, at, found = hashlib.blake2b(b"ids", digest_size=16), 0, []
    for length in sorted(length for length in lengths if length <= len(ids)):
        state.update(ids[at:length].tobytes())
        at = length
        found.append((length, state.digest()))
    return found[::-1]

"""`SessionStore`: records what clients of a server said and were told, token for token.

A server calls `begin` with the messages of a request, renders ``turn.messages``, samples, records every answer and
closes the turn::

    with store.begin(messages, tools=tools, session=name) as turn:
        …                                     # render turn.messages, sample
        turn.record(prompt_ids=…, ids=…, logprobs=…, finish_reason="stop", provenance=…, message=…)

**Which session.** The one of the given name, a new one if there is none yet. Without a name, the session with the
longest recorded beginning of the messages, the latest used one of several, else a new one with a random name. A
beginning counts only if it has everything of an earlier request: a system prompt that many agents share does not join
them. A client that gave no name continues a session that another one named only if it sends back an answer of it.

**Where in its tree.** After the longest recorded beginning of the messages. An answer that the client sends back, as
`chat_messages` compares it, is the node that was recorded, and keeps its ids in ``turn.messages``. From the first
message that differs the tree forks, and answers have no ids from there on, because they were sampled after something
else. Other tools differ from the start.

**Ids instead of messages.** `begin_tokens` finds the longest recorded beginning of ids in the same way. A client may
cut an answer: the new ids then follow the part that it kept.

**What is stored** of an answer is what the engine read and sampled. Ids that an earlier node has as well are stored
there only, so that a long conversation is stored once. `SessionRecord` says how they are read.

**Limits.** Where there are too many sessions or ids, the sessions that were used longest ago are dropped and counted
(`dropped`), but none in use, that is, with an open turn. A request that ends without an answer leaves nothing behind.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from corelm import validate
from corelm.errors import InvalidRequestError, MissingKeyError
from corelm.spec import Chat, Message, Provenance
from corelm.validate import invalid, shown
from corelm_serve.chat_messages import MessageKey, chained, digests_of_messages, read_messages, read_tools, said
from corelm_serve.session_records import SessionRecord
from corelm_serve.session_tree import Ids, Node, Reading, SessionIndex, SessionTree, digests_of_beginnings

#: What a session may be called: it is a part of a URL and the value of a header.
_NAME = re.compile(r"[A-Za-z0-9._:@~-]{1,128}")


class SessionStore:
    """Sessions by name. All methods may be called on any thread.

    Args:
        limit_sessions: the number of sessions to keep.
        limit_tokens: the number of ids to keep, in all sessions together.
        clock: returns the time in seconds since 1970.
    """

    def __init__(
        self,
        *,
        limit_sessions: int = 1000,
        limit_tokens: int = 20_000_000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.limit_sessions = validate.count("limit_sessions", limit_sessions, 1)
        self.limit_tokens = validate.count("limit_tokens", limit_tokens, 1)
        self._clock = clock
        self._lock = threading.Lock()
        self._index = SessionIndex()
        #: The session used last is the last one.
        self._sessions: OrderedDict[str, SessionTree] = OrderedDict()
        #: Those without an open turn, so that dropping one does not take a look at all that are in use.
        self._idle: OrderedDict[SessionTree, None] = OrderedDict()
        #: Sessions of turns that were collected without being closed. The collector must not wait for the lock.
        self._lost: deque[SessionTree] = deque()
        self._uses = 0
        self._dropped = 0

    def begin(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        session: str | None = None,
    ) -> Turn:
        """Find a request's place in a session, and keep that session until the turn is closed.

        Args:
            messages: the messages as the client sent them.
            tools: the tools of the request.
            session: the name of the session; None finds it.

        Raises:
            InvalidRequestError: there are no messages, or a message is malformed (`rows` are the messages at fault), or
                `tools` is not a list of dicts, or the name has other characters than letters, digits and ``._:@~-``.
        """
        name = _read_name(session)
        chat = read_messages(messages)
        given = read_tools(tools)
        keys = [MessageKey.of(message) for message in chat]
        digests = digests_of_messages(given, keys)
        with self._lock:
            now = self._clock()
            tree, path = self._find_chat(digests, keys, name, now)
            node = path[-1] if path else None
            for at in range(len(path), len(chat)):
                values = {"digest": digests[at], "message": chat[at], "key": keys[at]}
                node = tree.add(node, "message", now, **values, tools=given or None if node is None else None)
            assert node is not None
            kept = tuple(one.with_ids(message) for one, message in zip(path, chat, strict=False))
            return self._opened(tree, node, now, (*kept, *chat[len(path) :]))

    def begin_tokens(self, prompt_ids: Sequence[int], *, session: str | None = None) -> Turn:
        """Find the place of a request whose prompt is ids. See `begin`.

        Raises:
            InvalidRequestError: there are no ids, or one that no vocabulary has.
        """
        name = _read_name(session)
        ids = array("q", validate.token_ids("prompt_ids", prompt_ids))
        if not ids:
            raise invalid("prompt_ids", "expected at least one id, got none")
        with self._lock:
            now = self._clock()
            tree, node = self._find_ids(ids, name, now)
            digest = digests_of_beginnings(ids, [len(ids)])[0][1]
            if node is None or node.digest != digest:
                after, shared = (None, 0) if node is None else tree.reading_after(node, ids)
                node = tree.add(
                    node, "prompt", now, digest=digest, reading=Reading(after, shared, ids[shared:], len(ids))
                )
            return self._opened(tree, node, now, ())

    def ids(self) -> tuple[str, ...]:
        """Return the names of all sessions, the one used last at the end."""
        with self._lock:
            return tuple(self._sessions)

    def get(self, session_id: str) -> SessionRecord:
        """Return a session as it is now.

        Raises:
            MissingKeyError: there is no session of this name, or it was dropped.
        """
        with self._lock:
            tree = self._sessions.get(session_id)
            if tree is None:
                raise MissingKeyError(
                    f"session: there is no session {shown(session_id)}; {len(self._sessions)} are kept, and "
                    f"{self._dropped} were dropped to stay within the limits",
                    field="session",
                )
            read = tree.reader()
        return read()

    def to_json(self, session_id: str) -> dict[str, Any]:
        """Return ``get(session_id)`` in values that JSON has. See `session_records`.

        Raises:
            MissingKeyError: there is no session of this name, or it was dropped.
        """
        return self.get(session_id).to_json()

    @property
    def dropped(self) -> int:
        """How many sessions were dropped to stay within the limits."""
        return self._dropped

    @property
    def tokens(self) -> int:
        """How many ids all sessions hold."""
        with self._lock:
            return self._index.tokens

    # Finding ---------------------------------------------------------------------------------------------------------

    def _find_chat(
        self, digests: Sequence[bytes], keys: Sequence[MessageKey], name: str | None, now: float
    ) -> tuple[SessionTree, list[Node]]:
        """Return the session, and the nodes of the longest recorded beginning of the messages in it."""
        named = None if name is None else self._named(name, now)
        for count in range(len(keys), 0, -1):
            digest = digests[count - 1]
            found = []
            for tree in [*self._index.nodes.get(digest, ())] if named is None else [named]:
                path = tree.path_of(digest, keys[:count])
                if path and (named is not None or tree.is_continued_by(path)):
                    found.append((tree, path))
            if found:
                return max(found, key=lambda one: one[0].used)
        return self._new(now) if named is None else named, []

    def _find_ids(self, ids: Ids, name: str | None, now: float) -> tuple[SessionTree, Node | None]:
        """Return the session, and the node that the ids follow."""
        named = None if name is None else self._named(name, now)
        best: tuple[tuple[int, int, int], SessionTree, Node] | None = None
        for length, digest in digests_of_beginnings(ids, [*self._index.prompt_lengths]):
            for tree in [*self._index.nodes.get(digest, ())] if named is None else [named]:
                place = tree.place_after(digest, ids, length)
                if place is None or not (named is not None or tree.is_continued_by([*place[0].upwards()])):
                    continue
                rank = (place[1], tree.used, length)
                if best is None or rank > best[0]:
                    best = rank, tree, place[0]
        if best is None:
            return self._new(now) if named is None else named, None
        return best[1], best[2]

    def _named(self, name: str, now: float) -> SessionTree:
        return self._sessions[name] if name in self._sessions else self._new(now, name)

    def _new(self, now: float, name: str | None = None) -> SessionTree:
        session_id = secrets.token_hex(16) if name is None else name
        tree = SessionTree(session_id, named=name is not None, now=now, index=self._index)
        self._sessions[session_id] = tree
        return tree

    # Turns -----------------------------------------------------------------------------------------------------------

    def _opened(self, tree: SessionTree, node: Node, now: float, messages: Chat) -> Turn:
        node.asked += 1
        tree.open += 1
        turn = Turn(self, tree, node, messages, now)
        turn.lost = weakref.finalize(turn, self._lost.append, tree)
        turn.lost.atexit = False
        self._idle.pop(tree, None)
        self._touch(tree, now)
        return turn

    def _touch(self, tree: SessionTree, now: float) -> None:
        """Note that a session was used, and drop others while there are too many."""
        self._uses += 1
        tree.used, tree.updated = self._uses, now
        self._sessions.move_to_end(tree.id)
        while self._lost:
            one = self._lost.popleft()
            one.open -= 1
            if not one.open:
                self._idle[one] = None
        while self._idle and (len(self._sessions) > self.limit_sessions or self._index.tokens > self.limit_tokens):
            self._dropped += 1
            self._remove(next(iter(self._idle)))

    def _remove(self, tree: SessionTree) -> None:
        tree.clear()
        del self._sessions[tree.id]
        self._idle.pop(tree, None)

    def _record(
        self,
        turn: Turn,
        prompt: Ids | None,
        ids: Ids,
        logprobs: tuple[float, ...] | None,
        message: Message | None,
        **labels: Any,
    ) -> int:
        with self._lock:
            if turn.closed:
                raise InvalidRequestError("turn: it is closed; record its answers before closing it", field="turn")
            tree, node, now = turn.tree, turn.node, self._clock()
            if prompt is None and node.reading is not None:
                prompt = node.reading.all_ids()
            if prompt is None:
                raise invalid("prompt_ids", "expected the ids that the engine read for these messages, got None")
            after, shared = tree.reading_after(node, prompt)
            key, digest = None, b""
            if message is not None and node.key is not None:
                key = MessageKey.of(message)
                digest = chained(node.digest, key.spoken)
            recorded = tree.add(
                node,
                "answer",
                now,
                digest=digest,
                message=message,
                key=key,
                reading=Reading(after, shared, prompt[shared:] + ids, len(prompt), logprobs),
                began=turn.began,
                **labels,
            )
            turn.answered = True
            self._touch(tree, now)
            return recorded.id

    def _close(self, turn: Turn) -> None:
        with self._lock:
            if turn.closed:
                return
            turn.closed = True
            turn.lost.detach()
            tree = turn.tree
            tree.open -= 1
            if not turn.answered:
                turn.node.asked -= 1
                tree.remove_unasked(turn.node)
            if not tree.open:
                self._idle[tree] = None
            if tree.nodes or tree.open:
                self._touch(tree, self._clock())
            else:
                self._remove(tree)


class Turn:
    """A request in progress. Its session is kept until the turn is closed or lost; ``with`` closes it.

    Attributes:
        messages: the messages to render. Answers of the store that the client sent back carry the ids that were
            sampled; all others are the client's. Empty for a request of ids.
        tree: the session.
        node: where the request ends in it.
        began: when the request arrived, in seconds since 1970.
        answered: whether an answer was recorded.
        closed: whether the turn was closed.
        lost: what releases the session if the owner of the turn loses it.
    """

    lost: weakref.finalize[..., Turn]

    def __init__(self, store: SessionStore, tree: SessionTree, node: Node, messages: Chat, began: float) -> None:
        self.store, self.tree, self.node = store, tree, node
        self.messages, self.began = messages, began
        self.answered = self.closed = False

    @property
    def session_id(self) -> str:
        """The name of the session."""
        return self.tree.id

    def record(
        self,
        *,
        ids: Sequence[int],
        prompt_ids: Sequence[int] | None = None,
        logprobs: Sequence[float] | None = None,
        finish_reason: str | None = None,
        provenance: Provenance | None = None,
        message: Message | Mapping[str, Any] | None = None,
        choice: int = 0,
    ) -> int:
        """Record an answer and return the number of its node. Each call adds one, next to the others.

        Args:
            ids: what was sampled, the EOS included; may be empty if the client left before the first token.
            prompt_ids: what the engine read before; None for the ids that `begin_tokens` was given.
            logprobs: of `ids`, in nats; may be NaN or infinite. None without log-probs.
            finish_reason: why the answer ended; "abort" if the client left.
            provenance: which distribution `logprobs` are of, and which weights sampled the ids.
            message: what the client was told; without it, the client cannot send the answer back as a message.
            choice: the index of the answer among those to the same request.

        Raises:
            InvalidRequestError: the turn is closed, or a value is malformed, or there are other numbers of `logprobs`
                than of `ids`.
        """
        sampled = array("q", validate.token_ids("ids", ids))
        values = None if logprobs is None else tuple(map(float, validate.as_list(logprobs)))
        if values is not None and len(values) != len(sampled):
            raise invalid("logprobs", f"expected one for each of the {len(sampled)} ids, got {len(values)}")
        if provenance is not None and not isinstance(provenance, Provenance):
            raise invalid("provenance", f"expected a Provenance or None, got {shown(provenance)}")
        return self.store._record(
            self,
            None if prompt_ids is None else array("q", validate.token_ids("prompt_ids", prompt_ids)),
            sampled,
            values,
            None if message is None else said(message),
            finish_reason=finish_reason,
            provenance=provenance,
            choice=validate.count("choice", choice),
        )

    def close(self) -> None:
        """End the turn. Without an answer, what only this request said is forgotten. A second call does nothing."""
        self.store._close(self)

    def __enter__(self) -> Turn:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _read_name(session: str | None) -> str | None:
    if session is not None and not (isinstance(session, str) and _NAME.fullmatch(session)):
        raise invalid("session", f"expected 1 to 128 letters, digits and ._:@~-, got {shown(session)}")
    return session

"""Random clients of a store, compared with a model that keeps whole conversations in dicts and knows no tree."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from corelm_serve.session_records import SessionRecord
from corelm_serve.sessions import SessionStore, Turn

#: What a message says: a role and a text. A conversation is the number of its tools, then its messages.
Said = tuple[str, str]
Path = tuple[Any, ...]

TOOLS = [None, [{"type": "function", "function": {"name": "look", "parameters": {}}}]]
NAMES = [None, None, None, "a", "b"]
#: Each example is a whole conversation of several clients. A profile with more examples has more of these, too.
EXAMPLES = settings.default.max_examples // 2
LOG_PROBS = st.sampled_from([-0.5, -1.25, math.nan, -math.inf])


@dataclass
class Call:
    """A request in progress, or an answer: where it is, and what the engine read and sampled."""

    path: Path
    prompt: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] | None = None

    @property
    def row(self) -> list[int]:
        return self.prompt + self.ids


@dataclass
class Session:
    """Everything that was said in one session.

    Attributes:
        requests: open ones, and those that were answered, as often as there were some.
        answers: by the conversation that ends with them.
        used: larger if it was used later.
    """

    named: bool
    requests: list[Path] = field(default_factory=list)
    answers: dict[Path, Call] = field(default_factory=dict)
    used: int = 0

    def paths(self) -> set[Path]:
        """Return every conversation that is the beginning of another one, and all whole ones."""
        return {path[:end] for path in [*self.requests, *self.answers] for end in range(2, len(path) + 1)}

    def fits(self, path: Path) -> bool:
        """Return whether a request without a name that begins like this may belong here."""
        parts = [path[:end] for end in range(2, len(path) + 1)]
        return any(part in self.answers for part in parts) or (
            not self.named and any(part in self.requests for part in parts)
        )


def as_sent(said: Said, noise: int) -> dict[str, Any]:
    """Return a message in one of the ways in which clients write it."""
    role, text = said
    message: dict[str, Any] = {"role": role, "content": text}
    if role == "assistant" and text.startswith("call"):
        arguments = {"text": text, "n": 1.0}
        if noise % 2:
            arguments = {"n": 1, "text": text}
        call = {"id": text, "type": "function", "function": {"name": "look", "arguments": json.dumps(arguments)}}
        message |= {"content": None if noise % 3 else "", "tool_calls": [call]}
    elif noise % 3 == 1:
        message["content"] = [{"type": "text", "text": text}]
    if noise > 2:
        message |= {"refusal": None, "annotations": [], "function_call": None}
    return message


class Chats(RuleBasedStateMachine):
    """Clients that continue, repeat and rewrite conversations. Answers come in another order than their requests."""

    def __init__(self) -> None:
        super().__init__()
        self.store = SessionStore()
        self.sessions: dict[str, Session] = {}
        self.open: list[tuple[Turn, str, Path, list[int]]] = []
        self.answered: set[int] = set()
        self.said: list[Path] = [(0,)]
        self.count = 0

    @precondition(lambda self: len(self.open) < 4)
    @rule(
        data=st.data(),
        cut=st.integers(0, 2),
        rewritten=st.sampled_from([None] * 6 + [0, 1, 2, 3]),
        added=st.lists(st.sampled_from("xyz"), max_size=2),
        tools=st.sampled_from([None] * 6 + [0, 1]),
        name=st.sampled_from(NAMES),
    )
    def begin(self, data, cut, rewritten, added, tools, name):
        earlier = data.draw(st.sampled_from(self.said[-8:]))
        messages = list(earlier[1 : len(earlier) - cut])
        if rewritten is not None and rewritten < len(messages):
            role, text = messages[rewritten]
            messages[rewritten] = (role, text + "!")
        messages += [("user", text) for text in added] or ([] if messages else [("user", "x")])
        path: Path = (earlier[0] if tools is None else tools, *messages)

        expected = self._session(name, path)
        sent = [as_sent(message, data.draw(st.integers(0, 5))) for message in messages]
        turn = self.store.begin(sent, tools=TOOLS[path[0]], session=name)
        assert turn.session_id == expected if expected else turn.session_id not in self.sessions
        session = self.sessions.setdefault(turn.session_id, Session(named=name is not None))
        for number, message in enumerate(turn.messages):
            answer = session.answers.get(path[: number + 2])
            assert message.token_ids == (tuple(answer.ids) if answer and answer.ids else None)
        self._use(session)
        session.requests.append(path)
        self.open.append((turn, turn.session_id, path, self._prompt(session, path, data)))

    def _session(self, name: str | None, path: Path) -> str | None:
        """Return the session that a request belongs to, by looking at everything; None for a new one."""
        if name is not None:
            return name if name in self.sessions else None
        best, found = (0, 0), None
        for key, session in self.sessions.items():
            paths = session.paths()
            same = max((end for end in range(2, len(path) + 1) if path[:end] in paths), default=0)
            if same and session.fits(path[:same]) and (same, session.used) > best:
                best, found = (same, session.used), key
        return found or (name if name in self.sessions else None)

    def _use(self, session: Session) -> None:
        self.count += 1
        session.used = self.count

    def _prompt(self, session: Session, path: Path, data: Any) -> list[int]:
        """Render a conversation: sampled ids as they were, other messages as numbers. Some templates forget a turn."""
        ids = [path[0]]
        forgotten = data.draw(st.sampled_from([None] * 4 + [1, 2]))
        for end in range(2, len(path) + 1):
            answer = session.answers.get(path[:end])
            if answer is not None and end - 1 == forgotten:
                ids += answer.ids[: len(answer.ids) // 2]
            elif answer is not None:
                ids += answer.ids
            else:
                ids += [100 + sum(map(ord, path[end - 1][1]))]
            ids += [99]
        return ids

    @precondition(lambda self: self.open)
    @rule(data=st.data(), calls=st.booleans(), values=st.lists(LOG_PROBS, max_size=4), scored=st.booleans())
    def answer(self, data, calls, values, scored):
        turn, key, path, prompt = data.draw(st.sampled_from(self.open))
        self.count += 1
        said = ("assistant", f"{'call' if calls else 'text'} {self.count}")
        # Some ids are sampled in every answer.
        ids = [50 + (self.count * at if at % 2 else at) for at in range(len(values))]
        turn.record(
            prompt_ids=prompt,
            ids=ids,
            logprobs=values if scored else None,
            message=as_sent(said, 0),
            finish_reason="stop",
        )
        session = self.sessions[key]
        session.answers[(*path, said)] = Call((*path, said), prompt, ids, values if scored else None)
        self.said.append((*path, said))
        self.answered.add(id(turn))
        self._use(session)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def close(self, data):
        one = data.draw(st.sampled_from(self.open))
        turn, key, path, _ = one
        self.open.remove(one)
        turn.close()
        session = self.sessions[key]
        self._use(session)
        if id(turn) not in self.answered:
            session.requests.remove(path)
        self.answered.discard(id(turn))
        if not session.requests:
            del self.sessions[key]

    @invariant()
    def every_session_holds_what_was_said(self):
        assert set(self.store.ids()) == set(self.sessions)
        assert list(self.store.ids()) == sorted(self.sessions, key=lambda key: self.sessions[key].used)
        for key, session in self.sessions.items():
            check(self.store.get(key), session)


def check(record: SessionRecord, session: Session) -> None:
    """Compare a record, read back from its JSON, with the model."""
    record = SessionRecord.from_json(json.loads(json.dumps(record.to_json(), allow_nan=False)))
    paths = {node.id: path_of(record, node) for node in record.nodes}
    assert sorted(map(str, paths.values())) == sorted(map(str, session.paths()))
    answers = {paths[node.id]: node for node in record.nodes if node.kind == "answer"}
    assert answers.keys() == session.answers.keys()
    numbers = {node.id: path for path, node in answers.items()}
    for path, call in session.answers.items():
        row = record.row(answers[path])
        assert row.token_ids == call.row
        sources = [sampled_by(session, call, position) for position in range(len(call.row))]
        assert [number if number is None else numbers[number] for number in row.sampled_by] == [
            None if one is None else one.path for one in sources
        ]
        expected = [
            None if one is None or one.log_probs is None else one.log_probs[position - len(one.prompt)]
            for position, one in enumerate(sources)
        ]
        assert str(row.log_probs) == str(expected)
    last = [path for path in answers if not any(other != path and other[: len(path)] == path for other in answers)]
    assert {paths[node.id] for node in record.last_answers()} == set(last)


def sampled_by(session: Session, call: Call, position: int) -> Call | None:
    """Return the answer in the conversation of `call` that sampled a token after the same ids; the last of several."""
    before = [
        session.answers[part] for end in range(2, len(call.path) + 1) if (part := call.path[:end]) in session.answers
    ]
    for one in reversed(before):
        if len(one.prompt) <= position < len(one.row) and one.row[: position + 1] == call.row[: position + 1]:
            return one
    return None


def path_of(record: SessionRecord, node: Any) -> Path:
    nodes = record.path(node)
    said = []
    for one in nodes:
        calls = one.message.tool_calls
        said.append((one.role, calls[0]["function"]["arguments"]["text"] if calls else one.message.content))
    return (int(nodes[0].tools is not None), *said)


class Prompts(RuleBasedStateMachine):
    """Clients that send ids: they continue answers, cut them, and ask again."""

    def __init__(self) -> None:
        super().__init__()
        self.store = SessionStore()
        #: Session, prompt as the client sent it, what the engine sampled, and the row before, if any.
        self.calls: list[tuple[str, list[int], list[int], int]] = []
        self.used: dict[str, int] = {}

    @rule(
        data=st.data(),
        cut=st.integers(0, 3),
        added=st.lists(st.integers(0, 2), max_size=2),
        samples=st.lists(st.lists(st.integers(0, 2), max_size=3), min_size=1, max_size=2),
    )
    def ask(self, data, cut, added, samples):
        rows = [[], *([*prompt, *ids] for _, prompt, ids, _ in self.calls[-6:])]
        row = data.draw(st.sampled_from(rows))
        prompt = [*row[: len(row) - cut], *added] or [0]
        best, session = (0, 0), None
        for key, asked, ids, _ in self.calls:
            if prompt[: len(asked)] == asked:
                whole = [*asked, *ids]
                same = next((n for n in range(min(len(whole), len(prompt)), 0, -1) if whole[:n] == prompt[:n]), 0)
                if (same, self.used[key]) > best:
                    best, session = (same, self.used[key]), key
        with self.store.begin_tokens(prompt) as turn:
            assert turn.session_id == session if session else turn.session_id not in self.used
            for ids in samples:
                number = turn.record(ids=ids, logprobs=[-float(token) for token in ids])
                self.calls.append((turn.session_id, prompt, ids, number))
        self.used[turn.session_id] = len(self.calls)

    @invariant()
    def every_row_is_what_was_read_and_sampled(self):
        records = {key: self.store.get(key) for key in self.used}
        for key, prompt, ids, number in self.calls:
            row = records[key].row(records[key].by_id[number])
            assert row.token_ids == [*prompt, *ids]
            assert row.sampled_by[len(prompt) :] == [number] * len(ids)
            for position, by in enumerate(row.sampled_by):
                if by is not None:
                    # Whatever counts as sampled was sampled after the same ids, and has the number from then.
                    _, asked, sampled, _ = next(call for call in self.calls if (call[0], call[3]) == (key, by))
                    assert [*asked, *sampled][: position + 1] == row.token_ids[: position + 1]
                    assert position >= len(asked) and row.log_probs[position] == -float(row.token_ids[position])
        assert sum(len(record.nodes) for record in records.values()) == len(self.calls) + len(
            {(key, tuple(prompt)) for key, prompt, _, _ in self.calls}
        )


TestChats = Chats.TestCase
TestChats.settings = settings(max_examples=EXAMPLES, stateful_step_count=30)
TestPrompts = Prompts.TestCase
TestPrompts.settings = settings(max_examples=EXAMPLES, stateful_step_count=20)

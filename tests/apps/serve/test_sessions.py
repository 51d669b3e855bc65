"""Sessions by example: to which one a request belongs, which messages are the same, what is kept and dropped."""

import json
import math
import threading

import pytest

from corelm import Provenance
from corelm.errors import InvalidRequestError
from corelm_serve.session_records import SessionRecord
from corelm_serve.sessions import SessionStore
from helpers.serving import told

HI = {"role": "user", "content": "Hi"}
NEXT = {"role": "user", "content": "And then?"}
PIP = {"role": "assistant", "content": "I am Pip."}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1, "b": [2.0, null]}'}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


def kept_ids(store, messages, **options):
    """Return the ids of every message of a request."""
    with store.begin(messages, **options) as turn:
        return [message.token_ids for message in turn.messages]


# What counts as the same message ---------------------------------------------------------------------------------


def test_an_answer_keeps_its_ids_whichever_way_a_client_writes_it():
    for answer, sent in (
        (PIP, {**PIP, "refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}),
        (PIP, {**PIP, "refusal": "no", "annotations": [{"type": "url_citation"}], "parsed": {"name": "Pip"}}),
        (PIP, {"role": "assistant", "content": [{"type": "text", "text": "I am Pip."}]}),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "assistant", "tool_calls": [CALL]}),
        (
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"function": {"arguments": '{"b":[2,null],"a":1.0}', "name": "look"}, "id": "other", "index": 0}
                ],
            },
        ),
        ({**PIP, "reasoning_content": "Who?"}, PIP),
        ({**PIP, "reasoning_content": "Who?"}, {**PIP, "reasoning": "Who?", "reasoning_content": None}),
    ):
        store = SessionStore()
        session, _ = told(store, [HI], answer)
        with store.begin([HI, sent, NEXT]) as turn:
            assert turn.session_id == session, sent
            assert [message.token_ids for message in turn.messages] == [None, (7, 8), None], sent
            assert turn.messages[1].extra.get("reasoning_content") == answer.get("reasoning_content")


def test_a_changed_answer_forks_the_tree_and_has_no_ids_from_there_on():
    for sent in (
        {**PIP, "content": "I am Pip. "},
        {**PIP, "content": None},
        {**PIP, "role": "user"},
        {**PIP, "name": "Pip"},
        {**PIP, "reasoning_content": "Someone else."},
        {**PIP, "tool_calls": [CALL]},
    ):
        store = SessionStore()
        session, _ = told(store, [HI], {**PIP, "reasoning_content": "Who?"})
        told(store, [HI, PIP, NEXT], {"role": "assistant", "content": "Nothing."})
        again = [HI, sent, NEXT, {"role": "assistant", "content": "Nothing."}, NEXT]
        with store.begin(again) as turn:
            assert turn.session_id == session, sent
            assert [message.token_ids for message in turn.messages] == [None] * 5, sent
            turn.record(prompt_ids=[1], ids=[2], message=PIP)
        assert len({node.parent for node in store.get(session).nodes if node.kind == "answer"}) == 3, sent


def test_changed_calls_fork_the_tree():
    store = SessionStore()
    other = {**CALL, "function": {"name": "look", "arguments": "{}"}}
    told(store, [HI], {"role": "assistant", "content": None, "tool_calls": [CALL, other]})
    for change, calls in {
        "name": [{**CALL, "function": {**CALL["function"], "name": "see"}}, other],
        "arguments": [{**CALL, "function": {**CALL["function"], "arguments": '{"a": 1, "b": [2, 0]}'}}, other],
        "order": [other, CALL],
    }.items():
        assert kept_ids(store, [HI, {"role": "assistant", "tool_calls": calls}]) == [None, None], change
    assert kept_ids(store, [HI, {"role": "assistant", "tool_calls": [CALL, other]}]) == [None, (7, 8)]


def test_of_equal_calls_the_one_whose_id_was_sent_back_is_meant():
    store = SessionStore()
    calls = [{**CALL, "id": f"call_{number}"} for number in range(3)]
    answers = [{"role": "assistant", "content": None, "tool_calls": [call]} for call in calls]
    with store.begin([HI]) as turn:
        for number, answer in enumerate(answers):
            turn.record(prompt_ids=[1], ids=[number], message=answer, choice=number)
    for number, answer in enumerate(answers):
        assert kept_ids(store, [HI, answer]) == [None, (number,)]


def test_of_equal_answers_the_one_with_the_longest_continuation_is_meant():
    store = SessionStore()
    with store.begin([HI]) as turn:
        turn.record(prompt_ids=[1], ids=[2], message=PIP)
    told(store, [HI, PIP, NEXT], {"role": "assistant", "content": "Nothing."}, ids=[9])
    with store.begin([HI]) as turn:
        turn.record(prompt_ids=[1], ids=[2, 2], message=PIP)
    sent = [HI, PIP, NEXT, {"role": "assistant", "content": "Nothing."}]
    assert kept_ids(store, sent) == [None, (2,), None, (9,)]


def test_arguments_become_objects_for_the_template_and_other_texts_stay():
    store = SessionStore()
    bad = [{**CALL, "function": {"name": "look", "arguments": text}} for text in ("{", "[1]", '{"a": NaN}')]
    with store.begin([HI, {"role": "assistant", "content": None, "tool_calls": [CALL, *bad]}]) as turn:
        arguments = [call["function"]["arguments"] for call in turn.messages[1].tool_calls]
    assert arguments == [{"a": 1, "b": [2.0, None]}, "{", "[1]", '{"a": NaN}']


def test_an_aborted_answer_is_recorded_as_far_as_it_came():
    store = SessionStore()
    with store.begin([HI]) as turn:
        turn.record(prompt_ids=[1, 2], ids=[], logprobs=[], finish_reason="abort", message={**PIP, "content": ""})
        turn.record(prompt_ids=[1, 2], ids=[3], logprobs=[-1.0], finish_reason="abort", message={**PIP, "content": "I"})
    answers = [node for node in store.get(turn.session_id).nodes if node.kind == "answer"]
    assert [node.finish_reason for node in answers] == ["abort", "abort"]
    assert [store.get(turn.session_id).row(node).token_ids for node in answers] == [[1, 2], [1, 2, 3]]
    assert kept_ids(store, [HI, {**PIP, "content": "I"}, NEXT]) == [None, (3,), None]
    assert kept_ids(store, [HI, {**PIP, "content": ""}, NEXT]) == [None, None, None]


# Records ---------------------------------------------------------------------------------------------------------


def test_a_record_survives_json_with_every_value():
    store = SessionStore(clock=map(float, range(100)).__next__)
    provenance = Provenance("toy", "m", "3", penalties=(("presence", 0.5),), version_runs=(("3", 0), ("4", 2)))
    values = [-0.5, math.nan, -math.inf, math.inf]
    odd = {"role": "user", "content": "Hi", "odd": {"x": math.nan, "y": [math.inf, 1]}}
    with store.begin([odd], tools=TOOLS, session="s") as turn:
        turn.record(
            prompt_ids=[1, 2],
            ids=[3, 4, 5, 6],
            logprobs=values,
            finish_reason="stop",
            provenance=provenance,
            message=PIP,
        )
    text = json.dumps(store.to_json("s"), allow_nan=False)
    seen = json.loads(text)
    assert (seen["format"], seen["version"], seen["id"], seen["created"]) == ("corelm.session", 1, "s", 0)
    message, answer = seen["nodes"]
    assert (message["role"], message["message"]["content"], message["tools"]) == ("user", "Hi", TOOLS)
    assert message["message"]["odd"] == {"x": "NaN", "y": ["Infinity", 1]}
    assert answer["log_probs"] == [None, None, -0.5, "NaN", "-Infinity", "Infinity"]
    assert answer["sampled"] == [False] * 2 + [True] * 4 and answer["token_ids"] == [1, 2, 3, 4, 5, 6]
    assert (answer["parent"], answer["choice"], answer["finish_reason"]) == (message["id"], 0, "stop")
    assert answer["began"] < answer["created"] and answer["provenance"]["weight_version"] == "3"
    again = SessionRecord.from_json(seen)
    assert again.nodes[1].provenance == provenance
    assert json.dumps(again.to_json(), allow_nan=False) == text


def test_what_is_no_session_is_refused():
    store = SessionStore()
    session, _ = told(store, [HI], PIP)
    assert SessionRecord.from_json(store.to_json(session)).nodes == store.get(session).nodes
    for number, change in enumerate(
        (
            lambda session: session.update(format="other"),
            lambda session: session.update(version=2),
            lambda session: session.pop("nodes"),
            lambda session: session["nodes"].append(session["nodes"][0]),
            lambda session: session["nodes"].reverse(),
            lambda session: session["nodes"][1].update(shared=1),
            lambda session: session["nodes"][1].update(after=17),
            lambda session: session["nodes"][1].update(sampled=[True]),
            lambda session: session["nodes"][1].update(log_probs=[0.0]),
            lambda session: session["nodes"][1].update(log_probs=["x"] * 5),
            lambda session: session["nodes"][1].update(message={"content": "no role"}),
        )
    ):
        seen = store.to_json(session)
        change(seen)
        with pytest.raises(InvalidRequestError):
            pytest.fail(f"change {number} was read: {SessionRecord.from_json(seen)}")


def test_the_prompt_of_several_answers_is_stored_once():
    store = SessionStore()
    prompt = list(range(1000))
    with store.begin([HI]) as turn:
        for number in range(8):
            turn.record(prompt_ids=prompt, ids=[number], message={**PIP, "content": str(number)}, choice=number)
    assert store.tokens == 1008
    with store.begin([HI, {**PIP, "content": "5"}, NEXT]) as turn:
        turn.record(prompt_ids=[*prompt, 5, 6], ids=[7], message=PIP)
    assert store.tokens == 1010
    record = store.get(turn.session_id)
    assert record.row(record.nodes[-1]).token_ids == [*prompt, 5, 6, 7]


def test_what_another_answer_sampled_is_part_of_the_prompt():
    store = SessionStore()
    with store.begin([HI]) as turn:
        turn.record(prompt_ids=[1, 2], ids=[3], message=PIP)
        number = turn.record(prompt_ids=[1, 2, 3], ids=[4], message=PIP)
    record = store.get(turn.session_id)
    assert record.row(record.by_id[number]).sampled_by == [None, None, None, number]


def test_chats_and_ids_are_told_apart():
    store = SessionStore()
    session, _ = told(store, [HI], PIP)
    with store.begin_tokens([1, 2, 3, 7, 8]) as turn:
        assert turn.session_id != session


# Many threads ----------------------------------------------------------------------------------------------------


def test_nothing_is_lost_when_many_threads_send_the_same_messages():
    store, clients, turns = SessionStore(), 8, 12
    start = threading.Barrier(clients)
    failures = []

    def client(number):
        try:
            start.wait()
            for depth in range(turns):
                with store.begin([HI] + [NEXT] * depth) as turn:
                    turn.record(prompt_ids=[1] * (depth + 1), ids=[number, depth], message=PIP)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    (session,) = store.ids()
    record = store.get(session)
    answers = [node for node in record.nodes if node.kind == "answer"]
    assert len(record.nodes) - len(answers) == turns
    rows = sorted(record.row(node).token_ids for node in answers)
    expected = [[1] * (depth + 1) + [number, depth] for number in range(clients) for depth in range(turns)]
    assert rows == sorted(expected)


def nested(depth):
    """Return a dict that is nested so deep."""
    return {"deeper": nested(depth - 1)} if depth else {}


# Mistakes --------------------------------------------------------------------------------------------------------


def test_a_malformed_request_is_refused_and_leaves_nothing():
    store = SessionStore()
    for messages, options, what in (
        ([], {}, "messages: expected a list with at least one message"),
        ("Hi", {}, "messages: expected a list"),
        ([HI, {"content": "?"}], {}, "message|role is missing"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "a list of parts such as"),
        ([HI], {"tools": "look"}, "tools: expected a list of dicts"),
        ([HI], {"tools": [nested(200)]}, "tools: .*nested more than"),
        ([{**HI, "extra": nested(200)}], {}, "nested more than"),
        ([HI], {"session": "a/b"}, "session: expected 1 to 128 letters"),
        ([HI], {"session": ""}, "session: expected"),
    ):
        with pytest.raises(InvalidRequestError, match=what):
            store.begin(messages, **options)
        assert store.ids() == ()


def test_a_malformed_answer_is_refused():
    store = SessionStore()
    with store.begin([HI]) as turn:
        for field, values in (
            ("prompt_ids", {"ids": [1], "prompt_ids": None}),
            ("ids", {"ids": [-1], "prompt_ids": [1]}),
            ("logprobs", {"ids": [1, 2], "prompt_ids": [1], "logprobs": [0.0]}),
            ("provenance", {"ids": [1], "prompt_ids": [1], "provenance": {}}),
            ("choice", {"ids": [1], "prompt_ids": [1], "choice": -1}),
        ):
            with pytest.raises(InvalidRequestError, match=field):
                turn.record(**values)
    with pytest.raises(InvalidRequestError, match="closed"):
        turn.record(prompt_ids=[1], ids=[1])
    assert store.ids() == ()

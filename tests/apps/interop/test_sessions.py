"""Recorded sessions as containers: ids against what the engine read, log-probs against a plain forward."""

import json
import math

import pytest
import torch
from tensordict import TensorDict

import corelm
from corelm import History, LLMPolicy, Provenance, merge_turns, ragged
from corelm.errors import CoreLMError, InvalidRequestError, ProvenanceMismatchError
from corelm.kl import KLRewardTransform
from corelm_serve import recorded as sessions
from corelm_serve.sessions import SessionStore
from helpers import oracle
from helpers.chat_templates import FORGETFUL
from helpers.http_server import FaultServer, json_reply
from helpers.tiny_models import tiny_model, tiny_tokenizer

SAMPLING = {"max_new_tokens": 6}
HI = {"role": "user", "content": "Hello there, who are you?"}
NEXT = [{"role": "user", "content": "And then?"}]
SAID = [[{"role": "tool", "content": "The sky is clear."}, *NEXT], NEXT]
RAW = Provenance("toy", "tiny", "3")


def ask(store, policy, messages, *, seed=0, answers=1, **options):
    """Answer a request as a server does. Return what the client is told, and what the policy wrote."""
    with store.begin(messages, **options) as turn:
        results = []
        for choice in range(answers):
            td = policy.replace(inplace=False)(
                TensorDict(history=History.of([turn.messages], (1,))), seed=seed + choice
            )
            (message,) = td["history"].response.chats[0]
            turn.record(
                prompt_ids=rows(td, "tokens", "prompt")[0],
                ids=rows(td, "tokens", "response")[0],
                logprobs=rows(td, "log_probs", "response")[0] if "log_probs" in td.keys() else None,
                finish_reason=td["finish_reason"][0],
                provenance=td["log_probs"].provenance if "log_probs" in td.keys() else None,
                message=message,
                choice=choice,
            )
            # A client of the usual kind knows no ids, and adds keys.
            results.append(({"role": "assistant", "content": message.content, "refusal": None}, td))
    return turn.session_id, results


def chat(store, policy, turns, between=lambda turn: None, **options):
    """Have a conversation of several turns. Return its session, the messages, and what the policy wrote."""
    messages, results = [HI], []
    for turn in range(turns):
        session, [(told, td)] = ask(store, policy, messages, seed=turn, **options)
        messages = [*messages, told, *SAID[turn % 2]]
        results.append(td)
        between(turn)
    return session, messages, results


def rows(td, container, field):
    return ragged(td, (container, field)).tolist()


def recorded(*calls, store=None, name="s"):
    """Return a session of ids: each call has a prompt and what `record` takes."""
    store = store or SessionStore()
    for prompt, values in calls:
        with store.begin_tokens(prompt, session=name) as turn:
            turn.record(**values)
    return store.to_json(name)


# A real model ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dense", [False, True], ids=["rows", "dense"])
def test_a_chat_of_three_turns_has_the_ids_the_engine_read_and_the_log_probs_of_a_plain_forward(backend, model, dense):
    store = SessionStore()
    session, _, results = chat(store, LLMPolicy(backend, sampling_params=SAMPLING), 3)
    td = sessions.load(store.to_json(session), pad_output=dense, pad_id=backend.pad_id)
    assert tuple(td.batch_size) == (1,) and td["tokens"].padded is dense
    (ids,) = rows(td, "tokens", "full")
    assert ids == rows(results[-1], "tokens", "full")[0]
    assert rows(td, "tokens", "prompt") == rows(results[0], "tokens", "prompt")
    expected = torch.zeros(len(ids), dtype=torch.bool)
    for one in results:
        expected[len(rows(one, "tokens", "prompt")[0]) : len(rows(one, "tokens", "full")[0])] = True
    for container, mask in (("masks", "all_assistant_mask"), ("log_probs", "scored_mask")):
        assert rows(td, container, mask)[0] == expected.tolist()
    found = ragged(td, ("log_probs", "full")).values
    oracle.close(found[expected], oracle.logprobs(model, ids)[expected])
    assert not found[~expected].any()
    assert (
        list(td["weight_versions"]) == [("0", "0", "0")]
        and td["log_probs"].provenance == merge_turns(results)["log_probs"].provenance
    )
    assert td["history"].full.to_chats() == results[-1]["history"].full.to_chats()
    assert td["history"].response.to_chats() == results[-1]["history"].response.to_chats()
    assert td["finish_reason"][0] == results[-1]["finish_reason"][0] and td["session"][0] == session


def test_a_loaded_row_can_be_scored_and_compared(backend, trainer):
    store = SessionStore()
    session, _, _ = chat(store, LLMPolicy(backend, sampling_params=SAMPLING), 2)
    td = sessions.load(store.get(session))
    td["next"] = TensorDict(reward=torch.ones(1), batch_size=[1])
    same = KLRewardTransform(LLMPolicy(backend), 0.1)(td.clone())
    torch.testing.assert_close(same["next", "reward"], torch.ones(1), atol=1e-5, rtol=0)
    assert float((KLRewardTransform(LLMPolicy(trainer), 0.1)(td)["next", "reward"] - 1).abs()) > 1e-4


def test_every_turn_keeps_the_numbers_and_the_version_of_its_weights():
    models = [tiny_model(seed=seed) for seed in range(3)]
    store = SessionStore()
    with corelm.get_backend("transformers", tiny_model(seed=0), tokenizer=tiny_tokenizer()) as backend:

        def train(turn):
            backend.update_weights(models[turn + 1].state_dict(), version=f"step {turn + 1}")

        session, _, results = chat(store, LLMPolicy(backend, sampling_params=SAMPLING), 2, between=train)
    td, merged = sessions.load(store.get(session)), merge_turns(results)
    assert list(td["weight_versions"]) == [("0", "step 1")]
    assert td["log_probs"].provenance == merged["log_probs"].provenance
    assert td["log_probs"].provenance.weight_version == "0, step 1"
    for container, field in (("tokens", "full"), ("log_probs", "full"), ("masks", "all_assistant_mask")):
        assert rows(td, container, field) == rows(merged, container, field)


def test_answers_and_forks_are_rows(backend, model):
    store, policy = SessionStore(), LLMPolicy(backend, sampling_params=SAMPLING)
    session, group = ask(store, policy, [HI], answers=3)
    told, _ = group[1]
    _, [(_, longer)] = ask(store, policy, [HI, told, *NEXT])
    forked, [(_, rewritten)] = ask(store, policy, [HI, {**told, "content": "I am Pip."}, *NEXT], seed=7)
    assert forked == session
    expected = [rows(td, "tokens", "full")[0] for _, td in (group[0], group[2])]
    expected += [rows(td, "tokens", "full")[0] for td in (longer, rewritten)]
    td = sessions.load(store.get(session))
    assert rows(td, "tokens", "full") == expected
    assert [len(turns) for turns in td["turns"]] == [1, 1, 2, 1]
    assert td["node"].tolist() == [turns[-1] for turns in td["turns"]]
    for row, found in enumerate(ragged(td, ("log_probs", "full")).split()):
        scored = torch.tensor(rows(td, "log_probs", "scored_mask")[row])
        oracle.close(found[scored], oracle.logprobs(model, expected[row])[scored])
    # The rewritten answer is the client's: it has no ids, and is no part of the loss.
    answer = rows(rewritten, "tokens", "response")[0]
    assert sum(rows(td, "masks", "all_assistant_mask")[3]) == len(answer)
    calls = sessions.load(store.get(session), rows="calls")
    assert [sum(mask) for mask in rows(calls, "masks", "all_assistant_mask")] == [
        len(rows(one, "tokens", "response")[0]) for _, one in [*group, (0, longer), (0, rewritten)]
    ]


def test_a_prompt_that_was_rendered_otherwise_is_kept_as_it_was_read(backend, model):
    store = SessionStore()
    options = {"chat_template": FORGETFUL, "prefer_tokens": False, "return_masks": False}
    session, _, results = chat(store, LLMPolicy(backend, sampling_params=SAMPLING, **options), 3)
    td = sessions.load(store.get(session))
    assert rows(td, "tokens", "full") == rows(results[-1], "tokens", "full")
    # The template writes "[earlier]" for earlier answers, so only the last one was sampled after these ids.
    assert rows(td, "tokens", "response")[0] == rows(results[-1], "tokens", "response")[0]
    assert [len(turns) for turns in td["turns"]] == [1]
    (ids,) = rows(td, "tokens", "full")
    answer = slice(len(rows(td, "tokens", "prompt")[0]), len(ids))
    oracle.close(ragged(td, ("log_probs", "full")).values[answer], oracle.logprobs(model, ids)[answer])
    calls = sessions.load(store.get(session), rows="calls")
    assert rows(calls, "tokens", "response") == [rows(one, "tokens", "response")[0] for one in results]


def test_a_session_without_log_probs_has_tokens_and_masks(backend):
    store = SessionStore()
    session, _, _ = chat(store, LLMPolicy(backend, sampling_params=SAMPLING, return_log_probs=False), 2)
    td = sessions.load(store.get(session))
    assert "log_probs" not in td.keys() and list(td["weight_versions"]) == [("", "")]
    assert sum(rows(td, "masks", "all_assistant_mask")[0]) > 0


# Values ----------------------------------------------------------------------------------------------------------


def test_ids_are_rows_without_messages():
    first = {"ids": [3, 4, 5], "logprobs": [-3.0, math.nan, -math.inf], "provenance": RAW}
    td = sessions.load(
        recorded(([1, 2], first), ([1, 2, 3, 4, 9], {"ids": [6], "logprobs": [-6.0], "provenance": RAW}))
    )
    assert "history" not in td.keys()
    assert rows(td, "tokens", "full") == [[1, 2, 3, 4, 9, 6]] and rows(td, "tokens", "prompt") == [[1, 2]]
    assert rows(td, "masks", "all_assistant_mask") == [[False, False, True, True, False, True]]
    found = ragged(td, ("log_probs", "full")).values
    torch.testing.assert_close(
        found, torch.tensor([0.0, 0.0, -3.0, math.nan, 0.0, -6.0]), equal_nan=True, rtol=0, atol=0
    )


def test_runs_of_versions_are_counted_from_the_first_sampled_token():
    runs = Provenance("toy", "tiny", "3", version_runs=(("3", 0), ("4", 1), ("5", 2)))
    calls = [([1], {"ids": [2, 3, 4], "logprobs": [-1.0] * 3, "provenance": runs})]
    calls += [([1, 2, 3, 9], {"ids": [5], "logprobs": [-1.0], "provenance": Provenance("toy", "tiny", "6")})]
    (found,) = {sessions.load(recorded(*calls))["log_probs"].provenance}
    # The client cut the token that version 5 sampled.
    assert (found.weight_version, found.version_runs) == ("3, 6", (("3", 0), ("4", 1), ("6", 3)))


def test_a_row_of_unknown_origin_does_not_hide_where_others_came_from():
    store = SessionStore()
    recorded(([1], {"ids": [2], "logprobs": [-1.0], "provenance": RAW}), store=store, name="known")
    recorded(([3], {"ids": [4], "logprobs": [-1.0]}), ([7], {"ids": []}), store=store, name="unknown")
    td = sessions.load([store.get("unknown"), store.to_json("known")])
    assert [row["log_probs"].provenance for row in td.unbind(0)] == [None, None, RAW]
    assert list(td["session"]) == ["unknown", "unknown", "known"]
    assert rows(td, "tokens", "response") == [[4], [], [2]]


def test_log_probs_of_different_distributions_are_refused_with_the_row():
    warm = Provenance("toy", "tiny", "3", "processed", 0.7)
    first, second = ({"ids": [2], "logprobs": [-1.0], "provenance": one} for one in (RAW, warm))
    session = recorded(([5], first), ([1], first), ([1, 2], second))
    with pytest.raises(ProvenanceMismatchError, match=r"row 1: raw .*processed at temperature 0.7.*rows=.calls"):
        sessions.load(session)
    td = sessions.load(session, rows="calls")
    assert rows(td, "tokens", "full") == [[5, 2], [1, 2], [1, 2, 2]]
    assert td["log_probs"].provenance == (RAW, warm)


def test_no_answers_are_an_empty_batch():
    store = SessionStore()
    with store.begin([HI], session="s"):
        assert tuple(sessions.load(store.get("s")).batch_size) == (0,)
    assert tuple(sessions.load([]).batch_size) == (0,)


# Sources ---------------------------------------------------------------------------------------------------------


def test_a_session_is_read_from_a_url_a_file_and_a_list(tmp_path):
    session = recorded(([1, 2], {"ids": [3], "logprobs": [math.nan], "provenance": RAW}))
    path = tmp_path / "session.json"
    path.write_text(json.dumps(session))
    with FaultServer(lambda request: json_reply(session)) as server:
        for source in (f"{server.url}/sessions/s", path, str(path), session, [path, session]):
            td = sessions.load(source, key="a-secret-key")
            assert rows(td, "tokens", "full") == [[1, 2, 3]] * len(td)
        (request,) = server.requests
    assert (request.method, request.path) == ("GET", "/sessions/s")
    assert request.headers["Authorization"] == "Bearer a-secret-key"


@pytest.mark.parametrize("status", [401, 404])
def test_a_server_that_refuses_is_quoted_without_the_key(status):
    reply = json_reply({"error": "not here: a-secret-key"}, status)
    with FaultServer(lambda request: reply) as server, pytest.raises(CoreLMError, match="not here") as error:
        sessions.load(f"{server.url}/sessions/s", key="a-secret-key")
    assert "a-secret-key" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "what"),
    [
        (7, "source: expected a URL, a path, a dict or a list"),
        ("no-such-file.json", "source: cannot read no-such-file.json"),
        ("localhost:8000/sessions/my-run", "a URL begins with http://"),
        ({"format": "other"}, "expected an object with 'format': 'corelm.session'"),
        ([{}], "expected an object with 'format'"),
    ],
)
def test_what_is_no_session_is_refused(source, what):
    with pytest.raises(InvalidRequestError, match=what):
        sessions.load(source)
    with pytest.raises(InvalidRequestError, match="rows: "):
        sessions.load([], rows="leafs")


def test_a_tree_is_shown_as_text():
    store = SessionStore()
    told = {"role": "assistant", "content": "I am Pip, and I say much more than fits into one line of the tree."}
    with store.begin([HI], session="s") as turn:
        turn.record(prompt_ids=[1], ids=[2, 3], finish_reason="stop", message=told)
        turn.record(prompt_ids=[1], ids=[4], finish_reason="length", message={"role": "assistant", "content": "I"})
    with store.begin([HI, told, *NEXT], session="s") as turn:
        turn.record(prompt_ids=[1, 2, 3], ids=[4], finish_reason="abort", message={"role": "assistant", "content": ""})
    recorded(([1, 2], {"ids": [3]}), store=store, name="t")
    assert sessions.tree([store.to_json("s"), store.get("t")]).splitlines() == [
        "session s",
        '0 user: "Hello there, who are you?"',
        '  1 assistant: "I am Pip, and I say much more than fits into one line of th…" (2 ids, stop)',
        '  3 user: "And then?"',
        '  4 assistant: "" (1 ids, abort)',
        '  2 assistant: "I" (1 ids, length)',
        "session t",
        "0 prompt: 2 ids",
        "1 answer: 1 ids, unknown end",
    ]

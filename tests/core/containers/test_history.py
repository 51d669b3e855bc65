"""`Message` and `History`: conversations survive every operation of tensordict."""

import math
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack

from corelm.containers.history import History
from corelm.errors import InvalidRequestError, TemplateError
from corelm.spec.message import Message
from helpers import chat_templates as ct
from helpers.each import each
from helpers.refusals import refused

CALL = {"id": "c1", "type": "function", "function": {"name": "capital", "arguments": {"of": "Italy"}}}


def chat(number: int, length: int = 2) -> list[dict[str, Any]]:
    """A chat of `length` messages, every second one sampled; `number` makes it unique."""
    return [
        {"role": "assistant", "content": f"{number}.{turn}", "token_ids": [number, turn]}
        if turn % 2
        else {"role": "user", "content": f"{number}.{turn}"}
        for turn in range(length)
    ]


RICH = [
    {"role": "system", "content": "Answer."},
    {"role": "user", "content": "Italy?", "name": "ann", "weight": None},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm", "token_ids": [5, 6, 2]},
    {"role": "tool", "content": "Rome", "tool_call_id": "c1", "name": "capital", "meta": {"cost": [1, 2.5]}},
]


# Messages ------------------------------------------------------------------------------------------------------------


def test_a_message_survives_a_round_trip() -> None:
    messages = [Message.from_dict(message) for message in RICH]
    assert [message.to_dict() for message in messages] == RICH
    assert messages[2].token_ids == (5, 6, 2)
    assert messages[3].extra == {"meta": {"cost": [1, 2.5]}}
    assert Message.from_dict({"role": "assistant", "content": None}) == Message("assistant")


def test_messages_share_no_data_with_their_input_or_output() -> None:
    given = deepcopy(RICH)
    history = History.from_chats(given)
    given[2]["tool_calls"][0]["function"]["name"] = "other"
    given[3]["meta"]["cost"].append(3)
    given.append({"role": "user", "content": "more"})
    message = Message.from_dict(given[3])
    message.to_dict()["meta"]["cost"].append(5)
    given[3]["meta"]["cost"].append(6)
    assert message.extra == {"meta": {"cost": [1, 2.5, 3]}}
    history.to_chats()[3]["meta"]["cost"].append(4)
    assert history.to_chats() == RICH


# The shape of a batch ------------------------------------------------------------------------------------------------


@each(
    "chats, shape",
    [
        (chat(0), ()),
        ([chat(0)], (1,)),
        ([chat(0, 1), chat(1, 3), RICH], (3,)),
        # Two chats of two messages: a batch of two, not two by two.
        ([chat(0), chat(1)], (2,)),
        ([[chat(0), chat(1)], [chat(2, 1), chat(3)]], (2, 2)),
        ([[[chat(0)], [chat(1)]]], (1, 2, 1)),
        ([], (0,)),
        ([[], []], (2,)),
        ([[], chat(1)], (2,)),
    ],
)
def test_chats_survive_a_round_trip(chats: list[Any], shape: tuple[int, ...]) -> None:
    history = History.from_chats(chats)
    assert tuple(history.batch_size) == shape
    assert history.to_chats() == chats
    assert len(history.chats) == math.prod(shape)
    again = History.of(history.chats, shape)
    assert again.to_chats() == chats


@each(
    "chats",
    [[[chat(0)], chat(1)], [[chat(0), chat(1)], [chat(2)]], "hello", ["hello"], {"role": "user", "content": "x"}],
)
def test_uneven_lists_and_other_types_are_refused(chats: Any) -> None:
    with refused(InvalidRequestError, field="history"):
        History.from_chats(chats)


@each(
    "message, said",
    [
        ({"role": "user", "contnet": "a"}, "contnet: did you mean 'content'"),
        ({"role": "user", "contents": "a"}, "contents: did you mean 'content'.* give 'content': None"),
        ({"role": "assistant", "content": None, "tool_cals": []}, "tool_cals: did you mean 'tool_calls'"),
        ({"role": "assistant", "tool_call": {}}, "tool_call: did you mean 'tool_calls'"),
    ],
)
def test_a_misspelt_key_that_leaves_a_message_empty_is_refused_with_its_place(message: Any, said: str) -> None:
    good = {"role": "user", "content": "a"}
    with pytest.raises(InvalidRequestError, match=rf"row 1: message 1: {said}") as caught:
        History.from_chats([[good], [good, message]])
    assert caught.value.rows == (1,)
    with pytest.raises(InvalidRequestError, match=said):
        History.from_chats([[good]]).append(message)


@each("message, near", [({"role": "assitant", "content": "a"}, "assistant"), (Message("usr", "a"), "user")])
def test_a_role_that_is_spelt_almost_like_a_usual_one_is_warned_about_once(message: Any, near: str) -> None:
    with pytest.warns(UserWarning, match=f"did you mean '{near}'") as warned:
        History.from_chats([[message], [message]])
    assert [one.filename for one in warned] == [__file__], "said at the call"


@pytest.mark.filterwarnings("error")
@each("role", ["tool", "developer", "function", "ipython", "model", "human", "tools", "user_2", "User", "seer", "pool"])
def test_roles_and_keys_of_strangers_templates_are_kept(role: str) -> None:
    extra = {"reasoning_content": "b", "tool_plan": "c", "documents": [], "thinking": "d", "tool_name": "e"}
    message = {"role": role, "content": "a", "name": "f", "tool_call_id": "g", **extra}
    assert History.from_chats([message]).to_chats() == [message]
    given = {"role": role, "content": None, "contents": ["a"], "context": "b"}
    assert History.from_chats([given]).to_chats() == [given]
    given = {"role": role, "content": "a", "tool_call": {}, "tool_call_index": 1, "tool_call_ids": [], "contents": []}
    assert History.from_chats([given]).to_chats() == [given]
    given = {"role": role, "context": "a", "contexts": ["b"]}
    assert History.from_chats([given]).to_chats() == [{"content": None, **given}]


def test_every_conversation_at_fault_is_reported() -> None:
    image = [{"type": "image", "url": "x"}]
    chats = [
        chat(0),
        [{"role": "user", "content": image}],
        [*chat(2), {"content": "x"}],
        [chat(3)[0], {"role": 3, "content": "x"}],
        [{"role": "assistant", "content": "x", "token_ids": ["a"]}],
        [{"role": "assistant", "content": "x", "token_ids": [1, -2]}],
        [{"role": "assistant", "tool_calls": "capital()"}],
        [*chat(7), "hello"],
        [{"role": "user"}],
    ]
    with pytest.raises(InvalidRequestError) as caught:
        History.from_chats(chats)
    problems = caught.value.problems
    assert caught.value.rows == (1, 2, 3, 4, 5, 6, 7, 8)
    assert "message 0: content" in problems[1] and "images" in problems[1]
    assert "message 2: role is missing" in problems[2]
    assert "message 1: role" in problems[3]
    assert "message 0: token_ids" in problems[4] and "message 0: token_ids" in problems[5]
    assert "message 0: tool_calls" in problems[6]
    assert "message 2: message" in problems[7]
    assert "message 0: content: the message has neither content nor tool_calls; its keys are: 'role'" in problems[8]
    with refused(InvalidRequestError, field="batch_size"):
        History.of([chat(0), chat(1)], (3,))


# Under tensordict ----------------------------------------------------------------------------------------------------

GRID = [[chat(0), chat(1, 1), chat(2)], [chat(3), chat(4, 3), chat(5)]]


@each("index", [0, -1, slice(1), (1, 2), (slice(None), 1), (slice(None), slice(1, None)), (1, slice(None, None, 2))])
def test_indexing_selects_the_same_conversations_as_in_nested_lists(index: Any) -> None:
    numbers = np.arange(6).reshape(2, 3)[index]
    flat = [chat for row in GRID for chat in row]
    picked = History.from_chats(GRID)[index]
    assert isinstance(picked, History)
    assert tuple(picked.batch_size) == numbers.shape
    assert [list(map(Message.to_dict, c)) for c in picked.chats] == [flat[n] for n in np.ravel(numbers)]


def test_inside_tensordicts_dense_and_lazy() -> None:
    td = TensorDict({"history": {"prompt": History.from_chats(GRID[0])}, "reward": torch.zeros(3)}, (3,))
    assert td["history", "prompt"].to_chats() == GRID[0]
    assert td[1]["history", "prompt"].to_chats() == GRID[0][1]
    stacked = lazy_stack([td[2], td[0]])
    got = stacked["history", "prompt"]
    assert isinstance(got, History)
    assert got.to_chats() == [GRID[0][2], GRID[0][0]]
    stacked["history", "prompt"] = got.append({"role": "user", "content": "more"})
    assert stacked[0]["history", "prompt"].chats[0][-1] == Message("user", "more")


# Saving --------------------------------------------------------------------------------------------------------------

SAVED = [GRID, [RICH, RICH[:1]], RICH, []]


@pytest.mark.parametrize("chats", SAVED)
def test_memmap_writes_no_pickle(chats: list[Any], tmp_path: Path) -> None:
    history = History.from_chats(chats)
    TensorDict({"history": history}, history.batch_size).memmap(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = TensorDict.load_memmap(tmp_path, allow_pickle=False)["history"]
    assert isinstance(loaded, History)
    assert tuple(loaded.batch_size) == tuple(history.batch_size)
    assert loaded.to_chats() == chats
    assert loaded.append({"role": "user", "content": "more"}).chats == tuple(
        (*one, Message("user", "more")) for one in history.chats
    )


# Growing -------------------------------------------------------------------------------------------------------------

HELLO = {"role": "user", "content": "hello"}


def test_append_returns_a_new_history_and_keeps_the_ids() -> None:
    history = History.from_chats(GRID[0])
    longer = history.append(HELLO)
    assert longer.to_chats() == [[*c, HELLO] for c in GRID[0]]
    assert history.to_chats() == GRID[0]
    each = history.append([Message("user", str(n)) for n in range(3)])
    assert [c[-1].content for c in each.chats] == ["0", "1", "2"]
    assert [c[:-1] for c in each.chats] == list(history.chats)
    nested = History.from_chats(GRID).append([[Message("user", f"{r}{c}") for c in range(3)] for r in range(2)])
    assert [c[-1].content for c in nested.chats] == ["00", "01", "02", "10", "11", "12"]


def test_extend() -> None:
    history = History.from_chats(GRID[0])
    assert history.extend([HELLO, HELLO]).to_chats() == [[*c, HELLO, HELLO] for c in GRID[0]]
    each = [chat(7, 1), [], chat(8, 3)]
    expected = [[*a, *b] for a, b in zip(GRID[0], each, strict=True)]
    assert history.extend(each).to_chats() == expected
    assert history.extend(History.from_chats(each)).to_chats() == expected
    assert history.extend([]).to_chats() == GRID[0]
    assert History.from_chats(RICH).extend([HELLO]).to_chats() == [*RICH, HELLO]
    history.extend(each, inplace=True)
    assert history.to_chats() == expected


@each(
    "grow",
    [
        lambda h: h.append([HELLO, HELLO]),
        lambda h: h.append([[HELLO], [HELLO], [HELLO]]),
        lambda h: h[0].append([HELLO]),
        lambda h: h.append({"content": "no role"}),
        lambda h: h.extend([[HELLO], [HELLO]]),
        lambda h: h.extend(History.from_chats([[HELLO]])),
        lambda h: h.extend(HELLO),
    ],
)
def test_messages_that_do_not_fit_are_refused(grow: Any) -> None:
    history = History.from_chats(GRID[0])
    with pytest.raises(InvalidRequestError):
        grow(history)
    assert history.to_chats() == GRID[0]


# The template --------------------------------------------------------------------------------------------------------


def test_apply_chat_template_equals_the_tokenizers_for_every_row() -> None:
    tokenizer = ct.tokenizer()
    question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    chats = [[[question], [question, answer]], [[question, answer, question], [answer, question]]]
    history = History.from_chats(chats).append([[answer, question], [question, question]])
    expected = [
        [
            tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True, chat_template=ct.LLAMA)
            for c in row
        ]
        for row in history.to_chats()
    ]
    options = {"add_generation_prompt": True, "chat_template": ct.LLAMA}
    assert history.apply_chat_template(tokenizer, **options) == expected
    assert history[0].apply_chat_template(tokenizer, **options) == expected[0]
    assert history[0, 0].apply_chat_template(tokenizer, **options) == expected[0][0]
    assert history[:0].apply_chat_template(tokenizer, **options) == []
    ids = history[0, 0].apply_chat_template(tokenizer, tokenize=True, return_dict=False, **options)
    assert tokenizer.decode(ids) == expected[0][0]


def test_apply_chat_template_reports_the_conversations_that_fail() -> None:
    history = History.from_chats([chat(0), [HELLO, HELLO], []])
    with refused(TemplateError, rows=(1, 2)):
        history.apply_chat_template(ct.tokenizer(), chat_template=ct.STRICT)

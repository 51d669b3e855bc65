"""Conversations converted to TorchRL and back: only changed messages lose their extra fields."""

import pickle
import subprocess
import sys

import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack

from corelm import ChatHistory, History, LLMPolicy, Masks, Text, Tokens, get_backend, ragged
from corelm.errors import InvalidRequestError
from helpers.tiny_models import tiny_tokenizer
from helpers.torchrl import skip_without_torchrl

skip_without_torchrl()

from torchrl.data.llm import History as TheirHistory
from torchrl.data.llm.history import ContentBase
from torchrl.modules.llm.policies import ChatHistory as TheirChatHistory
from torchrl.modules.llm.policies import Masks as TheirMasks
from torchrl.modules.llm.policies import Text as TheirText
from torchrl.modules.llm.policies import Tokens as TheirTokens

from corelm_interop.torchrl import from_torchrl, to_torchrl

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": [1, 2], "b": None}}}
WEATHER = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 2?", "name": "Ada"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "token_ids": [7, 8, 2]},
    {"role": "tool", "content": "3", "tool_call_id": "c1"},
    {"role": "assistant", "content": "Three.", "token_ids": [9, 2], "reasoning_content": "Add them."},
]
PLAIN = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", "tool_calls": [CALL]}]


def asked(content, **more):
    return {"role": "user", "content": content, **more}


@pytest.mark.parametrize(
    "chats", [WEATHER, [WEATHER, PLAIN], [[PLAIN, WEATHER], [WEATHER, WEATHER]]], ids=["0", "1", "2"]
)
def test_a_round_trip_changes_nothing(chats):
    ours = History.from_chats(chats)
    theirs = to_torchrl(ours)
    assert isinstance(theirs, TheirHistory) and theirs.batch_size[:-1] == ours.batch_size
    assert from_torchrl(theirs).to_chats() == chats


def test_torchrl_reads_the_converted_history():
    theirs = to_torchrl(History.from_chats(WEATHER))
    assert theirs.role == [message["role"] for message in WEATHER]
    assert theirs.content == ["Be brief.", "1 + 2?", "", "3", "Three."]
    assert theirs[2].tool_calls == [CALL] and theirs[4].tool_calls is None
    tokenizer, text = tiny_tokenizer(), [asked("Hi"), {"role": "assistant", "content": "Hello", "token_ids": [5, 2]}]
    ours = History.from_chats([text, text])
    rendered = to_torchrl(ours).apply_chat_template(tokenizer=tokenizer, add_generation_prompt=False)
    assert rendered == ours.apply_chat_template(tokenizer)


@pytest.mark.parametrize(
    "move",
    [
        lambda history: history.clone(),
        lambda history: pickle.loads(pickle.dumps(history)),
        lambda history: lazy_stack([history[0], history[1]]),
        lambda history: TensorDict(h=history, batch_size=[2]).to_lazystack(0)["h"],
        lambda history: torch.cat([history[:1], history[1:]]),
    ],
    ids=["clone", "pickle", "stack", "rows", "cat"],
)
def test_sampled_ids_survive_tensordict_operations(move):
    # Two answers with the same text and different ids must stay different.
    chats = [[asked("Hi"), {"role": "assistant", "content": "Hello", "token_ids": ids}] for ids in ([5, 2], [6, 7, 2])]
    assert from_torchrl(move(to_torchrl(History.from_chats(chats)))).to_chats() == chats


def test_answers_with_equal_text_and_different_ids_stay_distinct():
    chats = [[{"role": "assistant", "content": "Hello", "token_ids": ids}] for ids in ([5], [6], [5])]
    a, b, c = (to_torchrl(History.from_chats([chat]))[0, 0].content for chat in chats)
    assert a == "Hello" == b and a == c and a != b and hash(a) == hash(b)
    stacked = torch.cat([NonTensorData(said, batch_size=[1]) for said in (a, b)])
    assert [said.message.token_ids for said in stacked.tolist()] == [(5,), (6,)]


def test_appending_a_message_does_not_change_the_others():
    ours = History.from_chats([WEATHER, WEATHER])
    more = TheirHistory(role=["user"] * 2, content=["And 4?"] * 2, batch_size=[2])
    assert from_torchrl(to_torchrl(ours).append(more, inplace=False)).to_chats() == [[*WEATHER, asked("And 4?")]] * 2


@pytest.mark.parametrize("change", [{"content": "Four."}, {"role": "user"}, {"tool_calls": [CALL]}])
def test_a_message_changed_in_torchrl_loses_its_sampled_ids(change):
    theirs = to_torchrl(History.from_chats([WEATHER[-1]]))
    fields = {"role": theirs[0].role, "content": theirs[0].content}
    (message,) = from_torchrl(TheirHistory.from_chats([fields | change])).to_chats()
    assert message == {"role": "assistant", "content": "Three."} | change


def test_fields_that_only_torchrl_has_are_kept_as_extra():
    theirs = TheirHistory.from_chats(
        [
            {"role": "user", "content": "Go"},
            {"role": "<none>", "content": ""},
            {"role": "tool", "content": "", "tool_responses": ["1", "2"]},
            {"role": "assistant", "content": "Unfinis", "is_complete": False},
        ]
    )
    ours = from_torchrl(theirs)
    assert ours.to_chats() == [
        asked("Go"),
        {"role": "tool", "content": "", "tool_responses": ["1", "2"]},
        {"role": "assistant", "content": "Unfinis", "is_complete": False},
    ]
    back = to_torchrl(ours)
    assert back[1].tool_responses == ["1", "2"] and back.is_complete == [True, True, False]


def test_chat_histories_are_converted_part_by_part():
    prompt, response = History.from_chats([[asked("Hi")]] * 2), History.from_chats([[WEATHER[-1]]] * 2)
    ours = ChatHistory(prompt=prompt, response=response, batch_size=[2])
    theirs = to_torchrl(ours)
    assert isinstance(theirs, TheirChatHistory) and theirs.batch_size == (2,) and theirs.full is None
    back = from_torchrl(theirs)
    assert isinstance(back, ChatHistory) and back.full is None
    assert back.prompt.to_chats() == prompt.to_chats() and back.response.to_chats() == response.to_chats()


def test_a_history_of_the_target_library_is_returned_unchanged():
    ours = History.from_chats([PLAIN])
    theirs = to_torchrl(ours)
    assert from_torchrl(ours) is ours and to_torchrl(theirs) is theirs


ROWS = [[5, 6, 7], [8]]


@pytest.mark.parametrize(
    "theirs",
    [
        lazy_stack([TheirTokens(full=torch.tensor(row), padded=False) for row in ROWS]),
        TheirTokens(full=torch.tensor([[5, 6, 7], [0, 0, 8]]), padded=True, batch_size=[2]),
        TheirTokens(full=torch.tensor([[5, 6, 7], [0, 0, 8]]), batch_size=[2]),
        lazy_stack([lazy_stack([TheirTokens(full=torch.tensor(row), padded=False) for row in ROWS])]),
    ],
    ids=["rows", "dense", "unmarked", "nested"],
)
def test_tokens_and_masks_are_converted_in_their_layout(theirs):
    mask = torch.tensor([[True] * 3, [False, False, True]])
    masks = from_torchrl(TheirMasks(all_attention_mask=mask, padded=True, batch_size=[2]))
    td = TensorDict(tokens=from_torchrl(theirs), masks=masks)
    assert isinstance(td["tokens"], Tokens) and isinstance(masks, Masks) and td["tokens"].prompt is None
    assert td["tokens"].padded is (theirs.padded is True or theirs.padded is None)
    assert td["tokens"].batch_size == theirs.batch_size
    assert ragged(td, ("tokens", "full")).tolist() == ROWS


@pytest.mark.parametrize(
    ("given", "batch"), [("Hi", ()), (["Hi", "Ho"], (2,)), ([["Hi"], ["Ho"]], (2, 1))], ids=["0", "1", "2"]
)
def test_texts_are_converted(given, batch):
    text = from_torchrl(TheirText(prompt=given, batch_size=batch))
    assert isinstance(text, Text) and text.prompt == given and text.full is None and text.batch_size == batch


THEIR_PROMPT = TheirHistory.from_chats([[asked("Hi")]])


@pytest.mark.parametrize(
    ("mode", "given"),
    [
        ("history", THEIR_PROMPT),
        ("history", TheirChatHistory(prompt=THEIR_PROMPT, batch_size=[1])),
        ("history", TensorDict(prompt=THEIR_PROMPT)),
        ("text", TheirText(prompt=["Hi"], batch_size=[1])),
        ("tokens", lazy_stack([TheirTokens(prompt=torch.tensor([72, 105]), padded=False)])),
    ],
    ids=["History", "ChatHistory", "a nested History", "Text", "Tokens"],
)
def test_a_policy_names_torchrls_containers_and_takes_them_converted(mode, given):
    with get_backend("toy") as backend:
        policy = LLMPolicy(backend, input_mode=mode, sampling_params={"max_new_tokens": 3}, inplace=False)
        with pytest.raises(InvalidRequestError, match=r"got \w+ of torchrl\..*corelm_interop\.torchrl\.from_torchrl"):
            policy(TensorDict({mode: given}))
        prompt = given["prompt"] if isinstance(given, TensorDict) else given
        out = policy(TensorDict({mode: from_torchrl(prompt)}))
        assert len(out["tokens"].response) == 1


@pytest.mark.parametrize(
    ("convert", "given", "message"),
    [
        (from_torchrl, "Hi", "expected TorchRL's History"),
        (from_torchrl, TheirHistory(role="user", content="Hi"), r"got History \[\]"),
        (to_torchrl, "Hi", "expected a History or a ChatHistory"),
        (to_torchrl, History.from_chats([]), "at least one conversation"),
        (to_torchrl, History.from_chats([PLAIN, []]), "at least one message"),
    ],
)
def test_other_inputs_are_refused(convert, given, message):
    with pytest.raises(InvalidRequestError, match=message):
        convert(given)


def test_rows_with_content_other_than_text_are_refused_by_row():
    picture = TheirHistory.from_chats([{"role": "user", "content": ContentBase(type="image", url="x")}])
    words = TheirHistory.from_chats([{"role": "user", "content": "Hi"}])
    with pytest.raises(InvalidRequestError, match="content: expected a str") as error:
        from_torchrl(lazy_stack([words, picture]))
    assert error.value.rows == (1,)


@pytest.mark.process
def test_only_this_module_needs_torchrl_and_its_error_says_how_to_install_it():
    code = """
import sys
import corelm.policy, corelm.kl
assert "torchrl" not in sys.modules
sys.modules["torchrl"] = None
import corelm_interop
try:
    import corelm_interop.torchrl
except ImportError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 'pip install "torchrl' in result.stdout

"""Sequences of strings and chats of every library, where a list is accepted."""

from collections import UserList, deque

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack

from corelm import History, LLMPolicy, Text, Tokens
from corelm.errors import InvalidRequestError
from helpers.refusals import refused
from helpers.toy_prompts import QUESTIONS, SAMPLING, chat

TEXTS = QUESTIONS[:2]
CHATS = [chat(TEXTS[0]), [*chat(TEXTS[1]), {"role": "assistant", "content": "No."}]]


def objects(rows):
    array = np.empty(len(rows), dtype=object)
    array[:] = rows
    return array


def series(rows):
    return pytest.importorskip("pandas").Series(rows, index=range(7, 7 + len(rows)))


def column(rows):
    datasets, arrow = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    table = datasets.table.InMemoryTable(arrow.table({"column": rows}))
    return datasets.Dataset(table, fingerprint="rows")["column"]


def polars_series(rows):
    return pytest.importorskip("polars").Series(rows)


def arrow(rows):
    return pytest.importorskip("pyarrow").chunked_array([rows])


class Column(UserList):
    """A sequence that is no list, as a column of `datasets` is."""


def kinds(*given):
    return pytest.mark.parametrize("kind", given, ids=lambda kind: kind.__name__)


SEQUENCES = kinds(tuple, np.array, objects, deque, Column, series, column, polars_series, arrow)
CHAT_SEQUENCES = kinds(tuple, objects, deque, Column, series, column)


@SEQUENCES
@pytest.mark.parametrize("batch", [[], [2]], ids=["no batch", "batch"])
def test_texts_may_be_any_sequence(backend, kind, batch):
    policy = LLMPolicy(backend, input_mode="text", sampling_params=SAMPLING, inplace=False)
    expected = policy(TensorDict(text=TEXTS), seed=1)
    texts = kind(TEXTS)
    for td in (
        TensorDict(text=texts, batch_size=batch),
        TensorDict(text=Text(prompt=texts, batch_size=[2]), batch_size=batch),
        TensorDict({"text": TensorDict(prompt=texts, batch_size=batch)}, batch_size=batch),
        TensorDict(query=texts, batch_size=batch),
    ):
        out = policy.replace(input_key="query" if "query" in td.keys() else None)(td, seed=1)
        assert tuple(out.batch_size) == (2,) and out["text"].prompt == TEXTS
        assert out["text"].response == expected["text"].response
        assert {type(text) for text in out["text"].prompt} == {str}
    in_place = policy.replace(inplace=True)(TensorDict(text=texts, batch_size=batch), seed=1)
    assert in_place["text"].response == expected["text"].response
    scored = policy.replace(generate=False)(TensorDict(text=texts, batch_size=batch))
    assert scored["text"].full == TEXTS
    assert backend.tokenize(texts).ids.tolist() == backend.tokenize(TEXTS).ids.tolist()


@CHAT_SEQUENCES
def test_chats_may_be_any_sequence(backend, kind):
    expected = History.from_chats(CHATS)
    for chats in (kind(CHATS), kind([objects(one) for one in CHATS]) if kind is not column else kind(CHATS)):
        history = History.from_chats(chats)
        assert tuple(history.batch_size) == (2,) and history.to_chats() == expected.to_chats()
    assert History.from_chats(kind([CHATS[0]])).to_chats() == [CHATS[0]]
    more = [{"role": "user", "content": "And?"}, {"role": "user", "content": "Who?"}]
    assert expected.append(kind(more)).to_chats() == expected.append(more).to_chats()
    assert expected.extend(kind([[one] for one in more])).to_chats() == expected.append(more).to_chats()


def test_what_can_be_read_only_once_is_refused_in_one_sentence(backend):
    policy = LLMPolicy(backend, input_mode="text")
    with refused(InvalidRequestError, field="text.prompt"):
        policy(TensorDict(text=(text for text in TEXTS)))
    with refused(InvalidRequestError, field="history"):
        History.from_chats(one for one in CHATS)
    with refused(InvalidRequestError, field="texts", rows=(0,)):
        History.from_text(text for text in TEXTS)
    with pytest.raises(InvalidRequestError, match=r"which can be read only once; pass list"):
        backend.tokenize(map(str, TEXTS))
    with refused(InvalidRequestError, field="tokens.prompt"):
        LLMPolicy(backend, input_mode="tokens")(TensorDict(tokens=([1] for _ in range(2))))


def test_missing_values_are_named_by_row(backend):
    policy = LLMPolicy(backend, input_mode="text", sampling_params=SAMPLING)
    with refused(InvalidRequestError, field="text.prompt", rows=(1,)):
        policy(TensorDict(text=objects(["Who?", float("nan"), "Where?"])))
    out = policy.replace(on_error="skip", inplace=False)(TensorDict(text=objects(["Who?", None])))
    assert "expected a str" in out["errors"][1] and out["text"].response[0] is not None


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float32, torch.bool])
def test_tokens_in_rows_are_read_as_int64_and_must_be_integers(backend, dtype):
    ids = [torch.tensor([5, 6, 7]), torch.tensor([5, 6])]
    held = lazy_stack([Tokens(full=row.to(dtype), padded=False, batch_size=[]) for row in ids])
    policy = LLMPolicy(backend, input_mode="tokens", generate=False, inplace=False)
    if dtype.is_floating_point or dtype == torch.bool:
        with refused(InvalidRequestError, field="tokens.full"):
            policy(TensorDict(tokens=held, batch_size=[2]))
        return
    expected = policy(TensorDict(tokens=Tokens.from_rows(full=ids), batch_size=[2]))
    scored = policy(TensorDict(tokens=held, batch_size=[2]))
    assert [row.dtype for row in scored["tokens"].full] == [torch.int64] * 2
    assert all(map(torch.equal, scored["log_probs"].full, expected["log_probs"].full))
